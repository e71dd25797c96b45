"""Show what the Triton engine's kernels compile to for four generations of GPUs; no GPU is needed.

Compiled ahead of time by Triton's own compiler: registers, memory, products and instructions.

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
from pathlib import Path
from typing import Any

import torch

from experiments.shelf.arguments import count

from . import measure
from .compiled import (
    CHIPS,
    FORMATS,
    KIB,
    MODES,
    TENSOR_MEMORY,
    Case,
    Compiled,
    Tile,
    compiled,
    launches_of,
)

ARCHES = (80, 86, 90, 100)
DIMS = (32, 64, 96, 128, 256, 300, 512, 1024)
NEGATIVES = ("all", "cross")
TEMPERATURES = (0.2, 0.01)

# Products on tensor cores, by their operation in Triton's language for GPUs.
TENSOR_CORES = {80: r"tt\.dot mma", 86: r"tt\.dot mma", 89: r"tt\.dot mma"}
TENSOR_CORES |= {90: r"ttng\.warp_group_dot", 100: r"ttng\.tc_gen5_mma\w*|tt\.dot mma"}

# Multiplications one by one that a pair may take, for what is computed of its similarity. A product
# without tensor cores takes as many as the embeddings have dimensions.
MOST_FMA = 24
# Loads of less than 8 bytes that a warp may issue for each of a tile's columns. Weights are looked
# up by the key of the other embedding, so once for each column, not for each pair; and backward for
# both embeddings of a pair. A thread that holds a whole line of the tile (sm_100) looks up all of
# them. A load of embeddings that is not by vectors takes many more.
MOST_NARROW_LOADS = 2.4
# The part of a tile's instructions that may move registers to memory and back. It is none where a
# block has one cluster, or no table; more clusters have a loop of their own in each tile, for which
# some compilers run out of registers.
MOST_SPILLS = 0.05
# Instructions that a thread may issue for a pair, with up to 128 dimensions; beyond, in proportion.
# As measured, and a tenth more. By architecture, by kernel and columns of its tile; for the formats
# "highest" and "high", and for "medium".
BUDGET: dict[int, dict[tuple[str, int], tuple[float, float]]] = {
    80: {
        ("backward", 32): (53, 37),
        ("backward", 64): (20, 12),
        ("d_pairs", 32): (64, 59),
        ("forward", 32): (33, 32),
        ("forward", 64): (24, 13),
        ("multiply", 64): (4, 3),
    },
    90: {
        ("backward", 32): (44, 33),
        ("backward", 64): (20, 11),
        ("d_pairs", 32): (45, 45),
        ("forward", 32): (30, 18),
        ("forward", 64): (15, 9),
        ("multiply", 64): (4, 4),
    },
    100: {
        ("backward", 32): (33, 27),
        ("backward", 64): (17, 10),
        ("d_pairs", 32): (41, 41),
        ("forward", 32): (30, 18),
        ("forward", 64): (16, 9),
        ("multiply", 64): (4, 4),
    },
}
BUDGET[86] = BUDGET[89] = BUDGET[80]
BUDGET_DIM = 128
# Kinds of weights with more to compute for a pair, and how many times as much it may be.
BUDGET_OF = {"soft": 1.5, "gaussian": 1.3, "gaussian, table": 1.4}
# It was measured with this version of Triton. Older ones make up to a quarter more.
BUDGET_TRITON = 3, 9
BUDGET_OF_OLDER = 1.25


def problems(case: Case, found: Compiled) -> list[str]:
    """What is wrong with a kernel, in words."""
    chip = CHIPS[case.arch]
    wrong = []
    if found.shared_memory > chip.shared_memory:
        limit = f"{chip.shared_memory // KIB} KiB"
        wrong.append(f"{found.shared_memory / KIB:.1f} KiB of shared memory, of {limit}")
    if found.tensor_memory > TENSOR_MEMORY:
        wrong.append(f"{found.tensor_memory} columns of tensor memory, of {TENSOR_MEMORY}")
    by_hand = {
        f"{one.how} of {one.operands}"
        for one in found.products
        if not re.fullmatch(TENSOR_CORES[case.arch], one.how)
    }
    wrong += [f"a product is not on this card's tensor cores: {how}" for how in sorted(by_hand)]
    for tile in found.tiles:
        wrong += problems_of_tile(case, found, tile)
    return wrong


def problems_of_tile(case: Case, found: Compiled, tile: Tile) -> list[str]:
    wrong = []
    fma = a_pair(found, tile, "FMA")
    if fma > MOST_FMA:
        wrong.append(f"{fma:.0f} multiplications one by one for a pair, of {MOST_FMA}")
    narrow = sum(count for name, count in tile.issued.items() if name.endswith("narrow"))
    allowed = MOST_NARROW_LOADS * tile.shape[1]
    if narrow > allowed:
        wrong.append(f"{narrow} loads of single numbers for a tile, of {allowed:.0f}")
    spills, total = tile.issued["LDL"] + tile.issued["STL"], tile.issued["total"]
    if spills > MOST_SPILLS * total:
        wrong.append(f"{spills} of {total} instructions for a tile move registers to memory")
    key = name_of(found, tile), tile.shape[1]
    budget = BUDGET[case.arch].get(key, (math.inf, math.inf))[case.format == "medium"]
    budget *= max(1.0, case.dim / BUDGET_DIM) * BUDGET_OF.get(case.mode, 1.0)
    if tuple(map(int, versions()["triton"].split(".")[:2])) < BUDGET_TRITON:
        budget *= BUDGET_OF_OLDER
    instructions = a_pair(found, tile, "total")
    if instructions > budget:
        wrong.append(f"{instructions:.1f} instructions for a pair, of {budget:.1f}")
    return wrong


def a_pair(found: Compiled, tile: Tile, name: str) -> float:
    """What threads issue for one pair."""
    return tile.issued[name] * found.warps * 32 / math.prod(tile.shape)


def name_of(found: Compiled, tile: Tile) -> str:
    """A kernel's loop that is within another one goes by a name of its own."""
    return found.kernel + " within" * tile.depth


