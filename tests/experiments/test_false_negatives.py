"""False negatives: which labels an encoder sees, what masks leave out, and the program."""

from functools import partial

import numpy as np
import pytest
import torch
from helpers.scripts import main_here
from helpers.tu_sets import write_tu_set
from matplotlib.figure import Figure
from torch_geometric.data import Batch

from experiments.common import probes, results
from experiments.common.probes import few_labels, halves
from experiments.common.tu import fetch
from experiments.false_negatives import __main__ as program
from experiments.false_negatives import report, study
from pgcl_losses import PGCLLoss

MASKS = (*study.LOSSES, *study.PGCLS, study.SHUFFLED, study.RANDOM)
TRAININGS = study.ONE, study.THREE
SMALL = study.Set(
    2, (0.5, 2.0, 4.0), epochs=1, has_variants=True, standardise=True, seeds=range(410, 413)
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder with a small set, whose classes are not those of its shapes."""
    monkeypatch.setattr(study, "SETS", {"MUTAG": SMALL})
    write_tu_set(tmp_path / "MUTAG", "MUTAG", [*range(12)] * 4)
    labels = np.random.default_rng(0).permutation([0, 1] * 24)
    lines = "".join(f"{label}\n" for label in labels)
    (tmp_path / "MUTAG" / "MUTAG_graph_labels.txt").write_text(lines)
    return tmp_path


def config_of(row, part="half"):
    given = {"seed": 7, "rates": [0.9, 0.2], "clusters": 2}
    return study.config_of("MUTAG", row, 0.5, part) | given | {"epochs": 2}


def graphs_of(root):
    file, _ = fetch("MUTAG", root, root / "cache")
    graphs = study.graphs_of(file)
    return file, graphs, np.array([int(graph.y) for graph in graphs])


def test_rows_of_a_seed_have_the_same_encoder_batches_and_views(root, monkeypatch):
    """Where nothing is learned, all of them see the same embeddings in every step."""
    file, graphs, labels = graphs_of(root)
    monkeypatch.setitem(study.SETTING, "lr", 0.0)
    monkeypatch.setitem(study.SETTING, "batch_size", 16)
    seen, train = [], study.train

    def watched(model, *given):
        views = []
        model.loss.register_forward_pre_hook(lambda _, z: views.extend(x.detach() for x in z))
        train(model, *given)
        seen.append(torch.cat(views))

    for row in dict.fromkeys((*MASKS, *TRAININGS)):
        config = config_of(row, "all")
        groups = study.groups_of(config, labels, file)  # may train too
        monkeypatch.setattr(study, "train", watched)
        study.trained(config, graphs, groups)
        monkeypatch.setattr(study, "train", train)
    assert len(seen[0]) == 2 * 2 * 48
    assert all(torch.equal(views, seen[0]) for views in seen[1:])


@pytest.mark.parametrize("row", dict.fromkeys(row for row in MASKS if row != study.SHUFFLED))
def test_labels_of_measured_graphs_reach_no_encoder(row, root):
    file, graphs, labels = graphs_of(root)
    development, held_out = halves(labels)
    training, states = [graphs[i] for i in development], []
    for others in (0, 1):
        labels[held_out] = (labels[held_out] + others) % 2
        model = study.trained(
            config_of(row), training, study.groups_of(config_of(row), labels, file)
        )
        states.append(torch.cat([value.flatten() for value in model.encoder.parameters()]))
    assert torch.equal(*states)


def test_a_random_mask_has_its_rates_and_leaves_out_whole_pairs():
    y = torch.arange(600) % 5
    mask = study.RandomMask(0.9, 0.2, seed=3)
    mask.given(Batch(y=y))
    same, others = y[:, None] == y, ~torch.eye(600, dtype=torch.bool)
    assert torch.equal(mask.left_out, mask.left_out.T)
    assert float(mask.left_out[same & others].float().mean()) == pytest.approx(0.9, abs=0.01)
    assert float(mask.left_out[~same].float().mean()) == pytest.approx(0.2, abs=0.01)
    first = mask.left_out
    mask.given(Batch(y=y))
    assert not torch.equal(first, mask.left_out)


def test_a_detached_consistency_moves_prototypes_alone():
    config = config_of(study.PGCL)
    torch.manual_seed(0)
    views = [torch.randn(20, study.DIM, requires_grad=True) for _ in range(2)]
    losses = []
    for row in (study.PGCL, study.DETACHED):
        torch.manual_seed(1)
        losses.append(study.loss_of(config | {"row": row}, torch.empty(0))[0])
    torch.testing.assert_close(losses[0](*views), losses[1](*views))
    contrast = PGCLLoss(study.DIM, study.PROTOTYPES, temperature=0.5, consistency_weight=0.0)
    contrast.load_state_dict(losses[0].state_dict())
    of_contrast, of_detached, of_pgcl = (
        torch.autograd.grad(loss(*views), views) for loss in (contrast, losses[1], losses[0])
    )
    torch.testing.assert_close(of_detached, of_contrast)
    assert not torch.allclose(of_pgcl[0], of_contrast[0])
    losses[1](*views).backward()
    assert losses[1].prototypes.weight.grad.abs().sum() > 0


def test_the_pairs_that_clusters_leave_out_against_a_loop():
    torch.manual_seed(2)
    pgcl, y = PGCLLoss(8, 3).eval(), torch.tensor([0, 0, 1, 1, 1, 2])
    views = torch.randn(6, 8), torch.randn(6, 8)
    found = study.of_batch(pgcl, y, *views)
    clusters = torch.cat([view.clusters for view in pgcl.prototypes(*views)])
    counts = {True: [0, 0], False: [0, 0]}
    for i in range(12):
        for j in range(12):
            if i % 6 != j % 6:
                of_class = counts[bool(y[i % 6] == y[j % 6])]
                of_class[0] += int(clusters[i] == clusters[j])
                of_class[1] += 1
    for name, (excluded, pairs) in (("within", counts[True]), ("between", counts[False])):
        assert found[f"pairs_{name}"] == pytest.approx(excluded / pairs)
        assert 0 <= found[f"left_out_{name}"] <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Number of distinct clusters")  # equal graphs
def test_the_program_runs_what_the_tables_need(root, monkeypatch):
    """On a small set, and again on what is finished; the tables have a cell for each."""
    monkeypatch.setattr(study, "CHOOSING_SEEDS", range(400, 401))
    monkeypatch.setattr(study, "RECORDS", root / "runs")
    monkeypatch.setattr(probes, "few_labels", partial(few_labels, draws=5))
    given = [f"--root={root}", f"--cache={root / 'c'}", f"--output={root / 'runs'}", "--workers=1"]
    given += ["--datasets", "MUTAG"]
    parts = "masks", "trainings"
    main_here(monkeypatch, program, *parts, *given)
    before = {file: file.read_bytes() for file in (root / "runs").iterdir()}
    assert len(before) == 2
    main_here(monkeypatch, program, *parts, *given)
    assert {file: file.read_bytes() for file in (root / "runs").iterdir()} == before
    made = report.Results("MUTAG")
    assert {run["config"]["seed"] for run in made.runs} == {410, 411, 412}
    runs = results.read(root / "runs" / "MUTAG-masks.jsonl").values()
    pgcl = study.config_of("MUTAG", study.PGCL, 2.0, "half")
    push = results.matching(runs, pgcl)[400]["push"]
    expected = [round(push[f"pairs_{of}"], 3) for of in ("within", "between")]
    masks = {(c["row"], c["temperature"]): c for c in study.reported_masks("MUTAG", runs)}
    assert masks[study.RANDOM, 2.0]["rates"] == expected
    tables = [report.ceiling([made]), report.at_best([made])]
    for head, _, *lines in (table.splitlines() for table in tables):
        assert lines
        assert all(line.count("|") == head.count("|") for line in lines)
    assert all("nan" not in table for table in tables)
    assert isinstance(report.draw(), Figure)
