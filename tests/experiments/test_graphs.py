"""Digits and TU sets: what is read, what is chosen, and that losses of a seed see the same."""

import itertools
import json
import re

import numpy as np
import pytest
import torch
from helpers.scripts import main_here
from helpers.tu_sets import write_tu_set
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from experiments import digits
from experiments.common import graphs, tu
from experiments.common.digits import graphs_of_digits
from experiments.few_labels import __main__ as few_labels_program
from experiments.few_labels import report as few_labels_report
from experiments.few_labels import study as few_labels
from experiments.tu_sets import __main__ as tu_program
from experiments.tu_sets import evaluate, study
from experiments.warm_up import study as warm_up
from pgcl_losses import SinkhornPrototypes

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
    setting = graphs.SETTING | {"batch_size": 16, "epochs": 2, "lr": 0.0}
    configs = [graphs.options_of(row, setting) for row in ROWS]
    configs += [configs[-1] | {"predictions": of} for of in few_labels.PREDICTIONS]
    seen = []
    for config in configs:
        torch.manual_seed(5)
        encoder = graphs.GIN(3)
        loader = graphs.batches_of(some, 16)
        model = graphs.build(config, encoder, len(loader))
        views = []
        model.loss.register_forward_pre_hook(
            lambda _, given, views=views: views.extend(z.detach() for z in given)
        )
        graphs.train(model, loader, config)
        assert len(views) == 2 * 2 * 3
        seen.append(torch.cat(views))
    assert all(torch.equal(views, seen[0]) for views in seen[1:])


@given(st.integers(1, 1000), st.integers(1, 200))
def test_batches_have_one_size_but_for_rounding(number, most):
    loader = graphs.batches_of([None] * number, most)
    count = -(-number // most)
    assert loader.batch_size <= most
    assert number - (count - 1) * loader.batch_size >= loader.batch_size - count


def test_centred_predictions_against_a_loop():
    torch.manual_seed(0)
    views = torch.randn(2, 7, 6, dtype=torch.float64)
    pgcl = graphs.pgcl_of(6, 4, graphs.CENTRED, temperature=0.3).double()
    batch = SinkhornPrototypes(6, 4).double()(*views).batch
    log_probs = batch.views(pgcl.prototypes(batch).log_probs)
    prototypes = torch.nn.functional.normalize(pgcl.prototypes.weight)
    for view, of_view in zip(torch.nn.functional.normalize(views, dim=2), log_probs, strict=True):
        scores = [[z @ c / 0.3 for c in prototypes] for z in view]
        means = [sum(row[k] for row in scores) / 7 for k in range(4)]
        for row, log_p in zip(scores, of_view, strict=True):
            logits = torch.stack([s - mean for s, mean in zip(row, means, strict=True)])
            torch.testing.assert_close(log_p, logits - logits.exp().sum().log())


def test_the_main_job_trains_and_draws(tmp_path, monkeypatch, capsys):
    made = graphs_of_digits()[:200]
    monkeypatch.setattr(warm_up, "graphs_of", lambda name, file: made)
    monkeypatch.setattr(digits, "graphs_of_digits", lambda: made)
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
    lines = (tmp_path / "runs").read_text().splitlines()
    assert sorted(json.loads(line)["config"]["epochs"] for line in lines) == [0, 20, 20]
    with pytest.raises(SystemExit, match="2"):
        main_here(monkeypatch, digits, *given)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Number of distinct clusters")  # equal graphs
def test_few_labels_run_what_the_tables_need(tmp_path, monkeypatch, capsys):
    """All parts run on small sets, and again on what is finished."""
    sets = {
        "digits": few_labels.Set(1, standardise=False, seeds=range(610, 613), in_depth=True),
        "ENZYMES": few_labels.Set(1, seeds=range(610, 613)),
    }
    for module in (few_labels, few_labels_report):
        monkeypatch.setattr(module, "SETS", sets)
    monkeypatch.setattr(few_labels, "CHOOSING_SEEDS", range(600, 601))
    monkeypatch.setattr(few_labels, "RECORDS", tmp_path / "runs")
    monkeypatch.setattr(few_labels, "FEW", 3)
    monkeypatch.setattr(few_labels, "OF_CURVE", 3)
    small = {"TEMPERATURES": (0.5, 2.0), "WEIGHTS": (1.0,), "OF_PGCL": (0.5,), "CURVE": (0.5, 2.0)}
    small |= {"OF_LENGTHS": (0.5, 2.0), "LONGER": (1, 2)}
    for name, value in small.items():
        monkeypatch.setattr(few_labels, name, value)
    made = graphs_of_digits()[:150]
    monkeypatch.setattr(few_labels, "graphs_of_digits", lambda: made)
    write_tu_set(tmp_path / "ENZYMES", "ENZYMES", [0, 1] * 15)
    given = [f"--root={tmp_path}", f"--cache={tmp_path / 'c'}", f"--output={tmp_path / 'runs'}"]
    for part in (few_labels_program.PARTS, few_labels_program.PARTS[2:]):
        main_here(monkeypatch, few_labels_program, *part, *given, "--datasets", *sets)
    assert "finished runs read" in capsys.readouterr().out
    every = [few_labels_report.Results(name) for name in sets]
    tables = [few_labels_report.table(every), few_labels_report.further(every)]
    for of in (few_labels_report.over_temperatures, few_labels_report.lengths):
        tables.append(of(every[:1]))
    for head, _, *lines in (table.split("\n\n")[0].splitlines() for table in tables):
        assert all(line.count("|") == head.count("|") for line in lines)
    assert "|  |" not in tables[0] + tables[3]
    assert all("nan" not in text for text in [*tables, few_labels_report.answers(every)])


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