def lines(case: Case, found: Compiled) -> Iterator[str]:
    text = f"{case!s:58s} {found.kernel:10s} {found.warps} warps {found.registers:3d} registers"
    text += f" {found.shared_memory / KIB:3.0f} KiB, {found.programs_at_once} at once"
    yield text if found.tiles else f"{text}, no products"
    for tile in found.tiles:
        shape = "x".join(str(length) for length in tile.shape)
        pair = a_pair(found, tile, "total")
        counts = ", ".join(f"{count} {name}" for name, count in tile.issued.most_common())
        yield f"    {name_of(found, tile):15s} {shape:7s} {pair:5.1f} a pair: {counts}"


def rows(case: Case, found: Compiled) -> list[dict[str, Any]]:
    mode = f"{case.format}, {case.mode}, {case.negatives}, tau={case.temperature}"
    figures = {
        "registers": found.registers,
        "bytes of registers in memory": found.spills,
        "KiB of shared memory": found.shared_memory / KIB,
        "programs at once": found.programs_at_once,
    }
    key = f"sm_{case.arch}", f"D={case.dim}", mode
    table = [
        measure.row("kernels", f"{found.kernel} {key[0]}", *key[1:], *f) for f in figures.items()
    ]
    for tile in found.tiles:
        figures = {"instructions a pair": a_pair(found, tile, "total")}
        figures |= {f"{name} a tile": count for name, count in tile.issued.items()}
        provider = f"{name_of(found, tile)} {key[0]}"
        table += [measure.row("kernels", provider, *key[1:], *one) for one in figures.items()]
    return table


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
    parser.add_argument("--arch", type=int, choices=CHIPS, nargs="+", default=ARCHES)
    parser.add_argument("--dim", type=count, nargs="+", default=DIMS)
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=FORMATS)
    parser.add_argument("--mode", choices=MODES, nargs="+", default=MODES, help="kinds of weights")
    parser.add_argument("--sample", type=count, help="take this many, well spread, instead of all")
    parser.add_argument("--check", action="store_true", help="fail if anything is wrong")
    parser.add_argument("--workers", type=count, default=os.cpu_count(), help="processes")
    parser.add_argument("--output", type=Path, help="JSON file; default: none")
    args = parser.parse_args()
    if args.output:
        measure.kept(args.output, versions())

    begun, table, failed, kernels = time.perf_counter(), [], [], 0
    print(versions())
    for case, found in examine(cases(args), args.workers):
        if isinstance(found, str):
            print(f"{case!s:60s} {found}", flush=True)
            failed.append(f"{case}: {found}")
            continue
        for kernel in found:
            kernels += 1
            print("\n".join(lines(case, kernel)), flush=True)
            table += rows(case, kernel)
            wrong = problems(case, kernel)
            failed += [f"{case} {kernel.kernel}: {problem}" for problem in wrong]
    print(f"{kernels} kernels in {time.perf_counter() - begun:.0f} s")
    if args.output:
        measure.save(args.output, table, versions())
        print(f"written to {args.output}")
    if failed:
        print("\n".join(["", "What is wrong:", *failed]))
    if failed and args.check:
        sys.exit(f"{len(failed)} problems")


if __name__ == "__main__":
    main()
