"""Estimate how long the contrast takes on GPUs that nobody here has; nothing is measured.

It compiles the Triton engine's kernels (see `kernels.py`), counts the instructions, bytes and
products of a tile of pairs in them, and divides them by the peak rates that cards are sold with.
The slowest of these is the bound of a kernel. No program reaches it. The part of it that good
programs reach, `REACHED`, was fixed before the first estimate. Launches come on top, none hidden
behind another.

python -m benchmarks.roofline
python -m benchmarks.roofline --card h100 --format highest --output /tmp/roofline.json
"""

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch

from pgcl_losses import PrototypeReweightedNCE
from pgcl_losses.engine import blocks, streaming

from . import measure
from .compiled import FORMATS, Compiled, compiled, recorded
from .counted import Work
from .kernels import versions

DIM = 128
NUM_PROTOTYPES = 10
SIZES = (256, 8192, 131_072, 1_048_576)  # M
REACHED = 0.7  # of a bound
LAUNCH = 5e-6  # seconds
STREAMING_BLOCK = 4096  # rows
WARP = 32


class Card(NamedTuple):
    """What it is sold with; rates a second, of numbers that fit (no sparsity)."""

    arch: int
    processors: int
    clock: float  # Hz, at which the peaks below hold
    bf16: float  # floating-point operations, summed in float32, on tensor cores
    tf32: float
    fp32: float  # without tensor cores
    dram: float  # bytes
    l2: float  # bytes


# From NVIDIA's data sheets and architecture papers, of the SXM forms where there are several. L2:
# the A100's from its paper (5120 bytes a clock); the H100's and the RTX 4090's as others measured
# it; of the B200 twice the H100's, a guess.
CARDS = {
    "h100": Card(90, 132, 1.83e9, 989e12, 494e12, 67e12, 3.35e12, 5.5e12),
    "a100": Card(80, 108, 1.41e9, 312e12, 156e12, 19.5e12, 2.04e12, 7.2e12),
    "rtx4090": Card(89, 128, 2.52e9, 165e12, 82.6e12, 82.6e12, 1.01e12, 5.0e12),
    "b200": Card(100, 148, 1.85e9, 2250e12, 1125e12, 75e12, 8.0e12, 11e12),
}
# Kernels whose tiles are of rows and columns of the gradient: they meet each pair several times.
BY_COLUMNS = {"multiply"}
ISSUED = 4  # instructions of warps, a clock and multiprocessor
POWERS = 16  # results of the special function units, a clock and multiprocessor


class Estimate(NamedTuple):
    """Seconds. What runs at one time is in one of the parts' bounds, the longest counts."""

    parts: tuple[dict[str, float], ...]
    launches: int

    def bound(self) -> float:
        return sum(max(part.values()) for part in self.parts) + LAUNCH * self.launches

    def expected(self) -> float:
        return sum(max(part.values()) for part in self.parts) / REACHED + LAUNCH * self.launches

    def limit(self) -> str:
        """What takes longest."""
        longest = [max(part, key=part.__getitem__) for part in self.parts]
        times = dict.fromkeys(longest, 0.0) | {"launches": LAUNCH * self.launches}
        for part, name in zip(self.parts, longest, strict=True):
            times[name] += part[name]
        return max(times, key=times.__getitem__)


def kernel_part(card: Card, launches: list[Compiled], num_rows: int) -> dict[str, float]:
    """One of the engine's kernels, if each pair is in one tile: none is skipped."""
    found = launches[0]
    tile = next(tile for tile in found.tiles if tile.depth == 0)  # most programs' loop
    if found.kernel in BY_COLUMNS:
        tiles = num_rows**2 / (tile.shape[0] * tile.inner) * DIM / tile.shape[1]
    else:
        tiles = num_rows**2 / math.prod(tile.shape)
    programs = sum(launch.programs for launch in launches)
    # The multiprocessor that has most programs of a launch is the last one to finish.
    rounds = sum(math.ceil(launch.programs / card.processors) for launch in launches)
    busiest = rounds / programs * tiles
    cycles = busiest / card.clock
    at_once = min(found.programs, card.processors * found.programs_at_once)
    loaded, stored = tiles * tile.bytes_loaded, tiles * tile.bytes_stored
    rates = {"bf16": card.bf16, "f16": card.bf16, "f32": card.tf32}
    products = sum(flops / rates[operands] for operands, flops in tile.flops.items())
    # Programs that run at once read the same rows; what is stored is stored and read again.
    memory = loaded / at_once + 2 * stored
    return {
        "tensor cores": card.processors * busiest * products,
        "instructions": cycles * found.warps * tile.issued["total"] / ISSUED,
        "powers": cycles * found.warps * WARP * tile.issued["MUFU"] / POWERS,
        "L2": loaded / card.l2,
        "DRAM": memory / card.dram,
    }


