# Neither the package triton nor what its decorators leave behind has type hints.
# mypy: disable-error-code="import-untyped, import-not-found"
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The engine for CUDA: fused kernels in which tiles of similarities never leave the chip.

Forward, a block of queries walks over all columns with a running maximum and sum. Backward, each
block of rows walks over the others again, recomputes the tiles and multiplies them, as softmax
weights, with the others' rows. No two programs write to one place.

Needs the package `triton`, so this module is imported only once the engine is asked for.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv, jit, next_power_of_2

from pgcl_losses.engine.pairs import Bells, Pairs, Table


def triton(pairs: Pairs, temperature: float) -> Tensor:
    """Each query's loss; float32 (with a gradient in their dtype) for rows in half precision.

    Float32 rows are multiplied in TF32 only where `torch.backends.cuda.matmul.allow_tf32` is set.
    """
    # Where queries and columns are one tensor, its gradient takes one pass instead of two.
    columns = None if pairs.columns is pairs.rows else pairs.columns
    losses: Tensor = _Contrast.apply(pairs.rows, columns, pairs, temperature)
    return losses


class _Contrast(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, columns: Tensor | None, pairs: Pairs, temperature: float
    ) -> Tensor:
        rows = rows.contiguous()
        columns = rows if columns is None else columns.contiguous()
        blocks = _blocks(rows)
        constants = _constants(pairs, rows, temperature, blocks)
        gaps = rows.new_empty(len(rows), dtype=_wide(rows.dtype))  # [R]
        positive_logits = torch.empty_like(gaps)  # [R]
        grid = (cdiv(len(rows), blocks["BLOCK_M"]),)
        with torch.cuda.device_of(rows):
            _forward_kernel[grid](rows, columns, gaps, positive_logits, **constants, **blocks)
        losses = F.softplus(gaps, threshold=40)  # beyond which float64 sees no difference
        ctx.save_for_backward(rows, columns, gaps, positive_logits + losses)
        ctx.one_gradient = columns is rows
        ctx.constants, ctx.blocks, ctx.temperature = constants, blocks, temperature
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        rows, columns, gaps, log_totals = ctx.saved_tensors
        scales = (upstream / ctx.temperature).contiguous()  # [R] of each softmax weight
        pulls = -scales * torch.sigmoid(gaps)  # [R] on the positive

        def gradient(mine: Tensor, others: Tensor, roles: range) -> Tensor:
            out = torch.empty_like(mine)
            queries = log_totals, scales, pulls
            options = {"FIRST_ROLE": roles.start, "END_ROLE": roles.stop}
            options.update(ctx.constants, **ctx.blocks)
            length, width = mine.shape
            grid = cdiv(length, options["BLOCK_M"]), cdiv(width, options["BLOCK_D"])
            with torch.cuda.device_of(mine):
                _backward_kernel[grid](mine, others, out, length, len(others), *queries, **options)
            return out

        if ctx.one_gradient:
            return gradient(rows, rows, range(2)), None, None, None
        for_rows, for_columns, *_ = ctx.needs_input_grad
        return (
            gradient(rows, columns, range(1)) if for_rows else None,
            gradient(columns, rows, range(1, 2)) if for_columns else None,
            None,
            None,
        )


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What products of that dtype are summed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _blocks(rows: Tensor) -> dict[str, Any]:
    """The kernels' shape, by width and dtype alone: timing them would break a CUDA graph."""
    width = rows.shape[1]
    tf32 = torch.backends.cuda.matmul.allow_tf32
    if rows.dtype in (torch.float16, torch.bfloat16) and width <= 128:
        m, n, widest, warps, stages = 128, 64, 128, 8, 3
    elif rows.dtype in (torch.float16, torch.bfloat16):  # parts of both sides fill shared memory
        m, n, widest, warps, stages = 64, 64, 128, 4, 2
    elif rows.dtype == torch.float32 and tf32:
        m, n, widest, warps, stages = 64, 64, 64, 4, 2
    elif rows.dtype == torch.float32:  # no tensor cores: operands are held in registers
        m, n, widest, warps, stages = 64, 32, 32, 4, 3
    elif rows.dtype == torch.float64:
        m, n, widest, warps, stages = 16, 16, 16, 4, 1
    else:
        raise TypeError(f"engine='triton' computes with floating-point rows, but got {rows.dtype}")
    return {
        "D": width,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "BLOCK_D": min(widest, max(16, next_power_of_2(width))),
        "PRECISION": "tf32" if tf32 else "ieee",
        "num_warps": warps,
        "num_stages": stages,
    }


