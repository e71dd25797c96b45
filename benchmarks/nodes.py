"""Every node is a negative: time, memory and value of GRACE's and MAGI's loss on four graphs.

python -m benchmarks.nodes
python -m benchmarks.nodes --root data --sets Cora Photo --output /tmp/nodes.json

The embeddings are the projections of GRACE's untrained model on its own two views. Losses take
turns. The record also has the time of the encoder, forward and backward, for the two views. What
does not fit into memory, by its peak on the first graph, is named and left out.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, CitationFull, Coauthor, Planetoid
from torch_geometric.nn import GCN
from torch_geometric.utils import dropout_edge, mask_feature

from pgcl_losses import InfoNCE

from . import fresh, measure, peers
from .measure import MIB, Loss, Row, Step

SETS = {"Cora": Planetoid, "Photo": Amazon, "DBLP": CitationFull, "CS": Coauthor}
DIM, TAU, WALKS, LENGTH = 128, 0.4, 20, 4
OURS = "InfoNCE"


def projections_of(graph: Data) -> tuple[list[Tensor], Step]:
    """Both views' projections ``[N, DIM]``, and a step of the encoder without a loss."""
    x, edge_index = F.normalize(graph.x), graph.edge_index
    encoder = GCN(x.shape[1], 2 * DIM, num_layers=2, out_channels=DIM, act="relu")
    head = nn.Sequential(nn.Linear(DIM, DIM), nn.ELU(), nn.Linear(DIM, DIM))
    views = [
        (mask_feature(x, features)[0], dropout_edge(edge_index, edges)[0])
        for features, edges in ((0.3, 0.2), (0.4, 0.4))
    ]

    def encoded() -> list[Tensor]:
        return [head(encoder(*view)) for view in views]

    return [z.detach().requires_grad_() for z in encoded()], lambda: sum(encoded()).sum().backward()


def visited(edge_index: Tensor, num_nodes: int) -> Tensor:
    """The pairs of a node and another node that one of its random walks visits, ``[2, P]``."""
    source, target = edge_index[:, edge_index[0].argsort(stable=True)]
    degree = torch.bincount(source, minlength=num_nodes)
    first = degree.cumsum(0) - degree
    start = at = torch.arange(num_nodes).repeat_interleave(WALKS)
    seen = []
    for _ in range(LENGTH):
        drawn = first[at] + (torch.rand(len(at)) * degree[at]).long()
        at = torch.where(degree[at] > 0, target[drawn.clamp_max(len(target) - 1)], at)
        seen.append(start * num_nodes + at)
    numbers = torch.cat(seen).unique()
    pairs = torch.stack([numbers // num_nodes, numbers % num_nodes])
    return pairs[:, pairs[0] != pairs[1]]


def magi(pairs: Tensor, z: Tensor) -> Tensor:
    """MAGI's loss as PyAGC has it: the mean over pairs, with a matrix of all similarities."""
    z = F.normalize(z)
    similarities = z @ z.T / TAU  # [N, N]
    similarities = similarities - similarities.amax(1, keepdim=True).detach()
    powers = similarities.exp()
    total = powers.sum(1) - powers.diagonal()
    return (total.log()[pairs[0]] - similarities[pairs[0], pairs[1]]).mean()


def magi_by_queries(pairs: Tensor, z: Tensor) -> Tensor:
    """The same mean over pairs, by `InfoNCE`: each query counts as often as it has pairs."""
    loss = InfoNCE(temperature=TAU, over_positives="supcon", reduction="none")
    degree = torch.bincount(pairs[0], minlength=len(z)).to(z.dtype)
    return (loss(z, positives=pairs) * degree).sum() / degree.sum()


def losses_of(mode: str, pairs: Tensor, num: int) -> dict[str, Loss]:
    """The losses of N nodes; of pairs of nodes, for MAGI."""
    if mode == "MAGI":
        return {OURS: partial(magi_by_queries, pairs), "the script's loss": partial(magi, pairs)}
    losses = {
        OURS: InfoNCE.like("GRACE", temperature=TAU),
        "the script's loss": partial(peers.grace_in_batches, size=num, tau=TAU),
        "the script's loss in batches of 256": partial(peers.grace_in_batches, size=256, tau=TAU),
        "PyGCL": peers.if_installed("PyGCL", partial(peers.pygcl_info_nce, TAU)),
    }
    return {name: loss for name, loss in losses.items() if loss}


def memory_steps(root: str, name: str, mode: str, of: str) -> tuple[Step, Step]:
    """A small step of a loss, and the step of a graph, for a process of their own."""
    torch.set_num_threads(1)
    graph = SETS[name](root, name)[0]
    torch.manual_seed(0)
    views, _ = projections_of(graph)
    pairs = visited(graph.edge_index, graph.num_nodes)
    steps = []
    for num in (64, len(views[0])):
        within = pairs[:, (pairs < num).all(0)]
        sets = [z[:num].detach().requires_grad_() for z in views][: 1 if mode == "MAGI" else 2]
        steps.append(measure.step_of(losses_of(mode, within, num)[of], *sets))
    return steps[0], steps[1]


def tables(args: measure.argparse.Namespace) -> Iterator[list[Row]]:
    per_pair: dict[str, float] = {}  # bytes, on the first graph
    graphs = {name: SETS[name](str(args.root), name)[0] for name in args.sets}
    for name, graph in graphs.items():
        torch.manual_seed(0)
        (z1, z2), encode = projections_of(graph)
        pairs = visited(graph.edge_index, graph.num_nodes)
        yield measure.compare(("nodes", name, "encoder"), {"GCN": encode}, args)
        for mode, views in (("GRACE", (z1, z2)), ("MAGI", (z1,))):
            losses = losses_of(mode, pairs, len(z1))
            steps = {of: measure.step_of(loss, *views) for of, loss in losses.items()}
            needs = {of: int(per_pair.get(mode + of, 0) * len(z1) ** 2) for of in steps}
            size = f"{name} N={len(z1)}" + f" P={pairs.shape[1]}" * (mode == "MAGI")
            row = partial(measure.row, "nodes", size=size, mode=mode)
            found = measure.compare(
                ("nodes", size, mode), steps, args, OURS, needs=needs, with_peak=steps, seconds=1.0
            )
            yield found
            for one in found:
                if one["metric"] == "peak MiB" and one["provider"] != OURS:
                    per_pair.setdefault(mode + one["provider"], one["value"] * MIB / len(z1) ** 2)
            run = list(dict.fromkeys(one["provider"] for one in found))
            for of in run:
                where = str(args.root), name, mode, of
                if (grown := fresh.grown_mib("benchmarks.nodes:memory_steps", *where)) is not None:
                    yield [row(of, metric="process MiB", value=grown)]
            yield [row(of, metric="loss", value=steps[of]()[0].item(), digits=7) for of in run]
            left_out = [(of, needed / MIB) for of, needed in needs.items() if of not in run]
            yield [row(of, metric="needed MiB", value=needed) for of, needed in left_out]


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=3, cpu_alone=True)
    parser.set_defaults(device="cpu")
    parser.add_argument("--root", type=Path, default=Path("runs/data"), help="folder of PyG's sets")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=[*SETS])
    args = parser.parse_args()
    torch.set_num_threads(1)
    measure.report("nodes", args, tables(args))
