"""PyG's augmentations, graphs to augment, and models of encoders of all kinds."""

import torch
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import GIN
from torch_geometric.utils import to_undirected

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import (
    AttributeMask,
    ContrastiveModel,
    EdgePerturb,
    NodeDrop,
    Subgraph,
)

DROPPING = [NodeDrop, Subgraph]
ALL = [*DROPPING, EdgePerturb, AttributeMask]


def molecules(count, **changes):
    """Rings of six with a tail of four; the first feature is the graph's class."""
    ring = torch.arange(6)
    tail = torch.arange(5, 9)
    one_way = torch.stack([torch.cat([ring, tail]), torch.cat([ring.roll(-1), tail + 1])])
    edge_index = to_undirected(one_way)
    graphs = []
    for i in range(count):
        x = torch.cat([torch.full((10, 1), i % 2 - 0.5), torch.randn(10, 3)], dim=1)
        graphs.append(Data(x=x, edge_index=edge_index, y=torch.tensor([i % 2]), **changes))
    return Batch.from_data_list(graphs)


class Encoder(torch.nn.Module):
    """GIN on tensors and the number of graphs."""

    def __init__(self, width=4, dim=8, **options):
        super().__init__()
        self.gin = GIN(width, dim, num_layers=3, **options)
        self.head = torch.nn.Linear(dim, dim)

    def forward(self, x, edge_index, batch, num_graphs):
        return self.head(global_add_pool(self.gin(x, edge_index), batch, num_graphs))


class Forgetful(Encoder):
    """Pools without the number of graphs."""

    def forward(self, x, edge_index, batch):
        return super().forward(x, edge_index, batch, None)


class NodeEncoder(Encoder):
    def forward(self, x, edge_index):
        return self.gin(x, edge_index)


def model_of(encoder, *augmentations, **options):
    return ContrastiveModel(encoder, *augmentations, PGCLLoss(8, 4, **options))