def _constants(
    pairs: Pairs, rows: Tensor, temperature: float, blocks: dict[str, Any]
) -> dict[str, Any]:
    """What `_logits` takes; a None is compiled away."""
    dtype = _wide(rows.dtype)
    constants: dict[str, Any] = dict.fromkeys(
        ("table", "K", "table_rows", "table_columns", "bells", "row_clusters", "column_clusters")
    )
    constants |= {
        "R": len(rows),
        "C": len(pairs.columns),
        # A tensor, because kernels get Python's floats in single precision.
        "inverse_temperature": rows.new_full((1,), 1 / temperature, dtype=dtype),
        "positives": pairs.positives.contiguous(),
        # Without a column of its own a query leaves out its positive twice.
        "own": (pairs.positives if pairs.own is None else pairs.own).contiguous(),
    }
    if isinstance(pairs.weights, Table):
        table, table_rows, table_columns = pairs.weights
        constants["table"] = table.to(dtype).contiguous()  # [T, K]
        constants["K"] = table.shape[1]
        constants["table_rows"] = table_rows.contiguous()
        constants["table_columns"] = table_columns.contiguous()
    elif isinstance(pairs.weights, Bells):
        constants["bells"] = _bells(pairs.weights, rows, blocks)
    if pairs.left_out is not None:
        constants["row_clusters"] = pairs.left_out.rows.contiguous()
        constants["column_clusters"] = pairs.left_out.columns.contiguous()
    return constants


def _bells(weights: Bells, rows: Tensor, blocks: dict[str, Any]) -> Tensor:
    """Mean, -1 / (2 variance) and log mean weight of each query: ``[3, R]``."""
    dtype = _wide(rows.dtype)
    mean, variance = weights.mean.to(dtype), weights.variance.to(dtype)
    bells = torch.stack((mean, -0.5 / variance, torch.zeros_like(mean)))
    population = weights.population.to(rows.dtype).contiguous()
    grid = (cdiv(len(rows), blocks["BLOCK_M"]),)
    with torch.cuda.device_of(rows):
        _log_mean_kernel[grid](rows, population, bells, len(rows), len(population), **blocks)
    bells[2] -= math.log(len(population))
    return bells


# The kernels. Tiles have shape [M, N]: a program's M rows against N others at a time.


