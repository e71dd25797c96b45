"""Digits and TU sets: what is read, what is chosen, and that losses of a seed see the same."""

import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.scripts import main_here
from helpers.tu_sets import write_tu_set
from sklearn.datasets import load_digits
from torch_geometric.loader import DataLoader

from experiments import digits
from experiments.common import graphs, results, tu
from experiments.common.digits import graphs_of_digits
from experiments.few_labels import __main__ as few_labels_program
from experiments.few_labels import study as few_labels
from experiments.tu_sets import __main__ as tu_program
from experiments.tu_sets import evaluate, study

ROWS = (graphs.INFO_NCE, graphs.GRAPH_CL, *graphs.ABLATION)


def test_digits_as_graphs():
    """Against literal loops over pixels."""
    images, made = load_digits().images / 16, graphs_of_digits()
    assert len(made) == 1797
    for index in (0, 7, 1796):
        pixels = itertools.product(range(8), range(8))
        nodes = [pixel for pixel in pixels if images[index][pixel] > 0.2]
        edges = [
            [a, b]
            for a, b in itertools.permutations(range(len(nodes)), 2)
            if all(abs(x - y) <= 1 for x, y in zip(nodes[a], nodes[b], strict=True))
        ]
        assert sorted(made[index].edge_index.T.tolist()) == edges
        centre = np.mean(nodes, 0)
        x = [[images[index][node], *((node - centre) / 8)] for node in nodes]
        np.testing.assert_allclose(made[index].x, x, atol=1e-6)


def test_losses_of_a_seed_have_the_same_encoder_batches_and_views():
    """Where nothing is learned, all of them see the same embeddings in every step."""
    some = graphs_of_digits()[:40]
    setting = few_labels.DIGITS.setting | {"batch_size": 16, "epochs": 2, "lr": 0.0}
    seen = []
    for row in ROWS:
        config = graphs.options_of(row, setting)
        torch.manual_seed(5)
        encoder = graphs.GIN(3)
        loader = DataLoader(some, 16, shuffle=True)
        model = graphs.build(config, encoder, len(loader))
        views = []
        model.loss.register_forward_pre_hook(
            lambda _, given, views=views: views.extend(z.detach() for z in given)
        )
        graphs.train(model, loader, config)
        assert len(views) == 2 * 2 * 3
        seen.append(torch.cat(views))
    assert all(torch.equal(views, seen[0]) for views in seen[1:])


def test_the_main_job_trains_and_draws(tmp_path, monkeypatch, capsys):
    made = graphs_of_digits()

    def trained(config, some):
        return graphs.trained(config | {"epochs": 1}, some)

    for module in (few_labels, digits):
        monkeypatch.setattr(module, "graphs_of_digits", lambda: made[:200])
        monkeypatch.setattr(module, "trained", trained)
    picture = tmp_path / "digits.png"
    given = ["--seeds=1", "--workers=1", f"--output={tmp_path / 'runs'}", f"--picture={picture}"]
    main_here(monkeypatch, digits, *given)
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines()[:-1])) <= 80  # the last names the picture
    means, deltas = (
        [line for line in part.splitlines() if re.match(r"1 label |5 labels", line)]
        for part in printed.split("Points, with")
    )
    assert [len(re.findall(r"\b\d+\.\d\b", line)) for line in means] == [3, 3]
    assert all(re.search(r" [+-]\d+\.\d  +[+-]\d+\.\d \(.* to .*\)$", line) for line in deltas)
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="2"):
        main_here(monkeypatch, digits, *given)


