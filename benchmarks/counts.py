"""Count what a step of a loss calls: operations of torch, and Python functions of the package.

python -m benchmarks.counts

Operations are those of ATen that reach a device, views included; a GPU launches most of them. The
Python calls are those of a forward. All counts are of later steps: the first three of each twenty
also look for silent failures.
"""

import cProfile
import os
import pstats
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import pgcl_losses
from pgcl_losses import InfoNCE, PGCLLoss

from . import measure, peers, scripts

NUM, DIM, NUM_PROTOTYPES = 64, 96, 10
PACKAGE = os.path.dirname(pgcl_losses.__file__)


class Operations(TorchDispatchMode):
    """Counts the operations in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace != "aten":
            raise RuntimeError(f"the operations within {func} would not be counted")
        self.count += 1
        return func(*args, **(kwargs or {}))


def counted(loss: peers.Loss, device: str) -> dict[str, int]:
    z1, z2 = (torch.randn(NUM, DIM, device=device, requires_grad=True) for _ in range(2))
    for _ in range(4):
        loss(z1, z2).backward()
    with Operations() as forward:
        value = loss(z1, z2)
    with Operations() as backward:
        value.backward()
    counts = {"operations forward": forward.count, "operations backward": backward.count}
    profile = cProfile.Profile()
    profile.runcall(loss, z1, z2)
    calls = {  # by file, line and name; every resumption of a generator is a call
        where: known[1]
        for where, known in pstats.Stats(profile).stats.items()
        if where[0].startswith(PACKAGE)
    }
    if calls:
        counts |= {"Python calls": sum(calls.values()), "files": len({file for file, *_ in calls})}
    return counts


def tables(device: str) -> Iterator[list[dict[str, Any]]]:
    loss_cal, info_nce = scripts.SCRIPTS["GraphCL"].values()
    losses = {
        "PGCLLoss": PGCLLoss(DIM, NUM_PROTOTYPES).to(device),
        "InfoNCE": InfoNCE(),
        "InfoNCE with GraphCL's options": info_nce,
        "GraphCL's loss_cal": loss_cal,
    }
    for name, loss in losses.items():
        row = partial(measure.row, "counts", name, f"N={NUM} D={DIM} K={NUM_PROTOTYPES}", "a step")
        yield [row(metric, value) for metric, value in counted(loss, device).items()]


if __name__ == "__main__":
    args = measure.parser(__doc__, rounds=None).parse_args()
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "PGCLLoss: the prototypes have not moved")  # no optimizer
    measure.report("counts", args, tables(args.device))
