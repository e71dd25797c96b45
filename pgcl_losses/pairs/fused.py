"""The two jobs between the products of a chunk as kernels for a GPU, which read each score once.

A large batch takes a GPU the time to move its scores through memory. The operations of `sums` read
or write the scores eleven times, products included, and with these kernels it is six times. They
compute what `sums.PLAIN` computes for views of the same graphs, whose weights are a table or all 1.
Which keys are partners, and the losses of rows, are decided elsewhere, as for any other chunk.
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError(
        f"Triton is missing ({error}), which torch's builds for GPUs on Linux have: install it, or "
        "choose engine='chunks'"
    ) from error

from pgcl_losses.pairs.partners import Columns
from pgcl_losses.pairs.rows import Pairs, Rows
from pgcl_losses.pairs.sums import Passes, Powers, SumsOfRows

# How many keys a program reads at a time, and by how many groups of 32 threads.
_NUM_KEYS, _NUM_WARPS = 2048, 8


def sum_up(
    pairs: Pairs, rows: Rows, scores: Tensor, partners: Columns, *_: Any
) -> tuple[SumsOfRows, Powers]:
    """Compute the sums from scores ``[I, K]``, which stay as they are."""
    # As in plain torch, the largest logit and the sum of powers are kept, and not log S alone: of
    # large scores log S has lost the digits that the derivative needs.
    num_rows, num_partners = partners.partner_columns.shape
    shapes = (num_rows,), (num_rows, num_partners), (num_rows, 2)
    log_s, x, peak_and_total = map(scores.new_empty, shapes)
    negatives = _negatives(pairs, rows, partners)
    with torch.cuda.device_of(scores):
        _logsumexps[(len(scores),)](
            log_s, x, peak_and_total, scores, *negatives, block=_NUM_KEYS, num_warps=_NUM_WARPS
        )
    x = x[:, num_partners - partners.positive_columns.shape[1] :]
    return (x, log_s, None), Powers([scores], [peak_and_total], None)


def derivatives_by_scores(
    pairs: Pairs,
    rows: Rows,
    partners: Columns,
    powers: Powers,
    d_log_s: Tensor,
    d_x: Tensor,
    scale: Tensor,
    _: bool,
) -> tuple[Tensor, tuple[()]]:
    """Overwrite the scores ``[I, K]`` by the derivatives by them."""
    scores, peak_and_total = powers.powers[0], powers.totals[0]
    blocks = len(scores), triton.cdiv(scores.shape[1], _NUM_KEYS)
    d_log_s, d_x = d_log_s.contiguous(), d_x.contiguous()
    given = d_log_s, d_x, scale, d_x.shape[1], peak_and_total, scores
    negatives = _negatives(pairs, rows, partners)
    with torch.cuda.device_of(scores):
        _derivatives[blocks](*given, *negatives, block=_NUM_KEYS, num_warps=_NUM_WARPS)
    return scores, ()


KERNELS = Passes(sum_up, derivatives_by_scores)


def try_on(device: torch.device) -> None:
    """Compile and run a kernel; raise an error if that is not possible."""
    one, column = torch.zeros(1, 1, device=device), torch.zeros(1, 1, device=device).long()
    with torch.cuda.device_of(one):
        outputs = one, one, torch.cat([one, one])
        _logsumexps[(1,)](*outputs, one, 1, column, 1, 1, 1, None, 0, None, None, block=1)


def _negatives(pairs: Pairs, rows: Rows, partners: Columns) -> tuple[Any, ...]:
    """What `_logits` needs besides scores."""
    table: tuple[Any, ...] = None, 0, None, None
    if pairs.cluster_weights is not None:
        log_w = pairs.cluster_weights.log_weights[0].contiguous()
        clusters = rows.pick(pairs.cluster_weights.clusters[:, 0].to(torch.int32).contiguous())
        table = log_w, len(log_w), *clusters
    columns = partners.partner_columns
    return rows.shape()[1], columns, *columns.stride(), columns.shape[1], *table


@triton.jit
def _logits(
    row, at, scores, num_keys, columns, row_stride, column_stride, num_columns: tl.constexpr,
    table, num_clusters, of_queries, of_keys,
):  # fmt: skip
    """Compute the logits of a query with some keys; -inf for keys that are no negatives."""
    logits = tl.load(scores + row * num_keys + at, mask=at < num_keys, other=-float("inf"))
    if table is not None:
        of_query = tl.load(of_queries + row).to(tl.int64)
        of_key = tl.load(of_keys + at, mask=at < num_keys, other=0)
        # The number of no cluster is not looked up: it makes the loss NaN.
        of_key = tl.where((of_query >= 0) & (of_query < num_clusters), of_key, -1)
        is_known = (of_key >= 0) & (of_key < num_clusters)
        at_pair = table + of_query * num_clusters + of_key
        logits += tl.load(at_pair, mask=is_known, other=float("nan"))
    for c in tl.static_range(num_columns):
        column = tl.load(columns + row * row_stride + c * column_stride)
        logits = tl.where(at == column, -float("inf"), logits)
    return logits


@triton.jit
def _logsumexps(
    log_sums, x, peak_and_total,
    scores, num_keys, columns, row_stride, column_stride, num_columns: tl.constexpr,
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
    sum_of_all = tl.sum(total * tl.exp(peak - highest), 0)
    tl.store(log_sums + row, tl.log(sum_of_all) + highest)
    tl.store(peak_and_total + 2 * row, highest)
    tl.store(peak_and_total + 2 * row + 1, tl.where(sum_of_all == 0, 1.0, sum_of_all))
    for c in tl.static_range(num_columns):
        column = tl.load(columns + row * row_stride + c * column_stride)
        tl.store(x + row * num_columns + c, tl.load(scores + row * num_keys + column))


@triton.jit
def _derivatives(
    d_logsumexps, d_x, scale, num_positives: tl.constexpr, peak_and_total,
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
    scale = tl.load(scale)
    factor = tl.load(d_logsumexps + row) * scale / tl.load(peak_and_total + 2 * row + 1)
    d = tl.exp(logits - tl.load(peak_and_total + 2 * row)) * factor
    for p in tl.static_range(num_positives):
        c = num_columns - num_positives + p
        column = tl.load(columns + row * row_stride + c * column_stride)
        d = tl.where(at == column, tl.load(d_x + row * num_positives + p) * scale, d)
    tl.store(scores + row * num_keys + at, d, mask=at < num_keys)
