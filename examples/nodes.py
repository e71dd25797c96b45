"""Nodes without labels, by GRACE (Zhu et al., 2020): a GCN on the nodes of one graph.

Each view drops edges and masks columns of the features, at its own two rates, and row i of both
views is node i. A logistic regression evaluates the embeddings; only this probe uses labels. PyG
downloads the set unless it is in --root. The options are GRACE's for the set, or else for Cora:

    python examples/nodes.py --dataset Cora  # 82.3 % in 90 seconds; the paper reports 83.3 %
    python examples/nodes.py --dataset CS --batch-size 1024 --epochs 5

Without --batch-size all nodes are negatives in each step. With it, PyG's NeighborLoader samples the
two-hop neighbourhoods of some nodes at a time (needs pyg-lib or torch-sparse).
"""

import argparse

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression  # pip install -r requirements.txt
from sklearn.preprocessing import normalize
from torch_geometric import seed_everything
from torch_geometric.datasets import Amazon, CitationFull, Coauthor, Planetoid
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import GCN, MLP
from torch_geometric.transforms import Compose, NormalizeFeatures
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from tqdm import tqdm

from pgcl_losses import InfoNCE
from pgcl_losses.adapters.pyg import EdgeDrop, FeatureMask

SETS = {
    **dict.fromkeys(["Cora", "CiteSeer", "PubMed"], Planetoid),
    **dict.fromkeys(["Photo", "Computers"], Amazon),
    **dict.fromkeys(["CS", "Physics"], Coauthor),
    **dict.fromkeys(["DBLP"], CitationFull),
}
# From GRACE's config.yaml; edges and features are the rates of both views.
CORA = {"lr": 5e-4, "dim": 128, "tau": 0.4, "edges": (0.2, 0.4), "features": (0.3, 0.4)}
OPTIONS = {
    "CiteSeer": {"lr": 1e-3, "dim": 256, "tau": 0.9, "edges": (0.2, 0.0), "features": (0.3, 0.2)},
    "PubMed": {"lr": 1e-3, "dim": 256, "tau": 0.7, "edges": (0.4, 0.1), "features": (0.0, 0.2)},
    "DBLP": {"lr": 1e-3, "dim": 256, "tau": 0.7, "edges": (0.1, 0.4), "features": (0.1, 0.0)},
}

parser = argparse.ArgumentParser(description="GRACE: nodes without labels.")
parser.add_argument("--dataset", choices=SETS, default="Cora")
parser.add_argument("--root", default="data", help="folder of the sets")
parser.add_argument("--epochs", type=int, default=200)
parser.add_argument("--batch-size", type=int, help="nodes in a loss; without it, all nodes")
parser.add_argument("--temperature", type=float, help="without it, GRACE's")
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
options = OPTIONS.get(args.dataset, CORA)
tau = options["tau"] if args.temperature is None else args.temperature
if (
    args.epochs < 1
    or (args.batch_size is not None and args.batch_size < 2)
    or not 0 < tau < float("inf")
):
    parser.error("--epochs must be 1 or more, --batch-size 2 or more, and --temperature above 0")
if args.batch_size and not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
    parser.error("--batch-size needs pyg-lib or torch-sparse, which sample the neighbours")

seed_everything(args.seed)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
try:
    data = SETS[args.dataset](args.root, args.dataset, transform=NormalizeFeatures())[0]
except OSError as error:
    parser.error(f"--root must be a folder with {args.dataset}, or where PyG can store it: {error}")
batches = [data]
if args.batch_size:
    batches = NeighborLoader(data, [10, 10], batch_size=args.batch_size, shuffle=True)
augments = [
    Compose([EdgeDrop(edges), FeatureMask(features)])
    for edges, features in zip(options["edges"], options["features"], strict=True)
]
dim = options["dim"]
encoder = GCN(data.num_features, 2 * dim, num_layers=2, out_channels=dim).to(device)
head = MLP([dim, dim, dim], act="elu", norm=None).to(device)
criterion = InfoNCE.like("GRACE", temperature=tau)
parameters = [*encoder.parameters(), *head.parameters()]
optimizer = torch.optim.Adam(parameters, lr=options["lr"], weight_decay=1e-5)


def embed(data):
    return encoder(data.x.to(device), data.edge_index.to(device)).relu()


def train():
    encoder.train()
    losses = []
    for batch in batches:
        seeds = slice(batch.get("batch_size"))  # NeighborLoader puts them first; None: all nodes
        z1, z2 = (head(embed(augment(batch))[seeds]) for augment in augments)
        loss = criterion(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return np.mean(losses)


@torch.no_grad()
def test():
    """Accuracy in % of a logistic regression: 10 % of the nodes train it, 10 % choose its C."""
    encoder.eval()
    z, y = normalize(embed(data).cpu().numpy()), data.y.cpu().numpy()
    accuracies = []
    for split in range(5):
        nodes = np.random.default_rng(split).permutation(len(y))
        train, valid, test = np.split(nodes, [len(y) // 10, len(y) // 5])
        probes = [LogisticRegression(C=C, max_iter=1000) for C in 10.0 ** np.arange(5)]
        probes = [probe.fit(z[train], y[train]) for probe in probes]
        best = max(probes, key=lambda probe: probe.score(z[valid], y[valid]))
        accuracies.append(100 * best.score(z[test], y[test]))
    return np.mean(accuracies)


print(f"{args.dataset}: {data.num_nodes} nodes, accuracy of the probe {test():.1f} % untrained")
progress = tqdm(range(1, args.epochs + 1), unit="epoch")
for epoch in progress:
    loss = train()
    progress.set_postfix(loss=f"{loss:.3f}")
    if epoch % 50 == 0 or epoch == args.epochs:
        progress.write(f"Epoch: {epoch:03d}, Loss: {loss:.4f}, Accuracy: {test():.1f} %")
