"""Check and time the engines on a GPU, beside torch's linear_cross_entropy, and write JSON.

python -m benchmarks.gpu
python -m benchmarks.gpu --device cpu --sizes 64   # a dry run on a CPU

- `errors`: relative errors of value and gradient, against `dense` in float64 on the same device.
- `gpu`: forward and backward in time and, on a GPU, peak memory. The ratio is to `chunks`.

"uniform" is the InfoNCE between two views, which `torch.nn.functional.linear_cross_entropy` gives
in two calls. What does not fit into memory is named, and the others are measured.
"""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses import PrototypeReweightedNCE

from . import measure, peers
from .measure import Row, Step, count
from .peers import TAU

DIM, NUM_PROTOTYPES = 128, 10
ENGINES = ("chunks", "dense")
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {"weighting": "uniform", "exclude_same_cluster": False, "negatives": "cross"},
    "table": {"weighting": "prototype"},
    "sample": {"weighting": "sample"},
}
PRECISIONS = ("highest", "high", "medium")  # of torch.set_float32_matmul_precision
CHECKED = 1024  # N, of errors; smaller if all sizes are
COLD = 0.02  # a low temperature, whose errors are larger
MATRICES = 6  # [2N, 2N] that dense and logits by themselves hold at once, at most
SECONDS_PER_LOSS = 2.0


def views_of(num: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same in every dtype."""
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(2, num, DIM, generator=generator).to(device, dtype)
    return [view.requires_grad_() for view in made.unbind()]


def step_of(kind: str, engine: str, views: list[Tensor], temperature: float = TAU) -> Step:
    """A step of the contrast; clusters and prototypes are the same for every engine."""
    generator = torch.Generator().manual_seed(1)
    clusters = torch.randint(NUM_PROTOTYPES, (2, len(views[0])), generator=generator)
    given = {
        "clusters": tuple(clusters.to(views[0].device)),
        "prototypes": torch.randn(NUM_PROTOTYPES, DIM, generator=generator).to(views[0]),
    }
    loss = PrototypeReweightedNCE(temperature=temperature, engine=engine, **KINDS[kind])
    return measure.step_of(partial(loss, **given), *views)


def errors(args: Namespace) -> Iterator[list[Row]]:
    num = min(CHECKED, max(args.sizes))
    views, exact_views = views_of(num, args.device), views_of(num, args.device, torch.float64)
    for kind, temperature, precision in itertools.product(KINDS, (TAU, COLD), PRECISIONS):
        torch.set_float32_matmul_precision(precision)
        exact = step_of(kind, "dense", exact_views, temperature)
        for engine in ENGINES:
            name, mode = f"{engine}, {precision}", f"{kind}, tau={temperature}"
            row = partial(measure.row, "errors", name, f"N={num} D={DIM}", mode)
            found = measure.differences(step_of(kind, engine, views, temperature), exact).items()
            yield [row(f"millionths of the {part}", 1e6 * error) for part, error in found]


def times(args: Namespace) -> Iterator[list[Row]]:
    for num, kind, precision in itertools.product(args.sizes, KINDS, args.precisions):
        torch.set_float32_matmul_precision(precision)
        views, needed = views_of(num, args.device), MATRICES * 4 * (2 * num) ** 2
        steps = {engine: step_of(kind, engine, views) for engine in ENGINES}
        if kind == "uniform" and hasattr(F, "linear_cross_entropy"):
            by_torch, chunked = (peers.linear_cross_entropy(chunked=c) for c in (False, True))
            steps["linear_cross_entropy"] = measure.step_of(by_torch, *views)
            steps["linear_cross_entropy, chunked"] = measure.step_of(chunked, *views)
        yield measure.compare(
            ("gpu", f"N={num} D={DIM}", f"{kind}, {precision}"),
            steps,
            args,
            "chunks",
            needs={"dense": needed, "linear_cross_entropy": needed},
            with_peak=steps if args.device.startswith("cuda") else (),
            seconds=SECONDS_PER_LOSS,
        )


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=11)
    parser.set_defaults(device="cuda")
    sizes = [256, 1024, 4096, 16384, 65536]
    parser.add_argument("--sizes", type=count, nargs="+", default=sizes, help="N")
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=PRECISIONS[:2])
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device=cpu is a dry run")
    measure.report("gpu", args, itertools.chain(errors(args), times(args)))
