"""Frozen encoders: scores of their embeddings, which use no label of the test part."""

import json

import numpy as np
import pytest
import torch
from helpers.scripts import main_here, threads_for_processes
from sklearn.metrics import average_precision_score, roc_auc_score
from sklearn.preprocessing import normalize

from experiments.common import results
from experiments.transfer import pretrain, probe, probe_run, probe_tables
from experiments.transfer.model import MoleculeGIN
from experiments.transfer.molecules import graph_of
from experiments.transfer.ranking import ranking
from experiments.transfer.scaffold import TEST, TRAIN, VALID


@pytest.fixture(autouse=True)
def threads(monkeypatch):
    """Threads in place of processes, which would import everything again."""
    threads_for_processes(monkeypatch, results)


def linear_tasks(tasks=3, width=8):
    """Embeddings in which each task is a direction, their labels and their parts."""
    random = np.random.default_rng(0)
    rows = normalize(random.normal(size=(300, width)))
    labels = (rows @ random.normal(size=(width, tasks)) > 0).astype(float)
    labels[random.random(labels.shape) < 0.2] = np.nan
    return rows, labels, random.choice([TRAIN, VALID, TEST], 300, p=[0.6, 0.2, 0.2])


def test_scores_are_of_the_tasks_that_can_be_ranked():
    random = np.random.default_rng(0)
    logits = random.normal(size=(40, 5)).round(1)  # with ties
    labels = random.choice([0, 1, np.nan], size=(40, 5))
    labels[labels[:, 2] == 0, 2] = np.nan  # one class alone
    labels[:, 4] = np.nan
    auc, precision = [], []
    for task in (0, 1, 3):
        pairs = [(x, y) for x, y in zip(logits[:, task], labels[:, task], strict=True) if y == y]
        ones, noughts = ([x for x, y in pairs if y == value] for value in (1, 0))
        won = sum((one > nought) + (one == nought) / 2 for one in ones for nought in noughts)
        auc.append(100 * won / (len(ones) * len(noughts)))
        # At the threshold of each one: which fraction of the scores at least as high are ones?
        fractions = [np.mean([y for x, y in pairs if x >= one]) for one in ones]
        precision.append(100 * np.mean(fractions))
    expected = {"auc": np.mean(auc), "ap": np.mean(precision)}
    assert ranking(logits, labels) == pytest.approx(expected)
    known = ~np.isnan(labels[:, 0])
    assert ranking(logits[:, :1], labels[:, :1]) == pytest.approx(
        {
            "auc": 100 * roc_auc_score(labels[known, 0], logits[known, 0]),
            "ap": 100 * average_precision_score(labels[known, 0], logits[known, 0]),
        }
    )
    assert np.isnan(ranking(logits[:, 2:3], labels[:, 2:3])["auc"])
    with pytest.raises(ValueError, match="logits are nan: its training has diverged, lower --lr"):
        ranking(logits * np.nan, labels)


def test_few_labels_are_of_both_classes_and_of_measured_molecules():
    labels = np.full(500, np.nan)
    labels[100:400] = 0
    labels[[150, 399]] = 1  # rare: ten at random would hardly ever have one
    draws = [probe_run.draw(labels, 10, np.random.default_rng(seed)) for seed in range(400)]
    for some in draws:
        assert len({*some.tolist()}) == 10
        assert {*labels[some].tolist()} == {0.0, 1.0}
    # Each has one of the two, and the other as often as one of 298 others is among 8.
    ones = [int((labels[some] == 1).sum()) for some in draws]
    assert np.mean(ones) == pytest.approx(1 + 8 / 298, abs=0.02)
    counts = np.bincount(np.concatenate(draws), minlength=500)
    assert abs(counts[150] - counts[399]) < 80
    assert counts[100:400].min() > 0
    assert counts[:100].sum() + counts[400:].sum() == 0
    again = probe_run.draw(labels, 10, np.random.default_rng(3))
    assert (again == draws[3]).all()


@pytest.mark.parametrize("part", [VALID, TEST])
def test_labels_of_other_parts_are_not_used(monkeypatch, part):
    """Neither to the few nor to all: what is fitted is the same with other labels there."""
    rows, labels, parts = linear_tasks()
    calls = []
    fitted = probe_run.fitted

    def noted(here, answers, others, strength=1.0):
        calls.append((here.tobytes(), answers.tobytes(), strength))
        return fitted(here, answers, others, strength)

    monkeypatch.setattr(probe_run, "fitted", noted)
    runs = []
    others = np.where((parts == part)[:, None], 1 - labels, labels)
    for answers in (labels, others):
        probe_run.few(rows, answers, parts, 10, draws=3, seed=0)
        probe_run.every(rows, answers, parts, [0.1, 1.0])
        runs.append(calls.copy())
        calls.clear()
    assert runs[0] == runs[1]
    assert len(runs[0]) == 3 * 3 + 2 * 3


