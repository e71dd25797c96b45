# Neither the package triton nor what its decorators leave behind has type hints.
# mypy: disable-error-code="import-untyped, import-not-found"
# mypy: disable-error-code="no-untyped-call, untyped-decorator"
"""The engine for CUDA: fused kernels in which tiles of pairs never leave the chip.

A program has a block of embeddings and goes over the others, tile by tile. Forward it adds up sums.
Backward it computes each tile again, with the gradients of its pairs from the sums of both
embeddings, and multiplies them with the others. No two programs write to one address. `layout.py`
lays embeddings out, and `kernels.py` computes a tile.
"""

import functools
import itertools
import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import cdiv
from triton.runtime import driver

from pgcl_losses.engine.contract import (
    ALL_PAIRS,
    LOG2_E,
    Factors,
    Gaussian,
    Pairs,
    Portion,
    Sums,
    Table,
    check_kind,
    may_overflow,
)
from pgcl_losses.engine.triton.kernels import (
    _backward_kernel,
    _d_pairs_kernel,
    _forward_kernel,
    _multiply_kernel,
)
from pgcl_losses.engine.triton.layout import (
    FEWEST_COLUMNS,
    SOME_COLUMNS,
    Format,
    Layout,
    Sorted,
    lay_out,
)

# So many programs for each processor, where there are tiles for them.
_PROGRAMS = 2
# GPUs with so much of it multiply operands that are there, others those in registers.
_OPERANDS_IN_SHARED_MEMORY = 200 << 10
# Where embeddings are too wide for one kernel, so many pairs are in memory at a time.
_PAIRS_IN_MEMORY = 1 << 27


def log_sums(pairs: Pairs, temperature: float | Tensor, portion: Portion = ALL_PAIRS) -> Sums:
    """See `Sums`. A portion is a run of embeddings, each against all others.

    Products of float32 are computed from bfloat16 parts, as PyTorch's own switch for them says.
    """
    check_kind("triton", pairs.by_cluster, Table, Factors)
    check_kind("triton", pairs.by_cosine, Gaussian)
    log_sums, log_totals = _log_sums(*_flat(pairs, temperature, portion))
    return Sums(log_sums, None if pairs.by_cosine is None else log_totals)


def gradient(
    pairs: Pairs,
    temperature: float | Tensor,
    log_s: Tensor,
    d_log_s: Tensor,
    portion: Portion,
    layout: object = None,
) -> Tensor:
    """Gradient ``[M, D]`` of the sum of d_log_s_i log S_i, to the embeddings of this portion.

    ``log_s``: of all portions together, without the pair weight's scale.
    """
    d_embeddings: Tensor = _gradient(log_s, d_log_s, *_flat(pairs, temperature, portion))
    return d_embeddings


# Operators of PyTorch, so that its compiler takes them as they are. It knows no tuples of tuples.
_ARGUMENTS = (
    "Tensor embeddings, SymInt[] lengths, int[] compared, Tensor? items, Tensor[] table, "
    "Tensor[] factors, Tensor[] gaussian, float number, Tensor? temperature, int[] portion"
)


def _flat(pairs: Pairs, temperature: float | Tensor, portion: Portion) -> tuple[Any, ...]:
    """The operators' arguments; the temperature is a number or a tensor."""
    table: list[Tensor] = []
    factors: list[Tensor] = []
    if isinstance(pairs.by_cluster, Table):
        table = [pairs.by_cluster.clusters, *pairs.by_cluster.log_weights]
    elif pairs.by_cluster is not None:
        factors = [*pairs.by_cluster]
    gaussian = [*pairs.by_cosine] if isinstance(pairs.by_cosine, Gaussian) else []
    compared = [*itertools.chain(*pairs.compared)]
    sets = pairs.embeddings.detach(), [*pairs.lengths], compared, pairs.items
    both = (0.0, temperature.detach()) if isinstance(temperature, Tensor) else (temperature, None)
    return *sets, table, factors, gaussian, *both, [*portion]


def _of_flat(arguments: tuple[Any, ...]) -> tuple[Pairs, float | Tensor, Portion]:
    embeddings, lengths, compared, items, table, factors, gaussian, *others = arguments
    number, temperature, portion = others
    by_cluster: Table | Factors | None = Factors(*factors) if factors else None
    if table:
        by_cluster = Table(tuple(table[1:]), table[0])
    by_cosine = Gaussian(*gaussian) if gaussian else None
    couples = tuple(zip(compared[::2], compared[1::2], strict=True))
    pairs = Pairs(embeddings, tuple(lengths), couples, items, by_cluster, by_cosine)
    return pairs, number if temperature is None else temperature, Portion(*portion)


@torch.library.custom_op(
    "pgcl_losses::triton_log_sums", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)"
)
def _log_sums(*arguments: Any) -> tuple[Tensor, Tensor]:
    sums = log_sums_by_kernels(*_of_flat(arguments))
    none = sums.log_sums.new_empty(0)
    return sums.log_sums, none if sums.log_totals is None else sums.log_totals


