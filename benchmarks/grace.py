"""Train GRACE on Cora with the loss of its script and with InfoNCE: values, accuracy and memory.

python -m benchmarks.grace
python -m benchmarks.grace --root data --epochs 5 --output /tmp/grace.json
"""

import resource
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch_geometric.nn import GCN
from torch_geometric.utils import dropout_edge, mask_feature

from experiments.common.arguments import count
from experiments.nodes.data import load, raw_folder
from experiments.nodes.probe import linear
from pgcl_losses import InfoNCE

from . import measure

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


LOSSES: dict[str, Callable[[], Callable[[Tensor, Tensor], Tensor]]] = {
    "InfoNCE(temperature=0.4)": lambda: InfoNCE(temperature=TAU),
    "the script's own loss": lambda: loss_of_the_script,
}


def train(name: str, folder: Path, epochs: int) -> dict[str, float]:
    """Measures of one training, which runs in a process of its own."""
    torch.manual_seed(SEED)
    x, edge_index, labels = load("Cora", folder)
    encoder = GCN(x.shape[1], 2 * DIM, num_layers=2, out_channels=DIM, act="relu")
    head = torch.nn.Sequential(torch.nn.Linear(DIM, DIM), torch.nn.ELU(), torch.nn.Linear(DIM, DIM))
    parameters, loss_of = [*encoder.parameters(), *head.parameters()], LOSSES[name]()
    optimizer = torch.optim.Adam(parameters, lr=5e-4, weight_decay=1e-5)
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # KiB on Linux
    with torch.no_grad():
        accuracy = 100 * linear(encoder(x, edge_index).numpy(), labels.numpy(), SEED)
    return {
        "first loss": values[0],
        "last loss": values[-1],
        "linear probe in %": accuracy,
        "peak MiB of the process": peak,
    }


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=None, cpu_alone=True)
    parser.add_argument("--root", type=Path, help="folder of Cora; without it, it is downloaded")
    parser.add_argument("--cache", type=Path, default=Path("runs/data"))
    parser.add_argument("--epochs", type=count, default=60)
    args = parser.parse_args()
    folder = raw_folder("Cora", args.root, args.cache)

    def tables() -> Iterator[list[dict[str, Any]]]:
        for name in LOSSES:
            with ProcessPoolExecutor(1, get_context("spawn")) as process:
                measured = process.submit(train, name, folder, args.epochs).result()
            size = f"{args.epochs} epochs"
            row = partial(measure.row, "grace", name, size, "Cora", digits=7)  # of equal losses
            yield [row(metric, value) for metric, value in measured.items()]

    measure.report("grace", args, tables())
