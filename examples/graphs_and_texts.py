"""Embed graphs and their captions in one space, as CLIP does, with a learned temperature.

Each graph has one to three captions; a graph and its captions have one label. A caption names five
edges of its graph, each by the types of its two nodes. The script prints how often the nearest of
200 held-out graphs is the caption's own. Less than ten seconds on a CPU:

    python examples/graphs_and_texts.py --epochs 5
"""

import argparse
import math

import torch
import torch.nn.functional as F
from torch_geometric.data import Data  # pip install -e '.[pyg]'
from torch_geometric.loader import DataLoader
from torch_geometric.nn import SAGEConv, global_mean_pool
from torch_geometric.utils import to_undirected

from pgcl_losses import InfoNCE

parser = argparse.ArgumentParser(description="Graphs and captions in one space, as in CLIP.")
parser.add_argument("--graphs", type=int, default=2000)
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

HELD_OUT, NODES, EDGES, TYPES, WORDS, DIM = 200, 10, 14, 8, 5, 64
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synthetic_graph():
    types = torch.randint(TYPES, (NODES,))
    edges = torch.rand(EDGES, NODES).topk(2).indices.T  # [2, EDGES]
    low, high = types[edges].sort(0).values
    words = low * TYPES + high  # one for each edge
    chosen = torch.rand(int(torch.randint(1, 4, ())), EDGES).topk(WORDS).indices
    x = F.one_hot(types, TYPES).float()
    # captions: [number of captions, WORDS]
    return Data(x=x, edge_index=to_undirected(edges), captions=words[chosen])


class GraphEncoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = SAGEConv(TYPES, 128, aggr="add")
        self.lin = torch.nn.Linear(128, DIM)

    def forward(self, data):
        x = self.conv(data.x, data.edge_index).relu()
        return self.lin(global_mean_pool(x, data.batch))  # [num_graphs, DIM]


def train():
    total_loss = 0.0
    for data in train_loader:
        data = data.to(device)
        criterion.temperature = 1 / logit_scale.exp()
        labels = torch.arange(data.num_graphs, device=device), data.captions_batch
        loss = criterion(graph_encoder(data), text_encoder(data.captions), labels=labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total_loss += loss.item() / len(train_loader)
    return total_loss


@torch.no_grad()
def test():
    """The fraction of held-out captions whose nearest graph is their own."""
    (data,) = (data.to(device) for data in test_loader)
    nearest = (text_encoder(data.captions) @ F.normalize(graph_encoder(data)).T).argmax(1)
    return (nearest == data.captions_batch).float().mean().item()


torch.manual_seed(args.seed)
graphs = [synthetic_graph() for _ in range(args.graphs + HELD_OUT)]
# `captions_batch` says which graph each caption belongs to.
train_loader = DataLoader(graphs[HELD_OUT:], 100, shuffle=True, follow_batch=["captions"])
test_loader = DataLoader(graphs[:HELD_OUT], HELD_OUT, follow_batch=["captions"])
graph_encoder = GraphEncoder().to(device)
text_encoder = torch.nn.EmbeddingBag(TYPES * TYPES, DIM).to(device)
logit_scale = torch.nn.Parameter(torch.tensor(math.log(1 / 0.07), device=device))  # as in CLIP
criterion = InfoNCE(negatives="cross")
parameters = [*graph_encoder.parameters(), *text_encoder.parameters(), logit_scale]
optimizer = torch.optim.Adam(parameters, lr=1e-2)

print(f"Epoch: 000, Retrieval accuracy: {test():.3f}")
for epoch in range(1, args.epochs + 1):
    line = f"Epoch: {epoch:03d}, Loss: {train():.3f}, Retrieval accuracy: {test():.3f}"
    print(f"{line}, Temperature: {1 / logit_scale.exp().item():.3f}")
