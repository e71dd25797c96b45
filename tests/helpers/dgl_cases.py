"""DGL's augmentations, graphs to augment that say where everything is from, and a model."""

import dgl
import torch
from dgl.nn import GINConv, SumPooling
from hypothesis import strategies as st
from torch import nn

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.dgl import (
    AttributeMask,
    ContrastiveModel,
    EdgePerturb,
    NodeDrop,
    Subgraph,
)

KINDS = [NodeDrop, Subgraph, EdgePerturb, AttributeMask]


def batch_of(graphs, idtype=torch.int64):
    """A batch of (number of nodes, undirected edges); its features say where everything is from."""
    parts = []
    num_nodes = num_edges = 0
    for index, (size, pairs) in enumerate(graphs):
        ends = torch.tensor(pairs, dtype=idtype).reshape(-1, 2).T
        part = dgl.graph((*torch.cat([ends, ends.flip(0)], 1),), num_nodes=size, idtype=idtype)
        part.ndata["graph"] = torch.full((size,), index)
        part.ndata["_ID"] = torch.arange(num_nodes, num_nodes + size)
        part.ndata["feat"] = torch.full((size, 3), index + 1.0)
        part.edata["graph"] = torch.full((2 * len(pairs),), index)
        part.edata["_ID"] = torch.arange(num_edges, num_edges + 2 * len(pairs))
        # Both directions of an edge have the same weight.
        part.edata["weight"] = torch.arange(float(len(pairs))).repeat(2)
        parts.append(part)
        num_nodes, num_edges = num_nodes + size, num_edges + 2 * len(pairs)
    return dgl.batch(parts)


@st.composite
def graph_lists(draw):
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    return [
        (
            size,
            draw(st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=9)) if size else [],
        )
        for size in sizes
    ]


def ring(size):
    return size, [(node, (node + 1) % size) for node in range(size)]


class GIN(nn.Module):
    def __init__(self, width=3, dim=16):
        super().__init__()
        self.conv1 = GINConv(nn.Sequential(nn.Linear(width, dim), nn.ReLU(), nn.Linear(dim, dim)))
        self.conv2 = GINConv(nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)))
        self.pool = SumPooling()

    def forward(self, graph, feat):
        return self.pool(graph, self.conv2(graph, self.conv1(graph, feat).relu()))


def model_of(encoder=None, augment1=None, augment2=None, feat_name="feat"):
    augments = augment1 or NodeDrop(0.3), augment2 or EdgePerturb(0.3)
    return ContrastiveModel(encoder or GIN(), *augments, PGCLLoss(16, 4), feat_name=feat_name)
