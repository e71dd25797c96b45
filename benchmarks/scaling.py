"""Measure one loss over several processes: time against one process, and the work of each.

Processes of one thread take turns with one process that has as many threads. The work of a process
is counted as the multiplications of its matrix products, which needs no quiet machine.

python -m benchmarks.scaling
python -m benchmarks.scaling --num 512 --counted 2 4 --output /tmp/scaling.json
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

from experiments.common.arguments import count
from pgcl_losses import PGCLLoss, PrototypeReweightedNCE

from . import measure
from .ranks import on_ranks

DIM, NUM_PROTOTYPES = 128, 10
ALONE, TOGETHER = "1 process, {} threads", "{} processes, a thread each"
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


def steps(num: int, rank: int, num_ranks: int, **options: Any) -> dict[str, Callable[[], None]]:
    """Forward and backward of PGCLLoss and of the contrast, with one process's part of N graphs."""
    torch.manual_seed(0)  # the same graphs, however many processes there are
    views, clusters = torch.randn(2, num, DIM), torch.randint(NUM_PROTOTYPES, (2, num))
    prototypes = torch.randn(NUM_PROTOTYPES, DIM)
    z1, z2 = (view.clone().requires_grad_() for view in views.tensor_split(num_ranks, 1)[rank])
    given = {
        "clusters": tuple(clusters.tensor_split(num_ranks, 1)[rank]),
        "prototypes": prototypes,
    }
    pgcl, contrast = PGCLLoss(DIM, NUM_PROTOTYPES, **options), PrototypeReweightedNCE(**options)

    def pgcl_step() -> None:
        z1.grad = z2.grad = pgcl.prototypes.weight.grad = None
        pgcl(z1, z2).backward()

    def contrast_step() -> None:
        z1.grad = z2.grad = None
        contrast(z1, z2, **given).backward()

    return {"PGCLLoss": pgcl_step, "contrast": contrast_step}


def times_in_turn(num: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds a step, one value a round, of one process alone and of all together."""
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    alone, together = (name.format(num_ranks) for name in (ALONE, TOGETHER))
    sides = {alone: steps(num, 0, 1, gather=False), together: steps(num, rank, num_ranks)}
    times: dict[str, dict[str, list[float]]] = {
        name: {side: [] for side in sides} for name in sides[alone]
    }
    for turn in range(-1, rounds):  # the first one is discarded
        for side in (alone, together) if turn % 2 else (together, alone):
            torch.set_num_threads(num_ranks if side == alone else 1)
            for name, step in sides[side].items():
                distributed.barrier()
                start = time.perf_counter()
                if side == together or rank == 0:
                    step()
                distributed.barrier()  # the others sleep here while process 0 is alone
                milliseconds = 1e3 * (time.perf_counter() - start)
                if turn >= 0:
                    times[name][side].append(milliseconds)
    return times


def work_of_processes(num: int) -> list[int]:
    """How much each process multiplies in a step of the contrast."""
    torch.set_num_threads(1)
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    step = steps(num, rank, num_ranks, engine="blocks")["contrast"]
    with Multiplications() as mine:
        step()
    work = [0] * num_ranks
    distributed.all_gather_object(work, mine.count)
    return work


def work_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The most and the least work, relative to the mean, and all of it relative to one process."""
    (of_one,) = on_ranks(work_of_processes, 1, args.num)
    table = []
    for num_ranks in args.counted:
        work = on_ranks(work_of_processes, num_ranks, args.num)
        measured = {
            "most to mean": max(work) * num_ranks / sum(work),
            "least to mean": min(work) * num_ranks / sum(work),
            "all to one process": sum(work) / of_one,
        }
        size = f"N={args.num} D={DIM} K={NUM_PROTOTYPES}"
        key = "work", f"{num_ranks} processes", size, "contrast"
        table += [measure.row(*key, *one) for one in measured.items()]
    return table


def time_table(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds a step of processes together, and as a ratio to one process."""
    size = f"N={args.num} D={DIM} K={NUM_PROTOTYPES}"
    table = []
    for name, times in on_ranks(times_in_turn, args.ranks, args.num, args.rounds).items():
        table += measure.rows("scaling", size, name, times, ALONE.format(args.ranks))
    return table


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21, cpu_alone=True)
    parser.add_argument("--num", type=count, default=4096, help="N, graphs of all processes")
    parser.add_argument("--ranks", type=count, default=2, help="processes that are timed")
    parser.add_argument(
        "--counted", type=count, nargs="+", default=[1, 2, 3, 4, 8], help="processes, for work"
    )
    args = parser.parse_args()
    measure.report(args, (table(args) for table in (work_table, time_table)))
