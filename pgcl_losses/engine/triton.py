# Neither the package triton nor what its decorators leave behind has type hints.
# mypy: disable-error-code="import-untyped, import-not-found"
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The engine for CUDA: fused kernels in which tiles of pairs never leave the chip.

Forward, a block of rows walks over all rows with a running maximum and sum. Backward, it walks
again, recomputes each tile, and multiplies what its pairs give to both their ends with the others'
rows. No two programs write to one place.

Needs the package `triton`, so this module is imported only once the engine is asked for.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from triton import cdiv, jit, next_power_of_2

from pgcl_losses.engine.pairs import (
    ALL_PAIRS,
    Factors,
    Gaussian,
    Pairs,
    Share,
    Sums,
    check_kinds,
    weight_of,
)

# Weights of a tile are a product of that rank; looking them up costs less above.
_MOST_COLUMNS = 128
_BLOCK_R = 16  # columns at a time: the fewest that tensor cores take


@torch.compiler.disable  # which would otherwise follow the launch into triton's own code
def log_sums(pairs: Pairs, temperature: float, share: Share = ALL_PAIRS) -> Sums:
    """See `Sums`; float32 for rows in half precision. A share is a run of rows, each against all.

    Float32 rows are multiplied in TF32 only where PyTorch's own switch for products says so.
    """
    p, launch = _arguments(pairs, temperature, share)
    log_s = p.inverse_temperature.new_full((p.num_rows,), -torch.inf)
    log_masses = None if p.mean is None else log_s.clone()
    grid = (cdiv(p.stop - p.start, p.BLOCK_M.value),)
    with torch.cuda.device_of(log_s):
        _forward_kernel[grid](p, log_s, log_masses, **launch)
    return Sums(log_s, log_masses)


@torch.compiler.disable
def gradient(
    pairs: Pairs, temperature: float, log_s: Tensor, slopes: Tensor, share: Share
) -> Tensor:
    """Gradient ``[M, D]`` of the sum of slopes_i log S_i, to the rows of this share.

    ``log_s``: the log-sums of all shares together, without the Gaussian's scale.
    """
    p, launch = _arguments(pairs, temperature, share)
    # Infinite where there is no negative: no pair has a part in that sum.
    log_s = log_s.masked_fill(log_s == -torch.inf, torch.inf).contiguous()
    slopes = (slopes / temperature).contiguous()
    d_rows = torch.zeros_like(p.rows)
    grid = cdiv(p.stop - p.start, p.BLOCK_M.value), cdiv(p.D.value, p.BLOCK_D.value)
    with torch.cuda.device_of(d_rows):
        _backward_kernel[grid](p, log_s, slopes, d_rows, **launch)
    return d_rows


class _Arguments(NamedTuple):
    """What both kernels take. Each None and each constexpr is compiled in."""

    rows: Tensor  # [M, D]
    num_rows: int
    num_graphs: int
    start: int  # of the share
    stop: int
    inverse_temperature: Tensor  # [1] because kernels get Python's floats in single precision
    left: Tensor | None  # [M, R]
    right: Tensor | None  # [M, R], or [M] the columns to look up
    R: Any  # int where columns are looked up, else constexpr
    mean: Tensor | None  # [M]
    curvature: Tensor | None  # [M]: -1 / (2 variance)
    # Those below are constexpr.
    ACROSS_VIEWS: Any
    D: Any
    BLOCK_M: Any  # rows of a program
    BLOCK_N: Any  # others at a time
    BLOCK_D: Any  # columns of the rows at a time
    BLOCK_R: Any  # columns of the factors at a time
    PRECISION: Any  # of float32 products
    SMALLEST: Any  # smaller weights count as 0: their reciprocals may overflow


def _arguments(pairs: Pairs, temperature: float, share: Share) -> tuple[_Arguments, dict[str, int]]:
    """What the kernels take, and how they are launched."""
    check_kinds("triton", pairs.weights, Factors, Gaussian)
    rows = pairs.rows.detach().contiguous()
    mine = share.of(len(rows))
    dtype = torch.float64 if rows.dtype == torch.float64 else torch.float32  # of sums
    left, right, columns = None, None, None
    factors = weight_of(Factors, pairs.weights)
    if factors is not None:
        left, right, columns = factors.left_matrix(), factors.right, factors.num_columns()
        if not factors.looked_up() or columns <= _MOST_COLUMNS:
            padding = 0, -columns % _BLOCK_R
            left, right = F.pad(left, padding), F.pad(factors.right_matrix(), padding).to(dtype)
            columns = tl.constexpr(left.shape[1])
        left, right = left.to(dtype).contiguous(), right.contiguous()
    mean, curvature = None, None
    gaussian = weight_of(Gaussian, pairs.weights)
    if gaussian is not None:
        mean = gaussian.mean.to(dtype).contiguous()
        curvature = -0.5 / gaussian.variance.to(dtype).contiguous()
    shape, launch = _blocks(rows)
    arguments = _Arguments(
        rows=rows,
        num_rows=len(rows),
        num_graphs=pairs.num_graphs(),
        start=mine.start,
        stop=mine.stop,
        inverse_temperature=rows.new_full((1,), 1 / temperature, dtype=dtype),
        left=left,
        right=right,
        R=columns,
        mean=mean,
        curvature=curvature,
        ACROSS_VIEWS=tl.constexpr(pairs.across_views),
        D=tl.constexpr(rows.shape[1]),
        BLOCK_R=tl.constexpr(_BLOCK_R),
        SMALLEST=tl.constexpr(torch.finfo(dtype).tiny),
        **{name: tl.constexpr(value) for name, value in shape.items()},
    )
    return arguments, launch


