"""Measure the Triton engine on a CUDA machine; prints a table and writes JSON.

It takes ten minutes at most. If there is no time left for a part, it names the part and skips it.

python -m benchmarks.gpu
python -m benchmarks.gpu --only error graphs --output /tmp/gpu.json
python -m benchmarks.gpu --device cpu --only times --sizes 64 256   # tries this program itself
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.common.arguments import count, positive
from pgcl_losses import PGCLLoss, PrototypeReweightedNCE, SinkhornPrototypes
from pgcl_losses._normalize import unit_vectors
from pgcl_losses.engine.dispatch import Engine
from pgcl_losses.weights import cluster_counts, prototype_log_weights

from . import measure, peers
from .compiled import FORMATS

DIM = 128
NUM_PROTOTYPES = 10
SLOW = 2.0  # seconds, of a rival that is timed once
SECONDS_PER_RIVAL = 1.0
LARGEST = 1 << 20  # M; its own part, as the last one
MATRICES = 5  # [M, M] that the dense engine holds at once, at most
Rows = list[dict[str, Any]]
# Prototypes, in all or of each head, and options.
KINDS: dict[str, tuple[int | tuple[int, ...], dict[str, Any]]] = {
    "prototype": (NUM_PROTOTYPES, {}),
    "prototype, all clusters": (NUM_PROTOTYPES, {"exclude_same_cluster": False}),
    "1000 prototypes": (1000, {}),
    "heads (10, 42, 84)": ((10, 42, 84), {}),
    "soft clusters": (NUM_PROTOTYPES, {"soft_clusters": True}),
    "negative_ranks=(2, 8)": (NUM_PROTOTYPES, {"negative_ranks": (2, 8)}),
    "sample": (NUM_PROTOTYPES, {"weighting": "sample"}),
    "sample, all clusters": (
        NUM_PROTOTYPES,
        {"weighting": "sample", "exclude_same_cluster": False},
    ),
    "uniform": (NUM_PROTOTYPES, {"weighting": "uniform", "exclude_same_cluster": False}),
    "uniform, cross": (NUM_PROTOTYPES, {"weighting": "uniform", "negatives": "cross"}),
    "temperature=0.01": (NUM_PROTOTYPES, {"temperature": 0.01}),
}
SANITIZER = "compute-sanitizer --tool memcheck python -m benchmarks.gpu --only error"

Step = Callable[[], Any]


def contrast(
    num_rows: int, device: str, engine: Engine, kind: str = "prototype"
) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """A loss of two views, and the views; the same ones for every engine."""
    torch.manual_seed(0)
    num_prototypes, options = KINDS[kind]
    views = [torch.randn(num_rows // 2, DIM, device=device).requires_grad_() for _ in range(2)]
    prototypes = SinkhornPrototypes(DIM, num_prototypes).to(device)
    with torch.no_grad():
        assignments = prototypes(*views)
    loss = PrototypeReweightedNCE(engine=engine, **options)

    def of_views(*views: Tensor) -> Tensor:
        weight = prototypes.weight.detach().to(views[0].dtype)
        return loss(list(views), assignments=assignments, prototypes=weight)

    return of_views, views


def step(loss: Callable[..., Tensor], leaves: list[Tensor]) -> Step:
    """Forward and backward, of the views and what else the gradient goes to."""
    return lambda: torch.autograd.grad(loss(*leaves[:2]), leaves)


def limits(num_rows: int, device: str, precision: str) -> dict[str, Step]:
    """The three products that a dense loss needs, by the vendor's own kernels."""
    rows = unit_vectors(torch.randn(num_rows, DIM, device=device), torch.float32)
    room = measure.available_bytes(device) / 4
    block = int(max(256, min(8192, room / (4 * num_rows))))
    half = peers.gemm_limit(rows.bfloat16(), block)

    def of_three_each() -> None:  # high and low parts of both, without the product of low parts
        for _ in range(3):
            half()

    full = peers.gemm_limit(rows, block)
    if precision == "highest":
        return {"products, float32": full, "products, of three bf16": of_three_each}
    if precision == "high":
        return {"products, TF32": full, "products, of three bf16": of_three_each}
    return {"products, TF32": full, "products, bf16": half}


