"""Check and time the engines on a GPU, beside torch's linear_cross_entropy, and write JSON.

python -m benchmarks.gpu
python -m benchmarks.gpu --device cpu --sizes 64   # a dry run on a CPU

- `errors`: relative errors of value and gradient, against `dense` in float64 on the same device.
- `gpu`: forward and backward in time and, on a GPU, peak memory. The ratio is to `blocks`.

"uniform" is the InfoNCE between two views, which `torch.nn.functional.linear_cross_entropy` gives
in two calls. An engine that fails is named, and the others are measured.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses import PrototypeReweightedNCE

from . import measure, peers
from .measure import count

DIM, NUM_PROTOTYPES, TAU = 128, 10, 0.2
ENGINES = ("blocks", "dense")
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

Loss = peers.Loss


def contrast(kind: str, engine: str, num: int, device: str, temperature: float = TAU) -> Loss:
    """A loss of two views; clusters and prototypes are the same for every engine."""
    generator = torch.Generator().manual_seed(1)
    options = KINDS[kind]
    given: dict[str, Any] = {}
    if kind != "uniform":
        clusters = torch.randint(NUM_PROTOTYPES, (2, num), generator=generator).to(device)
        given["clusters"] = tuple(clusters)
    if kind == "table":
        given["prototypes"] = torch.randn(NUM_PROTOTYPES, DIM, generator=generator).to(device)
    loss = PrototypeReweightedNCE(temperature=temperature, engine=engine, **options)

    def of_views(z1: Tensor, z2: Tensor) -> Tensor:
        cast = {name: v.to(z1.dtype) if name == "prototypes" else v for name, v in given.items()}
        value: Tensor = loss(z1, z2, **cast)
        return value

    return of_views


def views(num: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(2, num, DIM, generator=generator).to(device, dtype)
    return [view.requires_grad_() for view in made.unbind()]


def step(loss: Loss, leaves: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The value, and the gradient of both views."""
    value = loss(*leaves)
    return value.detach(), torch.cat(torch.autograd.grad(value, leaves))


def attempt(name: str, failed: list[str], run: Callable[[], Any]) -> Any:
    """What it returns; None if it fails, which is kept for the end."""
    try:
        return run()
    except Exception as error:  # compilers have their own
        reason = f"{name}: {type(error).__name__}: {error}".partition("\n")[0]
        print(reason)
        failed.append(reason)
        return None


def errors(args: Namespace, failed: list[str]) -> Iterator[list[dict[str, Any]]]:
    num = min(CHECKED, max(args.sizes))
    for kind in KINDS:
        for temperature in (TAU, COLD):
            mode = f"{kind}, tau={temperature}"
            exact = step(
                contrast(kind, "dense", num, args.device, temperature),
                views(num, args.device, torch.float64),
            )
            for precision in PRECISIONS:
                torch.set_float32_matmul_precision(precision)
                table = []
                for engine in ENGINES:
                    name = f"{engine}, {precision}"
                    loss = contrast(kind, engine, num, args.device, temperature)
                    run = partial(step, loss, views(num, args.device))
                    found = attempt(f"errors {mode}: {name}", failed, run)
                    for metric, wrong, right in zip(
                        ("value", "gradient"), found or (), exact, strict=False
                    ):
                        error = 1e6 * ((wrong - right).norm() / right.norm()).item()
                        key = "errors", name, f"N={num} D={DIM}", mode
                        table.append(measure.row(*key, f"millionths of the {metric}", error))
                yield table
    torch.set_float32_matmul_precision("highest")


def times(args: Namespace, failed: list[str]) -> Iterator[list[dict[str, Any]]]:
    for num in args.sizes:
        for kind in KINDS:
            for precision in args.precisions:
                torch.set_float32_matmul_precision(precision)
                yield cell(kind, num, f"{kind}, {precision}", args, failed)
    torch.set_float32_matmul_precision("highest")


def cell(
    kind: str, num: int, mode: str, args: Namespace, failed: list[str]
) -> list[dict[str, Any]]:
    """One kind of weights at one size: time and peak memory of all that fit and work."""
    losses = {engine: contrast(kind, engine, num, args.device) for engine in ENGINES}
    if kind == "uniform" and hasattr(F, "linear_cross_entropy"):
        losses["linear_cross_entropy"] = peers.linear_cross_entropy(TAU)
        losses["linear_cross_entropy, chunked"] = peers.linear_cross_entropy(TAU, chunked=True)
    size, leaves = f"N={num} D={DIM}", views(num, args.device)
    steps: dict[str, Callable[[], Any]] = {}
    table = []
    for name, loss in losses.items():
        run = partial(step, loss, leaves)
        needed = MATRICES * 4 * (2 * num) ** 2
        if name in ("dense", "linear_cross_entropy") and needed > measure.available_bytes(
            args.device
        ):
            print(f"{size} {mode}: {name} needs about {needed / 2**30:.0f} GiB")
        elif attempt(f"{size} {mode}: {name}", failed, run):  # compiles what compiles
            if args.device.startswith("cuda"):
                peak = measure.peak_mib(run, args.device)
                table.append(measure.row("gpu", name, size, mode, "peak MiB", peak))
            steps[name] = run
    timed = measure.time_in_turn(steps, args.rounds, SECONDS_PER_LOSS) if steps else {}
    against = ["blocks"] if "blocks" in timed else []
    return measure.rows("gpu", size, mode, timed, *against) + table


def main() -> None:
    parser = measure.parser(__doc__, rounds=11)
    parser.set_defaults(device="cuda")
    sizes = [256, 1024, 4096, 16384, 65536]
    parser.add_argument("--sizes", type=count, nargs="+", default=sizes, help="N")
    parser.add_argument("--precisions", choices=PRECISIONS, nargs="+", default=PRECISIONS[:2])
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device=cpu is a dry run")
    failed: list[str] = []

    def tables() -> Iterator[list[dict[str, Any]]]:
        for part in (errors, times):
            yield from part(args, failed)

    measure.report("gpu", args, tables())
    if failed:
        sys.exit("\n".join(["These failed:", *failed]))


if __name__ == "__main__":
    main()
