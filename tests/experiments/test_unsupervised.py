"""Whole graphs: the program runs, resumes, evaluates as it says, and refuses what it cannot use."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from helpers.scripts import ROOT, kept_here, main_here
from helpers.tu_sets import write_tu_set
from sklearn.datasets import make_blobs
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.preprocessing import scale
from sklearn.svm import SVC

from experiments.common import results
from experiments.common.rows import INFO_NCE
from experiments.common.tables import fill
from experiments.unsupervised import __main__ as program
from experiments.unsupervised import data, evaluate, pictures, report, table, train

SMALL = ("--seeds=1", "--epochs=1", "--workers=1")


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    return kept_here(program, results, monkeypatch, capsys, tmp_path)


def test_the_script_resumes_and_prints_both_protocols(tmp_path, script):
    write_tu_set(tmp_path / "RINGS", "RINGS", [0, 1] * 15)
    given = (*SMALL, "--dataset=RINGS", f"--root={tmp_path}", "--rows=all")
    printed, output = script(*given)
    lines = output.read_text().splitlines()
    assert len(lines) == 9
    assert "| PGCL | 1 | " in printed
    assert "Accuracy in per cent" in printed
    assert printed.rstrip().endswith("take --seeds 5.")
    assert "best epoch by test accuracy (optimistic)" in printed
    assert "| WL kernel | 1 | 100.0 | " in printed
    run = json.loads(next(line for line in lines if '"PGCL"' in line))
    assert run["versions"]["torch"] == torch.__version__
    assert 0.1 <= run["history"][0]["largest_cluster"] <= 1
    assert ["labels_1" in line for line in lines].count(False) == 1  # the kernel

    # Killed while it wrote the last line: that run is done again, and no other.
    output.write_text("\n".join([*lines[:-1], lines[-1][:40]]))
    again, _ = script(*given)
    assert output.read_text().splitlines()[:-1] == lines[:-1]
    last, before = json.loads(output.read_text().splitlines()[-1]), json.loads(lines[-1])
    assert last["accuracy"] == before["accuracy"]
    assert again == printed


def test_ctrl_c_keeps_what_is_finished(tmp_path):
    output = tmp_path / "runs.jsonl"
    command = [sys.executable, "-m", "experiments.unsupervised", "--epochs=500", "--workers=1"]
    given = (f"--output={output}", f"--cache={tmp_path}", "--rows", "untrained GIN", "PGCL")
    process = subprocess.Popen(
        [*command, *given], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None and not (output.exists() and output.stat().st_size):
        time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert f"stopped; what is finished is kept in {output}" in errors
    assert "Traceback" not in errors
    assert [json.loads(line)["config"]["row"] for line in output.read_text().splitlines()]


@pytest.mark.parametrize("name", ["{}/MYSET", "../MYSET", "..", "", "MYSET/"])
def test_no_path_is_taken_for_a_name(tmp_path, script, name):
    """The folder that it leads to stays as it was."""
    mine = tmp_path / "MYSET" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(SystemExit, match="--dataset must be the name of a set"):
        script(*SMALL, "--dataset", name.format(tmp_path))
    assert mine.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["MYSET"]


def test_a_changed_set_is_another_set(tmp_path, script):
    """It has new runs; those of the set as it was are found again."""
    given = (*SMALL, "--dataset=RINGS", f"--root={tmp_path}", "--rows", "WL kernel")
    labels = [0, 1] * 15
    write_tu_set(tmp_path / "RINGS", "RINGS", labels)
    printed, output = script(*given)
    assert "| WL kernel | 1 | 100.0 | " in printed
    path = tmp_path / "RINGS" / "RINGS_graph_labels.txt"
    state, text = path.stat(), path.read_text()
    path.write_text("0\n1\n1\n0\n0\n1\n" * 5)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))  # as large and as old as before
    shuffled, _ = script(*given)
    assert "| 100.0 |" not in shuffled
    path.write_text(text)
    assert script(*given)[0] == printed
    runs = [json.loads(line)["config"] for line in output.read_text().splitlines()]
    assert [run["dataset"] for run in runs] == ["RINGS"] * 2
    assert runs[0]["data"] != runs[1]["data"]
    shutil.rmtree(tmp_path / "RINGS")
    with pytest.raises(SystemExit, match=f"--root {tmp_path} has no RINGS"):
        script(*given)
    with pytest.raises(SystemExit, match=r"--root .*absent is not a folder"):
        script(*given, f"--root={tmp_path / 'absent'}")


def refitted(embeddings, labels, seed):
    """The accuracy by machines that compute their kernels themselves."""
    scaled, scores = scale(embeddings), []
    folds = StratifiedKFold(10, shuffle=True, random_state=seed)
    for fit, test in folds.split(scaled, labels):
        svm = SVC(gamma=1 / scaled.shape[1])
        search = GridSearchCV(svm, {"C": evaluate.PENALTIES}, cv=5)
        search.fit(scaled[fit], labels[fit])
        scores.append(search.score(scaled[test], labels[test]))
    return 100 * np.mean(scores)


def test_one_kernel_gives_the_accuracy_of_refitting_from_vectors():
    """The same folds on standardised embeddings; the scale of a feature makes no difference."""
    rows, labels = make_blobs(120, 96, centers=6, center_box=(-0.5, 0.5), random_state=0)
    scaled = rows * np.where(np.arange(rows.shape[1]) == 2, 1e5, 1)
    score = evaluate.accuracy(rows, labels, seed=4)
    assert score == pytest.approx(refitted(rows, labels, seed=4), abs=1e-9)
    assert evaluate.accuracy(scaled, labels, seed=4) == score
    assert 50 < score < 95


def test_many_graphs_choose_their_penalty_in_two_folds(monkeypatch):
    """As well as in five, also where classes are all but equally large."""
    random = np.random.default_rng(0)
    labels = np.arange(301) % 2
    rows = random.normal(size=(301, 20)) + 0.5 * labels[:, None]
    by_five = evaluate.accuracy(rows, labels, seed=0)
    sizes, fit = [], SVC.fit
    monkeypatch.setattr(SVC, "fit", lambda svm, x, y: sizes.append(len(y)) or fit(svm, x, y))
    monkeypatch.setattr(evaluate, "MANY", 301)
    assert evaluate.accuracy(rows, labels, seed=0) == pytest.approx(by_five, abs=3)
    assert len(sizes) == 10 * (2 * 7 + 1)
    assert by_five > 80


def test_evaluation_does_not_change_a_run(tmp_path):
    graphs, _ = data.fetch("motifs", None, tmp_path)
    config = {"row": "PGCL", "seed": 0, **train.SETTING, "epochs": 2}
    often, once = (train.run({**config, "look_every": every}, graphs, None) for every in (1, 2))
    assert often["history"] == once["history"]
    assert often["accuracy"][2] == once["accuracy"][2]


def test_unknown_rows_are_named(script, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        script("--rows", "PGLC")
    assert "'PGLC' is not one of 'WL kernel', 'untrained GIN'" in capsys.readouterr().err


def test_a_folder_without_the_name_of_a_set_is_an_error(tmp_path, script, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        script(f"--root={tmp_path}")
    assert "--root holds no 'motifs'" in capsys.readouterr().err


def test_differences_are_paired_by_seed():

    def of(row, values):
        return [
            {
                "config": {"dataset": "MUTAG", "row": row, "seed": seed},
                "accuracy": {"5": value + 3, "20": value},
            }
            for seed, value in values.items()
        ]

    runs = of("InfoNCE (GraphCL)", {0: 70.0, 1: 80.0, 2: 90.0, 3: 10.0})
    runs += of("PGCL", {0: 71.0, 1: 82.0, 2: 93.0})
    line = next(line for line in table.comparison(runs).splitlines() if "PGCL" in line)
    # Mean 2, standard error 1 / sqrt(3), t(0.975, 2) = 4.303.
    assert line == "| PGCL | 3 | 82.0 ± 11.0 | 85.0 ± 11.0 | +2.0 (-0.5 to +4.5) |  |"


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([71.0, 69.0, 70.0], "not significantly different from InfoNCE: +0.0 (-2.5 to +2.5)"),
        ([72.0, 72.2, 72.4], "PGCL is significantly above InfoNCE: +2.2 (+1.7 to +2.7) points"),
        ([68.0, 68.2, 68.4], "PGCL is significantly below InfoNCE: -1.8 (-2.3 to -1.3) points"),
        ([72.0, 72.2], "Fewer than three seeds do not tell PGCL and InfoNCE apart"),
        ([], ""),
    ],
)
def test_the_verdict_is_in_words(ours, said):
    scores = {"PGCL": ours, INFO_NCE: [70.0] * 3}
    of_set = {"dataset": data.SYNTHETIC}
    runs = [
        {"config": {**of_set, "row": row, "seed": seed}, "accuracy": {"5": 99.0, "20": score}}
        for row, of_row in scores.items()
        for seed, score in enumerate(of_row)
    ]
    verdict = table.verdict(runs)
    assert said in verdict
    assert verdict.startswith("On synthetic graphs (motifs) PGCL is ") == (len(ours) > 2)
    assert bool(verdict) == bool(said)


def test_few_labels_have_columns_and_a_sentence_of_their_own():
    of_rows = {train.UNTRAINED: (70.0, 30.0), INFO_NCE: (70.0, 40.0), "PGCL": (70.0, 35.0)}
    runs = [
        {
            "config": {"dataset": data.SYNTHETIC, "row": row, "seed": seed},
            "accuracy": {"20": accuracy + seed},
            "labels_1": few + seed,
        }
        for row, (accuracy, few) in of_rows.items()
        for seed in range(3)
    ]
    head, _, _, of_info_nce, _ = table.comparison(runs).splitlines()
    assert head.endswith("| 1 label per class | minus InfoNCE | minus untrained |")
    assert of_info_nce.endswith("| 41.0 ± 1.0 |  | +10.0 (+10.0 to +10.0) |")
    said = table.verdict(runs).splitlines()
    assert "with 1 label per class PGCL is significantly below InfoNCE: -5.0" in said[1]
    del runs[0]["labels_1"]
    assert "1 label per class" not in table.comparison(runs)


def test_the_page_has_the_tables_of_its_runs():
    files = report.RUNS, report.PAPER_RUNS, report.MEASURED
    pages = report.pages(*(results.read(path).values() for path in files))
    assert {*pages} == {report.PAGE, report.CONCLUSIONS}
    for path, tables in pages.items():
        page = path.read_text()
        assert fill(page, tables) == page
        for name in re.findall(r"^<!-- ([\w ]+) -->\n<!-- end -->", page, flags=re.MULTILINE):
            pytest.fail(f"{name} has no runs")
    assert "<!-- averages -->\n| loss | " in report.PAGE.read_text()


def test_the_report_takes_runs_of_one_set_alone():
    """Lines from before there were digests still serve."""

    def of(seed, **digest):
        return {
            "config": {"dataset": "MUTAG", **digest, "row": train.WL, "seed": seed},
            "accuracy": {"0": 80.0},
        }

    runs = [of(0), of(1, data="one"), of(2, data="one")]
    assert report.of_setting(runs, train.SETTING) == {"MUTAG": runs}
    with pytest.raises(ValueError, match=r"^MUTAG: runs on two sets, one and other"):
        report.of_setting([*runs, of(3, data="other")], train.SETTING)


def test_pictures(tmp_path, monkeypatch, capsys):
    write_tu_set(tmp_path / "RINGS", "RINGS", [0, 1] * 15)
    output = tmp_path / "picture.png"
    given = (f"--root={tmp_path}", f"--cache={tmp_path / 'cache'}", f"--output={output}")
    main_here(monkeypatch, pictures, "--datasets=RINGS", *given)
    drawn = output.read_bytes()
    assert drawn.startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match=r"^2$"):
        main_here(monkeypatch, pictures, "--datasets=RINGS", *given)
    assert f"--output {output} is there already: choose another" in capsys.readouterr().err
    assert output.read_bytes() == drawn


def test_curves_for_tensorboard(tmp_path, script):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_tu_set(tmp_path / "RINGS", "RINGS", [0, 1] * 15)
    logs = tmp_path / "logs"
    given = (f"--root={tmp_path}", "--dataset=RINGS", "--rows=PGCL", f"--tensorboard={logs}")
    script(*SMALL, *given)
    (folder,) = logs.iterdir()
    tags = EventAccumulator(str(folder)).Reload().Tags()
    assert {"accuracy", "contrast", "consistency", "entropy"} <= set(tags["scalars"])
