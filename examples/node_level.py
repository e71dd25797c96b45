"""Train a GCN on the nodes of one graph by InfoNCE and by PGCL, on the views of GRACE.

A view drops random edges and masks random columns of the features, and keeps all nodes. The GCN
encodes all nodes in two views. The loss compares a random batch of nodes: row i of both views is
one node. The graph is a stochastic block model with weak features. A linear probe evaluates the
embeddings on held-out nodes; only the probe uses labels. A minute on a CPU:

    python examples/node_level.py --nodes 100000 --batch-size 2048
"""

import argparse

import torch
from sklearn.linear_model import LogisticRegression  # pip install -e '.[experiments]'
from torch_geometric import seed_everything  # pip install -e '.[experiments]'
from torch_geometric.data import Data
from torch_geometric.nn import GCN
from torch_geometric.transforms import Compose
from torch_geometric.utils import to_undirected
from tqdm import tqdm  # pip install -e '.[experiments]'

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import EdgeDrop, FeatureMask

parser = argparse.ArgumentParser(description="InfoNCE and PGCL on nodes.")
parser.add_argument("--nodes", type=int, default=100_000)
parser.add_argument("--batch-size", type=int, default=2048, help="nodes in a loss")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()

CLASSES, FEATURES, DIM, LABELLED = 10, 32, 32, 2000
if args.nodes <= LABELLED:
    parser.error(f"--nodes must be above {LABELLED}, the labelled ones, but it is {args.nodes}")
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def block_model(num_nodes):
    """A node has four neighbours in its own class and four in any class, on average."""
    y = torch.arange(num_nodes) % CLASSES
    source = torch.randint(num_nodes, (2 * num_nodes,))
    same_class = torch.randint(num_nodes // CLASSES, source.shape) * CLASSES + y[source]
    edges = [torch.stack([source, same_class]), torch.randint(num_nodes, (2, 2 * num_nodes))]
    x = 0.3 * torch.randn(CLASSES, FEATURES)[y] + torch.randn(num_nodes, FEATURES)
    return Data(x=x, edge_index=to_undirected(torch.cat(edges, 1)), y=y)


def train(encoder, criterion):
    augment = Compose([EdgeDrop(0.3), FeatureMask(0.3)])  # both keep all nodes
    optimizer = torch.optim.Adam([*encoder.parameters(), *criterion.parameters()], lr=1e-2)
    for _ in tqdm(range(args.steps), unit="step"):
        nodes = torch.randperm(graph.num_nodes, device=device)[: args.batch_size]
        views = augment(graph), augment(graph)
        z1, z2 = (encoder(view.x, view.edge_index)[nodes] for view in views)
        loss = criterion(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def test(encoder):
    nodes = torch.randperm(graph.num_nodes, generator=torch.Generator().manual_seed(args.seed))
    z, y = encoder(graph.x, graph.edge_index).cpu()[nodes].numpy(), graph.y.cpu()[nodes].numpy()
    probe = LogisticRegression(max_iter=1000).fit(z[:LABELLED], y[:LABELLED])
    return probe.score(z[LABELLED:], y[LABELLED:])


seed_everything(args.seed)
graph = block_model(args.nodes).to(device)
for name, criterion in {
    "InfoNCE": InfoNCE(temperature=0.5),
    "PGCL": PGCLLoss(DIM, consistency_weight=1, temperature=0.5),
}.items():
    seed_everything(args.seed)  # the same initial encoder for both losses
    encoder = GCN(FEATURES, DIM, num_layers=2).to(device)
    untrained = test(encoder)
    train(encoder, criterion.to(device))
    print(f"{name}: linear probe {untrained:.3f} untrained, {test(encoder):.3f} trained")
