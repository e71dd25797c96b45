"""Measure what augmenting and PGCL add to a step over PyG batches; prints a table, writes JSON.

Random graphs of the size of NCI1's molecules: no data is needed.

python benchmarks/pipeline.py
python benchmarks/pipeline.py --rounds 5 --output /tmp/pipeline.json
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import GIN
from torch_geometric.utils import to_undirected

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import (
    AttributeMask,
    ContrastiveModel,
    EdgePerturb,
    NodeDrop,
    Subgraph,
)

NODES, EDGES, FEATURES = 30, 32, 37
WIDTH, LAYERS = 32, 3
CROSS_VIEW = "InfoNCE, N x N, as in GraphCL"


def molecule() -> Data:
    """A random tree whose branches are short, and a few rings."""
    child = torch.arange(1, NODES)
    parent = (child - torch.randint(1, 4, (NODES - 1,))).clamp(min=0)
    start = torch.randint(NODES - 6, (EDGES - NODES + 1,))
    ends = torch.cat([torch.stack([parent, child]), torch.stack([start, start + 5])], dim=1)
    x = F.one_hot(torch.randint(FEATURES, (NODES,)), FEATURES).float()
    return Data(x=x, edge_index=to_undirected(ends, num_nodes=NODES), y=torch.zeros(1))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gin = GIN(FEATURES, WIDTH, LAYERS)

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor, num_graphs: int) -> Tensor:
        return global_add_pool(self.gin(x, edge_index), batch, num_graphs)


class CrossViewInfoNCE(nn.Module):
    """Queries of one view against all rows of the other, as GraphCL-style scripts have it."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        cosines = F.normalize(z1) @ F.normalize(z2).T
        return F.cross_entropy(cosines / 0.2, torch.arange(len(z1), device=z1.device))


class NTXent(nn.Module):
    """Queries of both views against the rows of both."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        rows = F.normalize(torch.cat([z1, z2]))
        index = torch.arange(len(rows), device=rows.device)
        logits = (rows @ rows.T / 0.2).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, index.roll(len(z1)))


def augment_times(batch: Batch, rounds: int) -> dict[str, list[float]]:
    """Each augmentation, and the pair that makes two views, beside one encoder's forward."""
    encoder = Encoder().to(batch.x.device)
    augments = [kind(0.2) for kind in (NodeDrop, EdgePerturb, Subgraph, AttributeMask)]
    node_drop, edge_perturb, *_ = augments
    rivals: dict[str, Callable[[], Any]] = {
        "encoder forward": lambda: encoder(
            batch.x, batch.edge_index, batch.batch, batch.num_graphs
        ),
        "NodeDrop and EdgePerturb": lambda: (node_drop(batch), edge_perturb(batch)),
        **{str(augment): lambda augment=augment: augment(batch) for augment in augments},
    }
    return measure.time_in_turn(rivals, rounds)


def step_times(batch: Batch, rounds: int) -> dict[str, list[float]]:
    """Augment twice, encode both views, loss and backward."""

    def stepping(loss: nn.Module) -> Callable[[], None]:
        torch.manual_seed(0)
        model = ContrastiveModel(Encoder(), NodeDrop(0.2), EdgePerturb(0.2), loss)
        model.to(batch.x.device)

        def step() -> None:
            model.zero_grad()
            model(batch).backward()

        return step

    rivals = {
        "PGCL": stepping(PGCLLoss(WIDTH)),
        CROSS_VIEW: stepping(CrossViewInfoNCE()),
        "InfoNCE, 2N x 2N, as in SimCLR": stepping(NTXent()),
    }
    return measure.time_in_turn(rivals, rounds)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--graphs", type=int, default=512, help="in the batch")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--output", type=Path, help="default: results/cpu.json or results/cuda.json"
    )
    args = parser.parse_args()
    kind = args.device.partition(":")[0]
    output = args.output or Path(__file__).parent / "results" / f"{kind}.json"

    torch.manual_seed(0)
    machine = measure.machine(args.device)
    print(machine)
    batch = Batch.from_data_list([molecule() for _ in range(args.graphs)]).to(args.device)
    size = f"G={args.graphs} V={batch.num_nodes} E={batch.num_edges}"
    table = [
        *measure.rows("augment", size, "PyG", augment_times(batch, args.rounds), "encoder forward"),
        *measure.rows("pipeline", size, "PyG", step_times(batch, args.rounds), CROSS_VIEW),
    ]
    measure.show(table)
    measure.save(output, table, machine)
    print(f"written to {output}")
