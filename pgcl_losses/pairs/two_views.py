"""Two views of a small batch: InfoNCE on one screen, in few operations.

A step of 128 graphs takes the time of starting operations and of calling Python, not of arithmetic.
So for autograd one operation leads from the embeddings to the losses, and its gradient is written
here. What counts is decided where it is for all batches: `all_rows` says with which keys queries
are compared, `partners` which keys are positives, and `add_log_weights` which are negatives.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.base.modes import may_overwrite, remembered
from pgcl_losses.base.normalize import full_precision, lengths_of, through_lengths
from pgcl_losses.pairs.chunks import chunk_size
from pgcl_losses.pairs.negatives import add_log_weights
from pgcl_losses.pairs.partners import Strides, diagonals, lowest, strided
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows, part_of
from pgcl_losses.pairs.sums import (
    exponentiate_,
    has_small_logits,
    log_s_of,
    logsumexp_of,
    raise_if_differentiated_twice,
    scale_of,
)


class Block(NamedTuple):
    """A matrix of scores: all queries of one view, or of both, with their keys."""

    rows: Rows
    is_small: bool  # whether no peak has to be taken out of the powers of logits
    # One product of matrices may serve the queries of both views. Without peaks, powers are added
    # up by rows and by columns, which are the queries of the second view. With peaks, the
    # transposed matrix is stacked below the matrix.
    by_columns: bool
    is_stacked: bool
    partners: Strides  # where the queries themselves and their positives are
    positives: Strides  # where the positives are, [S, N] for S views of queries


def blocks_of(pairs: Pairs, inputs: Inputs, rows: Sequence[Rows]) -> tuple[Block, ...]:
    """The matrices for the losses of all queries, which are in ``rows``."""
    num, is_small = pairs.lengths[0], has_small_logits(pairs, inputs.temperature)
    is_shared = len(rows) == 2 and pairs.cluster_weights is None and pairs.cosine_weights is None
    if not is_small:  # together, two matrices that are stacked stay in the cache
        is_shared &= 2 * num**2 <= chunk_size(inputs.z.device) // 2
    return _blocks(num, tuple(rows), is_small, is_shared)


@remembered
def _blocks(num: int, rows: tuple[Rows, ...], is_small: bool, is_shared: bool) -> tuple[Block, ...]:
    by_columns, is_stacked, blocks = is_shared and is_small, is_shared and not is_small, []
    for some in rows[:1] if is_shared else rows:
        num_rows, num_keys = some.shape()
        strides = diagonals(num, num_rows * (1 + is_stacked), num_keys, some.queries.start)
        blocks.append(Block(some, is_small, by_columns, is_stacked, *strides))
    return tuple(blocks)


def losses_of_block(pairs: Pairs, block: Block, inputs: Inputs) -> Tensor:
    """Compute the losses ``[I]`` of the queries of a block."""
    losses: Tensor = _TwoViews.apply(*inputs[:2], pairs, block)  # type: ignore[no-untyped-call]  # torch has no type there
    return losses


class _TwoViews(torch.autograd.Function):
    """The matrix ``[I, K]`` holds scores, then powers e^x, then the derivatives by scores."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: Any, pairs: Pairs, block: Block) -> Tensor:
        lengths = None
        if pairs.normalize:
            lengths = lengths_of(z)
            z = z / lengths
        queries, keys = part_of(z, block.rows.queries), part_of(z, block.rows.keys[0])
        scores = queries / temperature @ keys.T
        if block.is_stacked:
            scores = torch.cat([scores, scores.T])
        x = strided(scores, block.positives).clone()  # [S, N]
        logits = add_log_weights(pairs, block.rows, scores, None, temperature)
        strided(logits, block.partners).fill_(lowest(z.dtype))
        peaks = exponentiate_(logits, block.is_small)
        total = logits.sum(1)
        if block.by_columns:
            total = torch.cat([total, logits.sum(0)])
        log_s = log_s_of([logsumexp_of(total, peaks)], None)
        gaps = (log_s.view(-1, x.shape[1]) - x).view(-1)
        ctx.save_for_backward(z, lengths, logits, total, gaps)
        ctx.rest = temperature, pairs, block
        return pairs.form.against(gaps)

    @staticmethod
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Any, ...]:
        raise_if_differentiated_twice()
        z, lengths, powers, total, gaps = ctx.saved_tensors
        temperature, pairs, block = ctx.rest
        scale = scale_of(temperature, block.is_small)
        d_gaps = pairs.form.derivatives(gaps) * (d_losses * scale)
        factors = (d_gaps / total).unsqueeze(1)  # [I, 1]
        if block.by_columns:  # a pair counts in its row, and in its column
            row_factors, column_factors = factors.chunk(2)
            factors = row_factors + column_factors.T
            d_gaps = d_gaps.view(2, -1).sum(0)
        multiply = torch.Tensor.mul_ if may_overwrite(d_losses) else torch.mul
        d = multiply(powers.contiguous(), factors)  # hooks may unpack them otherwise
        strided(d, block.positives).sub_(d_gaps.view(block.positives[0]))
        if block.is_stacked:
            d, below = d.chunk(2)
            d = d + below.T
        queries, keys = part_of(z, block.rows.queries), part_of(z, block.rows.keys[0])
        with full_precision(d.device):
            d_queries, d_keys = d @ keys, d.T @ queries
        if d_keys.shape == z.shape:
            d_z = d_keys
            part_of(d_z, block.rows.queries).add_(d_queries)
        else:
            is_first = block.rows.queries.start == 0
            d_z = torch.cat((d_queries, d_keys) if is_first else (d_keys, d_queries))
        d_tau = None
        if ctx.needs_input_grad[1]:  # each score is counted twice: by its query, and by its key
            d_tau = (z / (-2 * scale * temperature) * d_z).sum() / temperature
        unit = scale * temperature
        if lengths is None:
            return d_z.div_(unit), d_tau, None, None
        return through_lengths(d_z, z, lengths * unit), d_tau, None, None
