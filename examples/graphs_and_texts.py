"""Graphs and their captions in one space, as CLIP has images and texts.

Each graph has one to three captions. A caption names five edges of its graph, each by the types of
its two nodes. A graph and its captions are one item: positives of each other, across the two sets
alone (`negatives="cross"`). The temperature is learned. The script prints how often the nearest of
200 held-out graphs is the caption's own, before training and after. A few seconds on a CPU:

    python examples/graphs_and_texts.py
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pgcl_losses import InfoNCE

GRAPHS, HELD_OUT, NODES, EDGES, TYPES, CAPTION = 2000, 200, 10, 14, 8, 5
DIM, BATCH, EPOCHS, RATE = 64, 100, 5, 1e-2


def synthetic_graphs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Types of nodes, adjacency matrices, and edges as words: two types make a number."""
    types = torch.randint(TYPES, (count, NODES))
    ends = torch.rand(count, EDGES, NODES).topk(2, 2).indices  # [count, EDGES, 2]
    adjacency = torch.zeros(count, NODES * NODES)
    for a, b in ((0, 1), (1, 0)):
        adjacency.scatter_(1, ends[..., a] * NODES + ends[..., b], 1.0)
    low, high = types.unsqueeze(1).expand(-1, EDGES, -1).gather(2, ends).sort(2).values.unbind(2)
    return F.one_hot(types, TYPES).float(), adjacency.view(-1, NODES, NODES), low * TYPES + high


class GraphEncoder(nn.Module):
    """One layer of a GIN with a hidden layer, and the mean over nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(2 * TYPES, 128), nn.Linear(128, DIM)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        hidden = F.relu(self.hidden(torch.cat([nodes, adjacency @ nodes], 2)))
        return self.head(hidden.mean(1))


@torch.no_grad()
def retrieval() -> float:
    """The fraction of held-out captions whose nearest held-out graph is their own."""
    z = F.normalize(graph_encoder(nodes[GRAPHS:], adjacency[GRAPHS:]))
    held_out = owner >= GRAPHS
    nearest = (text_encoder(captions[held_out]) @ z.T).argmax(1)
    return (nearest + GRAPHS == owner[held_out]).float().mean().item()


torch.manual_seed(0)
nodes, adjacency, edges = synthetic_graphs(GRAPHS + HELD_OUT)
owner = torch.arange(len(nodes)).repeat_interleave(torch.randint(1, 4, (len(nodes),)))
chosen = torch.rand(len(owner), EDGES).topk(CAPTION, 1).indices
captions = edges[owner].gather(1, chosen)  # caption i is of graph owner[i]

graph_encoder, text_encoder = GraphEncoder(), nn.EmbeddingBag(TYPES * TYPES, DIM)
logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))  # as CLIP has it
loss_of = InfoNCE(negatives="cross")
learned = [*graph_encoder.parameters(), *text_encoder.parameters(), logit_scale]
optimizer = torch.optim.Adam(learned, lr=RATE)

before = retrieval()
for _ in range(EPOCHS):
    for batch in torch.randperm(GRAPHS).split(BATCH):
        its = torch.isin(owner, batch)
        loss_of.temperature = 1 / logit_scale.exp()
        sets = graph_encoder(nodes[batch], adjacency[batch]), text_encoder(captions[its])
        loss = loss_of(*sets, items=(batch, owner[its]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
print(f"retrieval accuracy {before:.3f} before training, {retrieval():.3f} after")
print(f"temperature 0.070 before, {1 / logit_scale.exp().item():.3f} after")
