"""The engine for batches that fit: plain torch operations on one matrix of logits."""

import math
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.engine.pairs import (
    LARGEST_EXPONENT,
    LOG2_E,
    Factors,
    Gaussian,
    Pairs,
    Sums,
    check_kinds,
    weight_of,
)
from pgcl_losses._normalize import backward_alone, on_cpu, scaled_product


def log_sums(pairs: Pairs, temperature: float) -> Sums:
    """See `Sums`; they can be differentiated any number of times."""
    check_kinds("dense", pairs.weights, Factors, Gaussian)
    log_gaussian, log_masses = _gaussian(pairs)
    function: Any = _sums
    if 1 / temperature <= LARGEST_EXPONENT and backward_alone():
        function = _Sums.apply  # fewer steps; what is too small for float32 is 0
    return Sums(function(pairs.rows, pairs, log_gaussian, temperature), log_masses)


_IN_CACHE = 1 << 20  # pairs; a copy of so many costs less than another product

# A side: the rows whose sums a matrix [J, I] gives, its columns I, and their partners J.
Side = tuple[slice, slice]


def _sides(pairs: Pairs) -> list[Side]:
    """All rows with all; or, where only two views are partners, each view with the other."""
    if pairs.across_views and pairs.num_views == 2:
        first, second = pairs.views()
        return [(first, second), (second, first)]
    all_rows = slice(0, len(pairs.rows))
    return [(all_rows, all_rows)]


def _gaussian(pairs: Pairs) -> tuple[Tensor | None, Tensor | None]:
    """Its logarithm ``[J, I]`` for all rows, and that of its mass ``[I]``, where there is one."""
    gaussian = weight_of(Gaussian, pairs.weights)
    if gaussian is None:
        return None, None
    with torch.no_grad():
        rows = pairs.rows.detach()  # for forward mode, too
        deviation = (rows @ rows.T).sub_(gaussian.mean)
        log_gaussian = deviation.square_().mul_(-0.5 / gaussian.variance)
        return log_gaussian, log_gaussian.logsumexp(0)


def _log_weights(pairs: Pairs, log_gaussian: Tensor | None, side: Side, *, exactly: bool) -> Tensor:
    """Log W ``[J, I]``, -inf for what is no negative: the one matrix, to which logits are added."""
    i, j = side
    factors = weight_of(Factors, pairs.weights)
    if factors is None:
        log_weights = pairs.rows.new_zeros(j.stop - j.start, i.stop - i.start)
    else:
        log_weights = factors.log_block(j, i, exactly=exactly)
    if log_gaussian is not None:
        log_weights += log_gaussian[j, i]
    pairs.fill_graphs(log_weights, j, i, -torch.inf)
    if pairs.across_views and i == j:
        for view in pairs.views():
            log_weights[view, view] = -torch.inf
    return log_weights


def _sums(rows: Tensor, pairs: Pairs, log_gaussian: Tensor | None, temperature: float) -> Tensor:
    """Log S ``[M]``, in steps that autograd can take."""
    of_sides = []
    limits = torch.finfo(rows.dtype)
    for i, j in _sides(pairs):
        with torch.no_grad():
            log_weights = _log_weights(pairs, log_gaussian, (i, j), exactly=True)
        logits = log_weights + rows[j] @ rows[i].T / temperature
        peaks = logits.detach().amax(0)  # [I] -inf where there is no negative
        sums = _above_underflow(logits - peaks.clamp_min(limits.min)).exp().sum(0)
        # Elsewhere they are 1 or more; log 0 would have no gradient but NaN.
        of_sides.append(sums.clamp_min(limits.tiny).log() + peaks)
    return torch.cat(of_sides)


def _above_underflow(logits: Tensor) -> Tensor:
    """Logarithms raised, in place, above that of the smallest normal number.

    The exponential of a smaller one takes a CPU up to thirty times as long. Beside a sum of 1 or
    more what it becomes is nothing.
    """
    return logits.clamp_min_(1 + math.log(torch.finfo(logits.dtype).tiny))


def _run(values: Tensor, run: slice) -> Tensor:
    """Some rows; all of them as they are, which saves a step."""
    return values if run == slice(0, values.shape[0]) else values[run]


class _Sums(torch.autograd.Function):
    """`_sums` with a gradient of its own, for temperatures at which nothing overflows."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, pairs: Pairs, log_gaussian: Tensor | None, temperature: float
    ) -> Tensor:
        of_sides, saved = [], []
        for i, j in _sides(pairs):
            mine, others = _run(rows, i), _run(rows, j)
            logits = _log_weights(pairs, log_gaussian, (i, j), exactly=False)
            logits.addmm_(others, mine.T, beta=LOG2_E, alpha=LOG2_E / temperature)
            terms = logits.exp2_()
            if pairs.weights and on_cpu(rows):  # where products choke on what is too small
                torch.threshold_(terms, torch.finfo(terms.dtype).tiny, 0.0)
            sums = terms.sum(0)
            of_sides.append(sums.log())
            # A row without negatives has nothing to share out.
            saved += [terms, torch.threshold_(sums, torch.finfo(sums.dtype).tiny, torch.inf)]
        ctx.save_for_backward(rows, *saved)
        ctx.pairs, ctx.temperature = pairs, temperature
        return of_sides[0] if len(of_sides) == 1 else torch.cat(of_sides)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is to be differentiated again
            log_gaussian, _ = _gaussian(ctx.pairs)
            log_s = _sums(rows, ctx.pairs, log_gaussian, ctx.temperature)
            (d_rows,) = torch.autograd.grad(log_s, rows, slopes, create_graph=True)
            return d_rows, None, None, None
        d_rows = None
        for (i, j), terms, sums in zip(_sides(ctx.pairs), saved[::2], saved[1::2], strict=True):
            scales = _run(slopes, i) / sums  # [I]
            if i == j and terms.numel() <= _IN_CACHE:  # a pair serves both its ends
                if on_cpu(rows):
                    d_pairs = terms.T.clone(memory_format=torch.contiguous_format)
                    d_pairs.mul_(scales.unsqueeze(1)).addcmul_(terms, scales)
                else:
                    d_pairs = terms * scales
                    d_pairs = d_pairs + d_pairs.T
                return scaled_product(d_pairs, rows, 1 / ctx.temperature), None, None, None
            scales.div_(ctx.temperature)
            d_rows = torch.zeros_like(rows) if d_rows is None else d_rows
            mine, others, scales = rows[i], rows[j], scales.unsqueeze(1)
            d_rows[j].addmm_(terms, mine * scales)
            d_rows[i].addcmul_(terms.T @ others, scales)
        return d_rows, None, None, None
