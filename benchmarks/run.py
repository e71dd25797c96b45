"""Time the contrast and its options; print a table and write JSON.

python -m benchmarks.run                      # everything
python -m benchmarks.run --only contrast --sizes 128 512 --modes prototype
python -m benchmarks.run --only options
"""

import argparse
import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from pgcl_losses import PrototypeReweightedNCE, SinkhornPrototypes

from . import measure, peers
from .measure import Loss, Row, count

DIM = 128
NUM_PROTOTYPES = 10
SECONDS_PER_LOSS = 3.0
MODES: dict[str, dict[str, Any]] = {
    "prototype": {"weighting": "prototype"},
    "sample": {"weighting": "sample"},
    "uniform": {"weighting": "uniform", "exclude_same_cluster": False},
}
# Options as the reader writes them: prototypes (of each head), options of the contrast.
OPTIONS: dict[str, tuple[int | tuple[int, ...], dict[str, Any]]] = {
    "default": (NUM_PROTOTYPES, {}),
    'weighting="sample"': (NUM_PROTOTYPES, MODES["sample"]),
    'negatives="cross"': (NUM_PROTOTYPES, {"negatives": "cross"}),
    "num_prototypes=1000": (1000, {}),
    "num_prototypes=(10, 42, 84)": ((10, 42, 84), {}),
}


def contrast_losses(
    mode: str, clusters: tuple[Tensor, ...], prototypes: Tensor
) -> dict[str, tuple[Loss, int]]:
    """The losses for one mode and size, each with the number of [2N, 2N] matrices it stores."""
    inputs: dict[str, Any] = {} if mode == "uniform" else {"clusters": clusters}
    if mode == "prototype":
        inputs["prototypes"] = prototypes
    num, dense = len(clusters[0]), 5 if mode == "sample" else 4

    losses: dict[str, tuple[Loss, int]] = {}
    for engine in ("dense", "chunks"):
        loss = PrototypeReweightedNCE(engine=engine, **MODES[mode])
        losses[engine] = (partial(loss, **inputs), dense if engine == "dense" else 0)
    compiled = torch.compile(PrototypeReweightedNCE(engine="dense", **MODES[mode]))
    losses["torch.compile of dense"] = (partial(compiled, **inputs), dense)
    if mode == "prototype" and num <= 128:
        losses["double loop, as published"] = (partial(peers.double_loop_pgcl, **inputs), 5)
    if mode == "uniform":
        if theirs := peers.if_installed("PyGCL's InfoNCE", peers.pygcl_info_nce):
            losses["PyGCL's InfoNCE"] = (theirs, 7)
        if num <= 256:  # each pair of a positive and a negative: 38 s at 512 on two cores
            losses["pytorch-metric-learning's NTXentLoss"] = (
                peers.metric_learning("NTXentLoss"),
                5 * 2 * num,
            )
    return losses


def contrast_cell(mode: str, num: int, args: argparse.Namespace) -> list[Row]:
    """One mode at one size: time and memory of each loss that fits into memory."""
    size = f"N={num} D={DIM} K={NUM_PROTOTYPES}"
    views = measure.sets_of(num, num, dim=DIM, device=args.device)
    clusters = tuple(torch.randint(NUM_PROTOTYPES, (num,), device=args.device) for _ in range(2))
    prototypes = torch.randn(NUM_PROTOTYPES, DIM, device=args.device)
    torch.compiler.reset()  # compile each size as if it were the only one

    losses = contrast_losses(mode, clusters, prototypes)
    matrix = 4 * (2 * num) ** 2  # bytes
    z = F.normalize(torch.cat(views).detach())
    steps = {"GEMM limit": peers.gemm_limit(z, block=2048 if matrix > 2**30 else 2 * num)}
    steps |= {name: measure.step_of(loss, *views) for name, (loss, _) in losses.items()}
    # Compiled code shows what it allocates on a GPU only.
    on_gpu = args.device.startswith("cuda")
    return measure.compare(
        ("contrast", size, mode),
        steps,
        args,
        "GEMM limit",
        needs={name: matrices * matrix for name, (_, matrices) in losses.items()},
        with_peak=[name for name in losses if on_gpu or not name.startswith("torch.compile")],
        seconds=SECONDS_PER_LOSS,
    )


def contrast(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Forward and backward of the reweighted contrast, by each engine and by other code."""
    for num, mode in tqdm(list(itertools.product(args.sizes, args.modes)), unit="cell"):
        yield contrast_cell(mode, num, args)


def options(args: argparse.Namespace) -> Iterator[list[Row]]:
    """Forward and backward of the contrast by chunks, with one option changed at a time."""
    num = args.options_at
    views, steps = measure.sets_of(num, num, dim=DIM, device=args.device), {}
    for name, (num_prototypes, changed) in OPTIONS.items():
        prototypes = SinkhornPrototypes(DIM, num_prototypes).to(args.device)
        with torch.no_grad():
            assignments = prototypes(*views)
        loss = PrototypeReweightedNCE(engine="chunks", **changed)
        inputs = {"assignments": assignments}
        steps[name] = measure.step_of(partial(loss, **inputs), *views)
    times = measure.time_in_turn(steps, args.rounds)
    yield measure.rows("options", f"N={num} D={DIM}", "chunks", times, "default")


BENCHMARKS = {"contrast": contrast, "options": options}

if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21)
    parser.add_argument("--only", choices=BENCHMARKS, help="one of them instead of all")
    sizes = [32, 128, 512, 2048, 4096, 8192, 16384]
    parser.add_argument("--sizes", type=count, nargs="+", default=sizes, help="N, for contrast")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--options-at", type=count, default=4096, help="N, for options")
    args = parser.parse_args()

    torch.manual_seed(0)
    for name in [args.only] if args.only else BENCHMARKS:
        measure.report(name, args, BENCHMARKS[name](args))
