"""Compile the Triton engine's kernels for a GPU that need not be there, and count what is in them.

The engine's own code runs on CPU tensors. Its launches are recorded and not run. So blocks, warps,
stages and arguments are those that it really chooses for such rows on such a card.
"""

import importlib
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

from . import sass, ttir

KIB = 1024
FORMATS = ("highest", "high", "medium")  # of torch.set_float32_matmul_precision
MODES = ("uniform", "table", "large table", "soft", "gaussian", "gaussian, table")
NUM_CLUSTERS = {"large table": 1000}
FEW_CLUSTERS = 10


class Chip(NamedTuple):
    """What a block of threads may have, and what a multiprocessor has."""

    shared_memory: int  # of one block
    warps: int
    blocks: int
    processors: int  # of the card that is sold most


OF_ONE_TILE = {"d_pairs"}  # kernels whose programs have one each
REGISTERS = 65_536  # of a multiprocessor, on all of them
TENSOR_MEMORY = 512  # columns of a multiprocessor, on those that have it
CHIPS = {
    80: Chip(163 * KIB, 64, 32, 108),
    86: Chip(99 * KIB, 48, 16, 82),
    89: Chip(99 * KIB, 48, 24, 128),
    90: Chip(227 * KIB, 64, 32, 132),
    100: Chip(227 * KIB, 64, 32, 148),
}


class Case(NamedTuple):
    """What an engine is asked for."""

    arch: int
    dim: int
    format: str
    mode: str
    negatives: str = "all"
    temperature: float = 0.2
    num_embeddings: int = 4096

    def __str__(self) -> str:
        pairs = f"{self.mode}, {self.negatives}, tau={self.temperature}"
        return f"sm_{self.arch} D={self.dim} {self.format} {pairs}"


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


class Tile(NamedTuple):
    """What a program does for one tile of pairs: one turn of one of its loops."""

    shape: tuple[int, int]
    inner: int  # how many numbers its first product adds up
    flops: Counter[str]  # of products, by their operands' type
    depth: int  # how many loops there are around it
    issued: Counter[str]  # instructions of one warp; see `sass.group`
    bytes_loaded: int  # by all warps
    bytes_stored: int


class Compiled(NamedTuple):
    """One kernel."""

    kernel: str
    programs: int
    warps: int
    registers: int  # of a thread
    shared_memory: int  # of a program
    tensor_memory: int  # of a program, columns of the 512 that sm_100 has
    programs_at_once: int  # of a multiprocessor
    spills: int  # bytes of registers that each thread keeps in memory
    products: list[ttir.Product]  # as they were compiled
    tiles: list[Tile]  # none where there are no products


def engine() -> ModuleType:
    """The engine, as it is for a GPU: in Triton's interpreter nothing can be compiled."""
    os.environ.pop("TRITON_INTERPRET", None)
    module = importlib.import_module("pgcl_losses.engine.triton.launch")
    from triton import knobs

    if knobs.runtime.interpret or not _kernels():
        raise RuntimeError("the engine was imported for Triton's interpreter: nothing to compile")
    return module


def _kernels() -> list[tuple[ModuleType, str, Any]]:
    """Every kernel of the engine, and where its launches look for it."""
    from triton.runtime.jit import JITFunction

    return [
        (module, name, value)
        for place, module in list(sys.modules.items())
        if place.startswith("pgcl_losses.engine")
        for name, value in list(vars(module).items())
        if name.endswith("_kernel") and isinstance(value, JITFunction)
    ]


class _Recorder:
    """Stands where a kernel was, and takes down what it would have been launched with."""

    def __init__(self, kernel: Any, launches: list[Launch]):
        self.kernel, self.launches = kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            self.launches.append(Launch(self.kernel, tuple(grid), arguments, options))

        return launch