@pytest.mark.slow
def test_settings_are_chosen_by_one_half_and_reported_on_the_other(tmp_path, monkeypatch, capsys):
    """Both sets run, are read again, and each loss has the best of its settings."""
    small = {"temperatures": (0.5, 2.0), "prototypes": (4,), "seeds": range(40, 42)}
    sets = {
        name: replace(of_set, **small, setting=of_set.setting | {"epochs": 1})
        for name, of_set in few_labels.STUDIES.items()
    }
    for module in (few_labels, few_labels_program):
        monkeypatch.setattr(module, "STUDIES", sets)
        monkeypatch.setattr(module, "CHOOSING_SEEDS", range(100, 101))
    monkeypatch.setattr(few_labels_program, "DIGITS", sets["digits"])
    made = graphs_of_digits()[:150]
    monkeypatch.setattr(few_labels, "graphs_of_digits", lambda: made)
    write_tu_set(tmp_path / "MSRC_9", "MSRC_9", [0, 1] * 15)
    given = [f"--root={tmp_path}", f"--cache={tmp_path / 'c'}", f"--output={tmp_path / 'runs'}"]
    for _ in range(2):
        main_here(monkeypatch, few_labels_program, "choose", "report", *given, "--workers=1")
    assert "finished runs read" in capsys.readouterr().out
    for of_set in sets.values():
        runs = results.read(tmp_path / "runs" / of_set.record.name).values()
        rows = of_set.rows(runs)
        for row in few_labels.LOSSES:
            scores = [
                few_labels.values(runs, options, "development", "labels_1")[100]
                for options in of_set.candidates(row)
            ]
            best = of_set.candidates(row)[int(np.argmax(scores))]
            assert rows[row] == best | ({"freeze_epochs": 0} if row == graphs.PGCL else {})
        for options in of_set.reported(rows):
            assert {*few_labels.values(runs, options, "held_out", "all")} >= {40, 41}
    development, held_out = few_labels.halves(np.arange(60) % 3)
    assert sorted([*development, *held_out]) == [*range(60)]


def test_temperatures_are_chosen_for_table_1_and_finished_runs_stay(tmp_path, monkeypatch):
    """What it chooses by is tested on the committed records, whose tables depend on it."""
    for name, value in {"SMALL": ("MUTAG",), "TEMPERATURES": (0.5, 2.0)}.items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "SETTING", graphs.SETTING | {"epochs": 1})
    monkeypatch.setattr(study, "seeds_of", lambda dataset: range(2))
    monkeypatch.setattr(evaluate, "PENALTIES", [1.0, 100.0])
    write_tu_set(tmp_path / "MUTAG", "MUTAG", [0, 1] * 10)
    given = [f"--root={tmp_path}", f"--cache={tmp_path / 'c'}", f"--output={tmp_path / 'runs'}"]
    given += ["--datasets=MUTAG", "--workers=1"]
    main_here(monkeypatch, tu_program, "table1", *given)
    record = tmp_path / "runs" / "results.jsonl"
    configs = [json.loads(line)["config"] for line in record.read_text().splitlines()]
    assert len(configs) == 3 * 2 * 2 + 4 * 2
    assert {config["row"] for config in configs if config["seed"] < 2} == {
        graphs.UNTRAINED,
        *study.LOSSES,
    }
    before = record.read_bytes()
    main_here(monkeypatch, tu_program, "table1", *given)
    assert record.read_bytes() == before


def test_sets_that_cannot_be_read(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("no network")

    def fetch(name, root=tmp_path):
        return tu.fetch(name, root, tmp_path / "cache")

    monkeypatch.setattr(tu.TUDataset, "download", no_network)
    with pytest.raises(ValueError, match=r"NOPE cannot be downloaded \(OSError: no network\)"):
        fetch("NOPE", None)
    with pytest.raises(ValueError, match=r"--root .* has no NOPE: NOPE_A.txt is in none of"):
        fetch("NOPE")
    write_tu_set(tmp_path / "FEW", "FEW", [0] * 20 + [1] * 9)
    with pytest.raises(ValueError, match=r"classes of \[20, 9\] graphs: .* 10 graphs of each"):
        fetch("FEW")
    write_tu_set(tmp_path / "BAD", "BAD", [0, 1] * 10)
    (tmp_path / "BAD" / "BAD_A.txt").write_text("one, two\n")
    with pytest.raises(ValueError, match=r"BAD cannot be read \(ValueError"):
        fetch("BAD")
    write_tu_set(tmp_path / "RINGS", "RINGS", [0, 1] * 10)
    folder, digest = fetch("RINGS")
    assert [graph.num_nodes for graph in tu.load(folder)] == [5, 6] * 10
    assert fetch("RINGS") == (folder, digest)
    write_tu_set(tmp_path / "RINGS", "RINGS", [0, 1] * 11)
    assert fetch("RINGS") != (folder, digest)
    assert {path.name for path in (tmp_path / "RINGS").iterdir()} == {
        f"RINGS_{part}.txt" for part in ("A", "graph_indicator", "graph_labels")
    }
