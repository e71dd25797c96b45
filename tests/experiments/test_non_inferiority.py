"""InfoNCE, then PGCL, beside InfoNCE: settings, splits, the margin, and the page."""

import json
import shutil

import pytest
from helpers.scripts import ROOT, main_here
from scipy import stats

from experiments.common import results
from experiments.common.probes import NAMES
from experiments.common.rows import PGCL, RECOMMENDED, recipe
from experiments.common.tables import Delta, difference, paired
from experiments.non_inferiority import __main__ as program
from experiments.non_inferiority import settings
from experiments.synthetic import recipe as synthetic
from experiments.unsupervised import recipe as graphs

PAGE = ROOT / "docs" / "where_it_helps.md"


def test_every_second_synthetic_setting_is_of_development():
    compared = [s for s in settings.all_settings() if s.kind == "synthetic"]
    assert len(compared) == 45
    runs = [(config["place"], config["seed"]) for config in synthetic.wanted(5)]
    for index, seeds in ((0, {0, 1, 2, 3, 4}), (1, {5, 6, 7, 8, 9})):
        assert {seed for setting, seed in runs if setting == synthetic.settings()[index]} == seeds
    for index, (setting, options) in enumerate(zip(compared, synthetic.settings(), strict=True)):
        assert setting.development == (index % 2 == 0)
        assert setting.name.startswith(f"{options['classes']} classes")
        if "," in setting.name:
            option, value = setting.name.partition(", ")[2].rsplit(" ", 1)
            assert str(options[option.replace(" ", "_")]) == value


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
    (setting,) = settings.compared("nodes", "Cora", True, runs)
    assert all(delta.mean == pytest.approx(2.0) for delta in setting.deltas.values())
    assert list(settings.compared("nodes", "Cora", True, runs[:-1])) == []  # two seeds are too few


def test_the_page_has_the_tables_of_its_runs(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    shutil.copy(PAGE, tmp_path)
    monkeypatch.setattr(program, "DOCS", tmp_path)
    main_here(monkeypatch, program)
    assert (tmp_path / PAGE.name).read_text() == PAGE.read_text()
    for name in program.PICTURES:
        assert (tmp_path / "images" / f"recommended-{name}.png").exists()
        assert f"(images/recommended-{name}.png)" in PAGE.read_text()


def test_all_synthetic_runs_are_committed_and_their_table_is_on_the_page():
    done = results.read(synthetic.RUNS)
    assert {results.key(config) for config in synthetic.wanted(5)} <= {*done}
    assert synthetic.causes_table(done) in PAGE.read_text()


def test_a_synthetic_run_has_the_fields_of_the_records():
    setting = synthetic.settings()[7] | {"epochs": 1}
    loss = synthetic.causes(setting)[RECOMMENDED]
    kept = next(iter(results.read(synthetic.RUNS).values()))
    run = synthetic.run({"place": setting, "loss": loss, "seed": 0})
    assert run.keys() | {"versions"} == kept.keys()
    assert all(0 <= run[name] <= 100 for name in NAMES if name != "ari")
    assert "agreement" in run["history"][-1]


def test_whole_graphs(tmp_path, monkeypatch):
    file, digest = graphs.fetch("motifs", None, tmp_path)
    monkeypatch.setitem(graphs.TRAINING, "epochs", 2)
    starts = []
    start = graphs.Objective.begin

    def spy(self, step, embeddings):
        starts.append(step in self.starts)
        start(self, step, embeddings)

    monkeypatch.setattr(graphs.Objective, "begin", spy)
    for row in (RECOMMENDED, "Barlow Twins", graphs.UNTRAINED):
        run = graphs.run(graphs.configuration("motifs", digest, row, 0), file)
        assert run.keys() >= {"config", "seconds", *NAMES}
        assert len(run["history"]) == (0 if row == graphs.UNTRAINED else 2)
    assert sum(starts) == 1


def test_the_papers_options_are_not_the_recommended_ones():
    setting = synthetic.settings()[40]
    assert setting["temperature"] == 0.5
    for loss, temperature in (
        (graphs.LOSSES, 0.2),
        (synthetic.causes(synthetic.settings()[0]), 0.2),
        (synthetic.causes(setting), 0.5),
    ):
        configs = [
            {"loss": json.loads(json.dumps(loss[row])), "temperature": temperature}
            | {"batch_size": 128}
            for row in (RECOMMENDED, PGCL)
        ]
        assert [*map(settings.is_recommended, configs)] == [True, False]
        for other in ({"temperature": 0.9}, {"batch_size": 64}):
            assert not settings.is_recommended(configs[0] | other)
