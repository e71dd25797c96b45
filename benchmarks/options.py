"""Time PGCL's contrast with one option changed at a time; print a table and write JSON.

python -m benchmarks.options
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from pgcl_losses import PrototypeReweightedNCE, SinkhornPrototypes

from . import measure
from .measure import Row, count

DIM, NUM_PROTOTYPES = 128, 10
# Options as the reader writes them: prototypes (of each head), options of the contrast.
OPTIONS: dict[str, tuple[int | tuple[int, ...], dict[str, Any]]] = {
    "default": (NUM_PROTOTYPES, {}),
    'weighting="sample"': (NUM_PROTOTYPES, {"weighting": "sample"}),
    'negatives="cross"': (NUM_PROTOTYPES, {"negatives": "cross"}),
    "num_prototypes=1000": (1000, {}),
    "num_prototypes=(10, 42, 84)": ((10, 42, 84), {}),
}


def options(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Forward and backward of the contrast by chunks."""
    views, steps = measure.sets_of(args.size, args.size, dim=DIM, device=args.device), {}
    for name, (num_prototypes, changed) in OPTIONS.items():
        prototypes = SinkhornPrototypes(DIM, num_prototypes).to(args.device)
        with torch.no_grad():
            assignments = prototypes(*views)
        loss = PrototypeReweightedNCE(engine="chunks", **changed)
        steps[name] = measure.step_of(partial(loss, assignments=assignments), *views)
    times = measure.time_in_turn(steps, args.rounds)
    yield measure.rows("options", f"N={args.size} D={DIM}", "chunks", times, "default")


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21)
    parser.add_argument("--size", type=count, default=4096, help="N")
    args = parser.parse_args()
    torch.manual_seed(0)
    measure.report("options", args, options(args))
