"""Measure on a CUDA machine what the Triton engine is for; prints a table and writes JSON.

python -m benchmarks.gpu
python -m benchmarks.gpu --only error graph --output /tmp/gpu.json
"""

import argparse
import itertools
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pgcl_losses import PGCLLoss, PrototypeReweightedNCE
from pgcl_losses.rows import unit_rows
from pgcl_losses.weights import cluster_counts, prototype_log_weights

from . import measure, peers

DEVICE = "cuda"
ENGINE = "triton"
DIM = 128
NUM_PROTOTYPES = 10
TEMPERATURE = 0.2
ROUNDS = 7
SECONDS = 10.0
SANITIZER = "compute-sanitizer --tool memcheck python -m benchmarks.gpu --only error"

Given = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Figures = dict[str, float]


def given(m: int, dtype: torch.dtype) -> Given:
    """z1, z2 (M / 2 rows each), clusters1, clusters2, prototypes."""
    num = m // 2
    z1, z2 = (torch.randn(num, DIM, device=DEVICE, dtype=dtype) for _ in range(2))
    c1, c2 = (torch.randint(NUM_PROTOTYPES, (num,), device=DEVICE) for _ in range(2))
    prototypes = torch.randn(NUM_PROTOTYPES, DIM, device=DEVICE)
    return z1.requires_grad_(), z2.requires_grad_(), c1, c2, prototypes


def step(loss: Callable[..., Tensor], inputs: Given) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(loss(*inputs), inputs[:2])


def medians(rivals: dict[str, Callable[[], Any]], against: str) -> Figures:
    times = measure.time_in_turn(rivals, ROUNDS, SECONDS)
    made = measure.rows("gpu", "", "", times, against)
    return {f"{row['provider']}, {row['metric']}": row["value"] for row in made}


def speed(m: int = 131_072, block: int = 8192) -> Figures:
    """bf16 forward and backward against cuBLAS's time for the three products; at most 3, aim 2."""
    inputs = given(m, torch.bfloat16)
    rows = unit_rows(torch.cat(inputs[:2]).detach(), torch.float32).bfloat16()
    loss = PrototypeReweightedNCE(engine=ENGINE)
    rivals = {"GEMM limit": peers.gemm_limit(rows, block), ENGINE: step(loss, inputs)}
    return medians(rivals, "GEMM limit")


def memory(m: int = 1_048_576) -> Figures:
    """Forward and backward beyond the inputs; at most 8 GiB."""
    run = step(PrototypeReweightedNCE(engine=ENGINE), given(m, torch.bfloat16))
    peak = measure.peak_mib(run, DEVICE) / 1024
    return {"peak GiB": peak, "seconds": measure.seconds_of(run)}


def compiled(m: int = 32_768) -> Figures:
    """torch.compile of the dense loss against Triton; aim 5 times its time."""
    figures = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch.compiler.reset()
        inputs = given(m, dtype)
        dense = torch.compile(PrototypeReweightedNCE(engine="dense"))
        rivals = {"compiled dense": step(dense, inputs)}
        rivals[ENGINE] = step(PrototypeReweightedNCE(engine=ENGINE), inputs)
        rivals["compiled dense"]()
        times = medians(rivals, ENGINE)
        figures |= {f"{str(dtype).removeprefix('torch.')} {k}": v for k, v in times.items()}
    return figures


def graph(m: int = 256) -> Figures:
    """A paper-sized step captured in a CUDA graph, and how many kernels it launches."""
    figures = {}
    for engine in ("dense", ENGINE):
        pgcl = PGCLLoss(DIM, NUM_PROTOTYPES, engine=engine).to(DEVICE)
        z1, z2 = given(m, torch.float32)[:2]
        leaves = (z1, z2, pgcl.prototypes.weight)

        def run(pgcl: PGCLLoss = pgcl, leaves: tuple[Tensor, ...] = leaves) -> Any:
            return torch.autograd.grad(pgcl(*leaves[:2]), leaves)

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
        kernels = [e for e in on_gpu if not e.name.startswith(("Memcpy", "Memset"))]
        figures[f"{engine}, kernels per step"] = len(kernels)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            gradients = run()
        rivals = {"eager": run, "graph": captured.replay}
        figures |= {f"{engine}, {k}": v for k, v in medians(rivals, "eager").items()}
        captured.replay()
        fresh = run()
        pairs = zip(gradients, fresh, strict=True)
        figures[f"{engine}, replay's error"] = max(relative_error(a, b) for a, b in pairs)
    return figures


