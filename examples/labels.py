"""InfoNCE with labels for some of the graphs: graphs of one label are positives of each other.

Each graph whose class is unknown has a label of its own, as in training without labels. The script
prints the accuracy of the nearest class mean on held-out graphs. The graphs are stochastic block
models: the class says which types of nodes are often linked. Ten seconds on a CPU:

    python examples/labels.py --labels 100
"""

import argparse

import torch
import torch.nn.functional as F
from torch_geometric.data import Batch, Data  # pip install -e '.[pyg]'
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GraphSAGE, global_mean_pool
from torch_geometric.utils import stochastic_blockmodel_graph

from pgcl_losses import InfoNCE
from pgcl_losses.adapters.pyg import EdgePerturb

parser = argparse.ArgumentParser(description="InfoNCE with labels for some of the graphs.")
parser.add_argument("--graphs", type=int, default=1000, help="and as many held-out graphs")
parser.add_argument("--labels", type=int, default=100, help="labelled training graphs")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

CLASSES, TYPES, DIM = 4, 7, 32
if not CLASSES <= args.labels <= args.graphs:
    parser.error(f"--labels must be {CLASSES} to --graphs, but it is {args.labels}")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synthetic_graph(label):
    """Sixteen nodes of random types; the class says which types are often linked."""
    types = torch.arange(TYPES)
    distance = (types[:, None] - types).abs()
    linked = torch.minimum(distance, TYPES - distance) == label
    sizes = torch.randint(TYPES, (16,)).bincount(minlength=TYPES)
    edge_index = stochastic_blockmodel_graph(sizes, torch.where(linked, 0.4, 0.1))
    x = F.one_hot(types.repeat_interleave(sizes), TYPES).float()
    return Data(x=x, edge_index=edge_index, y=label)


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.sage = GraphSAGE(TYPES, 64, num_layers=2, aggr="add")
        self.lin = torch.nn.Linear(64, DIM)

    def forward(self, data):
        x = self.sage(data.x, data.edge_index).relu()
        return self.lin(global_mean_pool(x, data.batch))  # [num_graphs, DIM]


def train(encoder, labels):
    for graph, label in zip(train_graphs, labels.tolist(), strict=True):
        graph.label = label
    augment, criterion = EdgePerturb(0.2), InfoNCE()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    for _ in range(args.epochs):
        for data in DataLoader(train_graphs, batch_size=100, shuffle=True):
            data = data.to(device)
            z1, z2 = encoder(augment(data)), encoder(augment(data))
            loss = criterion(z1, z2, labels=data.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def test(encoder):
    """Accuracy of the nearest mean of the labelled graphs."""
    labelled = Batch.from_data_list(train_graphs[: args.labels]).to(device)
    held_out = Batch.from_data_list(test_graphs).to(device)
    means = F.one_hot(labelled.y).float().T @ F.normalize(encoder(labelled))  # [CLASSES, DIM]
    predicted = (encoder(held_out) @ F.normalize(means).T).argmax(1)
    return (predicted == held_out.y).float().mean().item()


torch.manual_seed(args.seed)
graphs = [synthetic_graph(i % CLASSES) for i in range(2 * args.graphs)]
train_graphs, test_graphs = graphs[: args.graphs], graphs[args.graphs :]
ids = torch.arange(args.graphs)
classes, own = ids % CLASSES, CLASSES + ids  # own: a label that no other graph has
some = torch.where(ids < args.labels, classes, own)
for name, labels in {"no labels": own, f"{args.labels} labels": some}.items():
    torch.manual_seed(args.seed)  # the same initial encoder
    encoder = Encoder().to(device)
    untrained = test(encoder)
    train(encoder, labels)
    print(f"{name}: accuracy {untrained:.3f} untrained, {test(encoder):.3f} trained")
