"""Digits and TU sets: what is read, what is chosen, and that losses of a seed see the same."""

import itertools
import json
import shutil

import numpy as np
import pytest
import torch
from helpers.scripts import main_here
from helpers.tu_sets import write_tu_set
from sklearn.datasets import load_digits
from torch_geometric.loader import DataLoader

from experiments.common import graphs, results
from experiments.digits import __main__ as digits_main
from experiments.digits import study as digits
from experiments.digits.data import graphs_of_digits
from experiments.tu_sets import __main__ as program
from experiments.tu_sets import data, evaluate, study

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
    setting = digits.SETTING | {"batch_size": 16, "epochs": 2, "lr": 0.0}
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
        assert [*graphs.train(model, loader, config)] == [1, 2]
        seen.append(torch.cat(views))
    assert all(torch.equal(views, seen[0]) for views in seen[1:])


def test_the_main_job_trains_and_draws(tmp_path, monkeypatch, capsys):
    made = graphs_of_digits()
    for module in (digits, digits_main):
        monkeypatch.setattr(module, "graphs_of_digits", lambda: made[:200])
    runs = results.read(digits.RECORD).values()
    shorter = {row: of | {"epochs": 1} for row, of in digits.chosen(runs).items()}
    monkeypatch.setattr(digits, "chosen", lambda runs: shorter)
    picture = tmp_path / "digits.png"
    given = ["--seeds=1", "--workers=1", f"--output={tmp_path / 'runs'}", f"--picture={picture}"]
    main_here(monkeypatch, digits_main, *given)
    lines = [line.split("|") for line in capsys.readouterr().out.splitlines() if "|" in line]
    rows = graphs.UNTRAINED, graphs.INFO_NCE, graphs.PGCL, "PGCL minus InfoNCE"
    assert [line[1].strip() for line in lines[2:]] == [*rows]
    assert all(0 < float(cell) <= 100 for line in lines[2:5] for cell in line[2:6])
    assert picture.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit, match="2"):
        main_here(monkeypatch, digits_main, *given)


def test_the_program_chooses_temperatures_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    """What it chooses by is tested on the committed records, whose tables depend on it."""
    for name, value in {"SMALL": ("MUTAG",), "TEMPERATURES": (0.5, 2.0)}.items():
        monkeypatch.setattr(study, name, value)
    monkeypatch.setattr(study, "SETTING", graphs.SETTING | {"epochs": 1})
    monkeypatch.setattr(study, "seeds_of", lambda dataset: range(2))
    monkeypatch.setattr(evaluate, "PENALTIES", [1.0, 100.0])
    write_tu_set(tmp_path / "MUTAG", "MUTAG", [0, 1] * 10)
    given = [f"--root={tmp_path}", f"--cache={tmp_path / 'c'}", f"--output={tmp_path / 'runs'}"]
    given += ["--datasets=MUTAG", "--workers=1"]
    main_here(monkeypatch, program, "table1", *given)
    record = tmp_path / "runs" / "results.jsonl"
    configs = [json.loads(line)["config"] for line in record.read_text().splitlines()]
    assert len(configs) == 3 * 2 * 2 + 4 * 2
    assert {config["row"] for config in configs if config["seed"] < 2} == {
        graphs.UNTRAINED,
        *study.LOSSES,
    }
    before = record.read_bytes()
    main_here(monkeypatch, program, "table1", *given)
    assert record.read_bytes() == before


def test_sets_that_cannot_be_read(tmp_path, monkeypatch):
    def no_network(*args, **kwargs):
        raise OSError("no network")

    def fetch(name, root=tmp_path):
        return data.fetch(name, root, tmp_path / "cache")

    monkeypatch.setattr(data.TUDataset, "download", no_network)
    with pytest.raises(ValueError, match=r"NOPE cannot be downloaded \(OSError: no network\)"):
        fetch("NOPE", None)
    with pytest.raises(ValueError, match=r"--root .* has no NOPE: neither NOPE.zip nor"):
        fetch("NOPE")
    (tmp_path / "TORN.zip").write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"TORN\.zip is damaged"):
        fetch("TORN")
    write_tu_set(tmp_path / "FEW", "FEW", [0] * 20 + [1] * 9)
    with pytest.raises(ValueError, match=r"classes of \[20, 9\] graphs: .* 10 graphs of each"):
        fetch("FEW")
    write_tu_set(tmp_path / "BAD", "BAD", [0, 1] * 10)
    (tmp_path / "BAD" / "BAD_A.txt").write_text("one, two\n")
    with pytest.raises(ValueError, match=r"BAD cannot be read \(ValueError"):
        fetch("BAD")
    (tmp_path / "BAD" / "BAD_A.txt").unlink()
    with pytest.raises(ValueError, match=r"BAD has no BAD_A.txt"):
        fetch("BAD")
    write_tu_set(tmp_path / "made" / "RINGS", "RINGS", [0, 1] * 10)
    shutil.make_archive(tmp_path / "RINGS", "zip", tmp_path / "made", "RINGS")
    assert [graph.num_nodes for graph in data.load(fetch("RINGS")[0])] == [5, 6] * 10
