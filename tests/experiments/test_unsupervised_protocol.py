"""The paper's protocol: its views, its evaluation, and runs beside those of the usual protocol."""

import json

import numpy as np
import pytest
import torch
from helpers.scripts import main_here, threads_for_processes
from helpers.tu_sets import write_tu_set
from sklearn.datasets import make_blobs
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.preprocessing import normalize
from sklearn.svm import SVC
from torch import nn
from torch_geometric.data import Batch, Data

from experiments.common import results
from experiments.common.rows import INFO_NCE, PGCL
from experiments.unsupervised import __main__ as program
from experiments.unsupervised import protocol, table, train
from experiments.unsupervised.evaluate import PENALTIES

CONFIG = {**train.SETTING, **protocol.FIXED, "protocol": "paper", "seed": 3, "epochs": 3}


def path_of(size):
    """Nodes in a row, each with its number as its feature."""
    ends = torch.stack([torch.arange(size - 1), torch.arange(1, size)])
    edge_index = torch.cat([ends, ends.flip(0)], dim=1)
    return Data(
        x=torch.arange(size, dtype=torch.float32)[:, None],
        edge_index=edge_index,
        y=torch.tensor([size % 2]),
    )


def cheap_accuracy(z, labels, seed, draw):
    """It depends on the embeddings and on their order, and trains no classifier."""
    return float(np.abs(z) @ np.ones(z.shape[1]) @ labels) + draw


def test_self_loops_are_on_all_nodes_but_the_last():
    graph = path_of(4)
    looped = protocol.with_self_loops(graph)
    assert looped.edge_index.T.tolist() == [*graph.edge_index.T.tolist(), [0, 0], [1, 1], [2, 2]]
    assert looped.y is graph.y


def test_a_tenth_of_the_nodes_is_dropped_and_no_self_loop_is_left():
    sizes, unlike, without_last = [9, 25, 10], set(), 0
    batch = Batch.from_data_list([protocol.with_self_loops(path_of(size)) for size in sizes])
    for _ in range(50):
        view = protocol.dropped(batch)
        for index, size in enumerate(sizes):
            first, end = view.ptr[index : index + 2].tolist()
            kept = view.x[first:end, 0].tolist()
            assert (view.batch[first:end] == index).all()
            assert kept == sorted(kept)
            # The last node has no self-loop: it goes with its neighbour.
            lost_too = size - 1 not in kept and size - 2 not in kept
            without_last += lost_too
            assert len(kept) + size // 10 - size in ({0, -1} if lost_too else {0})
            inside = view.batch[view.edge_index[0]] == index
            edges = {
                (kept[a - first], kept[b - first]) for a, b in view.edge_index.T[inside].tolist()
            }
            assert edges == {(a, b) for a in kept for b in kept if abs(a - b) == 1}
            unlike.add((index, *kept))
    assert without_last
    assert len({kept for kept in unlike if kept[0] == 1}) > 20
    assert len({kept for kept in unlike if kept[0] == 0}) == 1


def test_the_accuracy_is_that_of_the_default_classifier_on_unit_embeddings():
    rows, labels = make_blobs(60, 96, centers=3, center_box=(-0.5, 0.5), random_state=0)
    unit, scores = normalize(rows), []
    for fit, test in StratifiedKFold(10, shuffle=True, random_state=2007).split(rows, labels):
        search = GridSearchCV(SVC(), {"C": PENALTIES}, cv=5).fit(unit[fit], labels[fit])
        scores.append(search.score(unit[test], labels[test]))
    score = protocol.accuracy(rows, labels, seed=2, draw=7)
    # The width of the kernel is that of all embeddings here, of the training part there.
    assert score == pytest.approx(100 * np.mean(scores), abs=2)
    lengths = np.random.default_rng(0).uniform(0.1, 10, size=(60, 1))
    assert protocol.accuracy(lengths * rows, labels, seed=2, draw=7) == score
    assert protocol.accuracy(rows, labels, seed=2, draw=8) != score


def test_losses_of_a_seed_have_the_same_initial_values_and_batches(monkeypatch):
    """Where nothing is learnt, PGCL is the untrained encoder, epoch by epoch."""
    batches = []

    def nothing_learnt(model, loader, optimizer):
        model.encoder.train()
        linear = [module for module in model.encoder.modules() if isinstance(module, nn.Linear)]
        assert len(linear) == 8
        for module in linear:  # six of the encoder, two of its head
            bound = (6 / sum(module.weight.shape)) ** 0.5
            assert 0.8 * bound < module.weight.abs().max() <= bound
            assert not module.bias.any()
        batches.append([batch.x.sum().item() for batch in loader])
        return {}

    monkeypatch.setattr(protocol, "train_epoch", nothing_learnt)
    monkeypatch.setattr(protocol, "accuracy", cheap_accuracy)
    graphs = [path_of(5 + number % 9) for number in range(40)]
    config = CONFIG | {"batch_size": 16}
    runs = []
    for row in (PGCL, train.UNTRAINED):
        torch.manual_seed(3)
        runs.append(protocol.every_epoch(config | {"row": row}, graphs))
    assert runs[0]["accuracy"] == runs[1]["accuracy"]
    assert runs[0]["fresh"] == runs[1]["fresh"]
    assert list(runs[0]["accuracy"]) == [1, 2, 3]
    assert batches == [batches[0]] * 3
    assert len(batches[0]) == 3