def test_more_labels_rank_better_and_the_validation_part_chooses():
    rows, labels, parts = linear_tasks()
    found = [probe_run.few(rows, labels, parts, count, draws=8, seed=0) for count in (10, 100)]
    every = probe_run.every(rows, labels, parts, [1e-6, 100.0])
    assert 60 < found[0]["auc"] < found[1]["auc"] < every["auc"]
    assert every["strength"] == 100.0
    assert probe_run.few(rows, labels, parts, 10, draws=8, seed=0) == found[0]
    assert probe_run.few(rows, labels, parts, 10, draws=8, seed=1) != found[0]
    # A task with too few labels is left out; without any there is no score.
    labels[np.flatnonzero(parts == TRAIN)[50:], 1] = np.nan
    assert [probe_run.few(rows, labels, parts, n, 1, 0)["tasks"] for n in (10, 100)] == [3, 2]
    assert probe_run.few(rows, labels, parts, 1000, 1, 0) == {"tasks": 0}
    # By the labels of the validation part alone: with those turned round the worse one is taken.
    turned = np.where((parts == VALID)[:, None], 1 - labels, labels)
    assert probe_run.every(rows, turned, parts, [1e-6, 100.0])["strength"] == 1e-6


def test_clusters_are_compared_where_there_is_one_class_for_all():
    rows = np.repeat(np.eye(4)[:2], 20, axis=0)
    labels = np.repeat([0.0, 1.0], 20)[:, None]
    assert probe_run.clusters(rows, labels, 0) == {"nmi": 100, "ari": 100}
    assert probe_run.clusters(rows, np.tile(labels, 2), 0) is None
    assert probe_run.clusters(rows, np.where(rows[:, :1] > 0, np.nan, labels), 0) is None


def test_of_many_tasks_some_are_taken():
    labels = np.arange(617.0)[None]
    some = probe_run.some_tasks(labels, 30)[0]
    assert len(some) == 30
    assert (some[0], some[-1]) == (0, 616)
    assert {*np.diff(some)} <= {21, 22}
    assert probe_run.some_tasks(labels[:, :30], 30).tolist() == labels[:, :30].tolist()


@pytest.fixture
def table(tmp_path):
    """Molecules with one task, and a line that is none."""
    path = tmp_path / "mine.csv"
    smiles = [f"{'C' * n}{ring}{end}" for n in range(1, 6) for ring in RINGS for end in ("", "O")]
    lines = [f"{text},{len(text) % 2}" for text in smiles]  # not easily learnt
    path.write_text("\n".join(["smiles,odd", "no molecule,1", *lines]) + "\n")
    return path


RINGS = ("C1CC1", "C1CCC1", "C1CCCC1", "C1CCCCC1", "C1CCNC1", "C1CCNCC1", "C1CCSC1", "C1CCOC1")


@pytest.fixture
def probed(monkeypatch, tmp_path, table):
    """Runs the program here; returns its finished runs."""
    setting = {"few": [4, 20], "draws": 2, "most_tasks": 2, "strengths": [1.0]}
    monkeypatch.setattr(probe, "SETTING", setting)
    output = tmp_path / "probes.jsonl"

    def call(*arguments):
        given = (f"--csv={table}", f"--cache={tmp_path / 'cache'}", f"--output={output}")
        main_here(monkeypatch, probe, *given, "--workers=1", *arguments)
        return [json.loads(line) for line in output.read_text().splitlines()]

    return call


def test_encoders_are_probed_once_each(probed, tmp_path, monkeypatch, capsys):
    encoder = tmp_path / "masked.pt"
    main_here(
        *(monkeypatch, pretrain, "--row=attribute masking", "--limit=24", "--epochs=1"),
        *("--seed=1", "--workers=1", f"--cache={tmp_path / 'cache'}", f"--output={encoder}"),
    )
    runs = probed("--seeds=2")
    assert [run["config"]["seed"] for run in runs] == [0, 1]
    runs = probed("--seeds=2", "--encoders", "none", str(encoder))
    assert len(runs) == 3  # what was there is not run again
    first, second, masked = runs
    assert masked["config"]["pretraining"]["row"] == "attribute masking"
    assert masked["config"]["seed"] == 1
    assert first["labels"] != second["labels"]
    assert first["labels"].keys() == {"4", "20", "all"}
    assert 0 <= first["clusters"]["nmi"] <= 100
    printed = capsys.readouterr().out
    assert "ROC-AUC, 4 | average precision, 4 | ROC-AUC, 20" in printed
    assert "| no pre-training | 2 | " in printed
    assert "| attribute masking, 24 molecules x 1 | 1 | " in printed


