"""InfoNCE or PGCL for your graphs: a table and a verdict.

A small GIN learns without labels, from node dropping and edge perturbation. All losses see the same
batches and views. Graphs with a label evaluate it; graphs without one only train it. It takes a
minute on synthetic graphs:

    python examples/compare.py
    python examples/compare.py --dataset MUTAG --root data  # PyG downloads what is not in --root
    python examples/compare.py --dataset path/to/folder     # NAME_A.txt and the other files of TU
    python examples/compare.py --dataset graphs.pt          # torch.save of a list of Data
"""

import argparse
import math
import re
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
import torch.nn.functional as F
from scipy.stats import t as student  # scikit-learn needs it
from sklearn.linear_model import LogisticRegression  # pip install -e '.[experiments]'
from sklearn.model_selection import StratifiedKFold, cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize
from torch import Tensor, nn
from torch_geometric.data import Batch, Data  # pip install -e '.[experiments]'
from torch_geometric.data.data import DataEdgeAttr, DataTensorAttr
from torch_geometric.data.storage import GlobalStorage
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, global_add_pool
from torch_geometric.utils import stochastic_blockmodel_graph
from tqdm import tqdm  # pip install -e '.[experiments]'

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

DATASETS = "synthetic, the name of a TU set, a folder in TU layout, or a file of torch.save"
parser = argparse.ArgumentParser(description="InfoNCE or PGCL for your graphs.")
parser.add_argument("--dataset", default="synthetic", help=DATASETS)
parser.add_argument("--root", default="data", help="folder of TU sets")
parser.add_argument("--seeds", type=int, default=5)
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument(
    "--temperatures", type=float, nargs="+", default=[0.2, 0.5, 1.0, 2.0], help="of both losses"
)
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--labels", type=int, default=1, help="per class, of the nearest class mean")
args = parser.parse_args()
for name, least in {"seeds": 3, "epochs": 1, "batch-size": 6, "labels": 1}.items():
    if (value := getattr(args, name.replace("-", "_"))) < least:
        parser.error(f"--{name} must be {least} or more, but it is {value}")
for value in args.temperatures:
    if not 0 < value < math.inf:
        parser.error(f"--temperatures must be above 0, but it is {value:g}")

HIDDEN, LAYERS, RATE = 32, 3, 1e-3
FOLDS, DRAWS = 5, 50  # of the linear probe, and of labelled graphs for the nearest class mean
MEASURES = ["linear probe", f"{args.labels} label{'s' * (args.labels > 1)} per class"]


class TUGraphs(TUDataset):
    """Reads text files only: PyG would unpickle what lies in `processed` beside them."""

    raw_dir = processed_dir = ""

    def __init__(self, folder: Path, name: str) -> None:
        self.raw_dir = str(folder)
        with tempfile.TemporaryDirectory() as self.processed_dir:
            super().__init__(self.raw_dir, name, use_node_attr=True)


def synthetic_graph(label: int) -> Data:
    """Three nodes of each of seven types; the label says which types are often linked."""
    types = torch.arange(7)
    apart = (types[:, None] - types).abs()
    chance = torch.where(torch.minimum(apart, 7 - apart) == label, 0.4, 0.1)
    edge_index = stochastic_blockmodel_graph([3] * 7, chance)
    return Data(x=F.one_hot(types.repeat_interleave(3)), edge_index=edge_index, y=label)


def read(dataset: str) -> list[Data]:
    path = Path(dataset)
    if dataset == "synthetic":
        torch.manual_seed(0)
        return [synthetic_graph(i % 4) for i in range(200)]
    if path.is_file():
        torch.serialization.add_safe_globals([DataEdgeAttr, DataTensorAttr, GlobalStorage])
        return torch.load(path, weights_only=True)  # or the file could run any code
    if path.is_dir():
        for file in sorted([*path.glob("*_A.txt"), *path.glob("raw/*_A.txt")]):
            name = file.name.removesuffix("_A.txt")
            if file.with_name(f"{name}_graph_indicator.txt").exists():  # else PyG would download
                return list(TUGraphs(file.parent, name))
        raise ValueError("the folder has no NAME_A.txt with a NAME_graph_indicator.txt")
    if not re.fullmatch(r"[\w-]+", dataset):
        parser.error(f"--dataset must be {DATASETS}, but it is {dataset}")
    return list(TUGraphs(Path(args.root, dataset, "raw"), dataset))


