# Neither the package triton nor what its decorators leave behind has type hints.
# mypy: disable-error-code="import-untyped, import-not-found"
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The engine for CUDA: fused kernels in which tiles of pairs never leave the chip.

A program has a block of rows and goes over the others, tile by tile. Forward it adds up sums.
Backward it computes each tile again, with the gradients of its pairs for both their ends, and
multiplies them with the others' rows. No two programs write to one place. `tiles.py` lays rows out,
and `kernels.py` computes a tile.

Needs the package `triton`, so this module is imported only once the engine is asked for.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor
from triton import cdiv
from triton.runtime import driver
from triton.runtime.errors import OutOfResources

from pgcl_losses._warnings import warn
from pgcl_losses.engine import streaming
from pgcl_losses.engine.kernels import (
    _backward_kernel,
    _d_pairs_kernel,
    _forward_kernel,
    _multiply_kernel,
)
from pgcl_losses.engine.pairs import (
    ALL_PAIRS,
    LARGEST_EXPONENT,
    LOG2_E,
    Factors,
    Gaussian,
    Pairs,
    Share,
    Sums,
    Weight,
    check_kinds,
    weight_of,
)
from pgcl_losses.engine.tiles import (
    FEWEST_COLUMNS,
    SOME_COLUMNS,
    Format,
    Layout,
    Rows,
    format_of,
    lay_out,
)

# So many programs for each processor, where there are tiles for them.
_PROGRAMS = 2
# GPUs with so much of it multiply operands that are there, others those in registers.
_OPERANDS_IN_SHARED_MEMORY = 200 << 10
# Where rows are too wide for one kernel, so many pairs are in memory at a time.
_PAIRS_IN_MEMORY = 1 << 27


def log_sums(pairs: Pairs, temperature: float, share: Share = ALL_PAIRS) -> Sums:
    """See `Sums`. A share is a run of rows, each against all others.

    Products of float32 are computed from bfloat16 parts, as PyTorch's own switch for them says.
    """
    check_kinds("triton", pairs.weights, Factors, Gaussian)
    log_sums, log_masses = _log_sums(*_flat(pairs), temperature, *share)
    return Sums(log_sums, None if weight_of(Gaussian, pairs.weights) is None else log_masses)


def gradient(
    pairs: Pairs, temperature: float, log_s: Tensor, slopes: Tensor, share: Share
) -> Tensor:
    """Gradient ``[M, D]`` of the sum of slopes_i log S_i, to the rows of this share.

    ``log_s``: the log-sums of all shares together, without the Gaussian's scale.
    """
    d_rows: Tensor = _gradient(log_s, slopes, *_flat(pairs), temperature, *share)
    return d_rows


# Operators of PyTorch, so that its compiler takes them as they are. It knows no tuples of tuples.


@torch.library.custom_op("pgcl_losses::triton_log_sums", mutates_args=())
def _log_sums(
    rows: Tensor,
    num_views: int,
    across_views: bool,
    kinds: str,
    weights: list[Tensor],
    temperature: float,
    rank: int,
    num_ranks: int,
) -> tuple[Tensor, Tensor]:
    pairs = _pairs(rows, num_views, across_views, kinds, weights)
    share = Share(rank, num_ranks)
    try:
        sums = sums_by_kernels(pairs, temperature, share)
    except OutOfResources as error:
        _give_up(error, share)
        sums = streaming.log_sums(pairs, temperature)
    return sums.log_sums, rows.new_empty(0) if sums.log_masses is None else sums.log_masses


@torch.library.custom_op("pgcl_losses::triton_gradient", mutates_args=())
def _gradient(
    log_s: Tensor,
    slopes: Tensor,
    rows: Tensor,
    num_views: int,
    across_views: bool,
    kinds: str,
    weights: list[Tensor],
    temperature: float,
    rank: int,
    num_ranks: int,
) -> Tensor:
    pairs = _pairs(rows, num_views, across_views, kinds, weights)
    share = Share(rank, num_ranks)
    try:
        return gradient_by_kernels(pairs, temperature, log_s, slopes, share)
    except OutOfResources as error:
        _give_up(error, share)
        return streaming.gradient(pairs, temperature, log_s, slopes, share)


@_log_sums.register_fake
def _(rows: Tensor, *pairs: Any) -> tuple[Tensor, Tensor]:
    weights = _pairs(rows, *pairs[:4]).weights
    sums = rows.new_empty(rows.shape[0])
    no_masses = weight_of(Gaussian, weights) is None
    return sums, rows.new_empty(0) if no_masses else torch.empty_like(sums)


@_gradient.register_fake
def _(log_s: Tensor, slopes: Tensor, rows: Tensor, *_: Any) -> Tensor:
    return rows.new_empty(rows.shape)