def _blocks(rows: Tensor) -> tuple[dict[str, Any], dict[str, int]]:
    """The kernels' shape, by width and dtype alone: timing them would break a CUDA graph."""
    width = rows.shape[1]
    half = rows.dtype in (torch.float16, torch.bfloat16)
    tf32 = _tf32()
    if half and width <= 128:
        m, n, widest, warps, stages = 128, 64, 128, 8, 3
    elif half:  # parts of both sides fill shared memory
        m, n, widest, warps, stages = 64, 64, 128, 4, 2
    elif rows.dtype == torch.float32 and tf32:
        m, n, widest, warps, stages = 64, 64, 64, 4, 2
    elif rows.dtype == torch.float32:  # no tensor cores: operands are held in registers
        m, n, widest, warps, stages = 64, 32, 32, 4, 3
    elif rows.dtype == torch.float64:
        m, n, widest, warps, stages = 16, 16, 16, 4, 1
    else:
        raise TypeError(f"engine='triton' computes with floating-point rows, but got {rows.dtype}")
    shape = {
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_D": min(widest, max(16, next_power_of_2(width))),
        # With rows in half precision, the products in float32 are of weights and small gradients.
        "PRECISION": "tf32" if tf32 or half else "ieee",
    }
    return shape, {"num_warps": warps, "num_stages": stages}


def _tf32() -> bool:
    """PyTorch's switch; where its newer form was used, reading the older one is an error."""
    products: Any = torch.backends.cuda.matmul
    if hasattr(products, "fp32_precision"):
        return bool(products.fp32_precision == "tf32")
    return bool(products.allow_tf32)


# The kernels. Tiles have shape [M, N]: a program's rows, `me`, against N others at a time.


@jit
def _forward_kernel(p, log_sums, log_masses):
    """Log S of my rows, and with a Gaussian the log of its mass."""
    me = p.start + tl.program_id(0) * p.BLOCK_M + tl.arange(0, p.BLOCK_M)  # [M]
    total = tl.zeros([p.BLOCK_M], log_sums.dtype.element_ty)
    peak = total - float("inf")
    mass = total
    mass_peak = peak
    for start in range(0, p.num_rows, p.BLOCK_N):
        other = start + tl.arange(0, p.BLOCK_N)  # [N]
        similarity = _products(p, p.rows, me, p.rows, other, p.D, p.BLOCK_D)
        exponents, weights = _pairs(p, similarity, me, other, 0)
        peak, total = _add_exp(peak, total, exponents, weights)
        if p.mean is not None:  # all rows have a part in the mass, negatives or not
            log_gaussian = _log_gaussian(p, similarity, me[:, None])
            is_row = (other < p.num_rows)[None, :]
            log_gaussian = tl.where(is_row, log_gaussian, -float("inf"))
            mass_peak, mass = _add_exp(mass_peak, mass, log_gaussian, 1.0)
    tl.store(log_sums + me, _log(peak, total), mask=me < p.stop)
    if p.mean is not None:
        tl.store(log_masses + me, _log(mass_peak, mass), mask=me < p.stop)