def relative_error(value: Tensor, reference: Tensor) -> float:
    reference = reference.double()
    return ((value.double() - reference).norm() / reference.norm()).item()


def error(m: int = 4096) -> Figures:
    """Against the dense loss in float64 of the same rows; at most 1e-5 (fp32) and 2e-2 (bf16)."""
    figures = {}
    modes = list(itertools.product(("prototype", "sample", "uniform"), (True, False)))
    for dtype in (torch.float32, torch.bfloat16):
        z1, z2, *rest = given(m, dtype)
        exact = [x.detach().double().requires_grad_() for x in (z1, z2)]
        for weighting, exclude in modes:
            options = {"weighting": weighting, "exclude_same_cluster": exclude}
            loss = PrototypeReweightedNCE(engine=ENGINE, **options)(z1, z2, *rest)
            truth = PrototypeReweightedNCE(engine="dense", **options)(*exact, *rest)
            mine = torch.cat(torch.autograd.grad(loss, (z1, z2)))
            true = torch.cat(torch.autograd.grad(truth, exact))
            name = f"{str(dtype).removeprefix('torch.')} {weighting}"
            name += ", exclusion" if exclude else ""
            figures[f"{name}, loss"] = relative_error(loss, truth)
            figures[f"{name}, gradient"] = relative_error(mine, true)
    return figures


def flex(m: int = 32_768) -> Figures:
    """flex_attention's log-sum-exp, with the table looked up per score, as a rival forward."""
    from torch.nn.attention.flex_attention import flex_attention

    z1, z2, c1, c2, prototypes = (x.detach() for x in given(m, torch.bfloat16))
    rows = unit_rows(torch.cat([z1, z2]), torch.float32)
    clusters = torch.cat([c1, c2])
    shares = cluster_counts(clusters, NUM_PROTOTYPES) / m
    table = prototype_log_weights(unit_rows(prototypes, torch.float32), shares)
    table.fill_diagonal_(-torch.inf)  # a row's own pair is among those of its cluster
    half = rows[None, None].bfloat16()  # [1, 1, M, D]
    positives = (rows[: m // 2] * rows[m // 2 :]).sum(1).repeat(2) / TEMPERATURE

    def weighted(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        is_positive = (i - j).abs() == m // 2
        return torch.where(is_positive, score, score + table[clusters[i], clusters[j]])

    attention = torch.compile(flex_attention)

    def forward() -> Tensor:
        lse = attention(half, half, half, weighted, scale=1 / TEMPERATURE, return_lse=True)[1]
        return (lse.flatten() - positives).mean()

    loss = PrototypeReweightedNCE(engine=ENGINE)
    inputs = (z1, z2, c1, c2, prototypes)
    truth = PrototypeReweightedNCE(engine="dense")(z1.float(), z2.float(), *inputs[2:])
    figures = {"flex_attention, error of the loss": relative_error(forward(), truth)}
    rivals = {"flex_attention": forward, ENGINE: lambda: loss(*inputs)}
    return figures | medians(rivals, ENGINE)


PARTS = {f.__name__: f for f in (speed, memory, compiled, graph, error, flex)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, nargs="+", default=list(PARTS))
    here = Path(__file__).parent / "results" / "gpu.json"
    parser.add_argument("--output", type=Path, default=here)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu measures on a CUDA machine, and this one has no CUDA device")

    torch.manual_seed(0)
    machine = measure.machine(DEVICE)
    output = measure.output(args, machine)
    print(machine)
    table = []
    for part in args.only:
        print(f"\n{part}: {PARTS[part].__doc__}")
        try:
            figures = PARTS[part]()
        except Exception as error:  # the other parts are still worth having
            figures = {f"{type(error).__name__}: {error}": math.nan}
        for name, value in figures.items():
            print(f"  {name:50s} {value:12.6g}")
            failed = {"value": None, "error": name} if math.isnan(value) else {"value": value}
            table.append({"benchmark": part, "metric": name} | failed)
        torch.cuda.empty_cache()
    measure.save(output, table, machine)
    print(f"\nwritten to {output}\nTo be run by itself, for memory errors:\n  {SANITIZER}")