def test_the_best_epoch_is_evaluated_again(monkeypatch):
    calls = []

    def accuracy(embeddings, labels, seed, draw):
        calls.append((embeddings, draw))
        return [50.0, 70.0, 60.0, 1.0, 2.0, 3.0, 4.0, 5.0][draw - 1]

    monkeypatch.setattr(protocol, "accuracy", accuracy)
    torch.manual_seed(3)
    graphs = [path_of(5 + number % 9) for number in range(40)]
    run = protocol.every_epoch(CONFIG | {"row": INFO_NCE}, graphs)
    assert run["accuracy"] == {1: 50.0, 2: 70.0, 3: 60.0}
    assert run["fresh"] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert [draw for _, draw in calls] == [*range(1, 9)]
    assert all(z is calls[1][0] for z, _ in calls[3:])
    assert not np.array_equal(calls[0][0], calls[1][0])
    assert len(run["history"]) == 3


def test_the_program_keeps_both_protocols_apart(tmp_path, monkeypatch, capsys):
    threads_for_processes(monkeypatch, results)
    write_tu_set(tmp_path / "RINGS", "RINGS", [0, 1] * 15)
    output = tmp_path / "runs.jsonl"
    given = ["--dataset=RINGS", f"--root={tmp_path}", f"--output={output}", "--seeds=1"]
    given += [f"--cache={tmp_path / 'cache'}", "--epochs=2", "--workers=1"]
    main_here(monkeypatch, program, *given, "--rows", "untrained GIN", "PGCL")
    monkeypatch.setattr(protocol, "accuracy", cheap_accuracy)
    usual = [json.loads(line)["config"] for line in output.read_text().splitlines()]
    assert not any("protocol" in config for config in usual)
    capsys.readouterr()
    paper = [*given, "--protocol=paper"]
    main_here(monkeypatch, program, *paper)
    printed = capsys.readouterr().out
    assert "| loss | seeds | best epoch | last epoch | best epoch, fresh folds |" in printed
    runs = [json.loads(line) for line in output.read_text().splitlines()[2:]]
    assert [run["config"]["row"] for run in runs] == [train.UNTRAINED, INFO_NCE, PGCL]
    assert all(run["config"]["protocol"] == "paper" for run in runs)
    assert all(len(run["accuracy"]) == 2 and len(run["fresh"]) == 5 for run in runs)
    main_here(monkeypatch, program, *paper)
    assert capsys.readouterr().out == printed
    assert len(output.read_text().splitlines()) == 5
    for wrong, message in {
        "--drop=0.3": "--drop is the usual protocol's",
        "--rows=WL kernel": "'WL kernel' is not one of 'untrained GIN', ",
    }.items():
        with pytest.raises(SystemExit, match=r"^2$"):
            main_here(monkeypatch, program, *paper, wrong)
        assert message in capsys.readouterr().err


def test_the_table_of_best_and_last_epochs():

    def of(row, values, **options):
        return [
            {
                "config": {"row": row, "seed": seed, **options},
                "accuracy": {"1": value + 9, "2": value + 8, "10": value},
                "fresh": [value + 1, value + 3],
            }
            for seed, value in enumerate(values)
        ]

    runs = of(PGCL, [71.0, 82.0], consistency_weight=6.0)
    runs += of(PGCL, [60.0, 60.0], consistency_weight=0.6)
    runs += of(INFO_NCE, [70.0, 80.0], consistency_weight=6.0)
    _, _, info_nce, pgcl, other = table.every_epoch(runs).splitlines()
    assert info_nce == f"| {INFO_NCE} | 2 | 84.0 ± 7.1 | 75.0 ± 7.1 | 77.0 ± 7.1 |  |"
    assert pgcl.startswith("| PGCL | 2 | 85.5 ± 7.8 | 76.5 ± 7.8 | 78.5 ± 7.8 | +1.5 (two seeds, ")
    assert other.startswith("| PGCL, lambda=0.6 | 2 | 69.0 ± 0.0 | 60.0 ± 0.0 | 62.0 ± 0.0 |")