def _flat(pairs: Pairs) -> tuple[Tensor, int, bool, str, list[Tensor]]:
    """Pairs as arguments of an operator, the kinds of their weights by name."""
    kinds, tensors = "", []
    factors, gaussian = weight_of(Factors, pairs.weights), weight_of(Gaussian, pairs.weights)
    if factors is not None:
        tensors += [factors.log_left, factors.right]
        if factors.lines is factors.right:
            kinds += "table "
        elif factors.lines is not None:
            kinds += "lines "
            tensors.append(factors.lines)
        else:
            kinds += "factors "
    if gaussian is not None:
        kinds += "gaussian"
        tensors += gaussian
    return pairs.rows.detach(), pairs.num_views, pairs.across_views, kinds, tensors


def _pairs(
    rows: Tensor, num_views: int, across_views: bool, kinds: str, tensors: list[Tensor]
) -> Pairs:
    left = iter(tensors)
    weights: list[Weight] = []
    for kind in kinds.split():
        first, second = next(left), next(left)
        if kind == "gaussian":
            weights.append(Gaussian(first, second))
        else:
            lines = next(left) if kind == "lines" else second if kind == "table" else None
            weights.append(Factors(first, second, lines))
    return Pairs(rows, num_views, across_views, tuple(weights))


def _give_up(error: OutOfResources, share: Share) -> None:
    """A GPU smaller than any that kernels have been compiled for."""
    if share.num_ranks > 1:
        raise error  # the others' shares are of another kind
    warn(f"engine='triton' takes engine='streaming' instead: its kernels do not fit ({error})")


def sums_by_kernels(
    pairs: Pairs, temperature: float, share: Share, splits: int | None = None
) -> Sums:
    """See `log_sums`; of others in so many parts, or in as many as a GPU works on at a time."""
    rows = pairs.rows
    if _is_empty(share.of(len(rows))):
        none = rows.new_full(rows.shape[:1], -torch.inf)
        return Sums(none, None if weight_of(Gaussian, pairs.weights) is None else none.clone())
    laid = lay_out(pairs, temperature, share, forward=True)
    p, launch = _arguments(laid, pairs, temperature, backward=False)
    grid = _grid(p, splits)
    sums = rows.new_empty(grid[1], p.num_mine)
    masses = None if p.mine.mean is None else torch.empty_like(sums)
    with torch.cuda.device_of(sums):
        _forward_kernel[grid](p, sums, masses, **launch)
    logs = sums.mul_(1 / LOG2_E).logsumexp(0) if p.PEAKS.value else sums.sum(0).log_()
    log_masses = None if masses is None else laid.unsort(masses.sum(0).log_(), -torch.inf)
    return Sums(laid.unsort(logs, -torch.inf), log_masses)


def gradient_by_kernels(
    pairs: Pairs,
    temperature: float,
    log_s: Tensor,
    slopes: Tensor,
    share: Share,
    splits: int | None = None,
) -> Tensor:
    """See `gradient`."""
    rows = pairs.rows
    if _is_empty(share.of(len(rows))):
        return rows.new_zeros(rows.shape)
    laid = lay_out(pairs, temperature, share, forward=False)
    p, launch = _arguments(laid, pairs, temperature, backward=True)
    none = log_s == -torch.inf  # a row without negatives has nothing to share out
    slopes = (slopes / temperature).masked_fill_(none, 0.0)
    if p.APART.value:
        log_s = (log_s * LOG2_E).masked_fill_(none, torch.inf)
    else:
        smallest = math.log(torch.finfo(log_s.dtype).tiny)
        largest = torch.finfo(log_s.dtype).max
        slopes = (slopes * log_s.clamp_min(smallest).neg_().exp_()).clamp_(-largest, largest)
    ends = _Ends(
        *(of_all[of.order] for of in (laid.mine, laid.others) for of_all in (log_s, slopes))
    )
    with torch.cuda.device_of(rows):
        if p.BLOCK_D.value == p.WIDTH.value:
            grid = _grid(p, splits)
            of_splits = rows.new_empty(grid[1], p.num_mine, p.WIDTH.value)
            _backward_kernel[grid](p, ends, of_splits, **launch)
            d_mine = of_splits.sum(0)
        else:
            d_mine = _wide_gradient(p, ends, launch, splits)
    return laid.unsort(d_mine[:, : rows.shape[1]] / math.sqrt(LOG2_E / temperature), 0.0)


def _is_empty(run: slice) -> bool:
    return bool(run.start == run.stop)