def pairs_of(case: Case) -> Any:
    """Pairs of two views with such weights, in the forms in which the losses make them."""
    from pgcl_losses.engine.contract import Factors, Gaussian, Pairs, Table, compared_sets

    count, columns = case.num_embeddings, NUM_CLUSTERS.get(case.mode, FEW_CLUSTERS)
    by_cluster: Table | Factors | None = None
    if "table" in case.mode:
        log_weights = torch.zeros(columns, columns).fill_diagonal_(-torch.inf)
        by_cluster = Table((log_weights,), (torch.arange(count) % columns).unsqueeze(1))
    elif "soft" in case.mode:
        by_cluster = Factors(*torch.ones(2, count, columns))
    gaussian = Gaussian(torch.zeros(count), torch.ones(count)) if "gaussian" in case.mode else None
    compared = compared_sets(2, case.negatives)
    embeddings, lengths = torch.zeros(count, case.dim), (count // 2, count // 2)
    return Pairs(embeddings, lengths, compared, None, by_cluster, gaussian)


@contextmanager
def recorded(arch: int, precision: str) -> Iterator[list[Launch]]:
    """What the engine launches in the block, on CPU tensors and as if on such a card."""
    module = engine()
    launches: list[Launch] = []
    replaced: list[tuple[ModuleType, str, Any]] = [
        (place, name, _Recorder(kernel, launches)) for place, name, kernel in _kernels()
    ]
    if hasattr(module, "_card"):  # what the engine looks at
        chip = CHIPS[arch]
        card = module.Card(shared_memory=chip.shared_memory, processors=chip.processors)
        replaced.append((module, "_card", lambda device: card))
    replaced += [  # it would refuse a CPU
        (place, "check_engine", lambda engine, embeddings: None)
        for name, place in list(sys.modules.items())
        if name.startswith("pgcl_losses") and hasattr(place, "check_engine")
    ]
    kept = [(place, name, getattr(place, name)) for place, name, _ in replaced]
    before = torch.get_float32_matmul_precision()
    try:
        for place, name, value in replaced:
            setattr(place, name, value)
        torch.set_float32_matmul_precision(precision)
        yield launches
    finally:
        for place, name, value in kept:
            setattr(place, name, value)
        torch.set_float32_matmul_precision(before)


def launches_of(case: Case) -> list[Launch]:
    """What the engine launches, forward and backward."""
    module, pairs, zeros = engine(), pairs_of(case), torch.zeros(case.num_embeddings)
    from pgcl_losses.engine.contract import ALL_PAIRS

    with recorded(case.arch, case.format) as launches:
        module.log_sums(pairs, case.temperature)
        module.gradient(pairs, case.temperature, zeros, zeros, ALL_PAIRS)
    return launches


def compiled(launch: Launch, arch: int) -> Compiled:
    """One launch's kernel, as it would be compiled on such a card just before."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", arch, 32),
            get_current_device=lambda: arch,  # Triton keeps its caches by device
            get_current_stream=lambda device: 0,
        )
    )
    kernel = launch.kernel.warmup(*launch.arguments, grid=launch.grid, **launch.options)
    if kernel.hash not in _KNOWN:  # some are launched many times
        _KNOWN[kernel.hash] = _examined(launch, arch, kernel)
    return _KNOWN[kernel.hash]._replace(programs=math.prod(launch.grid))


_KNOWN: dict[str, Compiled] = {}


def _examined(launch: Launch, arch: int, kernel: Any) -> Compiled:
    warps = kernel.metadata.num_warps
    tensor_memory = getattr(kernel.metadata, "tmem_size", None) or 0
    text = _disassembled(kernel.asm["cubin"])
    registers, spills = (int(re.findall(rf"\b{of}:(\d+)", text)[0]) for of in ("REG", "STACK"))
    code = sass.instructions(text)
    name = launch.kernel.__name__.strip("_").removesuffix("_kernel")
    tiles = ttir.tiles(kernel.asm["ttir"])
    loops = sass.tile_loops(code, warps, tiles, one_tile=name in OF_ONE_TILE)
    return Compiled(
        kernel=name,
        programs=math.prod(launch.grid),
        warps=warps,
        registers=registers,
        shared_memory=kernel.metadata.shared,
        tensor_memory=tensor_memory,
        programs_at_once=_programs_at_once(
            arch, registers, kernel.metadata.shared, tensor_memory, warps
        ),
        spills=spills,
        products=ttir.products(kernel.asm["ttgir"]),
        tiles=[
            Tile(
                tile.shape,
                tile.inner,
                tile.flops,
                tile.depth,
                sass.group(loop),
                warps * sass.bytes_of(loop, "LDG", "LDGSTS"),
                warps * sass.bytes_of(loop, "STG"),
            )
            for tile, loop in loops
        ],
    )


def _disassembled(cubin: bytes) -> str:
    """By the tools in Triton's own package."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    path = os.pathsep.join([str(tools), os.environ.get("PATH", "")])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tools / "cuobjdump"), "-sass", "-res-usage", file.name]
        environment = {**os.environ, "PATH": path}
        run = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return run.stdout + run.stderr


def _programs_at_once(
    arch: int, registers: int, shared_memory: int, tensor_memory: int, warps: int
) -> int:
    chip = CHIPS[arch]
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = REGISTERS // of_warp // warps
    by_memory = (chip.shared_memory + KIB) // (shared_memory + KIB)  # 1 KiB is the system's
    by_tensor_memory = TENSOR_MEMORY // max(1, tensor_memory)
    return min(by_registers, by_memory, by_tensor_memory, chip.warps // warps, chip.blocks)