def prepared(graphs: list[Data]) -> tuple[list[Data], list[Data], np.ndarray]:
    """All graphs, those with a label, and their labels."""
    if not isinstance(graphs, list) or not graphs or not isinstance(graphs[0], Data):
        raise TypeError("it must hold a list of Data")
    every, labelled, labels = [], [], []
    for graph in graphs:
        graph.validate()
        x = torch.ones(graph.num_nodes, 1) if graph.x is None else graph.x.float()
        every.append(Data(x=x.view(len(x), -1), edge_index=graph.edge_index))
        label = math.nan if graph.y is None else torch.as_tensor(graph.y).item()
        if not math.isnan(label):
            labelled.append(every[-1])
            labels.append(label)
    whole = Batch.from_data_list(every)
    if whole.edge_index is None or not whole.x.isfinite().all():
        raise ValueError("each graph needs an edge_index, and an x without NaN or inf")
    if not labels:
        raise ValueError("no graph has a label y: training needs none, the evaluation does")
    sizes, least = np.unique(labels, return_counts=True)[1], 2 * max(FOLDS, args.labels + 1)
    if len(sizes) < 2 or min(sizes) < least:
        raise ValueError(
            "the evaluation needs two classes or more, and "
            f"{least} labelled graphs of each: {len(sizes)} classes, the smallest of {min(sizes)}"
        )
    return every, labelled, np.array(labels)


class Encoder(nn.Module):
    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.gin = GIN(num_features, HIDDEN, LAYERS, norm="batch_norm", jk="cat")
        self.head = nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN))

    def embed(self, data: Data) -> Tensor:
        return global_add_pool(self.gin(data.x, data.edge_index), data.batch)

    def forward(self, data: Data) -> Tensor:
        return self.head(self.embed(data))


