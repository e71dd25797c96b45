"""InfoNCE or PGCL for your graphs, each at its best of several temperatures.

PGCL follows InfoNCE(), which trains the first half of the epochs. The accuracy is that of a linear
probe with few labels. Half of the graphs choose the temperatures, the other half report: on the
same graphs the best of several would look better than it is.

It also prints whether false negatives cost accuracy: what an oracle gains that leaves all of them
out, and how much of the push they get (`repulsion`). MUTAG, which PyG downloads, takes two minutes
on a CPU: python examples/compare.py --dataset MUTAG

Your own graphs are a list of PyG's Data with x, edge_index and y (a class) in a file that
torch.save(graphs, "graphs.pt") has written: python examples/compare.py --graphs graphs.pt
"""

import argparse
import math
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy.stats import ttest_1samp
from sklearn.linear_model import LogisticRegression  # pip install -r requirements.txt
from sklearn.model_selection import StratifiedShuffleSplit, cross_val_score, train_test_split
from sklearn.preprocessing import scale
from torch_geometric.data import Data
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.transforms import Constant
from tqdm import tqdm

from pgcl_losses import InfoNCE, PGCLLoss, repulsion
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

parser = argparse.ArgumentParser(description="InfoNCE or PGCL for your graphs.")
parser.add_argument("--dataset", default="MUTAG", help="a TU set")
parser.add_argument("--root", default="data", help="folder of TU sets, as MUTAG/raw/MUTAG_A.txt")
parser.add_argument("--graphs", type=Path, help="a file of your own graphs, in place of a TU set")
parser.add_argument("--labels", type=int, default=20, help="of the probe; try a few and many")
parser.add_argument("--seeds", type=int, default=5, help="2 or more")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--temperatures", type=float, nargs="+", default=[0.2, 0.5, 1.0, 2.0, 4.0])
args = parser.parse_args()
if args.seeds < 2 or args.epochs < 0 or not all(0 < t < math.inf for t in args.temperatures):
    parser.error("--seeds must be 2 or more, --epochs 0 or more, and --temperatures above 0")
DIM, device = 32, torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check(graph):
    """The features, edges and class of a graph, without other attributes."""
    graph = Data(x=graph.x.float(), edge_index=graph.edge_index, y=graph.y)
    graph.validate()  # nodes of edges exist
    if graph.x.dim() != 2 or not graph.x.isfinite().all() or float(graph.y) != int(graph.y):
        raise ValueError("x must be finite and [N, F], and y a whole number")
    graph.y = int(graph.y)
    return graph


def load(file):
    torch.serialization.add_safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage])
    try:
        graphs = [check(graph) for graph in torch.load(file, weights_only=True)]
        if len({graph.num_features for graph in graphs}) != 1:
            raise ValueError("graphs differ in their number of features, or there are none")
        return graphs
    except Exception as error:  # whatever the file is
        what = f"{type(error).__name__}: {error}".splitlines()[0]
        expected = "a list of PyG's Data with x, edge_index and y, written by torch.save"
        parser.error(f"--graphs {file} must be {expected}, but {what}")


def download(root, name):
    try:
        return list(TUDataset(root, name, transform=Constant(), use_node_attr=True))
    except OSError as error:
        parser.error(
            f"--root must be a folder with {name}, or where PyG can store it, as "
            f"{name}/raw/{name}_A.txt, but {error}. For your own graphs, give --graphs FILE"
        )


graphs = load(args.graphs) if args.graphs else download(args.root, args.dataset)
y = np.array([int(graph.y) for graph in graphs])
probe = LogisticRegression(C=0.1, max_iter=1000)
draws = StratifiedShuffleSplit(50, train_size=args.labels, random_state=0)


def score(z):
    """Accuracy in % of a linear probe on each half, the mean over 50 draws of its labels."""
    options = {"cv": draws, "error_score": "raise"}
    return [100 * cross_val_score(probe, scale(z[i]), y[i], **options).mean() for i in halves]


try:
    halves = train_test_split(range(len(y)), test_size=0.5, stratify=y, random_state=0)
    score(np.zeros([len(y), 1]))  # an error now, and not after a training
