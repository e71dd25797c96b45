"""The recommended setting beside InfoNCE: settings, halves, the margin, and its page."""

import json
import shutil

import pytest
from helpers.scripts import ROOT, main_here
from scipy import stats

from experiments.synthetic import recipe as of_map
from experiments.non_inferiority import __main__ as program
from experiments.non_inferiority import settings
from experiments.common import results
from experiments.common.probes import NAMES
from experiments.common.rows import PGCL, RECOMMENDED, recipe
from experiments.common.tables import Delta, difference, paired
from experiments.unsupervised import recipe as of_graphs

PAGE = ROOT / "docs" / "where_it_helps.md"


def test_every_second_place_of_the_map_was_chosen_on():
    found = [place for place in settings.all_places() if place.kind == "map"]
    assert len(found) == 45
    runs = [(config["place"], config["seed"]) for config in of_map.wanted(5)]
    for index, seeds in ((0, {0, 1, 2, 3, 4}), (1, {5, 6, 7, 8, 9})):
        assert {seed for place, seed in runs if place == of_map.places()[index]} == seeds
    for index, (place, knobs) in enumerate(zip(found, of_map.places(), strict=True)):
        assert place.chosen == (index % 2 == 0)
        assert place.name.startswith(f"{knobs['classes']} classes")
        if "," in place.name:
            knob, value = place.name.partition(", ")[2].rsplit(" ", 1)
            assert str(knobs[knob.replace(" ", "_")]) == value


def test_intervals_are_students():
    gains = [1.0, 2.5, -0.5, 0.7]
    delta = paired(dict(enumerate(gains)), dict.fromkeys(range(len(gains)), 0.0))
    test = stats.ttest_1samp(gains, 0)
    theirs = test.confidence_interval(0.95)
    assert delta == pytest.approx((0.925, theirs.low, theirs.high, test.pvalue))


def test_two_seeds_have_no_interval():
    zeros = dict.fromkeys(range(3), 0.0)
    assert paired({0: 1.0, 1: 2.0}, zeros) is None
    assert difference({0: 1.0, 1: 2.0}, zeros) == "+1.5 (two seeds, no interval)"
    assert difference({0: 1.0}, zeros) == ""


@pytest.mark.parametrize(("p", "left"), [((0.01, 0.02, 0.04), 3), ((0.02, 0.01, 0.06), 2)])
def test_holms_correction(p, left):
    """As in Holm (1979): the smallest p against 0.05 / 3, the next against 0.05 / 2, and so on."""
    assert len(program.holm([Delta(1.0, 0.0, 2.0, of_one) for of_one in p])) == left
    assert program.holm([Delta(1.0, 0.0, 2.0, of_one) for of_one in (0.03, 0.03)]) == []


@pytest.mark.parametrize(
    ("delta", "said"),
    [
        (Delta(-1.0, -1.4, -0.6), "worse, missed"),
        (Delta(-1.0, -1.6, -0.4), "worse"),
        (Delta(-0.2, -0.3, -0.1), "worse, met"),
        (Delta(1.0, 0.1, 1.9), "better, met"),
        (Delta(1.0, -0.1, 2.1), "met"),
        (Delta(1.0, -0.6, 2.6), ""),
    ],
)
def test_what_an_interval_says(delta, said):
    names = ("better", "worse", "met", "missed")
    tests = (program.is_better, program.is_worse, program.is_met, program.is_missed)
    assert ", ".join(n for n, test in zip(names, tests, strict=True) if test(delta)) == said


def test_pairs_are_of_one_seed():
    def run(loss, seed, value):
        measures = dict.fromkeys(NAMES, value)
        config = {"loss": loss, "seed": seed, "batch_size": 128}
        return {"config": config, **measures}

    recommended = recipe(128, 0.2) | {"start": [0.75]}
    runs = [run({}, seed, 10.0 * seed) for seed in range(4)] + [run({"lead": 0.5}, 0, 7.0)]
    runs += [run(recommended, seed, value) for seed, value in ((2, 23.0), (0, 1.0), (1, 12.0))]
    (place,) = settings.place("nodes", "Cora", True, runs)
    assert all(delta.mean == pytest.approx(2.0) for delta in place.deltas.values())
    assert list(settings.place("nodes", "Cora", True, runs[:-1])) == []  # two seeds say too little


def test_the_page_has_the_tables_of_its_runs(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    shutil.copy(PAGE, tmp_path)
    monkeypatch.setattr(program, "DOCS", tmp_path)
    main_here(monkeypatch, program)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text()
    assert (tmp_path / "images" / "recommended.png").exists()
    assert "(images/recommended.png)" in PAGE.read_text()


def test_all_runs_of_the_map_are_there_and_their_table_is_on_the_page():
    done = results.read(of_map.RUNS)
    assert {results.key(config) for config in of_map.wanted(5)} <= {*done}
    assert of_map.causes_table(done) in PAGE.read_text()


def test_a_run_of_the_map_agrees_with_the_kept_one_in_form():
    place = of_map.places()[7] | {"epochs": 1}
    loss = of_map.causes(place)[RECOMMENDED]
    kept = next(iter(results.read(of_map.RUNS).values()))
    run = of_map.run({"place": place, "loss": loss, "seed": 0})
    assert run.keys() | {"versions"} == kept.keys()
    assert all(0 <= run[name] <= 100 for name in NAMES if name != "ari")
    assert "agreement" in run["history"][-1]


def test_whole_graphs(tmp_path, monkeypatch):
    file, digest = of_graphs.fetch("motifs", None, tmp_path)
    monkeypatch.setitem(of_graphs.TRAINING, "epochs", 2)
    starts = []
    start = of_graphs.Objective.begin

    def noted(self, step, rows):
        starts.append(step in self.starts)
        start(self, step, rows)

    monkeypatch.setattr(of_graphs.Objective, "begin", noted)
    for row in (RECOMMENDED, "Barlow Twins", of_graphs.UNTRAINED):
        run = of_graphs.run(of_graphs.configuration("motifs", digest, row, 0), file)
        assert run.keys() >= {"config", "seconds", *NAMES}
        assert len(run["history"]) == (0 if row == of_graphs.UNTRAINED else 2)
    assert sum(starts) == 1


def test_the_paper_is_a_setting_apart():
    knobs = of_map.places()[40]
    assert knobs["temperature"] == 0.5
    for loss, temperature in (
        (of_graphs.LOSSES, 0.2),
        (of_map.causes(of_map.places()[0]), 0.2),
        (of_map.causes(knobs), 0.5),
    ):
        configs = [
            {"loss": json.loads(json.dumps(loss[row])), "temperature": temperature}
            | {"batch_size": 128}
            for row in (RECOMMENDED, PGCL)
        ]
        assert [*map(settings.is_recommended, configs)] == [True, False]
        for other in ({"temperature": 0.9}, {"batch_size": 64}):
            assert not settings.is_recommended(configs[0] | other)