@jit
def _backward_kernel(p, log_sums, slopes, d_rows):
    """BLOCK_D columns of my rows' gradient."""
    me = p.start + tl.program_id(0) * p.BLOCK_M + tl.arange(0, p.BLOCK_M)  # [M]
    part = 0
    if p.BLOCK_D < p.D:
        part = tl.program_id(1) * p.BLOCK_D
    gradient = tl.zeros([p.BLOCK_M, p.BLOCK_D], log_sums.dtype.element_ty)
    for start in range(0, p.num_rows, p.BLOCK_N):
        other = start + tl.arange(0, p.BLOCK_N)  # [N]
        similarity = _products(p, p.rows, me, p.rows, other, p.D, p.BLOCK_D)
        d_pairs = tl.zeros([p.BLOCK_M, p.BLOCK_N], log_sums.dtype.element_ty)
        for END in tl.static_range(2):
            exponents, weights = _pairs(p, similarity, me, other, END)
            row, _ = _ends(me, other, END)
            log_sum = tl.load(log_sums + row, mask=row < p.num_rows, other=float("inf"))
            slope = tl.load(slopes + row, mask=row < p.num_rows, other=0.0)
            d_pairs += slope * (weights * tl.exp(exponents - log_sum))
        theirs = _tile(p.rows, other, p.num_rows, part, p.D, p.BLOCK_D)
        if theirs.dtype == tl.float16:  # too narrow for small weights; TF32 holds all its digits
            theirs = theirs.to(tl.float32)
        gradient += _dot(d_pairs.to(theirs.dtype), theirs, p.PRECISION)
    d = part + tl.arange(0, p.BLOCK_D)
    at = me.to(tl.int64)[:, None] * p.D + d[None, :]
    is_mine = (me < p.stop)[:, None] & (d < p.D)[None, :]
    tl.store(d_rows + at, gradient.to(d_rows.dtype.element_ty), mask=is_mine)


@jit
def _pairs(p, similarity, me, other, END: tl.constexpr):
    """A tile of the sums of my rows (END 0), or, of the same pairs, of the others' sums (END 1).

    s / t with the Gaussian's logarithm, -inf for what is no negative; and the factors' product.
    """
    row, column = _ends(me, other, END)
    exponents = similarity * tl.load(p.inverse_temperature)
    if p.mean is not None:
        exponents += _log_gaussian(p, similarity, row)
    counts = (other < p.num_rows)[None, :] & (row % p.num_graphs != column % p.num_graphs)
    if p.ACROSS_VIEWS:
        counts = counts & (row // p.num_graphs != column // p.num_graphs)
    weights = 1.0
    if p.left is not None:
        if p.right.dtype.element_ty == tl.int64:
            place = tl.load(p.right + column, mask=column < p.num_rows, other=0)
            place += row.to(tl.int64) * p.R
            weights = tl.load(p.left + place, mask=row < p.num_rows, other=0.0)
        elif END == 0:
            weights = _products(p, p.left, me, p.right, other, p.R, p.BLOCK_R)
        else:
            weights = _products(p, p.right, me, p.left, other, p.R, p.BLOCK_R)
        counts = counts & (weights >= p.SMALLEST)
    return tl.where(counts, exponents, -float("inf")), weights


@jit
def _ends(me, other, END: tl.constexpr):
    """The rows whose sums are meant, and those that they meet: [M, 1] and [1, N], or turned."""
    if END == 0:
        row = me[:, None]
        column = other[None, :]
    else:
        row = other[None, :]
        column = me[:, None]
    return row, column


@jit
def _log_gaussian(p, similarity, row):
    deviation = similarity - tl.load(p.mean + row, mask=row < p.num_rows, other=0.0)
    return deviation * deviation * tl.load(p.curvature + row, mask=row < p.num_rows, other=0.0)


@jit
def _add_exp(peak, total, exponents, weights):
    """A running weighted sum of exponentials, total * e^peak, with a tile's rows added."""
    new_peak = tl.maximum(peak, tl.max(exponents, 1))
    finite = tl.where(new_peak == -float("inf"), 0.0, new_peak)
    added = tl.sum(weights * tl.exp(exponents - finite[:, None]), 1)
    return new_peak, total * tl.exp(peak - finite) + added


@jit
def _log(peak, total):
    """Of a running sum; where it is empty, the peak is -inf."""
    return peak + tl.log(tl.where(total == 0, 1.0, total))


@jit
def _products(p, of_mine, me, of_others, other, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """My rows of a [M, WIDTH] matrix times others of another one."""
    mine = _tile(of_mine, me, p.num_rows, 0, WIDTH, BLOCK)
    theirs = _tile(of_others, other, p.num_rows, 0, WIDTH, BLOCK)
    products = _dot(mine, tl.trans(theirs), p.PRECISION)
    for start in range(BLOCK, WIDTH, BLOCK):
        mine = _tile(of_mine, me, p.num_rows, start, WIDTH, BLOCK)
        theirs = _tile(of_others, other, p.num_rows, start, WIDTH, BLOCK)
        products += _dot(mine, tl.trans(theirs), p.PRECISION)
    return products


@jit
def _tile(matrix, index, length, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Entries start to start + BLOCK of rows of a [length, WIDTH] matrix; 0 beyond its edges."""
    d = start + tl.arange(0, BLOCK)
    at = index.to(tl.int64)[:, None] * WIDTH + d[None, :]
    return tl.load(matrix + at, mask=(index < length)[:, None] & (d < WIDTH)[None, :], other=0.0)


@jit
def _dot(a, b, PRECISION: tl.constexpr):
    """Summed in float32, or in float64 where the operands are, which tensor cores do not take."""
    if a.dtype == tl.float64:
        product = tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product
