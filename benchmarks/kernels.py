"""Show what the Triton engine's kernels compile to for four generations of GPUs; no GPU is needed.

Triton's own compiler compiles them ahead of time. The check finds matrix products that do not run
on tensor cores, registers that are kept in memory, and more shared memory than the GPU has.

python -m benchmarks.kernels --arch 90 --dim 128 --format highest   # some of all configurations
python -m benchmarks.kernels --check --sample 16                    # as continuous integration does
"""

import argparse
import itertools
import math
import multiprocessing
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from experiments.common.arguments import count

from .compiled import (
    CHIPS,
    FORMATS,
    KIB,
    MODES,
    TENSOR_MEMORY,
    Case,
    Compiled,
    compiled,
    launches_of,
)

DIMS = (32, 64, 96, 128, 256, 300, 512, 1024)
NEGATIVES = ("all", "cross")
TEMPERATURES = (0.2, 0.01)

# Products on tensor cores: operations of Triton's language for GPUs, and layouts of their results.
TENSOR_CORES = {80: r"tt\.dot mma", 86: r"tt\.dot mma"}
TENSOR_CORES |= {90: r"ttng\.warp_group_dot mma", 100: r"ttng\.tc_gen5_mma\w*|tt\.dot mma"}

# Bytes of registers that a thread may keep in memory.
MOST_SPILLS = 64


def problems(case: Case, found: Compiled) -> list[str]:
    """What is wrong with a kernel, in words."""
    chip = CHIPS[case.arch]
    wrong = []
    if found.shared_memory > chip.shared_memory:
        limit = f"{chip.shared_memory // KIB} KiB"
        wrong.append(f"{found.shared_memory / KIB:.1f} KiB of shared memory, of {limit}")
    if found.tensor_memory > TENSOR_MEMORY:
        wrong.append(f"{found.tensor_memory} columns of tensor memory, of {TENSOR_MEMORY}")
    if not found.products:
        wrong.append("no product was found")
    by_hand = {how for how in found.products if not re.fullmatch(TENSOR_CORES[case.arch], how)}
    wrong += [f"a product is not on this card's tensor cores: {how}" for how in sorted(by_hand)]
    if found.spills > MOST_SPILLS:
        wrong.append(f"{found.spills} bytes of a thread's registers in memory, of {MOST_SPILLS}")
    return wrong


def line(case: Case, found: Compiled) -> str:
    text = f"{case!s:58s} {found.kernel:10s} {found.warps} warps {found.registers:3d} registers"
    text += f" {found.spills:4d} bytes in memory, {found.shared_memory / KIB:3.0f} KiB shared, "
    return text + ", ".join(sorted(found.products))


def cases(args: argparse.Namespace) -> list[Case]:
    """All of what was asked for, or so many of them, each value of each option in its turn."""
    options = args.arch, args.dim, args.format, args.mode, NEGATIVES, TEMPERATURES
    if not args.sample:
        return [Case(*one) for one in itertools.product(*options)]
    # The multiples of irrational numbers fill a cube evenly, however many of them are taken.
    root = 2.0
    for _ in range(50):  # of x^(d + 1) = x + 1
        root = (1 + root) ** (1 / (len(options) + 1))
    chosen: dict[Case, None] = {}
    for number in range(100 * args.sample):
        if len(chosen) == min(args.sample, math.prod(len(values) for values in options)):
            break
        places = ((0.5 + number / root ** (axis + 1)) % 1 for axis in range(len(options)))
        picked = (v[int(p * len(v))] for v, p in zip(options, places, strict=True))
        chosen[Case(*picked)] = None
    return list(chosen)


def examined(case: Case) -> list[Compiled] | str:
    """What the engine's launches become, or what went wrong; in a process of its own."""
    torch.set_num_threads(1)
    try:
        return [compiled(launch, case.arch) for launch in launches_of(case)]
    except Exception as error:  # the other cases are still worth having
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def start(cache: str) -> None:
    """Workers share what they have compiled, with nobody else's."""
    os.environ["TRITON_CACHE_DIR"] = cache
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as today; silences a warning


def examine(chosen: Sequence[Case], workers: int) -> Iterator[tuple[Case, list[Compiled] | str]]:
    """Each case with its kernels, some at a time."""
    cache = tempfile.mkdtemp(prefix="kernels-")
    context = multiprocessing.get_context("spawn")  # a thread of torch's may hold a lock
    try:
        with ProcessPoolExecutor(workers, context, start, (cache,)) as pool:
            yield from zip(chosen, pool.map(examined, chosen), strict=True)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def versions() -> dict[str, Any]:
    """What the figures belong to; the machine that they were compiled on is nothing to them."""
    import triton

    return {"triton": triton.__version__, "torch": torch.__version__}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, choices=CHIPS, nargs="+", default=list(CHIPS))
    parser.add_argument("--dim", type=count, nargs="+", default=DIMS)
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=FORMATS)
    parser.add_argument("--mode", choices=MODES, nargs="+", default=MODES, help="kinds of weights")
    parser.add_argument("--sample", type=count, help="take this many, well spread, instead of all")
    parser.add_argument("--check", action="store_true", help="fail if anything is wrong")
    parser.add_argument("--workers", type=count, default=os.cpu_count(), help="processes")
    args = parser.parse_args()

    begun, failed, kernels = time.perf_counter(), [], 0
    print(versions())
    for case, found in examine(cases(args), args.workers):
        if isinstance(found, str):
            print(f"{case!s:60s} {found}", flush=True)
            failed.append(f"{case}: {found}")
            continue
        for kernel in found:
            kernels += 1
            print(line(case, kernel), flush=True)
            wrong = problems(case, kernel)
            failed += [f"{case} {kernel.kernel}: {problem}" for problem in wrong]
    print(f"{kernels} kernels in {time.perf_counter() - begun:.0f} s")
    if failed:
        print("\n".join(["", "What is wrong:", *failed]))
    if failed and args.check:
        sys.exit(f"{len(failed)} problems")


if __name__ == "__main__":
    main()
