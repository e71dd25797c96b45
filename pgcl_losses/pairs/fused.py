"""The two jobs between the products of a chunk as kernels for a GPU, which read each score once.

A large batch takes a GPU the time to move its scores through memory. The operations of `sums` read
or write the scores eleven times, products included, and with these kernels it is six times. They
compute what `sums.PLAIN` computes for views of the same graphs, whose weights are a table or all 1.
Which keys are partners, and the losses of rows, are decided elsewhere, as for any other chunk.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pgcl_losses.pairs.partners import Partners
from pgcl_losses.pairs.rows import Pairs, Rows
from pgcl_losses.pairs.sums import Passes, Powers, SumsOfRows

# How many keys a program reads at a time, and by how many groups of 32 threads.
_NUM_KEYS, _NUM_WARPS = 2048, 8


def sum_up(
    pairs: Pairs, rows: Rows, scores: Tensor, partners: Partners, *_: Any
) -> tuple[SumsOfRows, Powers]:
    """Compute the sums from scores ``[I, K]``, which stay as they are."""
    assert partners.columns is not None
    assert partners.of_positives is not None
    log_s, x = scores.new_empty(len(scores)), scores.new_empty(partners.columns.shape)
    negatives = _negatives(pairs, rows, partners)
    with torch.cuda.device_of(scores):
        _log_sums[(len(scores),)](
            log_s, x, scores, *negatives, block=_NUM_KEYS, num_warps=_NUM_WARPS
        )
    x = x[:, x.shape[1] - partners.of_positives.shape[1] :]
    return (x, log_s, None), Powers([scores], [log_s], None)


def derivatives_by_scores(
    pairs: Pairs,
    rows: Rows,
    partners: Partners,
    powers: Powers,
    d_log_s: Tensor,
    d_x: Tensor,
    scale: Tensor,
) -> tuple[Tensor, tuple[()]]:
    """Overwrite the scores ``[I, K]`` by the derivatives by them."""
    scores, log_s = powers.powers[0], powers.totals[0]
    blocks = len(scores), triton.cdiv(scores.shape[1], _NUM_KEYS)
    given = d_log_s.contiguous(), d_x.contiguous(), scale, d_x.shape[1], log_s, scores
    negatives = _negatives(pairs, rows, partners)
    with torch.cuda.device_of(scores):
        _derivatives[blocks](*given, *negatives, block=_NUM_KEYS, num_warps=_NUM_WARPS)
    return scores, ()


KERNELS = Passes(sum_up, derivatives_by_scores)


def try_on(device: torch.device) -> None:
    """Compile and run a kernel; raise an error if that is not possible."""
    one, column = torch.zeros(1, 1, device=device), torch.zeros(1, 1, device=device).long()
    with torch.cuda.device_of(one):
        _log_sums[(1,)](one, one, one, 1, column, 1, 1, 1, None, 0, None, None, block=1)


def _negatives(pairs: Pairs, rows: Rows, partners: Partners) -> tuple[Any, ...]:
    """What `_logits` needs besides scores."""
    table: tuple[Any, ...] = None, 0, None, None
    columns = partners.columns
    assert columns is not None
    if pairs.weights is not None:
        log_w = pairs.weights.log_weights[0]
        clusters = rows.pick(pairs.weights.clusters[:, 0].to(torch.int32))
        table = log_w, len(log_w), *clusters
    return rows.shape()[1], columns, *columns.stride(), columns.shape[1], *table


@triton.jit
def _logits(
    row, at, scores, num_keys, columns, row_stride, column_stride, num_columns: tl.constexpr,
    table, num_clusters, of_queries, of_keys,
):  # fmt: skip
    """Compute the logits of a query with some keys; -inf for keys that are no negatives."""
    logits = tl.load(scores + row * num_keys + at, mask=at < num_keys, other=-float("inf"))
    if table is not None:
        clusters = tl.load(of_keys + at, mask=at < num_keys, other=0)
        logits += tl.load(table + tl.load(of_queries + row) * num_clusters + clusters)
    for c in tl.static_range(num_columns):
        column = tl.load(columns + row * row_stride + c * column_stride)
        logits = tl.where(at == column, -float("inf"), logits)
    return logits


@triton.jit
def _log_sums(
    log_sums, x, scores, num_keys, columns, row_stride, column_stride, num_columns: tl.constexpr,
    table, num_clusters, of_queries, of_keys, block: tl.constexpr,
):  # fmt: skip
    """Compute log S of a query, and copy the scores of its partners."""
    row = tl.program_id(0).to(tl.int64)
    peak = tl.full([block], -float("inf"), scores.dtype.element_ty)
    total = tl.zeros([block], scores.dtype.element_ty)
    for start in range(0, num_keys, block):
        logits = _logits(
            row, start + tl.arange(0, block), scores, num_keys, columns, row_stride, column_stride,
            num_columns, table, num_clusters, of_queries, of_keys,
        )  # fmt: skip
        before, peak = peak, tl.maximum(peak, logits)
        finite = tl.where(peak == -float("inf"), 0.0, peak)
        total = total * tl.exp(before - finite) + tl.exp(logits - finite)
    highest = tl.max(peak, 0)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    tl.store(log_sums + row, tl.log(tl.sum(total * tl.exp(peak - highest), 0)) + highest)
    for c in tl.static_range(num_columns):
        column = tl.load(columns + row * row_stride + c * column_stride)
        tl.store(x + row * num_columns + c, tl.load(scores + row * num_keys + column))


@triton.jit
def _derivatives(
    d_log_sums, d_x, scale, num_positives: tl.constexpr, log_sums,
    scores, num_keys, columns, row_stride, column_stride, num_columns: tl.constexpr,
    table, num_clusters, of_queries, of_keys, block: tl.constexpr,
):  # fmt: skip
    """Compute the derivatives by some scores of a query: its positives come last in `columns`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * block + tl.arange(0, block)
    logits = _logits(
        row, at, scores, num_keys, columns, row_stride, column_stride, num_columns,
        table, num_clusters, of_queries, of_keys,
    )  # fmt: skip
    log_sum = tl.load(log_sums + row)
    finite = tl.where(log_sum == -float("inf"), 0.0, log_sum)
    d = tl.exp(logits - finite) * tl.load(d_log_sums + row)
    for p in tl.static_range(num_positives):
        c = num_columns - num_positives + p
        column = tl.load(columns + row * row_stride + c * column_stride)
        d = tl.where(at == column, tl.load(d_x + row * num_positives + p), d)
    tl.store(scores + row * num_keys + at, d * tl.load(scale), mask=at < num_keys)