@torch.library.custom_op(
    "pgcl_losses::triton_gradient",
    mutates_args=(),
    schema=f"(Tensor log_s, Tensor d_log_s, {_ARGUMENTS}) -> Tensor",
)
def _gradient(log_s: Tensor, d_log_s: Tensor, *arguments: Any) -> Tensor:
    pairs, temperature, portion = _of_flat(arguments)
    return gradient_by_kernels(pairs, temperature, log_s, d_log_s, portion)


@_log_sums.register_fake
def _(*arguments: Any) -> tuple[Tensor, Tensor]:
    pairs, _, _ = _of_flat(arguments)
    sums = pairs.embeddings.new_empty(pairs.embeddings.shape[0])
    return sums, sums.new_empty(0) if pairs.by_cosine is None else torch.empty_like(sums)


@_gradient.register_fake
def _(log_s: Tensor, d_log_s: Tensor, embeddings: Tensor, *arguments: Any) -> Tensor:
    return embeddings.new_empty(embeddings.shape)


def log_sums_by_kernels(
    pairs: Pairs, temperature: float | Tensor, portion: Portion, splits: int | None = None
) -> Sums:
    """See `log_sums`; the others in so many splits, or in as many as a GPU works on at a time."""
    embeddings = pairs.embeddings
    laid = lay_out(pairs, temperature, portion, forward=True)
    p, options = _arguments(laid, temperature, backward=False)
    grid = _grid(p, splits)
    sums = embeddings.new_empty(grid[1], p.num_mine)
    totals = None if p.mine.mean is None else torch.empty_like(sums)
    with torch.cuda.device_of(sums):
        _forward_kernel[grid](p, sums, totals, **options)
    logs = sums.mul_(1 / LOG2_E).logsumexp(0) if p.PEAKS.value else sums.sum(0).log_()
    log_totals = None if totals is None else laid.unsort(totals.sum(0).log_(), -torch.inf)
    return Sums(laid.unsort(logs, -torch.inf), log_totals)


def gradient_by_kernels(
    pairs: Pairs,
    temperature: float | Tensor,
    log_s: Tensor,
    d_log_s: Tensor,
    portion: Portion,
    splits: int | None = None,
) -> Tensor:
    """See `gradient`."""
    embeddings = pairs.embeddings
    laid = lay_out(pairs, temperature, portion, forward=False)
    p, options = _arguments(laid, temperature, backward=True)
    none = log_s == -torch.inf  # a sum without negatives has no gradient
    d_sums = (d_log_s / temperature).masked_fill_(none, 0.0)
    if p.APART.value:
        log_s = (log_s * LOG2_E).masked_fill_(none, torch.inf)
    else:
        numbers = torch.finfo(log_s.dtype)
        d_sums *= log_s.clamp_min(math.log(numbers.tiny)).neg_().exp_()
        d_sums.clamp_(-numbers.max, numbers.max)
    both = laid.mine.order, laid.others.order
    known = _Known(*(of_all[order] for order in both for of_all in (log_s, d_sums)))
    with torch.cuda.device_of(embeddings):
        if p.BLOCK_D.value == p.WIDTH.value:
            grid = _grid(p, splits)
            of_splits = embeddings.new_empty(grid[1], p.num_mine, p.WIDTH.value)
            _backward_kernel[grid](p, known, of_splits, **options)
            d_mine = of_splits.sum(0)
        else:
            d_mine = _wide_gradient(p, known, options, splits)
    d_mine = d_mine[:, : embeddings.shape[1]] * (temperature / LOG2_E) ** 0.5
    return laid.unsort(d_mine, 0.0)


