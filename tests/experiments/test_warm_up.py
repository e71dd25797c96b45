"""PGCL after a warm-up: how the form is chosen, which sets differ, and the program."""

import json
from statistics import mean

import numpy as np
import pytest
from helpers.scripts import ROOT, main_here
from helpers.tu_sets import write_tu_set
from hypothesis import given
from hypothesis import strategies as st

from experiments.common import probes
from experiments.warm_up import __main__ as program
from experiments.warm_up import choice, report, study


@given(st.lists(st.lists(st.floats(0, 9), min_size=3, max_size=3), min_size=2, max_size=6))
def test_the_rule_against_a_literal_one(of_candidates):
    tied = []
    for of in of_candidates:
        if mean(of) <= min(map(mean, of_candidates)) + 0.5:
            tied.append(of)
    worst = min(map(max, tied))
    expected = next(of for of in tied if max(of) <= worst + 1)
    position = choice.rule(np.array(of_candidates).T)
    assert of_candidates[position] == pytest.approx(expected)


def test_the_form_is_what_the_pages_show():
    form = study.warm_up("digits", study.RANDOM, 50)
    assert choice.chosen("digits") == form
    assert "PGCLLoss(model.embedding_dim, 50)" in (ROOT / "README.md").read_text()


def test_the_table_against_the_record():
    """The form minus InfoNCE, and PGCL from the first step on, on the held-out half of MSRC_21."""
    lines = (ROOT / "experiments" / "warm_up" / "MSRC_21.jsonl").read_text().splitlines()
    runs = [json.loads(line) for line in lines]

    def accuracy(**wanted):
        wanted = {"epochs": 40, **wanted}.items()
        found = [run for run in runs if wanted <= run["config"].items()]
        found = [run for run in found if not {"part", "encoder", "track"} & run["config"].keys()]
        found = [run for run in found if 710 <= run["config"]["seed"] < 730]
        return {run["config"]["seed"]: run["held_out"]["labels_1"] for run in found}

    info_nce = accuracy(row="InfoNCE", temperature=1.0)
    form = accuracy(row="warm-up", form="random", num_prototypes=50, fraction=0.5)
    today = accuracy(row="PGCL", num_prototypes=10)
    page = (ROOT / "docs" / "results.md").read_text().partition("<!-- warm-up -->")[2]
    (line,) = [line for line in page.splitlines()[:12] if line.startswith("| MSRC_21 ")]
    for of in (today, form):
        delta = mean(of[seed] - info_nce[seed] for seed in info_nce)
        assert f"| {delta:+.1f} (" in line
        assert len(of) == 20


def test_the_pages_say_what_the_plan_calls_refuted():
    refuted = report.refuted(report.trained())
    page = (ROOT / "docs" / "results.md").read_text()
    assert ("The warm-up is not refuted" in page) == (not refuted)


def test_within_against_a_loop():
    random = np.random.default_rng(0)
    z, clusters = random.normal(size=(30, 4)), random.integers(0, 3, 30)
    units = [vector / np.linalg.norm(vector) for vector in z]
    centre, inside, total = sum(units) / 30, 0.0, 0.0
    for unit, cluster in zip(units, clusters, strict=True):
        members = [u for u, c in zip(units, clusters, strict=True) if c == cluster]
        inside += ((unit - sum(members) / len(members)) ** 2).sum()
        total += ((unit - centre) ** 2).sum()
    assert study.within(z, clusters) == pytest.approx(inside / total)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Number of distinct clusters", "ignore:pgcl_losses")
def test_the_program_runs_what_the_tables_need(tmp_path, monkeypatch):
    """On small sets, and again on what is finished; the tables have a cell for each."""
    names = "MSRC_21", "Fingerprint"
    small = {name: study.SETS[name]._replace(epochs=4) for name in names}
    for name, value in {
        "SETS": small,
        "CHOOSE_ON": names[:1],
        "EXPLORED": (),
        "NEW": names[1:],
        "RECORDS": tmp_path / "runs",
        "SEEDS": range(710, 713),
        "CLUSTERS": 3,
        "TRACKED": 2,
        "SMALLEST": {"Fingerprint": 5},
    }.items():
        monkeypatch.setattr(study, name, value)
    for name, value in {
        "CHOOSE_ON": names[:1],
        "CHOOSING_SEEDS": range(700, 701),
        "SEEDS": range(710, 713),
        "FEW": range(710, 713),
        "FEWEST": range(710, 711),
    }.items():
        monkeypatch.setattr(choice, name, value)
    for module in (study, choice):
        monkeypatch.setattr(module, "CHOOSING_SEEDS", range(700, 701))
    monkeypatch.setattr(study, "FEW", range(710, 713))
    few_labels = probes.few_labels
    monkeypatch.setattr(probes, "few_labels", lambda *given: few_labels(*given, draws=3))
    write_tu_set(tmp_path / names[0], names[0], [0, 1] * 15)
    write_tu_set(tmp_path / names[1], names[1], [0, 1] * 15 + [2, 2])
    given = [f"--root={tmp_path}", f"--cache={tmp_path / 'c'}", f"--output={tmp_path / 'runs'}"]
    given += ["--workers=1", "--datasets", *names]
    main_here(monkeypatch, program, *choice.PARTS, *given)
    before = {file: file.read_bytes() for file in (tmp_path / "runs").iterdir()}
    assert len(before) == 2
    main_here(monkeypatch, program, *choice.PARTS, *given)
    assert {file: file.read_bytes() for file in (tmp_path / "runs").iterdir()} == before
    every = report.trained()
    assert [of.name for of in every] == [*names]
    tables = [report.table(every), report.controls(every), report.longer(every[:1])]
    tables += [report.candidates(), report.collapse(every)]
    for head, _, *lines in (table.split("\n\n")[0].splitlines() for table in tables):
        assert lines
        assert all(line.count("|") == head.count("|") for line in lines)
        assert not any("|  |" in line for line in lines)
    assert "nan" not in report.claim(every)
    tracks = [r["track"] for r in every[0].runs if "track" in r]
    assert [[epoch for epoch, *_ in track] for track in tracks] == [[2, 4]] * len(tracks)
