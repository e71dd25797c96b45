"""PyG and DGL give the same loss for the same graphs, and both train on MUTAG."""

import copy
import os
import shutil
from pathlib import Path

import dgl
import pytest
import torch
from dgl.nn import GINConv as GINConvOfDGL
from dgl.nn import SumPooling
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import TUDataset
from torch_geometric.nn import GINConv, global_add_pool
from torch_geometric.utils import to_undirected

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters import dgl as adapter_of_dgl
from pgcl_losses.adapters import pyg

# Where TUDataset's files are, MUTAG.zip among them.
DATA = Path(os.environ.get("PGCL_DATA", Path(__file__).parents[3] / "shared/data/tu"))
KINDS = ["NodeDrop", "Subgraph", "EdgePerturb", "AttributeMask"]


def layers_of(width, dim=16):
    """What both frameworks' encoders share."""
    widths = [(width, dim), (dim, dim)]
    return nn.ModuleList(
        nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU(), nn.Linear(b, b))
        for a, b in widths
    )


class EncoderOfPyG(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.convs = nn.ModuleList(GINConv(layer) for layer in layers)

    def forward(self, x, edge_index, batch, num_graphs):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return global_add_pool(x, batch, num_graphs)


class EncoderOfDGL(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.convs = nn.ModuleList(GINConvOfDGL(layer, "sum") for layer in layers)

    def forward(self, graph, feat):
        for conv in self.convs:
            feat = conv(graph, feat).relu()
        return SumPooling()(graph, feat)


def model_of(framework, layers, augment1, augment2, loss):
    if framework == "pyg":
        return pyg.ContrastiveModel(EncoderOfPyG(layers), augment1, augment2, loss)
    return adapter_of_dgl.ContrastiveModel(
        EncoderOfDGL(layers), augment1, augment2, loss, feat_name="feat"
    )


def augmentations(framework, name, p):
    module = pyg if framework == "pyg" else adapter_of_dgl
    return getattr(module, name)(p)


def dgl_batch(graphs):
    parts = []
    for data in graphs:
        part = dgl.graph((*data.edge_index,), num_nodes=data.num_nodes)
        part.ndata["feat"] = data.x
        parts.append(part)
    return dgl.batch(parts)


def random_graphs():
    """Of many sizes: one has no node, some have no edge."""
    graphs = []
    for size in (7, 0, 1, 12, 4, 9, 2, 15):
        edge_index = torch.randint(size, (2, 2 * size)) if size > 2 else torch.empty(2, 0).long()
        edge_index = to_undirected(edge_index, num_nodes=size)
        graphs.append(Data(x=torch.randn(size, 5).double(), edge_index=edge_index))
    return graphs


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_same_graphs_same_weights_same_loss(name, p):
    """Augmentations draw the same in both, from the same seed."""
    graphs = random_graphs()
    layers = layers_of(5).double()
    loss = PGCLLoss(16, 3).double()
    results = []
    for framework in ("pyg", "dgl"):
        own_layers, own_loss = copy.deepcopy((layers, loss))
        augment1 = augmentations(framework, name, p)
        augment2 = augmentations(framework, "EdgePerturb", p)
        model = model_of(framework, own_layers, augment1, augment2, own_loss)
        own_layers.load_state_dict(layers.state_dict())  # PyG's GINConv has drawn new ones
        batch = Batch.from_data_list(graphs) if framework == "pyg" else dgl_batch(graphs)
        torch.manual_seed(3)
        embeddings = model.embeddings(batch)
        torch.manual_seed(3)
        value = model(batch)
        value.backward()
        parameters = [*own_layers.parameters(), *own_loss.parameters()]
        results.append([value, *embeddings, *(parameter.grad for parameter in parameters)])
    torch.testing.assert_close(*results)


@pytest.fixture(scope="module")
def mutag(tmp_path_factory):
    archive = DATA / "MUTAG.zip"
    if not archive.exists():
        pytest.skip(f"{archive} is not there; PGCL_DATA may name another folder")
    folder = tmp_path_factory.mktemp("data")
    shutil.unpack_archive(archive, folder)
    (folder / "MUTAG").rename(folder / "raw")
    (folder / "MUTAG").mkdir()
    (folder / "raw").rename(folder / "MUTAG" / "raw")
    graphs = list(TUDataset(folder, "MUTAG"))
    assert len(graphs) == 188
    return graphs


@pytest.mark.parametrize("framework", ["pyg", "dgl"])
def test_training_on_mutag(framework, mutag):
    augment = (pyg if framework == "pyg" else adapter_of_dgl).RandomChoice(
        [augmentations(framework, name, 0.2) for name in KINDS]
    )
    model = model_of(framework, layers_of(7), augment, augment, PGCLLoss(16))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    prototypes = model.loss.prototypes.weight.detach().clone()
    losses = []
    for _ in range(8):
        for start in range(0, len(mutag), 64):
            graphs = mutag[start : start + 64]
            batch = Batch.from_data_list(graphs) if framework == "pyg" else dgl_batch(graphs)
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])
    assert not torch.equal(model.loss.prototypes.weight, prototypes)
