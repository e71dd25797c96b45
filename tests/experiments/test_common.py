"""Records, tables, probes, and the pages that hold the tables."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.scripts import ROOT, threads_for_processes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import pgcl_losses.adapters
from experiments import report
from experiments.common import results, tables
from experiments.common.probes import few_labels

PAGES = report.pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_tables_of_a_page_are_those_of_the_records(page):
    assert tables.fill(page.read_text(), PAGES[page]) == page.read_text()


def test_finished_runs_are_kept_and_not_run_again(tmp_path, monkeypatch, capsys):
    threads_for_processes(monkeypatch)
    output, ran = tmp_path / "runs" / "some.jsonl", []

    def run(config):
        if config["seed"] == 3:
            for _ in range(300):  # until the others are in the file
                if len(output.read_text().splitlines()) >= 3:
                    break
                time.sleep(0.1)
            raise ValueError("seed 3")
        ran.append(config["seed"])
        return {"config": config, "value": config["seed"] / 2}

    def complete(*seeds, threads=1):
        jobs = [({"seed": seed},) for seed in seeds]
        return [run["value"] for run in results.complete(output, jobs, run, 1, threads)]

    assert complete(1, 0, 1) == [0.5, 0.0, 0.5]
    assert not capsys.readouterr().out
    with pytest.raises(ValueError, match="seed 3"):
        complete(0, 1, 2, 3)
    assert "2 finished runs read from" in capsys.readouterr().out
    monkeypatch.setitem(results.ROUNDS, "torch", "9.9")
    assert complete(0, 1, 2) == [0.0, 0.5, 1.0]
    assert "3 finished runs read from" in (said := capsys.readouterr()).out
    assert f"Warning: some of them ran with torch {torch.__version__}, and this is 9.9" in said.out
    assert "?" not in said.err  # no progress of nothing
    assert sorted(ran) == [0, 1, 2]
    monkeypatch.setattr(results, "code_of", lambda module: "other source")
    assert complete(0) == [0.0]
    assert sorted(ran) == [0, 0, 1, 2]
    assert complete(0, threads=2) == [0.0]
    assert [run["versions"]["threads"] for run in results.read(output).values()] == [1] * 4 + [2]


def test_a_run_is_known_by_the_source_of_package_and_program(tmp_path, monkeypatch):
    """An edit anywhere, in copies of the files, makes its runs others."""
    module = "experiments.few_labels.study"
    edited = {
        pgcl_losses: "weights.py",
        pgcl_losses.adapters: "pyg.py",
        results: "graphs.py",
        sys.modules[module]: "report.py",
    }
    assert results.code_of(module) == results.code_of(module)
    for number, (of, file) in enumerate(edited.items()):
        folder = tmp_path / str(number)
        shutil.copytree(Path(of.__file__).parent, folder)
        before = results.code_of(module)
        monkeypatch.setattr(of, "__file__", str(folder / Path(of.__file__).name))
        assert results.code_of(module) == before
        with (folder / file).open("a") as source:
            source.write("# a comment")
        assert results.code_of(module) != before


NO_VERSIONS, NO_RUN = '{"config": {}, "versions": []}', '{"config": {}, "versions": {}}\n[1, 2]\n'


@pytest.mark.parametrize("text", ["no runs\n", NO_RUN, NO_VERSIONS, "\xff"])
def test_a_file_of_something_else_stays(tmp_path, text):
    output = tmp_path / "notes.txt"
    output.write_text(text, encoding="latin-1")
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"notes.txt, line \d, is not a run"):
        results.complete(output, [({"seed": 0},)], lambda config: config, workers=1)
    assert output.read_bytes() == before


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 100)), min_size=3, max_size=9))
def test_the_interval_is_that_of_a_paired_t_test(values):
    ours, theirs = (dict(enumerate(of)) for of in zip(*values, strict=True))
    delta = tables.paired(ours | {77: 1.0}, theirs | {88: 2.0})
    if len({a - b for a, b in values}) > 1:
        test = stats.ttest_rel([a for a, _ in values], [b for _, b in values])
        expected = test.confidence_interval(0.95)
        np.testing.assert_allclose([delta.low, delta.high], expected, atol=1e-6)
    assert tables.paired({0: 1.0, 1: 2.0}, theirs) is None


def test_a_verdict_counts_an_interval_that_touches_0_as_a_tie():
    deltas = {
        "up": tables.Delta(2.0, 0.1, 3.9),
        "down": tables.Delta(-2.0, -3.9, -0.1),
        "tie": tables.Delta(1.0, 0.0, 2.0),
    }
    assert (
        str(tables.Verdict.of(deltas)) == "above on up (+2.0), below on down (-2.0), and not "
        "significantly different on tie"
    )


def test_a_page_without_the_marker_is_not_written(tmp_path):
    page, other = tmp_path / "page.md", tmp_path / "other.md"
    page.write_text("<!-- a -->\nold\n<!-- end -->\n")
    other.write_text("no marker\n")
    with pytest.raises(ValueError, match="the page has no <!-- b -->"):
        tables.refill({page: {"a": "new"}, other: {"b": "new"}})
    assert "old" in page.read_text()
    tables.refill({page: {"a": "new"}})
    assert page.read_text() == "<!-- a -->\nnew\n<!-- end -->\n"


@given(st.integers(0, 99), st.integers(1, 3))
def test_few_labels_against_a_literal_loop(seed, each):
    data = np.random.default_rng(seed)
    labels = np.repeat([0, 1, 2], [7, 5, 4])
    z = np.eye(3, 4)[labels] + 0.8 * data.standard_normal((16, 4))
    unit = [vector / np.linalg.norm(vector) for vector in z]
    random, accuracies = np.random.default_rng(4), []
    for _ in range(5):
        means, test = [], []
        for label in range(3):
            order = random.permutation([i for i in range(16) if labels[i] == label])
            mean = sum(unit[i] for i in order[:each]) / each
            means.append(mean / np.linalg.norm(mean))
            test += list(order[each:])
        nearest = [max(range(3), key=lambda c: unit[i] @ means[c]) for i in test]
        accuracies.append(np.mean(np.array(nearest) == labels[test]))
    assert few_labels(z, labels, each, 4, draws=5) == pytest.approx(100 * np.mean(accuracies))


def test_the_error_of_a_missing_package_names_the_command():
    code = """
import sys
sys.modules["rdkit"] = None
import experiments.digits
print("digits need no rdkit")
import experiments.molecules.probe
"""
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("digits need no rdkit\n", 1)
    assert "needs rdkit: in the checkout, pip install -r requirements.txt rdkit" in ended.stderr
