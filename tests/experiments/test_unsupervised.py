"""The experiments on whole graphs: the script runs, resumes, and refuses what it cannot use."""

import json
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.scripts import ROOT, main_here, modules_of, run, threads_for_processes
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.svm import SVC

FOLDER = ROOT / "examples" / "unsupervised"
SMALL = ("--seeds=1", "--epochs=1", "--workers=1")


@pytest.fixture
def modules(monkeypatch):
    yield from modules_of(FOLDER, monkeypatch)


@pytest.fixture
def script(modules, monkeypatch, capsys, tmp_path):
    """Runs run.py here: what it prints, and where its runs are."""
    threads_for_processes(monkeypatch, modules("results"))

    def call(*arguments):
        output = tmp_path / "runs.jsonl"
        given = (f"--output={output}", f"--cache={tmp_path / 'cache'}", *arguments)
        main_here(monkeypatch, modules("run"), *given)
        return capsys.readouterr().out, output

    return call


def write_tu_set(folder, name, labels):
    """Rings, those of label 1 with a chord, in the raw layout of TU."""
    folder.mkdir(parents=True, exist_ok=True)
    edges, graph_of, node = [], [], 1
    for number, label in enumerate(labels, 1):
        size = 5 + label
        pairs = [(node + i, node + (i + 1) % size) for i in range(size)] + [
            (node, node + 3)
        ] * label
        edges += [f"{a}, {b}" for pair in pairs for a, b in (pair, pair[::-1])]
        graph_of += [str(number)] * size
        node += size
    for part, lines in (
        ("A", edges),
        ("graph_indicator", graph_of),
        ("graph_labels", map(str, labels)),
    ):
        (folder / f"{name}_{part}.txt").write_text("\n".join(lines) + "\n")


def test_the_script_resumes_and_prints_both_protocols(tmp_path, script):
    write_tu_set(tmp_path / "RINGS", "RINGS", [0, 1] * 15)
    given = (*SMALL, "--dataset=RINGS", f"--root={tmp_path}", "--rows=all")
    printed, output = script(*given)
    lines = output.read_text().splitlines()
    assert len(lines) == 9
    assert "| PGCL | 1 | " in printed
    assert "best epoch by test accuracy (optimistic)" in printed
    assert "| WL kernel | 1 | 100.0 | " in printed
    run = json.loads(next(line for line in lines if '"PGCL"' in line))
    assert run["versions"]["torch"] == torch.__version__
    assert sum(run["history"][0]["occupancy"]) == pytest.approx(1, abs=1e-3)

    # Killed while it wrote the last line: that run is done again, and no other.
    output.write_text("\n".join([*lines[:-1], lines[-1][:40]]))
    again, _ = script(*given)
    assert output.read_text().splitlines()[:-1] == lines[:-1]
    last, before = json.loads(output.read_text().splitlines()[-1]), json.loads(lines[-1])
    assert last["accuracy"] == before["accuracy"]
    assert again == printed


def test_ctrl_c_keeps_what_is_finished(tmp_path):
    output = tmp_path / "runs.jsonl"
    command = [sys.executable, "examples/unsupervised/run.py", "--epochs=500", "--workers=1"]
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


def test_a_killed_process_keeps_what_is_finished(tmp_path, modules):
    results, output = modules("results"), tmp_path / "runs.jsonl"
    results.append(output, {"config": "finished"})
    with pytest.raises(results.Stopped, match=f"killed.*: stopped; .* is kept in {output}"):
        results.complete(output, [(int(signal.SIGKILL),)], signal.raise_signal, workers=1)
    assert list(results.read(output)) == [results.key("finished")]


def test_after_an_error_no_further_run_begins(tmp_path, modules):
    results, output = modules("results"), tmp_path / "runs.jsonl"
    jobs = [["false"], *(["sh", "-c", f"sleep 1; touch {tmp_path / str(n)}.ran"] for n in range(8))]
    with pytest.raises(subprocess.CalledProcessError, match="'false'"):
        results.complete(output, [(job,) for job in jobs], subprocess.check_call, workers=1)
    for process in multiprocessing.active_children():
        process.join(60)
    assert len(list(tmp_path.glob("*.ran"))) < 4  # one and what the pool had handed out


