"""Compile the Triton engine's kernels for a GPU that need not be there, and read what they need.

The engine's own code runs on CPU tensors. Its launches are recorded and not run. So blocks, warps,
stages and arguments are those that it really chooses for such rows on such a card.
"""

import importlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch

KIB = 1024
FORMATS = ("highest", "high", "medium")  # of torch.set_float32_matmul_precision
MODES = ("uniform", "table", "large table", "soft", "gaussian", "gaussian, table")
NUM_CLUSTERS = {"large table": 1000}
FEW_CLUSTERS = 10


class Chip(NamedTuple):
    shared_memory: int  # of one block of threads
    processors: int  # of the card that is sold most


TENSOR_MEMORY = 512  # columns of a multiprocessor, on those that have it
CHIPS = {
    80: Chip(163 * KIB, 108),
    86: Chip(99 * KIB, 82),
    90: Chip(227 * KIB, 132),
    100: Chip(227 * KIB, 148),
}
# A matrix product in Triton's language for GPUs, and the layout of its result.
_PRODUCT = re.compile(
    r"(tt\.dot|ttng\.warp_group_dot|ttng\.tc_gen5_mma\w*) .*?(?:-> tensor<[^#]*#([a-z]+)\w*>)?$"
)


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


class Compiled(NamedTuple):
    kernel: str
    warps: int
    registers: int  # of a thread
    shared_memory: int  # of a program
    tensor_memory: int  # of a program, columns of the 512 that sm_100 has
    spills: int  # bytes of registers that each thread keeps in memory
    products: set[str]  # the operations that compute them, with the layouts of their results


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
        _KNOWN[kernel.hash] = _examined(kernel)
    return _KNOWN[kernel.hash]


_KNOWN: dict[str, Compiled] = {}


def _examined(kernel: Any) -> Compiled:
    usage = _resource_usage(kernel.asm["cubin"])
    registers, spills = (int(re.findall(rf"\b{name}:(\d+)", usage)[0]) for name in ("REG", "STACK"))
    lines = (line.partition(" loc(")[0] for line in kernel.asm["ttgir"].splitlines())
    return Compiled(
        kernel=kernel.name.strip("_").removesuffix("_kernel"),
        warps=kernel.metadata.num_warps,
        registers=registers,
        shared_memory=kernel.metadata.shared,
        tensor_memory=getattr(kernel.metadata, "tmem_size", None) or 0,
        spills=spills,
        products={
            " ".join(filter(None, how.groups())) for how in map(_PRODUCT.search, lines) if how
        },
    )


def _resource_usage(cubin: bytes) -> str:
    """By the tool in Triton's own package."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-res-usage", file.name]
        run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout + run.stderr