class Timer:
    """Times rivals, and knows how long the next ones will take."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.stop = args, time.monotonic() + 60 * args.minutes
        self.known: dict[tuple[str, str], tuple[int, float]] = {}  # M and seconds of a step

    def left(self) -> float:
        return self.stop - time.monotonic()

    def table(
        self, benchmark: str, num_rows: int, mode: str, rivals: dict[str, Step], *against: str
    ) -> Rows:
        """Peak memory and time of each, and its ratio to some of them."""
        size = f"M={num_rows} D={DIM}"
        made, quick, times = [], {}, {}
        for name, run in rivals.items():
            before, seconds = self.known.get((mode, name), (num_rows, 0.0))
            needed = 3 * seconds * (num_rows / before) ** 2
            if needed > self.left() / 2:
                tqdm.write(f"{benchmark} {size} {mode}: {name} would take {needed:.0f} s")
                continue
            try:
                run()  # compiles what compiles
                if self.args.device.startswith("cuda"):
                    peak = measure.peak_mib(run, self.args.device)
                    made.append(measure.row(benchmark, name, size, mode, "peak MiB", peak))
            except RuntimeError as error:  # out of memory, or no compiler
                reason = str(error).partition("\n")[0]
                tqdm.write(f"{benchmark} {size} {mode}: {name} is left out: {reason}")
                continue
            once = measure.seconds_of(run)
            self.known[mode, name] = num_rows, once
            if once > SLOW:
                times[name] = [1e3 * once]
            else:
                quick[name] = run
        if quick:
            times |= measure.time_in_turn(quick, self.args.rounds, SECONDS_PER_RIVAL)
        held = [name for name in against if name in times]
        return measure.rows(benchmark, size, mode, times, *held) + made


def times(args: argparse.Namespace, timer: Timer, benchmark: str = "times") -> Iterator[Rows]:
    """Forward and backward of the contrast, by engine and precision, beside products alone."""
    sizes = [LARGEST] if benchmark == "largest" else args.sizes
    for num_rows in sizes:
        for precision in FORMATS:
            torch.set_float32_matmul_precision(precision)
            rivals = limits(num_rows, args.device, precision)
            against = list(rivals)
            for engine in engines(args.device):
                fits = MATRICES * 4 * num_rows**2 < measure.available_bytes(args.device)
                if engine != "dense" or fits:
                    rivals[engine] = step(*contrast(num_rows, args.device, engine))
            yield timer.table(benchmark, num_rows, precision, rivals, *against)


def engines(device: str) -> list[Engine]:
    """Triton first: where there is no time for all, it is not the one to be left out."""
    return ["triton", "streaming", "dense"] if device.startswith("cuda") else ["streaming", "dense"]


def largest(args: argparse.Namespace, timer: Timer) -> Iterator[Rows]:
    """The same with a million rows."""
    return times(args, timer, "largest")


def relative_error(value: Tensor, reference: Tensor) -> float:
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm()).item()


def error(args: argparse.Namespace, timer: Timer) -> Iterator[Rows]:
    """Against the dense loss in float64 of the same rows, for every kind of weights."""
    size = f"M={args.error_rows} D={DIM}"
    for kind in KINDS:
        loss, views = contrast(args.error_rows, args.device, "dense", kind)
        exact = [view.detach().double().requires_grad_() for view in views]
        truth = loss(*exact)
        gradient = torch.cat(torch.autograd.grad(truth, exact))
        table = []
        for precision in FORMATS:
            torch.set_float32_matmul_precision(precision)
            for engine in engines(args.device):
                loss, views = contrast(args.error_rows, args.device, engine, kind)
                value = loss(*views)
                ours = torch.cat(torch.autograd.grad(value, views))
                key = "error", f"{engine}, {precision}", size, kind
                found = {
                    "millionths of the loss": relative_error(value, truth),
                    "millionths of the gradient": relative_error(ours, gradient),
                }
                table += [measure.row(*key, name, 1e6 * part) for name, part in found.items()]
        yield table


def whole(num_rows: int, device: str, engine: Engine) -> tuple[PGCLLoss, list[Tensor]]:
    """All of PGCL, and what its gradient goes to."""
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, NUM_PROTOTYPES, engine=engine).to(device)
    views = [torch.randn(num_rows // 2, DIM, device=device).requires_grad_() for _ in range(2)]
    return pgcl, [*views, pgcl.prototypes.weight]


def graphs(args: argparse.Namespace, timer: Timer) -> Iterator[Rows]:
    """A paper-sized step of all of PGCL captured in a CUDA graph; and how many kernels it has."""
    for num_rows in (256, 8192):
        for engine in ("triton", "dense"):
            pgcl, leaves = whole(num_rows, args.device, engine)
            run = step(pgcl, leaves)
            kernels = kernels_of(run)
            captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured):
                gradients = run()
            rivals = {f"{engine}, eager": run, f"{engine}, graph": captured.replay}
            yield timer.table("graphs", num_rows, "PGCLLoss", rivals, f"{engine}, eager")
            captured.replay()
            of_both = zip(gradients, run(), strict=True)
            key = "graphs", f"{engine}, graph", f"M={num_rows} D={DIM}", "PGCLLoss"
            wrong = 1e6 * max(relative_error(a, b) for a, b in of_both)
            yield [
                measure.row(*key, "kernels a step", kernels),
                measure.row(*key, "millionths of the gradient", wrong),
            ]


def kernels_of(run: Step) -> int:
    """How many one call launches, once everything is compiled; on a stream of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(not event.name.startswith(("Memcpy", "Memset")) for event in on_gpu)


