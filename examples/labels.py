"""Graphs of which one in ten has a label: InfoNCE with labels as items.

Graphs of one label are positives of each other. A graph without a label is an item of its own. Four
classes of synthetic graphs differ in which types of nodes they link. The script prints the accuracy
on held-out graphs of the nearest class mean of the labelled graphs. A few seconds on a CPU:

    python examples/labels.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pgcl_losses import InfoNCE

CLASSES, TYPES, NODES, GRAPHS, LABELLED = 4, 7, 16, 1000, 100  # and as many held-out graphs
DIM, BATCH, EPOCHS, RATE, DROPPED = 32, 100, 8, 3e-3, 0.2


def synthetic_graphs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Types of nodes, adjacency matrices, and classes."""
    classes = torch.arange(count) % CLASSES
    types = torch.randint(TYPES, (count, NODES))
    apart = (types[:, :, None] - types[:, None]).abs()
    linked = torch.minimum(apart, TYPES - apart) == classes[:, None, None]
    chance = torch.where(linked, 0.4, 0.1)
    upper = (torch.rand(count, NODES, NODES) < chance).float().triu(1)
    return F.one_hot(types, TYPES).float(), upper + upper.mT, classes


class Encoder(nn.Module):
    """Two layers of a GIN, and the mean over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2 * TYPES, 64), nn.Linear(128, 64)
        self.head = nn.Linear(64, DIM)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            nodes = F.relu(layer(torch.cat([nodes, adjacency @ nodes], 2)))
        return self.head(nodes.mean(1))


def view_of(nodes: Tensor, adjacency: Tensor) -> tuple[Tensor, Tensor]:
    """Drops edges."""
    kept = (torch.rand_like(adjacency) >= DROPPED).float().triu(1)
    return nodes, adjacency * (kept + kept.mT)


@torch.no_grad()
def accuracy(encoder: Encoder, nodes: Tensor, adjacency: Tensor, classes: Tensor) -> float:
    z = F.normalize(encoder(nodes, adjacency))
    means = F.one_hot(classes[:LABELLED]).float().T @ z[:LABELLED]
    predicted = (z[GRAPHS:] @ F.normalize(means).T).argmax(1)
    return (predicted == classes[GRAPHS:]).float().mean().item()


def train(with_labels: bool) -> tuple[float, float]:
    torch.manual_seed(0)
    nodes, adjacency, classes = synthetic_graphs(2 * GRAPHS)
    items = CLASSES + torch.arange(GRAPHS)  # each graph is an item of its own
    if with_labels:
        items[:LABELLED] = classes[:LABELLED]
    encoder, loss_of = Encoder(), InfoNCE()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=RATE)
    before = accuracy(encoder, nodes, adjacency, classes)
    for _ in range(EPOCHS):
        for batch in torch.randperm(GRAPHS).split(BATCH):
            views = (encoder(*view_of(nodes[batch], adjacency[batch])) for _ in range(2))
            loss = loss_of(*views, items=items[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return before, accuracy(encoder, nodes, adjacency, classes)


(before, without), (_, with_labels) = train(with_labels=False), train(with_labels=True)
print(f"accuracy {before:.3f} untrained, {without:.3f} without labels, {with_labels:.3f} with them")