def trained(
    graphs: list[Data], batch_size: int, seed: int, loss_of: Callable[[], nn.Module] | None
) -> Encoder:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    encoder = Encoder(graphs[0].num_features)  # drawn first: the same one for every loss
    if loss_of is None:
        return encoder
    model = ContrastiveModel(encoder, NodeDrop(), EdgePerturb(), loss_of()).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)  # the prototypes are among them
    order = torch.Generator().manual_seed(seed)
    loader = DataLoader(graphs, batch_size, shuffle=True, drop_last=True, generator=order)
    for epoch in range(args.epochs):
        for step, data in enumerate(loader, epoch * len(loader)):
            # Whatever the loss draws, the views depend on seed and step alone.
            torch.manual_seed(1_000_003 * seed + step)
            loss = model(data.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return encoder.cpu()


@torch.no_grad()
def measured(encoder: Encoder, graphs: list[Data], labels: np.ndarray, seed: int) -> list[float]:
    """Accuracies in %, in the order of MEASURES."""
    encoder.eval()
    z = torch.cat([encoder.embed(data) for data in DataLoader(graphs, 256)]).numpy()
    classifier = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    probe = cross_val_score(classifier, z, labels, cv=folds)
    z, (names, classes), nearest = normalize(z), np.unique(labels, return_inverse=True), []
    random = np.random.default_rng(seed)
    for _ in range(DRAWS):
        order = random.permutation(len(z))
        members = [order[classes[order] == each] for each in range(len(names))]
        means = normalize([z[few[: args.labels]].mean(0) for few in members])
        others = np.concatenate([rest[args.labels :] for rest in members])
        nearest.append(((z[others] @ means.T).argmax(1) == classes[others]).mean())
    return [100 * np.mean(probe), 100 * np.mean(nearest)]


def interval(differences: np.ndarray) -> tuple[float, float, float]:
    """The mean, and its 95 % interval over seeds."""
    mean, count = differences.mean(), len(differences)
    half = student.ppf(0.975, count - 1) * differences.std(ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def verdict(differences: np.ndarray, reference: str) -> str:
    _, low, high = interval(differences)
    if low > 0 or high < 0:
        return f"significantly {'above' if low > 0 else 'below'} {reference}"
    said = f"not significantly different from {reference}"
    if max(-low, high) <= 1:
        return said
    # Level 5 %, power 80 %: (1.96 + 0.84)^2 variances, and 2 seeds more for the t distribution.
    seeds = max(math.ceil(7.85 * differences.var(ddof=1)) + 2, args.seeds + 1)
    return f"{said} (inconclusive: a difference of 1 point needs about {seeds} seeds)"


def main() -> None:
    try:
        graphs, labelled, labels = prepared(read(args.dataset))
    except UnpicklingError:
        parser.error(
            f"--dataset {args.dataset} holds more than Data of tensors, which could run code: save "
            "[Data(x=g.x, edge_index=g.edge_index, y=g.y) for g in graphs] by torch.save"
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        parser.error(f"--dataset {args.dataset} cannot be used ({reason})")
    halves = train_test_split(range(len(labels)), test_size=0.5, stratify=labels, random_state=0)
    batch_size = min(args.batch_size, len(graphs))
    info_nce, pgcl = (
        {f"{name} at temperature {t:g}": partial(make, temperature=t) for t in args.temperatures}
        for name, make in (
            ("InfoNCE", InfoNCE),
            ("PGCL", partial(PGCLLoss, HIDDEN, consistency_weight=1)),
        )
    )
    losses = {"untrained": None, **info_nce, **pgcl}

    runs = [(row, seed) for seed in range(args.seeds) for row in losses]
    accuracy = {row: np.empty((args.seeds, 2, 2)) for row in losses}  # [seed, half, measure]
    for row, seed in tqdm(runs, unit="run"):
        encoder = trained(graphs, batch_size, seed, losses[row])
        for half, kept in enumerate(halves):
            held = [labelled[i] for i in kept]
            accuracy[row][seed, half] = measured(encoder, held, labels[kept], seed)

    rows = [[row] for row in losses]
    verdicts = []
    for m in range(len(MEASURES)):
        base, ours = (
            max(of_loss, key=lambda row: accuracy[row][:, 0, m].mean())
            for of_loss in (info_nce, pgcl)
        )
        for cells in rows:
            found = accuracy[cells[0]][:, 1, m]
            differences = found - accuracy[base][:, 1, m]
            said = "{:+.1f}, {:+.1f} to {:+.1f}".format(*interval(differences))
            said = {base: "chosen", ours: f"chosen: {said}"}.get(cells[0], said)
            cells.append(f"{found.mean():.1f} ({said})")
        differences = accuracy[ours][:, 1, m] - accuracy[base][:, 1, m]
        verdicts.append(f"{ours} is {verdict(differences, base)}")
    print(f"{args.dataset}: {len(graphs)} graphs, {len(labels)} with a label; {args.seeds} seeds\n")
    for cells in [["accuracy in %", *MEASURES], ["---"] * 3, *rows]:
        print(f"| {' | '.join(cells)} |")
    print("""
In brackets: mean difference from InfoNCE at the chosen temperature, paired by seed, and its 95 %
interval over seeds. One half of the labels chooses each loss's temperature, the table shows the
other half: the best of several on the same labels would look better than it is.
""")
    probe, nearest = verdicts
    print(f"Verdict: {probe} in the linear probe; {nearest} with {MEASURES[1]}.")


if __name__ == "__main__":
    main()