def engine_estimates(card: Card, precision: str) -> dict[int, Estimate]:
    """The Triton engine in the reweighted contrast, with what PyTorch does around it."""
    estimates = {}
    for num_rows in SIZES:
        kernels, around = recorded_step(card, precision, num_rows)
        by_name: dict[str, list[Compiled]] = {}
        for one in kernels:
            by_name.setdefault(one.kernel, []).append(one)
        parts = [
            kernel_part(card, launched, num_rows)
            for launched in by_name.values()
            if launched[0].tiles
        ]
        parts.append({"DRAM": around.bytes / card.dram})
        estimates[num_rows] = Estimate(tuple(parts), around.operations + len(kernels))
    return estimates


def recorded_step(card: Card, precision: str, num_rows: int) -> tuple[list[Compiled], Work]:
    with recorded(card.arch, precision) as launches, Work() as around:
        step(num_rows, "triton")
    return [compiled(launch, card.arch) for launch in launches], around


def step(num_rows: int, engine: Any) -> None:
    """Forward and backward of the contrast with prototype weights."""
    z1, z2 = (torch.randn(num_rows // 2, DIM, requires_grad=True) for _ in range(2))
    c1, c2 = torch.randint(NUM_PROTOTYPES, (2, num_rows // 2))
    prototypes = torch.randn(NUM_PROTOTYPES, DIM)
    loss = PrototypeReweightedNCE(engine=engine)(z1, z2, c1, c2, prototypes)
    torch.autograd.grad(loss, (z1, z2))


def streaming_estimates(card: Card, precision: str) -> dict[int, Estimate]:
    """The streaming engine on CUDA: vendor's products, and passes over blocks in memory.

    Counted on small blocks: operations are so many a block, and bytes so many a pair of a block.
    """
    block, counts = 256, (4, 8)  # blocks along a side
    counted = []
    with (
        mock.patch.object(blocks, "_BLOCK", block),
        mock.patch.object(blocks, "can_be_read", return_value=False),  # as on a GPU
        mock.patch.object(streaming, "can_be_read", return_value=False),
    ):
        for count in counts:
            with Work() as work:
                step(count * block, "streaming")
            counted.append(work)
    few, many = counted
    of_each = (many.operations - few.operations) / (_triangle(counts[1]) - _triangle(counts[0]))
    # Of bytes, so many a row are of the rest: with twice the rows, twice as many.
    pairs = [_triangle(count) * block**2 for count in counts]
    of_pair = (many.bytes - 2 * few.bytes) / (pairs[1] - 2 * pairs[0])
    multiplications = many.multiplications / (counts[1] * block) ** 2  # nearly those of large M
    rate = card.fp32 if precision == "highest" else card.tf32
    estimates = {}
    for num_rows in SIZES:
        side = math.ceil(num_rows / STREAMING_BLOCK)
        in_blocks = _triangle(side) * min(STREAMING_BLOCK, num_rows) ** 2
        products = {"products": 2 * multiplications * num_rows**2 / rate}
        passes = {"DRAM": of_pair * in_blocks / card.dram}
        launches = few.operations + round(of_each * (_triangle(side) - _triangle(counts[0])))
        estimates[num_rows] = Estimate((products, passes), max(launches, round(of_each)))
    return estimates


def _triangle(side: int) -> int:
    return side * (side + 1) // 2


class Design(NamedTuple):
    """What is known of others' ways, at their best: no other instruction is counted."""

    products: float  # of [M, D] with [D, M], or as large
    rate: str  # of the card
    powers: int  # a pair
    bytes_a_pair: float  # through DRAM
    launches: Callable[[int], int]


# Of rows with themselves, with gradient to both ends of each pair, and neither weights nor
# exclusion, of which only flex_attention has a form.
DESIGNS = {
    "three products, cuBLAS float32": Design(3, "fp32", 0, 0, lambda m: 3),
    "three products, cuBLAS, of three bf16 each": Design(9, "bf16", 0, 0, lambda m: 9),
    "three products, cuBLAS TF32": Design(3, "tf32", 0, 0, lambda m: 3),
    "three products, cuBLAS bf16": Design(3, "bf16", 0, 0, lambda m: 3),
    # The product of each pair forward, and for either end backward; and two for the gradient.
    "Inf-CL, TF32": Design(5, "tf32", 3, 0, lambda m: 10),
    # The product forward and backward; two for the gradient.
    "cut cross-entropy, bf16": Design(4, "bf16", 2, 0, lambda m: 10),
    # Logits of chunks of rows are in memory: written, read, read and written again, read twice.
    "Liger, float32": Design(3, "fp32", 2, 6 * 4, lambda m: 8 * math.ceil(m / 128)),
    "Liger, bf16": Design(3, "bf16", 2, 6 * 2, lambda m: 8 * math.ceil(m / 128)),
    # Two products forward; backward three for the queries' gradient and four for the others'.
    "flex_attention, bf16": Design(9, "bf16", 3, 0, lambda m: 10),
}


def design_estimates(card: Card, design: Design) -> dict[int, Estimate]:
    estimates = {}
    for num_rows in SIZES:
        pairs = num_rows**2
        rate = getattr(card, design.rate)
        part = {
            "products": design.products * 2 * pairs * DIM / rate,
            "powers": design.powers * pairs / (POWERS * card.processors * card.clock),
        }
        passes = {"DRAM": design.bytes_a_pair * pairs / card.dram}
        estimates[num_rows] = Estimate((part, passes), design.launches(num_rows))
    return estimates


def estimates_of(name: str, formats: Iterable[str]) -> dict[str, dict[int, Estimate]]:
    """Of one card, by design."""
    card, made = CARDS[name], {}
    for precision in formats:
        made[f"triton, {precision}"] = engine_estimates(card, precision)
    for precision in formats:
        made[f"streaming, blocks of {STREAMING_BLOCK}, {precision}"] = streaming_estimates(
            card, precision
        )
    for design in DESIGNS:
        made[design] = design_estimates(card, DESIGNS[design])
    return made


def rows(card: str, made: dict[str, dict[int, Estimate]]) -> list[dict[str, Any]]:
    table = []
    for design, by_size in made.items():
        for num_rows, estimate in by_size.items():
            figures = {"bound, ms": estimate.bound(), "expected, ms": estimate.expected()}
            for part in estimate.parts:
                for name, seconds in part.items():
                    figures[f"{name}, ms"] = figures.get(f"{name}, ms", 0.0) + seconds
            key = "roofline", design, f"M={num_rows} D={DIM}", card
            table += [measure.row(*key, n, 1e3 * seconds) for n, seconds in figures.items()]
            table.append(measure.row(*key, "launches", estimate.launches))
    return table


def shown(seconds: float) -> str:
    value, unit = (seconds, "s") if seconds >= 1 else (1e3 * seconds, "ms")
    return f"{float(f'{value:.2g}'):g} {unit}"


def markdown(card: str, made: dict[str, dict[int, Estimate]]) -> str:
    """The bound, what is expected, and what limits it."""
    lines = [
        f"| {card} | " + " | ".join(f"M={num_rows}" for num_rows in SIZES) + " |",
        "| --- |" + " --- |" * len(SIZES),
    ]
    for design, by_size in made.items():
        cells = [
            f"{shown(one.bound())}, {shown(one.expected())}, {one.limit()}"
            for one in by_size.values()
        ]
        lines.append(f"| {design} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--card", choices=CARDS, nargs="+", default=list(CARDS))
    parser.add_argument("--format", choices=FORMATS, nargs="+", default=["highest", "medium"])
    default = Path(__file__).parent / "results" / "roofline.json"
    parser.add_argument("--output", type=Path, default=default)
    args = parser.parse_args()
    measure.kept(args.output, versions())

    torch.manual_seed(0)
    table = []
    for card in args.card:
        made = estimates_of(card, args.format)
        print(f"\n{markdown(card, made)}")
        table += rows(card, made)
    measure.save(args.output, table, versions())
    print(f"\nwritten to {args.output}")


if __name__ == "__main__":
    main()