def test_a_zip_that_may_not_be_written_beside(tmp_path, modules):
    write_tu_set(tmp_path / "made" / "RINGS", "RINGS", [0, 1] * 10)
    root = tmp_path / "root"
    root.mkdir()
    shutil.make_archive(root / "RINGS", "zip", tmp_path / "made", "RINGS")
    root.chmod(0o500)
    data = modules("data")
    graphs = data.load(data.fetch("RINGS", root, tmp_path / "cache")[0])
    assert [graph.num_nodes for graph in graphs] == [5, 6] * 10
    assert graphs[0].x.tolist() == [[1.0]] * 5


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0] * 30, r"classes of \[30\] graphs: .* at least two classes"),
        ([0] * 20 + [1] * 9, r"classes of \[20, 9\] graphs: .* 10 graphs of each"),
    ],
)
def test_sets_that_cannot_be_evaluated(tmp_path, modules, labels, message):
    write_tu_set(tmp_path / "RINGS", "RINGS", labels)
    with pytest.raises(ValueError, match=message):
        modules("data").fetch("RINGS", tmp_path, tmp_path / "cache")


def test_damaged_and_missing_sets(tmp_path, modules, monkeypatch):
    data = modules("data")

    def no_network(*args, **kwargs):
        raise OSError("no network")

    monkeypatch.setattr(data.TUDataset, "download", no_network)
    cache = tmp_path / "cache"
    with pytest.raises(ValueError, match=r"NOPE cannot be downloaded \(OSError: no network\)"):
        data.fetch("NOPE", None, cache)
    with pytest.raises(
        ValueError, match=r"--root .* has no NOPE: neither NOPE.zip nor"
    ):
        data.fetch("NOPE", tmp_path, cache)
    with pytest.raises(ValueError, match=r"--root .*absent is not a folder"):
        data.fetch("NOPE", tmp_path / "absent", cache)
    (tmp_path / "TORN.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"TORN\.zip is damaged"):
        data.fetch("TORN", tmp_path, cache)
    write_tu_set(tmp_path / "BAD", "BAD", [0, 1] * 10)
    (tmp_path / "BAD" / "BAD_graph_labels.txt").unlink()
    with pytest.raises(ValueError, match=r"BAD has no BAD_graph_labels.txt"):
        data.fetch("BAD", tmp_path, cache)
    write_tu_set(tmp_path / "BAD", "BAD", [0, 1] * 10)
    (tmp_path / "BAD" / "BAD_A.txt").write_text("one, two\n")
    with pytest.raises(ValueError, match=r"BAD cannot be read \(ValueError"):
        data.fetch("BAD", tmp_path, cache)
    write_tu_set(tmp_path / "BAD", "BAD", [0, 1] * 10)
    assert len(data.load(data.fetch("BAD", tmp_path, cache)[0])) == 20


def test_a_set_is_downloaded_once_and_whole(tmp_path, modules, monkeypatch):
    data, downloads = modules("data"), []

    def download(dataset):
        downloads.append(dataset.name)
        write_tu_set(Path(dataset.raw_dir), dataset.name, [0, 1] * 10)
        if len(downloads) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(data.TUDataset, "download", download)
    with pytest.raises(KeyboardInterrupt):
        data.fetch("RINGS", None, tmp_path)
    once, again = (data.fetch("RINGS", None, tmp_path) for _ in range(2))
    assert once == again
    assert downloads == ["RINGS"] * 2


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
    """Its runs are made anew; those of the set as it was are found again."""
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


@pytest.mark.parametrize(
    "text", ["no runs\n", "to do: all", '{"config": {}}\n[1, 2]\n', '{\n "machine": 1\n}', "\xff"]
)
def test_a_file_of_something_else_stays(tmp_path, modules, text):
    results, output = modules("results"), tmp_path / "notes.txt"
    output.write_text(text, encoding="latin-1")
    before = output.read_bytes()
    with pytest.raises(ValueError, match=r"notes.txt, line \d, is not a run"):
        results.complete(output, [({"seed": 0},)], dict, workers=1)
    assert output.read_bytes() == before


def test_a_last_line_without_its_end_is_kept(tmp_path, modules):
    results, output = modules("results"), tmp_path / "runs.jsonl"
    results.append(output, {"config": "first"})
    output.write_text(output.read_text().rstrip())  # as some editors leave it
    results.append(output, {"config": "second"})
    assert list(results.read(output)) == ['"first"', '"second"']


def test_one_kernel_gives_the_accuracy_of_refitting_from_vectors(modules):
    """The same folds on standardised rows; how large a feature is makes no difference."""
    random = np.random.default_rng(0)
    labels = np.arange(120) % 3
    rows = random.normal(size=(120, 5)) + 0.8 * labels[:, None]
    standard = (rows - rows.mean(axis=0)) / rows.std(axis=0)
    scores = []
    for train, test in StratifiedKFold(10, shuffle=True, random_state=4).split(rows, labels):
        svm = GridSearchCV(SVC(gamma=1 / 5), {"C": [10.0**power for power in range(-3, 4)]}, cv=5)
        scores.append(svm.fit(standard[train], labels[train]).score(standard[test], labels[test]))
    accuracy = modules("evaluate").accuracy
    assert accuracy(rows, labels, seed=4) == pytest.approx(100 * np.mean(scores), abs=1e-9)
    assert accuracy(rows * [1, 1, 1e5, 1, 1], labels, seed=4) == accuracy(rows, labels, seed=4)
    assert 50 < np.mean(scores) * 100 < 95


def test_many_graphs_choose_their_penalty_in_two_folds(modules, monkeypatch):
    """As well as in five, also where classes are all but equally large."""
    evaluate = modules("evaluate")
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


def test_looking_at_a_run_does_not_change_it(modules, tmp_path):
    train = modules("train")
    graphs, _ = modules("data").fetch("motifs", None, tmp_path)
    config = {"row": "PGCL", "seed": 0, **train.SETTING, "epochs": 2}
    often, once = (train.run({**config, "look_every": every}, graphs, None) for every in (1, 2))
    assert often["history"] == once["history"]
    assert often["accuracy"][2] == once["accuracy"][2]


def test_planted_motifs_are_balanced_and_the_same_every_time(modules):
    data = modules("data")
    first, second = data.planted_motifs(), data.planted_motifs()
    assert torch.cat([graph.y for graph in first]).bincount().tolist() == [80] * 6
    assert all(torch.equal(a.edge_index, b.edge_index) for a, b in zip(first, second, strict=True))
    assert not any(graph.has_isolated_nodes() or graph.has_self_loops() for graph in first)


def test_unknown_rows_are_named(script, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        script("--rows", "PGLC")
    assert "'PGLC' is not one of 'WL kernel', 'untrained GIN'" in capsys.readouterr().err


def test_differences_are_paired_by_seed(modules):
    table = modules("table")

    def of(row, values):
        return [
            {"config": {"row": row, "seed": seed}, "accuracy": {"5": value + 3, "20": value}}
            for seed, value in values.items()
        ]

    runs = of("InfoNCE (GraphCL)", {0: 70.0, 1: 80.0, 2: 90.0, 3: 10.0})
    runs += of("PGCL", {0: 71.0, 1: 82.0, 2: 93.0})
    line = next(line for line in table.comparison(runs).splitlines() if "PGCL" in line)
    # Mean 2, standard error 1 / sqrt(3), t(0.975, 2) = 4.303.
    assert line == "| PGCL | 3 | 82.0 ± 11.0 | 85.0 ± 11.0 | +2.0 (-0.5 to +4.5) |  |"


def test_the_page_has_the_tables_of_its_runs(modules):
    report = modules("report")
    page = report.PAGE.read_text()
    assert report.filled(page, modules("results").read(report.RUNS).values()) == page
    assert "<!-- averages -->\n| | " in page
    for name in re.findall(r"^<!-- (\w+) -->\n<!-- end -->", page, flags=re.MULTILINE):
        pytest.fail(f"{name} has no runs")


def test_pictures(tmp_path):
    write_tu_set(tmp_path / "RINGS", "RINGS", [0, 1] * 15)
    output = tmp_path / "picture.png"
    run(
        "examples/unsupervised/pictures.py",
        "--datasets=RINGS",
        f"--root={tmp_path}",
        f"--cache={tmp_path / 'cache'}",
        f"--output={output}",
    )
    assert output.read_bytes().startswith(b"\x89PNG")


def test_curves_for_tensorboard(tmp_path, script):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_tu_set(tmp_path / "RINGS", "RINGS", [0, 1] * 15)
    logs = tmp_path / "logs"
    given = (f"--root={tmp_path}", "--dataset=RINGS", "--rows=PGCL", f"--tensorboard={logs}")
    script(*SMALL, *given)
    (folder,) = logs.iterdir()
    tags = EventAccumulator(str(folder)).Reload().Tags()
    assert {"accuracy", "contrast", "consistency", "entropy"} <= set(tags["scalars"])
    assert tags["histograms"] == ["occupancy"]


def test_the_map_is_drawn_from_its_runs(modules, tmp_path):
    """Nothing is missing in the file of runs, and page and pictures are those of its runs."""
    results, places = modules("results"), modules("places")
    missing = {results.key(config) for config in places.wanted(3)} - {
        *results.read(FOLDER / "map.jsonl")
    }
    assert not missing
    page = tmp_path / "where_it_helps.md"
    shutil.copy(ROOT / "docs" / "where_it_helps.md", page)
    shutil.copy(FOLDER / "map.jsonl", tmp_path)
    output = f"--output={tmp_path / 'map.jsonl'}"
    run("examples/unsupervised/map.py", "--workers=1", output, f"--docs={tmp_path}")
    assert page.read_text() == (ROOT / "docs" / "where_it_helps.md").read_text()
    assert (tmp_path / "map.jsonl").read_bytes() == (FOLDER / "map.jsonl").read_bytes()
    drawn = {path.name for path in (tmp_path / "images").iterdir()}
    assert drawn == {"map-grid.png", "map-knobs.png", "map-rule.png"}
    for name in drawn:
        assert f"(images/{name})" in page.read_text()


def test_runs_of_the_map(modules):
    planted, train = modules("planted"), modules("train")
    rows = (train.INFO_NCE, "PGCL", "consistency alone")
    config = {**planted.KNOBS, "epochs": 2, "warm_up_epochs": 2, "duplicates": 8, "seed": 0}
    runs = [planted.run({**config, "row": row}) for row in rows]
    assert all(40 < run["accuracy"] < 100 for run in runs)
    assert all(0 < run["effective_negatives"] <= 1 for run in runs)
    shares = [run["gradient_share"] for run in runs]
    assert shares[0] == 0 < shares[1] < shares[2] == 1
    del runs[1]["seconds"]
    again = planted.run(runs[1]["config"])
    assert again == {**runs[1], "seconds": again["seconds"]}


def test_gains_are_over_info_nce_at_the_same_place(modules):
    planted, places, train = modules("planted"), modules("places"), modules("train")
    accuracies = {
        (4, train.INFO_NCE, 10): 90.0,
        (4, "PGCL", 20): 92.0,
        (40, train.INFO_NCE, 10): 50.0,
        (40, "PGCL", 20): 47.0,
    }
    told = places.Map(
        {
            "config": {
                **planted.KNOBS,
                "classes": classes,
                "row": row,
                "num_prototypes": prototypes,
                "seed": seed,
            },
            "accuracy": accuracy + seed,
        }
        for (classes, row, prototypes), accuracy in accuracies.items()
        for seed in range(2)
    )
    assert told.mean("accuracy", classes=4, num_prototypes=20) == 92.5
    assert told.gain(classes=4, num_prototypes=20) == 2.0
    assert told.gain(classes=40, num_prototypes=20) == -3.0
    assert np.isnan(told.gain(classes=10, num_prototypes=20))