def _wide_gradient(
    p: "_Arguments", known: "_Known", options: dict[str, Any], splits: int | None
) -> Tensor:
    """The same with the gradients of pairs in memory, some blocks of embeddings at a time."""
    blocks, tiles = p.num_mine // p.BLOCK_I.value, p.num_others // p.BLOCK_J.value
    at_a_time = max(1, min(blocks, _PAIRS_IN_MEMORY // (p.BLOCK_I.value * p.num_others)))
    height, columns = at_a_time * p.BLOCK_I.value, p.WIDTH.value // p.BLOCK_D.value
    splits = splits or _splits(p, at_a_time * columns)
    d_pairs = p.mine.parts.new_empty(p.PARTS.value, height, p.num_others)
    of_splits = known.d_sums.new_empty(splits, height, p.WIDTH.value)
    d_mine = known.d_sums.new_empty(p.num_mine, p.WIDTH.value)
    for first in range(0, blocks, at_a_time):
        some = min(at_a_time, blocks - first)
        _d_pairs_kernel[tiles, some](p, known, d_pairs, first, height, **options)
        _multiply_kernel[some, columns, splits](p, d_pairs, of_splits, height, **options)
        rows = slice(first * p.BLOCK_I.value, (first + some) * p.BLOCK_I.value)
        torch.sum(of_splits[:, : some * p.BLOCK_I.value], 0, out=d_mine[rows])
    return d_mine


class Card(NamedTuple):
    """What the kernels' shape and the number of programs are chosen by."""

    shared_memory: int  # bytes that a program may have
    processors: int


@functools.cache
def _card(device: torch.device) -> Card:
    if device.type != "cuda":  # Triton's interpreter
        return Card(99 << 10, 2)
    known = driver.active.utils.get_device_properties(device.index)
    return Card(known["max_shared_mem"], known["multiprocessor_count"])


class _Known(NamedTuple):
    """Log2 S and its gradient for both embeddings of a pair; if not APART, that of S."""

    log_sums: Tensor  # of mine [M]
    d_sums: Tensor
    log_sums_of_others: Tensor
    d_sums_of_others: Tensor


class _Arguments(NamedTuple):
    """What all kernels take. Each None and each constexpr is compiled in."""

    mine: Sorted
    others: Sorted
    num_mine: int
    num_others: int
    table: Tensor | None  # [K, K]
    transposed: Tensor | None  # [K, K]
    num_keys: int
    skipped: Tensor | None
    masked: Tensor | None  # [I, J / RUN] see `Layout.masked_tiles`
    # Those below are constexpr.
    RUN: Any  # of tiles
    dtype: Any  # of sums
    WIDTH: Any
    FACTORS: Any  # columns of the factors
    PARTS: Any
    PEAKS: Any  # whether sums overflow unless a maximum is subtracted first
    APART: Any  # whether a pair has two exponents, one for the sum of each of its embeddings
    BLOCK_I: Any  # my embeddings at a time
    BLOCK_J: Any  # others at a time
    BLOCK_D: Any  # columns at a time
    BLOCK_R: Any  # columns of the factors at a time


def _arguments(
    laid: Layout, temperature: float | Tensor, *, backward: bool
) -> tuple[_Arguments, dict[str, Any]]:
    """What the kernels take, and how they are launched."""
    mine, table, kind = laid.mine, laid.table, laid.kind
    width = mine.parts.shape[2]
    peaks = may_overflow(temperature)
    apart = peaks or mine.mean is not None
    card = _card(mine.parts.device)
    i, j, d, warps, stages = _shape(width, kind, card, apart=apart, backward=backward)
    masked, run = laid.masked_tiles(i, j)
    arguments = _Arguments(
        mine=mine,
        others=laid.others,
        num_mine=len(mine.order),
        num_others=len(laid.others.order),
        table=table,
        transposed=None if table is None else table.T.contiguous(),
        num_keys=16 if table is None else len(table),
        skipped=laid.skipped,
        masked=masked,
        RUN=tl.constexpr(run),
        dtype=tl.constexpr(tl.float64 if kind.dtype == torch.float64 else tl.float32),
        WIDTH=tl.constexpr(width),
        FACTORS=tl.constexpr(0 if mine.left is None else mine.left.shape[1]),
        PARTS=tl.constexpr(kind.parts),
        PEAKS=tl.constexpr(peaks),
        APART=tl.constexpr(apart),
        BLOCK_I=tl.constexpr(i),
        BLOCK_J=tl.constexpr(j),
        BLOCK_D=tl.constexpr(d),
        BLOCK_R=tl.constexpr(FEWEST_COLUMNS),
    )
    # A product and a sum in one instruction: Triton means to leave that to whoever asks for it.
    return arguments, {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def _shape(
    width: int, kind: Format, card: Card, *, apart: bool, backward: bool
) -> tuple[int, int, int, int, int]:
    """My embeddings, others and columns of a tile; warps and stages.

    They are not tuned by timing, which would break the capture of a CUDA graph.
    """
    if kind.dtype == torch.float64:
        return 64, 64, min(width, SOME_COLUMNS), 4, 1
    row = width * kind.parts * kind.dtype.itemsize
    # Wider ones do not fit, into shared memory or into registers.
    if row <= (512 if card.shared_memory >= _OPERANDS_IN_SHARED_MEMORY else 128):
        return 128, 32 if apart else 64, width, 8, 3
    return 128, 32 if apart or backward else 64, min(width, SOME_COLUMNS), 8, 2


def _grid(p: _Arguments, splits: int | None) -> tuple[int, int]:
    """Blocks of my embeddings, and the number of splits of the others."""
    blocks = p.num_mine // p.BLOCK_I.value
    return blocks, splits or _splits(p, blocks)


def _splits(p: _Arguments, programs: int) -> int:
    """The number of splits of the others that keeps a GPU busy."""
    # A portion may have no program, with fewer embeddings than processes.
    wanted = cdiv(_PROGRAMS * _card(p.mine.parts.device).processors, max(1, programs))
    return int(min(wanted, p.num_others // p.BLOCK_J.value))
