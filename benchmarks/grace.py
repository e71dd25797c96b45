"""Train GRACE on Cora with the loss of its script and with InfoNCE: values, accuracy and memory.

python -m benchmarks.grace
python -m benchmarks.grace --root data --epochs 5 --output /tmp/grace.json
"""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, train_test_split
from torch import Tensor
from torch_geometric.datasets import Planetoid
from torch_geometric.nn import GCN
from torch_geometric.utils import dropout_edge, mask_feature

from pgcl_losses import InfoNCE

from . import measure
from .measure import count

TAU, DIM, SEED = 0.4, 128, 0


def loss_of_the_script(z1: Tensor, z2: Tensor) -> Tensor:
    """GRACE's loss: the mean of both directions, with matrices of all similarities."""
    h1, h2 = F.normalize(z1), F.normalize(z2)
    within1, within2 = torch.exp(h1 @ h1.T / TAU), torch.exp(h2 @ h2.T / TAU)  # [N, N]
    between1, between2 = torch.exp(h1 @ h2.T / TAU), torch.exp(h2 @ h1.T / TAU)
    denominators1 = within1.sum(1) + between1.sum(1) - within1.diag()
    denominators2 = within2.sum(1) + between2.sum(1) - within2.diag()
    l1 = -torch.log(between1.diag() / denominators1)
    l2 = -torch.log(between2.diag() / denominators2)
    return ((l1 + l2) / 2).mean()


LOSSES = {
    "InfoNCE(temperature=0.4)": InfoNCE(temperature=TAU),
    "the script's own loss": loss_of_the_script,
}


def linear_probe(z: np.ndarray, labels: np.ndarray) -> float:
    """Test accuracy in %, mean of five splits: trained on 10 % of nodes, whose folds choose C."""
    accuracies = []
    for seed in range(5):
        split = train_test_split(z, labels, train_size=0.1, stratify=labels, random_state=seed)
        z_train, z_test, train, test = split
        probe = GridSearchCV(LogisticRegression(max_iter=300), {"C": 4.0 ** np.arange(1, 6)})
        accuracies.append(probe.fit(z_train, train).score(z_test, test))
    return 100 * float(np.mean(accuracies))


def train(name: str, root: Path, epochs: int) -> dict[str, float]:
    """Measures of one training, which runs in a process of its own."""
    torch.manual_seed(SEED)
    graph = Planetoid(str(root), "Cora")[0]
    x, edge_index = F.normalize(graph.x), graph.edge_index
    encoder = GCN(x.shape[1], 2 * DIM, num_layers=2, out_channels=DIM, act="relu")
    head = torch.nn.Sequential(torch.nn.Linear(DIM, DIM), torch.nn.ELU(), torch.nn.Linear(DIM, DIM))
    parameters, loss_of = [*encoder.parameters(), *head.parameters()], LOSSES[name]
    optimizer = torch.optim.Adam(parameters, lr=5e-4, weight_decay=1e-5)
    leaves = [head(encoder(x, edge_index)).detach().requires_grad_() for _ in range(2)]
    peak = measure.peak_mib(lambda: loss_of(*leaves).backward(), "cpu")  # with buffers that stay
    values = []
    for _ in range(epochs):
        z1, z2 = (
            head(encoder(mask_feature(x, features)[0], dropout_edge(edge_index, edges)[0]))
            for features, edges in ((0.3, 0.2), (0.4, 0.4))
        )
        loss = loss_of(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    with torch.no_grad():
        z = encoder(x, edge_index).numpy()
    return {
        "first loss": values[0],
        "last loss": values[-1],
        "linear probe in %": linear_probe(z, graph.y.numpy()),
        "peak MiB of the loss": peak,
    }


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=None, cpu_alone=True)
    parser.add_argument("--root", type=Path, default=Path("runs/data"), help="folder of Planetoid")
    parser.add_argument("--epochs", type=count, default=60)
    args = parser.parse_args()
    Planetoid(str(args.root), "Cora")  # a download before the processes, if it is not there

    def tables() -> Iterator[list[dict[str, Any]]]:
        for name in LOSSES:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                measured = process.submit(train, name, args.root, args.epochs).result()
            size = f"{args.epochs} epochs"
            row = partial(measure.row, "grace", name, size, "Cora", digits=7)  # of equal losses
            yield [row(metric, value) for metric, value in measured.items()]

    measure.report("grace", args, tables())
