"""InfoNCE or PGCL for your graphs, each at its best of several temperatures.

A small GIN learns without labels. Runs of one seed have the same initial encoder, batches and
views. One half of the labels chooses the temperatures, the other half reports: the best of several
on the same labels would look better than it is. MUTAG takes a minute on a CPU:

    python examples/compare.py --dataset MUTAG      # PyG downloads what is not in --root
    python examples/compare.py --dataset graphs.pt  # torch.save of a list of Data with x and y
"""

import argparse
import re
import tempfile
from functools import partial

import numpy as np
import torch
from scipy.stats import ttest_rel  # scikit-learn needs it
from sklearn.linear_model import LogisticRegression  # pip install -e '.[experiments]'
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.neighbors import NearestCentroid
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.transforms import Constant
from tqdm import tqdm  # pip install -e '.[experiments]'

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

parser = argparse.ArgumentParser(description="InfoNCE or PGCL for your graphs.")
parser.add_argument("--dataset", default="MUTAG", help="a TU set, or a .pt file of graphs")
parser.add_argument("--root", default="data", help="folder of TU sets")
parser.add_argument("--seeds", type=int, default=5)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--temperatures", type=float, nargs="+", default=[0.2, 0.5, 1.0, 2.0])
args = parser.parse_args()
if not re.fullmatch(r"[\w-]+|.+\.pt", args.dataset):
    parser.error(f"--dataset must be the name of a TU set or a .pt file, not {args.dataset}")
if args.seeds < 3 or args.epochs < 1 or min(args.temperatures) <= 0:
    parser.error("3 --seeds or more, 1 of --epochs or more, and --temperatures above 0")

HIDDEN, BATCH_SIZE, DRAWS = 32, 64, 50
MEASURES = ["linear probe", "1 label per class"]
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
processed = tempfile.TemporaryDirectory()


class TUGraphs(TUDataset):
    """Reads the text files of a set: PyG would unpickle files of `processed` beside them."""

    processed_dir = processed.name


def read():
    if args.dataset.endswith(".pt"):
        torch.serialization.add_safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage])
        graphs = torch.load(args.dataset, weights_only=True)  # or the file could run any code
    else:
        graphs = list(TUGraphs(args.root, args.dataset, use_node_attr=True))
    return [graph if graph.x is not None else Constant()(graph) for graph in graphs]


class Encoder(torch.nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.gin = GIN(num_features, HIDDEN, num_layers=3, norm="batch_norm", jk="cat")
        self.head = MLP([HIDDEN, HIDDEN, HIDDEN], norm=None)

    def embed(self, data):
        return global_add_pool(self.gin(data.x, data.edge_index), data.batch)

    def forward(self, data):
        return self.head(self.embed(data))


def train(graphs, make_loss, seed):
    torch.manual_seed(seed)
    encoder = Encoder(graphs[0].num_features)
    if make_loss is None:
        return encoder
    model = ContrastiveModel(encoder, NodeDrop(), EdgePerturb(), make_loss()).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # prototypes are among them
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(graphs, BATCH_SIZE, shuffle=True, generator=order)
    for epoch in range(args.epochs):
        for step, data in enumerate(loader):
            torch.manual_seed(10**6 * seed + 10**3 * epoch + step)  # the views of any loss
            loss = model(data.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return encoder.cpu()


@torch.no_grad()
def test(encoder, graphs, seed):
    """Accuracies in %, in the order of MEASURES."""
    encoder.eval()
    z = torch.cat([encoder.embed(data) for data in DataLoader(graphs, 256)]).numpy()
    y = np.array([int(graph.y) for graph in graphs])
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    z_unit, random, one_shot = normalize(z), np.random.default_rng(seed), []
    for _ in range(DRAWS):
        labelled = [random.choice(np.flatnonzero(y == label)) for label in np.unique(y)]
        rest = np.setdiff1d(np.arange(len(y)), labelled)
        nearest = NearestCentroid().fit(z_unit[labelled], y[labelled])
        one_shot.append(nearest.score(z_unit[rest], y[rest]))
    return 100 * cross_val_score(probe, z, y, cv=5).mean(), 100 * np.mean(one_shot)


graphs = read()
labels = [int(graph.y) for graph in graphs]
halves = train_test_split(graphs, test_size=0.5, stratify=labels, random_state=0)
kinds = {"InfoNCE": InfoNCE, "PGCL": partial(PGCLLoss, HIDDEN, consistency_weight=1)}
losses = {
    (name, t): partial(make, temperature=t)
    for name, make in kinds.items()
    for t in args.temperatures
}
losses["untrained", 0.0] = None
accuracy = {key: np.empty((args.seeds, 2, 2)) for key in losses}  # [seed, half, measure]
for key, seed in tqdm([(key, seed) for seed in range(args.seeds) for key in losses]):
    encoder = train(graphs, losses[key], seed)
    accuracy[key][seed] = [test(encoder, half, seed) for half in halves]

print(f"{args.dataset}: {len(graphs)} graphs, {args.seeds} seeds, accuracy in %")
for m, measure in enumerate(MEASURES):
    best = {}
    for name in ("untrained", *kinds):
        keys = [key for key in losses if key[0] == name]
        best[name] = max(keys, key=lambda key: accuracy[key][:, 0, m].mean())
        reported = accuracy[best[name]][:, 1, m]
        at = f" at temperature {best[name][1]:g}" * (name in kinds)
        print(f"{measure}: {name}{at} {reported.mean():.1f} ± {reported.std(ddof=1):.1f}")
    ours, base = (accuracy[best[name]][:, 1, m] for name in ("PGCL", "InfoNCE"))
    low, high = ttest_rel(ours, base).confidence_interval()
    found = "no significant difference" if low <= 0 <= high else "significant"
    print(f"PGCL minus InfoNCE: {(ours - base).mean():+.1f} ({low:+.1f} to {high:+.1f}), {found}")
