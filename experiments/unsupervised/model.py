"""The paper's encoder: a graph isomorphism network, read out by sums, with a projection head."""

import torch
from torch import Tensor, nn
from torch_geometric.nn import GINConv, global_add_pool

LAYERS, WIDTH = 3, 32
DIM = LAYERS * WIDTH


class GIN(nn.Module):
    """Node features ``[V, F]`` -> embeddings ``[G, 96]``, the concatenation of all layers."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        widths = [num_features, *[WIDTH] * LAYERS]
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(width, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)))
            for width in widths[:-1]
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in self.convs)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
        layers = []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x, edge_index).relu())
            layers.append(global_add_pool(x, batch, num_graphs))
        return torch.cat(layers, dim=1)


class Projected(nn.Module):
    """The encoder with a projection head, which only the loss uses."""

    def __init__(self, encoder: GIN) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
        return self.head(self.encoder(x, edge_index, batch, num_graphs))