def _wide_gradient(
    p: "_Arguments", ends: "_Ends", launch: dict[str, Any], splits: int | None
) -> Tensor:
    """The same with the gradients of pairs in memory, some blocks of rows at a time."""
    blocks, tiles = p.num_mine // p.BLOCK_M.value, p.num_others // p.BLOCK_N.value
    at_a_time = min(blocks, max(1, _PAIRS_IN_MEMORY // (p.BLOCK_M.value * p.num_others)))
    num_rows, columns = at_a_time * p.BLOCK_M.value, p.WIDTH.value // p.BLOCK_D.value
    splits = splits or _splits(p, at_a_time * columns)
    d_pairs = p.mine.parts.new_empty(p.PARTS.value, num_rows, p.num_others)
    of_splits = ends.slopes.new_empty(splits, num_rows, p.WIDTH.value)
    d_rows = ends.slopes.new_empty(p.num_mine, p.WIDTH.value)
    for first in range(0, blocks, at_a_time):
        some = min(at_a_time, blocks - first)
        _d_pairs_kernel[tiles, some](p, ends, d_pairs, first, num_rows, **launch)
        _multiply_kernel[some, columns, splits](p, d_pairs, of_splits, num_rows, **launch)
        rows = slice(first * p.BLOCK_M.value, (first + some) * p.BLOCK_M.value)
        torch.sum(of_splits[:, : some * p.BLOCK_M.value], 0, out=d_rows[rows])
    return d_rows


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


class _Ends(NamedTuple):
    """Log2 S and slopes of both ends of a pair; or, where it has one exponent, slopes / S."""

    log_sums: Tensor  # of my rows [M]
    slopes: Tensor
    log_sums_of_others: Tensor
    slopes_of_others: Tensor


class _Arguments(NamedTuple):
    """What all kernels take. Each None and each constexpr is compiled in."""

    mine: Rows
    others: Rows
    num_mine: int
    num_others: int
    table: Tensor | None  # [K, K]
    turned: Tensor | None  # its transpose
    num_keys: int
    skips: Tensor | None
    meetings: Tensor
    # Those below are constexpr.
    dtype: Any  # of sums
    WIDTH: Any
    RANK: Any  # of the factors
    PARTS: Any
    PEAKS: Any  # whether sums overflow unless a maximum is taken off first
    APART: Any  # whether a pair has two exponents, one for each end
    BLOCK_M: Any  # rows of a program
    BLOCK_N: Any  # others at a time
    BLOCK_D: Any  # columns at a time
    BLOCK_R: Any  # columns of the factors at a time


def _arguments(
    laid: Layout, pairs: Pairs, temperature: float, *, backward: bool
) -> tuple[_Arguments, dict[str, Any]]:
    """What the kernels take, and how they are launched."""
    mine, others, table = laid.mine, laid.others, laid.table
    kind = format_of(pairs.rows.dtype)
    width = mine.parts.shape[2]
    peaks = 1 / temperature > LARGEST_EXPONENT
    apart = peaks or mine.mean is not None
    card = _card(pairs.rows.device)
    m, n, d, warps, stages = _shape(width, kind, card, apart=apart, backward=backward)
    arguments = _Arguments(
        mine=mine,
        others=others,
        num_mine=len(mine.graphs),
        num_others=len(others.graphs),
        table=table,
        turned=None if table is None else table.T.contiguous(),
        num_keys=16 if table is None else len(table),
        skips=laid.skips,
        meetings=laid.meetings(m, n, pairs.num_graphs()),
        dtype=tl.constexpr(tl.float64 if kind.dtype == torch.float64 else tl.float32),
        WIDTH=tl.constexpr(width),
        RANK=tl.constexpr(0 if mine.left is None else mine.left.shape[1]),
        PARTS=tl.constexpr(kind.parts),
        PEAKS=tl.constexpr(peaks),
        APART=tl.constexpr(apart),
        BLOCK_M=tl.constexpr(m),
        BLOCK_N=tl.constexpr(n),
        BLOCK_D=tl.constexpr(d),
        BLOCK_R=tl.constexpr(FEWEST_COLUMNS),
    )
    # A product and a sum in one instruction: Triton means to leave that to whoever asks for it.
    return arguments, {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}


def _shape(
    width: int, kind: Format, card: Card, *, apart: bool, backward: bool
) -> tuple[int, int, int, int, int]:
    """Rows, others and columns of a tile; warps and stages.

    They are not found by timing, which would break the capture of a CUDA graph.
    """
    if kind.dtype == torch.float64:
        return 64, 64, min(width, SOME_COLUMNS), 4, 1
    row = width * kind.parts * kind.dtype.itemsize
    # Wider rows do not fit, into shared memory or into registers.
    if row <= (512 if card.shared_memory >= _OPERANDS_IN_SHARED_MEMORY else 128):
        return 128, 32 if apart else 64, width, 8, 3
    return 128, 32 if apart or backward else 64, min(width, SOME_COLUMNS), 8, 2


def _grid(p: _Arguments, splits: int | None) -> tuple[int, int]:
    """Blocks of rows, and into how many parts the others are split where those are few."""
    blocks = p.num_mine // p.BLOCK_M.value
    return blocks, splits or _splits(p, blocks)


def _splits(p: _Arguments, programs: int) -> int:
    """Into how many parts the others are split for as many programs as a GPU works on at a time."""
    wanted = cdiv(_PROGRAMS * _card(p.meetings.device).processors, programs)
    return int(min(wanted, p.num_others // p.BLOCK_N.value))
