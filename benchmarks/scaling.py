"""Measure one loss over several processes: its time against one process, and how evenly they share.

Ranks with one thread each take turns with one process that has as many threads. The work of each
rank is counted as the multiplications of its matrix products, which needs no quiet machine.

python -m benchmarks.scaling
python -m benchmarks.scaling --num 512 --shares 2 4 --output /tmp/scaling.json
"""

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.common.arguments import count
from pgcl_losses import PGCLLoss, PrototypeReweightedNCE

from . import measure
from .ranks import on_ranks

DIM = 128
NUM_PROTOTYPES = 10
PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")
}


class Multiplications(TorchDispatchMode):
    """Counts those of matrix products in its block, in whatever order they are computed."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in PRODUCTS:
            *_, left, right = args
            self.count += left.numel() * right.shape[-1]
        return func(*args, **(kwargs or {}))


def steps(counts: Sequence[int], rank: int, **options: Any) -> dict[str, Callable[[], None]]:
    """Forward and backward, of the whole loss and of the contrast, with one rank's rows of all."""
    torch.manual_seed(0)  # the same rows in all, however many ranks there are
    of_ranks = torch.randn(2, sum(counts), DIM).split(list(counts), dim=1)
    z1, z2 = (view.clone().requires_grad_() for view in of_ranks[rank])
    clusters = torch.randint(NUM_PROTOTYPES, (2, sum(counts))).split(list(counts), dim=1)[rank]
    prototypes = torch.randn(NUM_PROTOTYPES, DIM)
    pgcl = PGCLLoss(DIM, NUM_PROTOTYPES, **options)
    contrast = PrototypeReweightedNCE(**options)

    def whole() -> None:
        z1.grad = z2.grad = pgcl.prototypes.weight.grad = None
        pgcl(z1, z2).backward()

    def contrast_alone() -> None:
        z1.grad = z2.grad = None
        contrast(z1, z2, *clusters, prototypes).backward()

    return {"PGCLLoss": whole, "contrast": contrast_alone}


def names(num_ranks: int) -> tuple[str, str]:
    return f"1 process, {num_ranks} threads", f"{num_ranks} ranks, a thread each"


def times_in_turn(num: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a step, one value a round, of rank 0 alone and of all ranks together."""
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    counts = [len(part) for part in torch.arange(num).tensor_split(num_ranks)]
    alone, together = names(num_ranks)
    sides = {alone: steps([num], 0, gather=False), together: steps(counts, rank)}
    times: dict[str, dict[str, list[float]]] = {
        name: {side: [] for side in sides} for name in sides[alone]
    }
    for turn in range(-1, rounds):  # the first one warms up
        for side in (alone, together) if turn % 2 else (together, alone):
            torch.set_num_threads(num_ranks if side == alone else 1)
            for name, step in sides[side].items():
                distributed.barrier()
                start = time.perf_counter()
                if side == together or rank == 0:
                    step()
                distributed.barrier()  # the others sleep here while rank 0 is alone
                milliseconds = 1e3 * (time.perf_counter() - start)
                if turn >= 0:
                    times[name][side].append(milliseconds)
    return times


def work_of_ranks(counts: Sequence[int]) -> list[int]:
    """How much each rank multiplies in a step of the contrast, if it brings so many graphs."""
    torch.set_num_threads(1)
    step = steps(counts, distributed.get_rank(), engine="streaming")["contrast"]
    with Multiplications() as mine:
        step()
    of_ranks = [0] * len(counts)
    distributed.all_gather_object(of_ranks, mine.count)
    return of_ranks


def split(num: int, num_ranks: int, mode: str) -> list[int]:
    """Graphs of each rank, as many as of the others, or in the proportion 1 : 2 : 3 and so on."""
    parts = [1] * num_ranks if mode == "equal rows" else range(1, num_ranks + 1)
    ends = [num * sum(parts[: end + 1]) // sum(parts) for end in range(num_ranks)]
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]


def share_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """What the ranks with the most and the least work have, in parts of an equal share."""
    (of_one,) = on_ranks(work_of_ranks, 1, [args.num])
    table = []
    print("work of each rank (1 is an equal share), and of all (1 is that of one process)")
    for num_ranks in args.shares:
        for mode in ("equal rows", "unequal rows")[: 1 if num_ranks == 1 else 2]:
            counts = split(args.num, num_ranks, mode)
            work = on_ranks(work_of_ranks, num_ranks, counts)
            parts = [num_ranks * one / sum(work) for one in work]
            measured = {
                "largest share times ranks": max(parts),
                "smallest share times ranks": min(parts),
                "work of all to that of one process": sum(work) / of_one,
            }
            each = " ".join(f"{part:.3f}" for part in parts)
            print(f"{num_ranks:5d} ranks, {mode}: {each}; {sum(work) / of_one:.3f}")
            key = "shares", f"{num_ranks} ranks", f"N={args.num} D={DIM} K={NUM_PROTOTYPES}", mode
            table += [measure.row(*key, *one) for one in measured.items()]
    return table


def time_rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds a step of ranks together, and as a ratio to one process."""
    size = f"N={args.num} D={DIM} K={NUM_PROTOTYPES}"
    alone, _ = names(args.ranks)
    table = []
    for name, times in on_ranks(times_in_turn, args.ranks, args.num, args.rounds).items():
        table += measure.rows("scaling", size, name, times, alone)
    return table


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21, cpu_alone=True)
    parser.add_argument("--num", type=count, default=4096, help="N, graphs of all ranks together")
    parser.add_argument("--ranks", type=count, default=2, help="how many to time: as many as cores")
    parser.add_argument("--shares", type=count, nargs="+", default=[1, 2, 3, 4, 8], help="counted")
    args = parser.parse_args()
    measure.report(args, (made(args) for made in (share_rows, time_rows)))