def test_a_new_encoder_is_the_one_that_pretraining_begins_with(tmp_path, monkeypatch):
    """So that a row and its absence differ by the training alone."""
    begun = []
    build = pretrain.pretraining

    def noted(config, encoder, batches):
        begun.append({name: value.clone() for name, value in encoder.state_dict().items()})
        return build(config, encoder, batches)

    monkeypatch.setattr(pretrain, "pretraining", noted)
    given = ("--limit=24", "--epochs=1", "--seed=2", "--workers=1")
    main_here(monkeypatch, pretrain, *given, f"--cache={tmp_path}", f"--output={tmp_path / 'x.pt'}")
    embedded = []

    def seen(encoder, molecules):
        embedded.append(encoder.state_dict())
        raise ValueError("enough")

    monkeypatch.setattr(probe_run, "embedded", seen)
    monkeypatch.setattr(probe_run, "Molecules", lambda folder: None)
    data = probe_run.LabelledSet([], tmp_path, torch.empty(0, 1), "", np.empty(0), "cpu")
    with pytest.raises(ValueError, match="enough"):
        probe_run.run({"seed": 2}, data, None)
    assert all(torch.equal(begun[0][name], value) for name, value in embedded[0].items())


def test_embeddings_have_unit_length_and_the_encoder_is_frozen():
    graphs = [graph_of(text) for text in ("CCO", "c1ccccc1", "CCN", "C1CC1", "CCCC")]
    encoder = MoleculeGIN(dropout=0.5)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    rows = probe_run.embedded(encoder, graphs)
    assert rows.shape == (5, 300)
    assert (rows**2).sum(1).mean() == pytest.approx(1, abs=0.1)
    assert np.abs(rows.mean(0)).max() < 1e-6
    assert (probe_run.embedded(encoder, graphs) == rows).all()
    assert all(torch.equal(before[name], value) for name, value in encoder.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--encoders=nowhere.pt",), r"--encoders: nowhere.pt is not a file"),
        (("--label-columns=strange",), r"has no column 'strange'; it has smiles, odd"),
    ],
)
def test_what_cannot_be_probed(probed, capsys, arguments, message):
    with pytest.raises((ValueError, SystemExit)) as error:
        probed(*arguments)
    assert message in capsys.readouterr().err + str(error.value)


def test_a_file_of_something_else_stays(probed, tmp_path):
    (tmp_path / "probes.jsonl").write_text("mine\n")
    with pytest.raises(ValueError, match=r"probes.jsonl, line 1, is not a run"):
        probed()
    assert (tmp_path / "probes.jsonl").read_text() == "mine\n"


def of_probe(dataset, row, seed, auc, clusters=None):
    pretraining = None if row == "no pre-training" else {"row": row, "seed": seed}
    score = {"auc": auc, "ap": auc / 10}
    labels = {"10": score, "100": {"tasks": 0}, "all": score | {"strength": 1.0}}
    return {
        "config": {"dataset": dataset, "pretraining": pretraining, "seed": seed},
        "labels": labels,
        "clusters": clusters,
        "chance": 2.5,
    }


def test_tables_are_over_seeds_of_pretraining():
    runs = [of_probe("muv.csv.gz", "no pre-training", seed, 50 + seed) for seed in range(2)]
    runs += [of_probe("muv.csv.gz", "PGCL", seed, 60 + 3 * seed) for seed in range(2)]
    runs.append(of_probe("bace.csv", "PGCL, recommended", 0, 70, {"nmi": 4, "ari": 3}))
    tables = probe_tables.tables(runs)
    none, pgcl, recipe = tables["probe_10"].splitlines()[2:]
    assert none == "| no pre-training |  | 50.5 ± 0.7 |  |  |"
    assert pgcl == "| PGCL |  | 61.5 ± 2.1 |  |  |"
    assert recipe == "| PGCL, recommended | 70.0 |  |  |  |"
    (line,) = tables["probe_all_differences"].splitlines()[2:]
    assert line == "| PGCL minus no pre-training |  | +11.0 (two seeds, no interval) |"
    assert tables["probe_100"].count("\n") == 1  # no set has so many labels
    chance, *rows = tables["probe_precision"].splitlines()[2:]
    assert chance == "| chance | 2.5 | 2.5 |"
    assert rows[1] == "| PGCL, 10 labels |  | 6.2 ± 0.2 |"
    assert tables["probe_clusters"].splitlines() == [
        "| pre-training | BACE, NMI | BACE, ARI |",
        "| --- | --- | --- |",
        "| PGCL, recommended | 4.0 | 3.0 |",
    ]
    runs[-2]["config"]["pretraining"]["row_of_more"] = 1
    with pytest.raises(ValueError, match=r"^MUV, PGCL: runs of two settings, .*row_of_more"):
        probe_tables.tables(runs)