def compiled(args: argparse.Namespace, timer: Timer) -> Iterator[Rows]:
    """What torch.compile makes of the Triton engine, in one graph, and of the dense one."""
    num_rows = args.compiled_rows
    for engine in ("triton", "dense"):
        if engine not in engines(args.device):
            continue
        torch.compiler.reset()
        torch.set_float32_matmul_precision("highest")
        pgcl, leaves = whole(num_rows, args.device, engine)
        in_one = torch.compile(pgcl, fullgraph=True)
        runs = {f"{engine}, eager": step(pgcl, leaves), f"{engine}, compiled": step(in_one, leaves)}
        yield timer.table("compiled", num_rows, "PGCLLoss", runs, f"{engine}, eager")
        eager, traced = (run() for run in runs.values())
        wrong = 1e6 * max(relative_error(a, b) for a, b in zip(traced, eager, strict=True))
        key = "compiled", f"{engine}, compiled", f"M={num_rows} D={DIM}", "PGCLLoss"
        yield [measure.row(*key, "millionths of the gradient", wrong)]
    for precision in ("highest", "medium"):
        torch.compiler.reset()
        torch.set_float32_matmul_precision(precision)
        loss, views = contrast(num_rows, args.device, "dense")
        rivals = {"torch.compile of dense": step(torch.compile(loss), views)}
        first = engines(args.device)[0]
        rivals[first] = step(*contrast(num_rows, args.device, first))
        yield timer.table("compiled", num_rows, f"contrast, {precision}", rivals, first)


def flex(args: argparse.Namespace, timer: Timer) -> Iterator[Rows]:
    """flex_attention's log-sum-exp, with the table looked up per score, as a rival forward."""
    num_rows, num = args.compiled_rows, args.compiled_rows // 2
    torch.set_float32_matmul_precision("medium")
    rows = unit_vectors(torch.randn(num_rows, DIM, device=args.device), torch.float32)
    clusters = torch.randint(NUM_PROTOTYPES, (num_rows,), device=args.device)
    prototypes = torch.randn(NUM_PROTOTYPES, DIM, device=args.device)
    shares = cluster_counts(clusters, NUM_PROTOTYPES) / num_rows
    table = prototype_log_weights(unit_vectors(prototypes, torch.float32), shares)
    table.fill_diagonal_(-torch.inf)  # a row's own pair is among those of its cluster
    forward = peers.flex_attention_pgcl(rows, clusters, table)

    first = engines(args.device)[0]
    loss: Callable[..., Tensor] = PrototypeReweightedNCE(engine=first)
    exact: Callable[..., Tensor] = PrototypeReweightedNCE(engine="streaming")
    z1, z2, *given = rows[:num], rows[num:], clusters[:num], clusters[num:], prototypes
    truth = exact(z1.double(), z2.double(), *given)
    key = "flex", "flex_attention, bf16", f"M={num_rows} D={DIM}", "forward"
    wrong = 1e6 * relative_error(forward(), truth)
    yield [measure.row(*key, "millionths of the loss", wrong)]
    rivals = {"flex_attention, bf16": forward, first: lambda: loss(z1, z2, *given)}
    yield timer.table("flex", num_rows, "forward", rivals, first)


def clusters(args: argparse.Namespace, timer: Timer) -> Iterator[Rows]:
    """What a thousand prototypes cost beside ten, and the other kinds of weights."""
    torch.set_float32_matmul_precision("highest")
    first = engines(args.device)[0]
    rivals = {kind: step(*contrast(args.compiled_rows, args.device, first, kind)) for kind in KINDS}
    yield timer.table("clusters", args.compiled_rows, first, rivals, "prototype")


PARTS = {f.__name__: f for f in (times, error, graphs, clusters, compiled, flex, largest)}


def tables(args: argparse.Namespace, failed: list[str]) -> Iterator[Rows]:
    """Of all parts. One that fails is named, and the others are still worth having."""
    timer = Timer(args)
    for part in args.only:
        print(f"\n{part}: {PARTS[part].__doc__}")
        try:
            yield from PARTS[part](args, timer)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            print("".join(traceback.format_tb(error.__traceback__)[1:4]) + reason)
            failed.append(f"{part}: {reason}")
        finally:
            torch.set_float32_matmul_precision("highest")
            if args.device.startswith("cuda"):
                torch.cuda.empty_cache()


def main() -> None:
    parser = measure.parser(__doc__, rounds=7)
    parser.set_defaults(device="cuda")
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    parser.add_argument("--sizes", type=count, nargs="+", default=[256, 8192, 131_072], help="M")
    parser.add_argument("--error-rows", type=count, default=4096)
    parser.add_argument("--compiled-rows", type=count, default=32_768)
    parser.add_argument("--minutes", type=positive, default=10.0, help="time limit for all of it")
    args = parser.parse_args()

    failed: list[str] = []
    measure.report(args, tables(args, failed))
    print(f"To be run by itself, for memory errors:\n  {SANITIZER}")
    if failed:
        sys.exit("\n".join(["These parts failed:", *failed]))


if __name__ == "__main__":
    main()
