"""InfoNCE with labels for some of the graphs: graphs of one label are positives of each other.

Each graph without a label is an item of its own, as in training without labels. The script prints
the accuracy of the nearest class mean on held-out graphs. The graphs are stochastic block models:
the class says which types of nodes are often linked. Ten seconds on a CPU:

    python examples/labels.py --labels 100
"""

import argparse

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric import seed_everything  # pip install -e '.[experiments]'
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GraphSAGE, global_mean_pool
from torch_geometric.utils import stochastic_blockmodel_graph
from tqdm import tqdm  # pip install -e '.[experiments]'

from pgcl_losses import InfoNCE
from pgcl_losses.adapters.pyg import EdgePerturb

parser = argparse.ArgumentParser(description="InfoNCE with labels for some of the graphs.")
parser.add_argument("--graphs", type=int, default=1000, help="and as many held-out graphs")
parser.add_argument("--labels", type=int, default=100, help="labelled training graphs")
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

CLASSES, TYPES, DIM = 4, 7, 32
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synthetic_graph(label: int) -> Data:
    """Sixteen nodes of random types; the class says which types are often linked."""
    types = torch.arange(TYPES)
    distance = (types[:, None] - types).abs()
    linked = torch.minimum(distance, TYPES - distance) == label
    sizes = torch.randint(TYPES, (16,)).bincount(minlength=TYPES)
    edge_index = stochastic_blockmodel_graph(sizes, torch.where(linked, 0.4, 0.1))
    x = F.one_hot(types.repeat_interleave(sizes), TYPES).float()
    return Data(x=x, edge_index=edge_index, y=label)


class Encoder(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sage = GraphSAGE(TYPES, 64, num_layers=2, aggr="add")
        self.lin = torch.nn.Linear(64, DIM)

    def forward(self, data: Batch) -> Tensor:
        x = self.sage(data.x, data.edge_index).relu()
        return self.lin(global_mean_pool(x, data.batch))  # [num_graphs, DIM]


def train(encoder: Encoder, items: Tensor) -> None:
    for i, graph in enumerate(train_graphs):
        graph.item = int(items[i])
    loader = DataLoader(train_graphs, batch_size=100, shuffle=True)
    augment, criterion = EdgePerturb(0.2), InfoNCE()
    optimizer = torch.optim.Adam(encoder.parameters(), lr=3e-3)
    for _ in tqdm(range(args.epochs), unit="epoch"):
        for data in loader:
            data = data.to(device)
            z1, z2 = encoder(augment(data)), encoder(augment(data))
            loss = criterion(z1, z2, items=data.item)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def test(encoder: Encoder) -> float:
    """Accuracy of the nearest mean of the labelled graphs."""
    labelled, held_out = (
        Batch.from_data_list(graphs).to(device)
        for graphs in (train_graphs[: args.labels], test_graphs)
    )
    z = F.normalize(encoder(labelled))
    means = F.one_hot(labelled.y).float().T @ z  # [CLASSES, DIM]
    predicted = (F.normalize(encoder(held_out)) @ F.normalize(means).T).argmax(1)
    return (predicted == held_out.y).float().mean().item()


seed_everything(args.seed)
graphs = [synthetic_graph(i % CLASSES) for i in range(2 * args.graphs)]
train_graphs, test_graphs = graphs[: args.graphs], graphs[args.graphs :]
without = CLASSES + torch.arange(args.graphs)  # each graph is an item of its own
labels = torch.tensor([graph.y for graph in train_graphs])
some = torch.where(torch.arange(args.graphs) < args.labels, labels, without)
for name, items in {"no labels": without, f"{args.labels} labels": some}.items():
    seed_everything(args.seed)  # the same initial encoder
    encoder = Encoder().to(device)
    untrained = test(encoder)
    train(encoder, items)
    print(f"{name}: accuracy {untrained:.3f} untrained, {test(encoder):.3f} trained")
