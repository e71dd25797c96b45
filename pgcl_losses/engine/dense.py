"""The engine for batches that fit: plain torch operations on one matrix of logits."""

from typing import Any

import torch
from torch import Tensor

from pgcl_losses.engine.pairs import (
    LARGEST_EXPONENT,
    Factors,
    Gaussian,
    Pairs,
    Sums,
    above_underflow,
    check_kinds,
    weight_of,
)
from pgcl_losses.rows import backward_alone


def log_sums(pairs: Pairs, temperature: float) -> Sums:
    """See `Sums`; they can be differentiated any number of times."""
    check_kinds("dense", pairs.weights, Factors, Gaussian)
    with torch.no_grad():
        log_weights, log_masses = _log_weights(pairs)
    function: Any = _sums
    if backward_alone():
        function = _Sums.apply  # the same values, in fewer steps
    return Sums(function(pairs.rows, pairs, log_weights, temperature), log_masses)


_IN_CACHE = 1 << 19  # entries of a matrix

# A side: the rows whose sums a matrix [J, I] gives, its columns I, and their partners J.
Side = tuple[slice, slice]


def _sides(pairs: Pairs) -> list[Side]:
    """All rows with all; or, where only two views are partners, each view with the other."""
    if pairs.across_views and pairs.num_views == 2:
        first, second = pairs.views()
        return [(first, second), (second, first)]
    all_rows = slice(0, len(pairs.rows))
    return [(all_rows, all_rows)]


def _log_weights(pairs: Pairs) -> tuple[list[Tensor], Tensor | None]:
    """Log W ``[J, I]`` of each side, -inf for what is no negative; and the log of the mass."""
    rows, log_masses, log_gaussian = pairs.rows.detach(), None, None
    factors = weight_of(Factors, pairs.weights)
    gaussian = weight_of(Gaussian, pairs.weights)
    if gaussian is not None:
        deviation = (rows @ rows.T).sub_(gaussian.mean)  # [M, M] a column for each row
        log_gaussian = deviation.square_().mul_(-0.5 / gaussian.variance)
        log_masses = log_gaussian.logsumexp(0)
    of_sides = []
    by_column = None if factors is None else factors.by_column()
    for i, j in _sides(pairs):
        if factors is not None and by_column is not None:
            log_weights = factors.log_block(by_column, j, i)
        else:
            log_weights = rows.new_zeros(j.stop - j.start, i.stop - i.start)
        if log_gaussian is not None:
            log_weights += log_gaussian[j, i]
        pairs.fill_graphs(log_weights, j, i, -torch.inf)
        if pairs.across_views and i == j:
            for view in pairs.views():
                log_weights[view, view] = -torch.inf
        of_sides.append(log_weights)
    return of_sides, log_masses


def _sums(rows: Tensor, pairs: Pairs, log_weights: list[Tensor], temperature: float) -> Tensor:
    """Log S ``[M]``, in steps that autograd can take."""
    of_sides = []
    limits = torch.finfo(rows.dtype)
    for (i, j), of_pairs in zip(_sides(pairs), log_weights, strict=True):
        logits = of_pairs + rows[j] @ rows[i].T / temperature
        peaks = logits.detach().amax(0)  # [I] -inf where there is no negative
        sums = (logits - peaks.clamp_min(limits.min)).exp().sum(0)
        # Elsewhere they are 1 or more; log 0 would have no gradient but NaN.
        of_sides.append(sums.clamp_min(limits.tiny).log() + peaks)
    return torch.cat(of_sides)


def _run(values: Tensor, run: slice) -> Tensor:
    """Some rows; all of them as they are, which saves a step."""
    return values if run == slice(0, values.shape[0]) else values[run]


class _Sums(torch.autograd.Function):
    """`_sums` with a gradient of its own, in which a pair serves both its ends."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, pairs: Pairs, log_weights: list[Tensor], temperature: float
    ) -> Tensor:
        of_sides, saved = [], []
        for (i, j), of_pairs in zip(_sides(pairs), log_weights, strict=True):
            mine, others = _run(rows, i), _run(rows, j)
            logits = of_pairs.addmm_(others, mine.T, alpha=1 / temperature)
            peaks = None
            if 1 / temperature > LARGEST_EXPONENT:
                peaks = logits.amax(0)
                logits = above_underflow(logits.sub_(peaks.clamp_min(torch.finfo(peaks.dtype).min)))
            exponentials = logits.exp_()
            sums = exponentials.sum(0)
            if peaks is not None:
                sums.masked_fill_(peaks == -torch.inf, 0.0)
            of_sides.append(sums.log() if peaks is None else sums.log() + peaks)
            # A row without negatives has nothing to share out.
            saved += [exponentials, sums.masked_fill_(sums == 0, torch.inf)]
        ctx.save_for_backward(rows, *saved)
        ctx.pairs, ctx.temperature = pairs, temperature
        return of_sides[0] if len(of_sides) == 1 else torch.cat(of_sides)

    @staticmethod
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor | None, ...]:
        rows, *saved = ctx.saved_tensors
        if torch.is_grad_enabled():  # it is to be differentiated again
            with torch.no_grad():
                log_weights, _ = _log_weights(ctx.pairs)
            log_s = _sums(rows, ctx.pairs, log_weights, ctx.temperature)
            (d_rows,) = torch.autograd.grad(log_s, rows, slopes, create_graph=True)
            return d_rows, None, None, None
        d_rows = None
        for (i, j), exponentials, sums in zip(
            _sides(ctx.pairs), saved[::2], saved[1::2], strict=True
        ):
            scales = (_run(slopes, i) / sums).div_(ctx.temperature)  # [I]
            if i == j and exponentials.numel() <= _IN_CACHE:  # two passes cost less than a product
                scaled = exponentials * scales
                return (scaled + scaled.T) @ rows, None, None, None
            d_rows = torch.zeros_like(rows) if d_rows is None else d_rows
            mine, others, scales = _run(rows, i), _run(rows, j), scales.unsqueeze(1)
            _run(d_rows, j).addmm_(exponentials, mine * scales)
            _run(d_rows, i).addcmul_(exponentials.T @ others, scales)
        return d_rows, None, None, None
