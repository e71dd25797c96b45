"""Time prototypes alone, SwAV's head, beside a script's lines and lightly's loss.

python -m benchmarks.heads

512 prototypes are balanced over N embeddings in each of two views, or 100 of them are in use, as
those of one slide. A process of its own tells by how much a step makes it grow.
"""

import argparse
import itertools
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from pgcl_losses import ConsistencyLoss, SinkhornPrototypes

from . import fresh, measure, peers
from .measure import Row, Step, count

DIM, NUM_PROTOTYPES, NUM_IN_USE, TAU = 128, 512, 100, 0.1
ALL, PART = f"all {NUM_PROTOTYPES}", f"{NUM_IN_USE} of {NUM_PROTOTYPES}"
OURS, LINES, LIGHTLY = "our two modules", "novae's lines", "lightly SwaVLoss"


class Ours(nn.Module):
    """The two modules, with the sizes of a part of the prototypes."""

    def __init__(self, in_use: Tensor | None) -> None:
        super().__init__()
        self.prototypes = SinkhornPrototypes(DIM, NUM_PROTOTYPES, temperature=TAU)
        self.consistency = ConsistencyLoss()
        self.in_use = in_use

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        return self.consistency(self.prototypes(z1, z2, sizes=self.in_use))


def head(name: str, mode: str) -> nn.Module | None:
    """A head with random prototypes; None where it is not installed or does not know the mode."""
    in_use = torch.arange(NUM_PROTOTYPES) < NUM_IN_USE if mode == PART else None
    if name == OURS:
        return Ours(in_use)
    if name == LINES:
        columns = None if in_use is None else in_use.nonzero().squeeze(1)
        return peers.SwAVLines(DIM, NUM_PROTOTYPES, TAU, columns)
    if in_use is not None:
        return None
    made: nn.Module | None = peers.if_installed(
        name, partial(peers.lightly_swav, DIM, NUM_PROTOTYPES, TAU)
    )
    return made


def steps(name: str, mode: str, *sizes: int) -> list[Step]:
    """Forward and backward of a head for some numbers of embeddings."""
    torch.manual_seed(0)
    made = head(name, mode)
    assert made is not None
    views = (measure.sets_of(num, num, dim=DIM, device="cpu") for num in sizes)
    return [measure.step_of(made, *of_size) for of_size in views]


def in_fresh_process(name: str, mode: str, num: int) -> list[Step]:
    return steps(name, mode, 64, num)


def heads(args: argparse.Namespace) -> Iterator[list[Row]]:
    for num, mode in itertools.product(args.sizes, (ALL, PART)):
        names = [name for name in (LINES, OURS, LIGHTLY) if head(name, mode) is not None]
        size = f"N={num:,} D={DIM}"
        each = {name: steps(name, mode, num)[0] for name in names}
        times = measure.time_in_turn(each, args.rounds)
        yield measure.rows("heads", size, mode, times, LINES)
        for name in names:
            grown = fresh.grown_mib("benchmarks.heads:in_fresh_process", name, mode, num)
            if grown is not None:
                yield [measure.row("heads", name, size, mode, "process MiB", grown)]


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=41, cpu_alone=True)
    parser.add_argument("--sizes", type=count, nargs="+", default=[256, 2048, 20480], help="N")
    args = parser.parse_args()
    measure.report("heads", args, heads(args))