@jit
def _forward_kernel(
    rows,
    columns,
    gaps,
    positive_logits,
    R,
    C,
    inverse_temperature,
    positives,
    own,
    table,
    K,
    table_rows,
    table_columns,
    bells,
    row_clusters,
    column_clusters,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """gap = log sum_j W_ij e^{s_ij / t} - s_ip / t; its softplus is the loss."""
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    is_query = query < R
    sharpness = tl.load(inverse_temperature)

    positive = tl.load(positives + query, mask=is_query, other=0)  # [M]
    positive_logit = tl.zeros([BLOCK_M], sharpness.dtype)
    for start in range(0, D, BLOCK_D):
        mine = _tile(rows, query, R, start, D, BLOCK_D).to(sharpness.dtype)
        theirs = _tile(columns, positive, C, start, D, BLOCK_D).to(sharpness.dtype)
        positive_logit += tl.sum(mine * theirs, 1) * sharpness

    # The maximum starts at the positive, so it is finite even where every negative is left out.
    peak = positive_logit
    total = tl.zeros([BLOCK_M], sharpness.dtype)
    first = _tile(rows, query, R, 0, D, BLOCK_D)
    for start in range(0, C, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)  # [N]
        similarity = _similarity(first, rows, query, R, columns, column, C, D, BLOCK_D, PRECISION)
        logits = _logits(
            similarity,
            query[:, None],
            column[None, :],
            R,
            C,
            sharpness,
            positives,
            own,
            table,
            K,
            table_rows,
            table_columns,
            bells,
            row_clusters,
            column_clusters,
        )
        peak, total = _add_exp(peak, total, logits)

    nothing = total == 0  # then its logarithm would raise a warning in the interpreter
    gap = peak - positive_logit + tl.log(tl.where(nothing, 1.0, total))
    tl.store(gaps + query, tl.where(nothing, -float("inf"), gap), mask=is_query)
    tl.store(positive_logits + query, positive_logit, mask=is_query)


@jit
def _backward_kernel(
    mine,
    others,
    out,
    MINE,
    OTHERS,
    log_totals,
    scales,
    pulls,
    R,
    C,
    inverse_temperature,
    positives,
    own,
    table,
    K,
    table_rows,
    table_columns,
    bells,
    row_clusters,
    column_clusters,
    FIRST_ROLE: tl.constexpr,
    END_ROLE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_D entries of my rows' gradient: in the role of queries (0), of columns (1), or both."""
    me = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    sharpness = tl.load(inverse_temperature)
    part = 0
    if BLOCK_D < D:
        part = tl.program_id(1) * BLOCK_D
    gradient = tl.zeros([BLOCK_M, BLOCK_D], sharpness.dtype)
    first = _tile(mine, me, MINE, 0, D, BLOCK_D)
    for start in range(0, OTHERS, BLOCK_N):
        other = start + tl.arange(0, BLOCK_N)  # [N]
        similarity = _similarity(
            first, mine, me, MINE, others, other, OTHERS, D, BLOCK_D, PRECISION
        )
        slopes = tl.zeros([BLOCK_M, BLOCK_N], sharpness.dtype)  # of the loss by the similarity
        for role in tl.static_range(FIRST_ROLE, END_ROLE):
            if role == 0:
                query = me[:, None]
                column = other[None, :]
            else:
                query = other[None, :]
                column = me[:, None]
            logits = _logits(
                similarity,
                query,
                column,
                R,
                C,
                sharpness,
                positives,
                own,
                table,
                K,
                table_rows,
                table_columns,
                bells,
                row_clusters,
                column_clusters,
            )
            is_query = query < R
            # Infinite, so that beyond the last query every weight is 0 whatever the logit.
            log_total = tl.load(log_totals + query, mask=is_query, other=float("inf"))
            weights = tl.exp(logits - log_total) * tl.load(scales + query, mask=is_query, other=0.0)
            positive = tl.load(positives + query, mask=is_query, other=-1)
            pull = tl.load(pulls + query, mask=is_query, other=0.0)
            slopes += tl.where(column == positive, pull, weights)
        theirs = _tile(others, other, OTHERS, part, D, BLOCK_D)
        if theirs.dtype == tl.float16:  # too narrow for small weights; TF32 holds all its digits
            gradient += _dot(slopes, theirs.to(tl.float32), "tf32")
        else:
            gradient += _dot(slopes.to(theirs.dtype), theirs, PRECISION)
    d = part + tl.arange(0, BLOCK_D)
    at = me.to(tl.int64)[:, None] * D + d[None, :]
    tl.store(out + at, gradient.to(mine.dtype.element_ty), (me < MINE)[:, None] & (d < D)[None, :])


@jit
def _log_mean_kernel(
    rows,
    population,
    bells,
    R,
    P,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each query's log sum of bells over the population, into the third row of `bells`."""
    query = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # [M]
    total = tl.zeros([BLOCK_M], bells.dtype.element_ty)
    peak = total - float("inf")
    first = _tile(rows, query, R, 0, D, BLOCK_D)
    for start in range(0, P, BLOCK_N):
        member = start + tl.arange(0, BLOCK_N)  # [N]
        similarity = _similarity(
            first, rows, query, R, population, member, P, D, BLOCK_D, PRECISION
        )
        log_weights = _log_bells(similarity, query[:, None], R, bells)
        log_weights = tl.where((member < P)[None, :], log_weights, -float("inf"))
        peak, total = _add_exp(peak, total, log_weights)
    tl.store(bells + 2 * R + query, peak + tl.log(total), mask=query < R)


@jit
def _logits(
    similarity,
    query,
    column,
    R,
    C,
    sharpness,
    positives,
    own,
    table,
    K,
    table_rows,
    table_columns,
    bells,
    row_clusters,
    column_clusters,
):
    """s / t + log W of negatives, -inf for what is none.

    Query and column number the tile's axes, [M, 1] and [1, N] or the other way round.
    """
    is_query = query < R
    is_column = column < C
    logits = similarity * sharpness
    if table is not None:
        row = tl.load(table_rows + query, mask=is_query, other=0)
        cluster = tl.load(table_columns + column, mask=is_column, other=0)
        logits += tl.load(table + (row * K + cluster))
    if bells is not None:
        logits += _log_bells(similarity, query, R, bells)
    counts = is_column & (column != tl.load(positives + query, mask=is_query, other=-1))
    counts = counts & (column != tl.load(own + query, mask=is_query, other=-1))
    if row_clusters is not None:
        row_cluster = tl.load(row_clusters + query, mask=is_query, other=-1)
        counts = counts & (row_cluster != tl.load(column_clusters + column, is_column, other=-1))
    return tl.where(counts, logits, -float("inf"))


@jit
def _log_bells(similarity, query, R, bells):
    mean = tl.load(bells + query, mask=query < R, other=0.0)
    curvature = tl.load(bells + R + query, mask=query < R, other=0.0)
    log_mean = tl.load(bells + 2 * R + query, mask=query < R, other=0.0)
    deviation = similarity - mean
    return deviation * deviation * curvature - log_mean


@jit
def _add_exp(peak, total, logits):
    """A running sum of exponentials, total * e^peak, with a tile's rows added."""
    new_peak = tl.maximum(peak, tl.max(logits, 1))
    added = tl.sum(tl.exp(logits - new_peak[:, None]), 1)
    return new_peak, total * tl.exp(peak - new_peak) + added


@jit
def _similarity(
    first,
    rows,
    row,
    R,
    columns,
    column,
    C,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Products of rows and columns; `first` is the part of the rows that stays loaded."""
    similarity = _dot(first, tl.trans(_tile(columns, column, C, 0, D, BLOCK_D)), PRECISION)
    for start in range(BLOCK_D, D, BLOCK_D):
        mine = _tile(rows, row, R, start, D, BLOCK_D)
        theirs = _tile(columns, column, C, start, D, BLOCK_D)
        similarity += _dot(mine, tl.trans(theirs), PRECISION)
    return similarity


@jit
def _tile(matrix, index, length, start, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Entries start to start + BLOCK_D of some rows of a [length, D] matrix; 0 beyond its edges."""
    d = start + tl.arange(0, BLOCK_D)
    at = index.to(tl.int64)[:, None] * D + d[None, :]
    return tl.load(matrix + at, mask=(index < length)[:, None] & (d < D)[None, :], other=0.0)


@jit
def _dot(a, b, PRECISION: tl.constexpr):
    """Summed in float32, or in float64 where the operands are, which tensor cores do not take."""
    if a.dtype == tl.float64:
        product = tl.sum(a[:, :, None] * b[None, :, :], 1)
    else:
        product = tl.dot(a, b, input_precision=PRECISION)
    return product
