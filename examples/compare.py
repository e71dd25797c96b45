"""InfoNCE or PGCL for your graphs, each at its best of several temperatures.

The accuracy is that of a linear probe with few labels. Half of the graphs choose the temperatures,
the other half report: on the same graphs the best of several would look better than it is. MUTAG,
which PyG downloads, takes two minutes on a CPU:

    python examples/compare.py --dataset MUTAG
    python examples/compare.py --dataset graphs.pt  # torch.save([g.to_dict() for g in your_graphs])
"""

import argparse
from functools import partial

import numpy as np
import torch
from scipy.stats import ttest_1samp
from sklearn.linear_model import LogisticRegression  # pip install -e '.[experiments]'
from sklearn.model_selection import StratifiedShuffleSplit, cross_val_score, train_test_split
from sklearn.preprocessing import scale
from torch_geometric.data import Data
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.transforms import Constant
from tqdm import tqdm

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

parser = argparse.ArgumentParser(description="InfoNCE or PGCL for your graphs.")
parser.add_argument("--dataset", default="MUTAG", help="a TU set, or a .pt file of graphs")
parser.add_argument("--root", default="data", help="folder of TU sets")
parser.add_argument("--labels", type=int, default=20, help="of the probe; try a few and many")
parser.add_argument("--seeds", type=int, default=5, help="2 or more")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--temperatures", type=float, nargs="+", default=[0.2, 0.5, 1.0, 2.0, 4.0])
args = parser.parse_args()
DIM, device = 32, torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gin = GIN(graphs[0].num_features, DIM, num_layers=3, norm="batch_norm", jk="cat")
        self.head = MLP([DIM, DIM, DIM], norm=None)

    def forward(self, data):
        return self.head(global_add_pool(self.gin(data.x, data.edge_index), data.batch))


def train(make_loss, seed):
    torch.manual_seed(seed)
    encoder = Encoder().to(device)
    if make_loss is None:
        return encoder
    model = ContrastiveModel(encoder, NodeDrop(), EdgePerturb(), make_loss()).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # prototypes are among them
    torch.manual_seed(seed)  # the same batches and views for both losses
    for _ in range(args.epochs):
        for data in DataLoader(graphs, batch_size=64, shuffle=True):
            loss = model(data.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return encoder


@torch.no_grad()
def test(encoder, graphs):
    """Accuracy in % of a linear probe, the mean over 50 draws of its labels."""
    encoder.eval().head = torch.nn.Identity()  # the loss alone needs it
    z = torch.cat([encoder(data.to(device)).cpu() for data in DataLoader(graphs, 256)]).numpy()
    draws = StratifiedShuffleSplit(50, train_size=args.labels, random_state=0)
    probe, y = LogisticRegression(C=0.1, max_iter=1000), [int(graph.y) for graph in graphs]
    return 100 * cross_val_score(probe, scale(z), y, cv=draws).mean()


if args.dataset.endswith(".pt"):
    graphs = [Data.from_dict(graph) for graph in torch.load(args.dataset, weights_only=True)]
else:  # PyG writes to --root: copy a read-only set first
    graphs = list(TUDataset(args.root, args.dataset, transform=Constant(), use_node_attr=True))
labels = [int(graph.y) for graph in graphs]
halves = train_test_split(graphs, test_size=0.5, stratify=labels, random_state=0)
losses, pgcl = {"untrained": None}, partial(PGCLLoss, DIM, consistency_weight=1)
for t in args.temperatures:
    losses[f"InfoNCE, temperature {t:g}"] = partial(InfoNCE, temperature=t)
    losses[f"PGCL, temperature {t:g}"] = partial(pgcl, temperature=t)
accuracy = {}  # of each half of the graphs, [seeds]
for name, make_loss in tqdm(losses.items()):
    encoders = [train(make_loss, seed) for seed in range(args.seeds)]
    accuracy[name] = [np.array([test(e, half) for e in encoders]) for half in halves]

print(f"{args.dataset}: accuracy in % with {args.labels} labels, {args.seeds} seeds")
reported = {}
for loss in ("untrained", "InfoNCE", "PGCL"):
    named = [name for name in losses if name.startswith(loss)]
    best = max(named, key=lambda name: accuracy[name][0].mean())
    reported[loss] = accuracy[best][1]
    print(f"{best}: {reported[loss].mean():.1f} ± {reported[loss].std(ddof=1):.1f}")
gain = reported["PGCL"] - reported["InfoNCE"]
low, high = ttest_1samp(gain, 0).confidence_interval()
print(f"PGCL minus InfoNCE: {gain.mean():+.1f} (95 % interval {low:+.1f} to {high:+.1f})")
