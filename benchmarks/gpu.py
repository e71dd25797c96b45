"""Check and time the losses on a GPU, the most informative rows first, and write JSON.

python -m benchmarks.gpu                # for ten minutes; again: what is missing
python -m benchmarks.gpu --device cpu --sizes 64 --output /tmp/gpu.json   # a dry run on a CPU

- `errors`: relative errors of value and gradient, against `dense` in float64 on the same device.
- `scripts`: losses of published scripts and ours; `compiled`: both also with `torch.compile`.
- `forms`: labels, memories and other options; `lists`: two listed negatives for each query.
- `score_mods`: functions of the scores of negatives.
- `engines`: the engines, beside torch's `linear_cross_entropy` where it gives the same loss.

Steps are forward and backward, with peak memory on a GPU. What does not fit into memory is named,
and the others are measured. A record grows with each run, and no row is measured again.
"""

import copy
import itertools
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pgcl_losses import PrototypeReweightedNCE

from . import measure, peers, scripts
from .measure import Job, Row, Step, Where, count
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
MATRICES = 6  # [2N, 2N] that a script, dense and logits by themselves hold at once, at most
SECONDS_PER_LOSS = 1.0
PAIRS = scripts.SCRIPTS | scripts.BESIDE


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


def errors(args: Namespace, where: Where, kind: str, tau: float, precision: str) -> list[Row]:
    num = min(CHECKED, max(args.sizes))
    views, exact_views = views_of(num, args.device), views_of(num, args.device, torch.float64)
    torch.set_float32_matmul_precision(precision)
    exact = step_of(kind, "dense", exact_views, tau)
    return [
        measure.row(where[0], engine, *where[1:], f"millionths of the {part}", 1e6 * error)
        for engine in ENGINES
        for part, error in measure.differences(step_of(kind, engine, views, tau), exact).items()
    ]


def compared(args: Namespace, where: Where, steps: dict[str, Step], *needing: str) -> list[Row]:
    """Times and peaks of steps; some of them need matrices of all pairs."""
    torch.set_float32_matmul_precision("highest")
    needed = MATRICES * 4 * (2 * int(where[1].removeprefix("N="))) ** 2
    return measure.compare(
        where,
        steps,
        args,
        next(iter(steps)),
        needs=dict.fromkeys(needing, needed),
        with_peak=steps if args.device.startswith("cuda") else (),
        seconds=SECONDS_PER_LOSS,
    )


def script(args: Namespace, where: Where, num: int, compiled: bool = False) -> list[Row]:
    losses = {
        name: copy.deepcopy(loss).to(args.device) if isinstance(loss, nn.Module) else loss
        for name, loss in zip((scripts.LINES, scripts.OURS), PAIRS[where[2]], strict=True)
    }
    if compiled:
        torch.compiler.reset()
        losses = {name + scripts.COMPILED: torch.compile(loss) for name, loss in losses.items()}
    views = measure.sets_of(num, num, dim=scripts.DIM, device=args.device)
    steps = {name: measure.step_of(loss, *views) for name, loss in losses.items()}
    return compared(args, where, steps, scripts.LINES, scripts.LINES + scripts.COMPILED)


def forms(args: Namespace, where: Where, num: int) -> list[Row]:
    views = measure.sets_of(num, num, dim=scripts.DIM, device=args.device)
    with torch.device(args.device):
        made = {name: make(TAU, num) for name, make in scripts.AT_LOW_TEMPERATURES.items()}
    return compared(args, where, {name: measure.step_of(x, *views) for name, x in made.items()})


def engines(args: Namespace, where: Where, num: int, kind: str) -> list[Row]:
    views = views_of(num, args.device)
    steps = {engine: step_of(kind, engine, views) for engine in ENGINES}
    if kind == "uniform" and hasattr(F, "linear_cross_entropy"):
        for name, chunked in ("linear_cross_entropy", False), ("the same, chunked", True):
            loss = peers.linear_cross_entropy(chunked=chunked)
            steps[name] = measure.step_of(loss, *views)
    return compared(args, where, steps, "dense", "linear_cross_entropy")


def of_scripts(args: Namespace, where: Where, **sizes: list[int]) -> list[Row]:
    """A benchmark of `benchmarks.scripts` at a size."""
    given = Namespace(**vars(args), **sizes)
    tables = scripts.BENCHMARKS[where[0]](given)
    place = dict(zip(("benchmark", "size", "mode"), where, strict=True))
    return [row | place for row in itertools.chain.from_iterable(tables)]


def jobs(args: Namespace) -> Iterator[tuple[Where, Job]]:
    """What is measured, in order."""

    def job(measured: Callable[..., list[Row]], *where: str, **given: Any) -> tuple[Where, Job]:
        return where, partial(measured, args, where, **given)

    size = f"N={min(CHECKED, max(args.sizes))}"
    for kind, tau, precision in itertools.product(KINDS, (TAU, COLD), PRECISIONS):
        given = {"kind": kind, "tau": tau, "precision": precision}
        yield job(errors, "errors", size, f"{kind}, tau={tau}, {precision}", **given)
    for num, name in [*itertools.product(args.sizes, PAIRS), (args.largest, "NT-Xent")]:
        yield job(script, "scripts", f"N={num}", name, num=num)
    for turn, num in enumerate(args.sizes):
        size = f"N={num}"
        yield job(forms, "forms", size, "options", num=num)
        yield job(of_scripts, "lists", size, "two listed negatives", listed=[num])
        yield job(of_scripts, "score_mods", size, "score_mod", modified=[num])
        for kind in KINDS:
            yield job(engines, "engines", size, f"weights: {kind}", num=num, kind=kind)
        for at, name in itertools.product(args.compile_at if turn == 0 else (), PAIRS):
            yield job(script, "compiled", f"N={at}", name, num=at, compiled=True)


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=11)
    parser.set_defaults(device="cuda")
    sizes, compiled = [1024, 128, 8192, 16384, 256, 65536], [1024]
    parser.add_argument("--sizes", type=count, nargs="+", default=sizes, help="N, in this order")
    parser.add_argument("--compile-at", type=count, nargs="*", default=compiled, metavar="N")
    parser.add_argument("--largest", type=count, default=131072, help="N, of NT-Xent alone")
    parser.add_argument("--minutes", type=float, default=10.0, help="no row starts after them")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "PGCLLoss: the prototypes have not moved")  # no optimizer
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device=cpu is a dry run")
    if args.device == "cpu" and args.output is None:
        parser.error("a dry run on a CPU needs --output")
    measure.report_in_parts("gpu", args, jobs(args))
