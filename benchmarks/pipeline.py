"""Measure what PGCL adds to a step over PyG batches; prints a table, writes JSON.

Also a whole epoch, data loader included, against one in the pattern of the code published with the
paper: graphs augmented one by one in Python, weights of negatives filled in by a Python loop.

Random graphs of the size of NCI1's molecules: no data is needed.

python -m benchmarks.pipeline
python -m benchmarks.pipeline --rounds 5 --output /tmp/pipeline.json
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_add_pool
from torch_geometric.nn.models import GIN
from torch_geometric.utils import to_undirected

from experiments.common.arguments import count
from pgcl_losses import ConsistencyLoss, PGCLLoss
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

from . import measure, peers

NODES, EDGES, FEATURES = 30, 32, 37
WIDTH, LAYERS = 32, 3
CROSS_VIEW = "InfoNCE, N x N, as in GraphCL"
PUBLISHED = "in the pattern of the published code"
PER_BATCH = 128  # of an epoch, as in the paper
RANDOM = np.random.default_rng(0)


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
    """Queries of one view against all embeddings of the other, as in scripts like GraphCL."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        cosines = F.normalize(z1) @ F.normalize(z2).T
        return F.cross_entropy(cosines / 0.2, torch.arange(len(z1), device=z1.device))


class NTXent(nn.Module):
    """Queries of both views against the embeddings of both."""

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        z = F.normalize(torch.cat([z1, z2]))
        index = torch.arange(len(z), device=z.device)
        logits = (z @ z.T / 0.2).fill_diagonal_(-torch.inf)
        return F.cross_entropy(logits, index.roll(len(z1)))


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


class OneByOne(torch.utils.data.Dataset):
    """Pairs of views, each made of one graph through its dense adjacency matrix."""

    def __init__(self, graphs: list[Data]) -> None:
        self.graphs = graphs

    def __len__(self) -> int:
        return len(self.graphs)

    def __getitem__(self, index: int) -> tuple[Data, Data]:
        return self.drop_nodes(self.graphs[index]), self.perturb_edges(self.graphs[index])

    @staticmethod
    def drop_nodes(graph: Data) -> Data:
        order = RANDOM.permutation(graph.num_nodes)
        dropped, kept = np.split(order, [graph.num_nodes // 5])
        adjacency = torch.zeros(graph.num_nodes, graph.num_nodes)
        adjacency[graph.edge_index[0], graph.edge_index[1]] = 1
        adjacency[dropped] = 0
        adjacency[:, dropped] = 0
        kept = torch.from_numpy(np.sort(kept))
        return Data(x=graph.x[kept], edge_index=adjacency[kept][:, kept].nonzero().T)

    @staticmethod
    def perturb_edges(graph: Data) -> Data:
        edges = graph.edge_index.numpy().T
        count = len(edges) // 5
        added = RANDOM.integers(graph.num_nodes, size=(count, 2))
        kept = edges[RANDOM.choice(len(edges), len(edges) - count, replace=False)]
        return Data(x=graph.x, edge_index=torch.from_numpy(np.concatenate([kept, added]).T))


def epoch_times(graphs: list[Data], rounds: int) -> dict[str, list[float]]:
    """An epoch over the same graphs with the same encoder, whose cost both have alike."""
    encoder = Encoder()
    augmented = ContrastiveModel(encoder, NodeDrop(0.2), EdgePerturb(0.2), PGCLLoss(WIDTH))
    prototypes, consistency = PGCLLoss(WIDTH).prototypes, ConsistencyLoss()

    def ours() -> None:
        for batch in DataLoader(graphs, PER_BATCH, shuffle=True):
            augmented.zero_grad()
            augmented(batch).backward()

    def published() -> None:
        for views in DataLoader(OneByOne(graphs), PER_BATCH, shuffle=True):
            z1, z2 = [encoder(v.x, v.edge_index, v.batch, v.num_graphs) for v in views]
            assignments = prototypes(z1, z2)
            clusters = tuple(assignment.clusters for assignment in assignments)
            contrast = peers.double_loop_pgcl(z1, z2, clusters, prototypes.weight.detach())
            encoder.zero_grad()
            (contrast + 6 * consistency(*assignments)).backward()

    return measure.time_in_turn({"PGCL": ours, PUBLISHED: published}, rounds, seconds=10)


def tables(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    graphs = [molecule() for _ in range(args.graphs)]
    batch = Batch.from_data_list(graphs).to(args.device)
    size = f"G={args.graphs} V={batch.num_nodes} E={batch.num_edges}"
    yield measure.rows("pipeline", size, "PyG", step_times(batch, args.rounds), CROSS_VIEW)
    times = epoch_times(graphs, args.rounds)
    yield measure.rows("epoch", size, "PyG, on CPU", times, PUBLISHED)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21)
    parser.add_argument("--graphs", type=count, default=512, help="in the batch")
    args = parser.parse_args()

    torch.manual_seed(0)
    measure.report(args, tables(args))