except ValueError as error:
    parser.error(
        f"--labels {args.labels} must leave a graph of each class to train and to test the probe, "
        f"in each half of {len(y)} graphs in {len(np.unique(y))} classes: {error}"
    )


class Encoder(GIN):
    def forward(self, data):
        return global_add_pool(super().forward(data.x, data.edge_index), data.batch)


def train(make_loss, seed, graphs=graphs, epochs=args.epochs, given=lambda data: {}, later=None):
    """Train an encoder, from half of the epochs on by the ``later`` loss, if there is one."""
    torch.manual_seed(seed)
    encoder = Encoder(graphs[0].num_features, DIM, num_layers=3, norm="batch_norm", jk="cat")
    projected = torch.nn.Sequential(encoder, MLP([DIM, DIM, DIM], norm=None))
    model = ContrastiveModel(projected, NodeDrop(), EdgePerturb(), make_loss()).to(device)
    model.later = later and later().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)  # prototypes are among them
    # Equal batches of at most 64: the step of a small last one would count like the others.
    size = math.ceil(len(graphs) / math.ceil(len(graphs) / 64))
    torch.manual_seed(seed)  # the same batches and views for both losses
    for epoch in range(epochs):
        if later is not None and epoch == epochs // 2:
            model.loss = model.later
        for data in DataLoader(graphs, size, shuffle=True):
            loss = model(data.to(device), **given(data))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def test(model):
    encoder, loader = model.encoder[0], DataLoader(graphs, 256)
    return score(torch.cat([encoder(data.to(device)).cpu() for data in loader]).double())


print(f"{args.graphs or args.dataset}: accuracy in % with {args.labels} labels, {args.seeds} seeds")
untrained = [test(train(InfoNCE, seed, epochs=0))[1] for seed in range(args.seeds)]
print(f"untrained: {np.mean(untrained):.1f} ± {np.std(untrained, ddof=1):.1f}")
reported, best_of = {}, {}
losses = {  # at a temperature; PGCL has 20 prototypes, as a batch has at most 64 graphs
    "InfoNCE": lambda t: {"make_loss": partial(InfoNCE, temperature=t)},
    "PGCL": lambda t: {"make_loss": InfoNCE, "later": partial(PGCLLoss, DIM, 20, temperature=t)},
}
for name, at in losses.items():
    runs = [
        [test(train(**at(t), seed=seed)) for seed in range(args.seeds)]
        for t in tqdm(args.temperatures)
    ]
    accuracy = np.array(runs)  # [temperatures, seeds, halves]
    best = accuracy[:, :, 0].mean(axis=1).argmax()
    reported[name] = mine = accuracy[best, :, 1]
    best_of[name] = temperature = args.temperatures[best]
    print(f"{name}, temperature {temperature:g}: {mine.mean():.1f} ± {mine.std(ddof=1):.1f}")


def show(name, gain):
    low, high = ttest_1samp(gain, 0).confidence_interval()
    print(f"{name}: {gain.mean():+.1f} (95 % interval {low:+.1f} to {high:+.1f})")


show("PGCL minus InfoNCE", reported["PGCL"] - reported["InfoNCE"])


def oracle(scores, pair):
    """Leave out all negatives of the query's class."""
    return scores.masked_fill(pair.query == pair.key, -torch.inf)


# The oracle knows the classes of the graphs that it trains on, so the other half measures it. Both
# train on half of the graphs; at a temperature of its own the oracle may gain more.
train_half = partial(train, graphs=[graphs[i] for i in halves[0]])
plain, without = [], []
for seed in range(args.seeds):
    model = train_half(partial(InfoNCE, temperature=best_of["InfoNCE"]), seed)
    plain.append(test(model)[1])
    knowing = partial(InfoNCE, temperature=best_of["InfoNCE"], score_mod=oracle)
    without.append(test(train_half(knowing, seed, given=lambda data: {"metadata": data.y}))[1])
show("half of the graphs, oracle minus InfoNCE", np.subtract(without, plain))
data = next(iter(DataLoader(graphs, batch_size=256, shuffle=True))).to(device)
views = model.encoder(model.augment1(data)), model.encoder(model.augment2(data))
print(repulsion(model.loss, *views, classes=data.y))
