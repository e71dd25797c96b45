"""A GraphCL script whose loss is InfoNCE, with the value of GraphCL's own loss, or PGCL.

A GIN with sum pooling and a projection head; view 1 is the batch itself, view 2 an augmentation of
it. The embedded graphs are trees whose node types follow one of six rules; with them it takes a
quarter of a minute on two cores. It also takes a TU set, which PyG downloads unless it is in
--root:

    python examples/graphcl_swap.py
    python examples/graphcl_swap.py --pgcl
    python examples/graphcl_swap.py --pgcl --dataset MUTAG --root data

Only the probe uses labels: a linear classifier on the encoder's output, before and after training,
by cross-validation.
"""

import argparse
import re
import tempfile

import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression  # pip install -e '.[experiments]'
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch_geometric.data import Data  # pip install -e '.[experiments]'
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINConv, global_add_pool
from torch_geometric.transforms import Constant
from torch_geometric.utils import to_undirected
from tqdm import tqdm  # pip install -e '.[experiments]'

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import AttributeMask, EdgePerturb, NodeDrop, RandomChoice, Subgraph

parser = argparse.ArgumentParser(description="GraphCL, and PGCL in its place.")
parser.add_argument("--pgcl", action="store_true", help="train with PGCL instead of InfoNCE")
parser.add_argument("--dataset", help="a TU set such as MUTAG, instead of the embedded graphs")
parser.add_argument("--root", default="data", help="folder of TU sets")
parser.add_argument("--graphs", type=int, default=520, help="how many embedded graphs")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
if args.dataset and not re.fullmatch(r"[\w-]+", args.dataset):
    parser.error(f"--dataset must be the name of a set, no path, but it is {args.dataset!r}")

GRAPHCL = {"negatives": "cross", "queries": "first", "decoupled": True}  # as its `loss_cal`
BATCH, HIDDEN, LAYERS, RATE = 128, 32, 3, 1e-3
DIM = HIDDEN * LAYERS
TYPES, CLASSES = 11, 6  # of nodes, and of embedded graphs
FOLDS = 5  # of the probe's cross-validation, with every class in each
for name, least in {"graphs": CLASSES * FOLDS, "epochs": 1}.items():
    if getattr(args, name) < least:
        parser.error(f"--{name} must be {least} or more, but it is {getattr(args, name)}")
READ = tempfile.TemporaryDirectory()


def synthetic_graph(label: int) -> Data:
    """A random tree with a hidden rule: most nodes have their parent's type plus `label`."""
    num_nodes = int(torch.randint(20, 40, ()))
    parents = (torch.rand(num_nodes - 1) * torch.arange(1, num_nodes)).long()
    types, follows = torch.randint(TYPES, (num_nodes,)), torch.rand(num_nodes) < 0.6
    for child, parent in enumerate(parents.tolist(), start=1):
        if follows[child]:
            types[child] = (types[parent] + label) % TYPES
    edges = torch.stack([parents, torch.arange(1, num_nodes)])
    return Data(x=F.one_hot(types, TYPES).float(), edge_index=to_undirected(edges), y=label)


class TUGraphs(TUDataset):
    """Read anew by each run: PyG would take what it once read, also when the files have changed."""

    processed_dir = READ.name


class GraphCL(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        widths = [num_features] + [HIDDEN] * LAYERS
        self.convs = nn.ModuleList(
            GINConv(nn.Sequential(nn.Linear(wide, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN)))
            for wide in widths[:-1]
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(HIDDEN) for _ in range(LAYERS))
        self.proj_head = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def encode(self, data: Data) -> Tensor:
        x, pooled = data.x, []
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(F.relu(conv(x, data.edge_index)))
            pooled.append(global_add_pool(x, data.batch))
        return torch.cat(pooled, 1)

    def forward(self, data: Data) -> Tensor:
        return self.proj_head(self.encode(data))


@torch.no_grad()
def probe(model: GraphCL, dataset: list[Data], device: torch.device) -> float:
    model.eval()
    batches = [data.to(device) for data in DataLoader(dataset, BATCH)]
    z = torch.cat([model.encode(data) for data in batches]).cpu().numpy()
    labels = torch.cat([data.y for data in batches]).cpu().numpy()
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    return cross_val_score(classifier, z, labels, cv=FOLDS).mean()


def main() -> None:
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.dataset:
        dataset = TUGraphs(args.root, args.dataset)
        if dataset.num_features == 0:
            dataset.transform = Constant()
    else:
        dataset = [synthetic_graph(i % CLASSES) for i in range(args.graphs)]
    loader = DataLoader(dataset, BATCH, shuffle=True)  # the last batch may be any size
    augment = RandomChoice([NodeDrop(), EdgePerturb(), AttributeMask(), Subgraph()])

    model = GraphCL(dataset[0].num_features)
    # The loss is an attribute before the optimizer is made: PGCL has parameters.
    info_nce = InfoNCE(temperature=0.2, **GRAPHCL)
    pgcl = PGCLLoss(DIM, consistency_weight=1, temperature=0.5)
    model.loss = pgcl if args.pgcl else info_nce
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)

    before = probe(model, dataset, device)
    progress = tqdm(range(args.epochs), unit="epoch")
    for _ in progress:
        model.train()
        total = 0.0
        for data in loader:
            data = data.to(device)
            x, x_aug = model(data), model(augment(data))
            loss = model.loss(x, x_aug)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * data.num_graphs
        progress.set_postfix(loss=f"{total / len(dataset):.3f}")
    after = probe(model, dataset, device)

    name = "PGCL" if args.pgcl else "InfoNCE"
    print(f"{name}: linear probe {before:.3f} before training, {after:.3f} after", end="")
    print(f" ({args.dataset or 'embedded graphs'}, {len(dataset)} graphs, seed {args.seed})")


if __name__ == "__main__":
    main()
