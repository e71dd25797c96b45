"""Time a loss over several processes against one process with as many threads; write JSON.

python -m benchmarks.scaling
python -m benchmarks.scaling --num 512 --output /tmp/scaling.json
"""

import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import distributed, multiprocessing

from pgcl_losses import PGCLLoss, PrototypeReweightedNCE

from . import measure
from .measure import Row, Step, Times, count

DIM, NUM_PROTOTYPES = 128, 10
ALONE, TOGETHER = "1 process, {} threads", "{} processes, a thread each"


def steps(num: int, rank: int, num_ranks: int, **options: Any) -> dict[str, Step]:
    """Steps of PGCLLoss and of the contrast, with a portion of N graphs."""
    torch.manual_seed(0)  # the same graphs for any number of processes
    views, clusters = torch.randn(2, num, DIM), torch.randint(NUM_PROTOTYPES, (2, num))
    prototypes = torch.randn(NUM_PROTOTYPES, DIM)
    own = [view.clone().requires_grad_() for view in views.tensor_split(num_ranks, 1)[rank]]
    own_clusters = tuple(clusters.tensor_split(num_ranks, 1)[rank])
    contrast = partial(
        PrototypeReweightedNCE(**options), clusters=own_clusters, prototypes=prototypes
    )
    losses = {"PGCLLoss": PGCLLoss(DIM, NUM_PROTOTYPES, **options), "contrast": contrast}
    return {name: measure.step_of(loss, *own) for name, loss in losses.items()}


def times_in_turn(num: int, rounds: int) -> dict[str, Times]:
    """Milliseconds per step, one value a round, of one process and of all together."""
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    alone, together = (name.format(num_ranks) for name in (ALONE, TOGETHER))
    sides = {alone: steps(num, 0, 1, gather=False), together: steps(num, rank, num_ranks)}
    times: dict[str, Times] = {name: {side: [] for side in sides} for name in sides[alone]}
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


def in_process(rank: int, num_ranks: int, folder: str, *args: int) -> None:
    store = f"file://{folder}/store"
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=num_ranks)
    times = times_in_turn(*args)
    if rank == 0:
        torch.save(times, Path(folder) / "times.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21, cpu_alone=True)
    parser.add_argument("--num", type=count, default=4096, help="N, graphs of all processes")
    parser.add_argument("--ranks", type=count, default=2, help="processes")
    args = parser.parse_args()

    def tables() -> Iterator[list[Row]]:
        with tempfile.TemporaryDirectory() as folder:
            given = args.ranks, folder, args.num, args.rounds
            # A forkserver's processes end without tearing Python down, which may abort with gloo.
            multiprocessing.start_processes(
                in_process, given, nprocs=args.ranks, start_method="forkserver"
            )
            measured = torch.load(Path(folder) / "times.pt")
        size = f"N={args.num} D={DIM} K={NUM_PROTOTYPES}"
        for name, times in measured.items():
            yield measure.rows("scaling", size, name, times, ALONE.format(args.ranks))

    measure.report("scaling", args, tables())
