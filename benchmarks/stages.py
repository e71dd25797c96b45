"""Measure a step in the warm-up of PGCL and one after it, against a step of InfoNCE.

python -m benchmarks.stages
python -m benchmarks.stages --sizes 128 --rounds 3 --output /tmp/stages.json
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from experiments.common.arguments import count
from pgcl_losses import InfoNCE, PGCLLoss

from . import measure

DIM = 128
INFO_NCE = "InfoNCE"


def losses(size: int) -> dict[str, nn.Module]:
    """By the name of the stage; what comes after a warm-up needs none."""
    return {
        INFO_NCE: InfoNCE(),
        "warm-up": PGCLLoss(DIM, warmup_steps=10**9),
        f"K={size // 3}, lambda=1": PGCLLoss(DIM, size // 3, consistency_weight=1.0),
        f"K={size // 3}, lambda=0": PGCLLoss(DIM, size // 3, consistency_weight=0.0),
        "K=50, lambda=0": PGCLLoss(DIM, 50, consistency_weight=0.0),
    }


def step_times(size: int, device: str, rounds: int) -> dict[str, list[float]]:
    views = [torch.randn(size, DIM, device=device, requires_grad=True) for _ in range(2)]

    def step_of(loss: nn.Module) -> Callable[[], None]:
        loss.to(device)

        def step() -> None:
            for tensor in (*views, *loss.parameters()):
                tensor.grad = None
            loss(*views).backward()

        return step

    return measure.time_in_turn(
        {name: step_of(loss) for name, loss in losses(size).items()}, rounds
    )


def tables(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    with measure.on_threads(args.threads):
        for size in args.sizes:
            times = step_times(size, args.device, args.rounds)
            yield measure.rows("stages", f"N={size} D={DIM}", "step", times, INFO_NCE)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=15)
    parser.add_argument("--sizes", type=count, nargs="+", default=[256, 2048], help="graphs")
    parser.add_argument("--threads", type=count, default=1)
    args = parser.parse_args()
    measure.report(args, tables(args))
