"""Whole trainings: on views that PyG's workers make, and on real graphs."""

import math
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.scripts import script_here
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader

from experiments.common import graphs
from experiments.common.digits import graphs_of_digits
from experiments.common.probes import few_labels
from pgcl_losses import PGCLLoss
from pgcl_losses.adapters import pyg

# On a machine of one core.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create 2 worker processes")


@pytest.mark.parametrize(
    "kind", ["NodeDrop", "EdgeDrop", "EdgePerturb", "AttributeMask", "FeatureMask", "Subgraph"]
)
def test_workers_draw_anew_for_each_graph_and_keep_the_data(kind):
    """One graph 32 times, twice: neither workers nor epochs repeat the draws of others."""
    dataset = FakeDataset(1, avg_num_nodes=40, num_channels=40, transform=getattr(pyg, kind)())
    before = dataset.get(0).clone()
    loader = DataLoader(dataset.copy([0] * 32), batch_size=8, num_workers=2)
    views = [view for _ in range(2) for batch in loader for view in batch.to_data_list()]
    drawn = {(*view.x.flatten().tolist(), *view.edge_index.flatten().tolist()) for view in views}
    assert len(drawn) > 60
    assert all(view.num_nodes > 0 for view in [*views, dataset[0]])
    assert all(torch.equal(value, before[name]) for name, value in dataset.get(0))


def two_views(graph):
    return pyg.NodeDrop()(graph), pyg.EdgePerturb()(graph)


def test_a_training_on_views_that_workers_make():
    dataset = FakeDataset(96, avg_num_nodes=8, num_channels=3, transform=two_views)
    encoder, loss_of = graphs.GIN(3), PGCLLoss(graphs.DIM, 4)
    optimizer = torch.optim.Adam([*encoder.parameters(), *loss_of.parameters()], lr=1e-3)
    losses = []
    for views in [*DataLoader(dataset, batch_size=32, num_workers=2)] * 4:
        loss = loss_of(*map(encoder, views))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(map(math.isfinite, losses))
    assert sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("row", [graphs.INFO_NCE, graphs.PGCL])
def test_training_on_digits_gains_one_shot_accuracy(row):
    """Of seeds 0 to 5 no gain was below 7 points, and their mean is 12."""
    digits = graphs_of_digits()[:500]
    labels = np.array([int(graph.y) for graph in digits])
    options = {"temperature": 0.5, "consistency_weight": 1.0, "perturb": 0.1, "epochs": 5}
    setting = graphs.SETTING | options | {"batch_size": 64}

    def accuracy(row, seed):
        config = graphs.options_of(row, setting) | {"seed": seed}
        embeddings = graphs.embed(graphs.trained(config, digits).encoder.encoder, digits)
        return few_labels(embeddings, labels, each=1, seed=0)

    gains = [accuracy(row, seed) - accuracy(graphs.UNTRAINED, seed) for seed in (0, 1)]
    assert np.mean(gains) > 5


@pytest.mark.skipif("TU_SETS" not in os.environ, reason="TU_SETS: a folder with MUTAG/raw of PyG")
@pytest.mark.parametrize("swap", [[], ["--pgcl"]])
def test_training_on_mutag(swap, monkeypatch, capsys, tmp_path):
    """Two thirds of the graphs are of one class."""
    raw = Path("MUTAG", "raw")
    shutil.copytree(os.environ["TU_SETS"] / raw, tmp_path / raw)  # PyG writes beside it
    script_here(monkeypatch, "examples/graphcl_swap.py", f"--root={tmp_path}", *swap)
    printed = capsys.readouterr().out
    assert float(re.search(r"(\d\.\d+) after", printed)[1]) > 0.75
