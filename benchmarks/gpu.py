"""Check and time the losses on a GPU, the most informative rows first, and write JSON.

python -m benchmarks.gpu                # for ten minutes; again: what is missing
python -m benchmarks.gpu --device cpu --sizes 64 --output /tmp/gpu.json   # a dry run on a CPU

- `scripts`: losses of published scripts and ours, of large batches also without kernels; `TF32`:
  the same with products in TF32; `compiled`: both with `torch.compile`.
- `clip`: CLIP's loss beside kernels of other libraries (`benchmarks.peers`), with the relative
  error of the gradient against float64; siglip-kernel's is another loss of the same pairs.
- `forms`: labels, memories and other options; `lists`: two listed negatives for each query.
- `score_mods`: functions of the scores of negatives.

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
from torch import nn

from pgcl_losses import InfoNCE

from . import measure, peers, scripts
from .measure import Job, Row, Step, Where, count
from .peers import TAU

CLIP_PRECISIONS = ("high", "highest", "bfloat16")  # the last one of embeddings
MATRICES = 6  # [2N, 2N] that a script, dense and logits by themselves hold at once, at most
SECONDS_PER_LOSS = 0.5
PLAIN = "our loss, without kernels"
CUT_FROM = 8192  # N, from which our losses cut a batch, and use kernels
PAIRS = scripts.SCRIPTS | scripts.BESIDE


def compared(
    args: Namespace, where: Where, steps: dict[str, Step], *needing: str, precision: str = "highest"
) -> list[Row]:
    """Times and peaks of steps; some of them need matrices of all pairs."""
    torch.set_float32_matmul_precision("high" if precision == "bfloat16" else precision)
    num = int(where[1].split()[0].removeprefix("N="))
    needed = MATRICES * 4 * (num if where[0] == "clip" else 2 * num) ** 2
    return measure.compare(
        where,
        steps,
        args,
        next(iter(steps)),
        needs=dict.fromkeys(needing, needed),
        with_peak=steps if args.device.startswith("cuda") else (),
        seconds=SECONDS_PER_LOSS,
    )


def script(
    args: Namespace, where: Where, num: int, name: str, precision: str = "highest"
) -> list[Row]:
    losses = dict(zip((scripts.LINES, scripts.OURS), PAIRS[name], strict=True))
    if num >= CUT_FROM:
        losses[PLAIN] = losses[scripts.OURS]
    compiles = where[0] == "compiled"
    if compiles:
        torch.compiler.reset()
    steps = {}
    views = measure.sets_of(num, num, dim=scripts.DIM, device=args.device)
    for provider, loss in losses.items():
        if isinstance(loss, nn.Module):
            loss = copy.deepcopy(loss).to(args.device)
        if provider == PLAIN:
            getattr(loss, "contrast", loss).engine = "chunks"
        steps[provider] = measure.step_of(torch.compile(loss) if compiles else loss, *views)
    if compiles:
        steps = {provider + scripts.COMPILED: step for provider, step in steps.items()}
    return compared(
        args, where, steps, *[x for x in steps if scripts.LINES in x], precision=precision
    )


def forms(args: Namespace, where: Where, num: int) -> list[Row]:
    views = measure.sets_of(num, num, dim=scripts.DIM, device=args.device)
    with torch.device(args.device):
        made = {name: make(TAU, num) for name, make in scripts.AT_LOW_TEMPERATURES.items()}
    return compared(args, where, {name: measure.step_of(x, *views) for name, x in made.items()})


def clip(args: Namespace, where: Where, num: int, dim: int, precision: str) -> list[Row]:
    """CLIP's loss beside other libraries. In bfloat16 the embeddings have this dtype."""
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    views = measure.sets_of(num, num, dim=dim, device=args.device, dtype=dtype)
    losses: dict[str, Any] = {scripts.OURS: InfoNCE(temperature=TAU, negatives="cross")}
    losses["cross-entropy"] = scripts.clip
    if precision != "highest":  # kernels that multiply with TF32
        made = {"memeff": peers.memeff_clip, "Inf-CL": peers.inf_cl, "siglip-kernel": peers.siglip}
        losses |= {name: peers.if_installed(name, make) for name, make in made.items()}
    steps = {name: measure.step_of(loss, *views) for name, loss in losses.items() if loss}
    table = compared(args, where, steps, "cross-entropy", precision=precision)
    exact = InfoNCE(temperature=TAU, negatives="cross", engine="chunks")
    exact_step = measure.step_of(
        exact, *[view.detach().double().requires_grad_() for view in views]
    )
    for name in {row["provider"] for row in table} - {"siglip-kernel"}:
        error = measure.differences(steps[name], exact_step)["gradient"]
        table.append(
            measure.row("clip", name, *where[1:], "millionths of the gradient", 1e6 * error)
        )
    return table


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

    def two_views(num: int, name: str, benchmark: str = "scripts") -> tuple[Where, Job]:
        return job(script, benchmark, f"N={num}", name, num=num, name=name)

    def clips(dims: list[int]) -> Iterator[tuple[Where, Job]]:
        for dim, num, precision in itertools.product(dims, args.clip, CLIP_PRECISIONS):
            given = {"num": num, "dim": dim, "precision": precision}
            yield job(clip, "clip", f"N={num} D={dim}", precision, **given)

    largest = max(args.sizes)
    first = ["NT-Xent", "CLIP", *scripts.BESIDE]
    for name in first:
        yield two_views(largest, name)
        given = {"num": largest, "name": name, "precision": "high"}
        yield job(script, "TF32", f"N={largest}", name, **given)
    yield from clips(args.dims[:1])
    for num, name in itertools.product(args.sizes, PAIRS):
        if num != largest or name not in first:
            yield two_views(num, name)
    yield two_views(args.largest, "NT-Xent")
    small = [num for num in args.sizes if num < largest][:3]
    for num in sorted(small, reverse=True):
        yield job(forms, "forms", f"N={num}", "options", num=num)
    yield from clips(args.dims[1:])
    for num in args.compile_at:
        for name in PAIRS:
            yield two_views(num, name, "compiled")
    for num in small:
        yield job(of_scripts, "lists", f"N={num}", "two listed negatives", listed=[num])
        yield job(of_scripts, "score_mods", f"N={num}", "score_mod", modified=[num])


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=11)
    parser.set_defaults(device="cuda")
    sizes, compiled = [65536, 1024, 128, 8192, 16384, 256], [1024]
    parser.add_argument("--sizes", type=count, nargs="+", default=sizes, help="N, in this order")
    clip_sizes, dims = [65536, 32768, 8192], [128, 512]
    parser.add_argument(
        "--clip", type=count, nargs="*", default=clip_sizes, help="N, of CLIP's loss"
    )
    parser.add_argument("--dims", type=count, nargs="+", default=dims, help="D, of CLIP's loss")
    parser.add_argument("--compile-at", type=count, nargs="*", default=compiled, metavar="N")
    parser.add_argument("--largest", type=count, default=131072, help="N, of NT-Xent alone")
    parser.add_argument("--minutes", type=float, default=10.0, help="no row starts after them")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "pgcl_losses: the prototypes have not moved")  # no optimizer
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("there is no CUDA device here; --device=cpu is a dry run")
    if args.device == "cpu" and args.output is None:
        parser.error("a dry run on a CPU needs --output")
    measure.report_in_parts("gpu", args, jobs(args))
