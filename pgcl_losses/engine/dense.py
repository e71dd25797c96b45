"""The engine for batches that fit: plain torch operations on one matrix of logits."""

import math
from typing import Any

import torch
from torch import Tensor

from pgcl_losses._modes import is_dual, is_eager
from pgcl_losses.engine.blocks import Run
from pgcl_losses.engine.contract import (
    LOG2_E,
    Factors,
    Pairs,
    Sums,
    Table,
    as_number,
    check_kind,
    couples,
    d_temperature,
    may_overflow,
)
from pgcl_losses.engine.lookup import BlockWeights

_IN_CACHE = 1 << 20  # pairs; a copy of so many costs less than another product


def log_sums(pairs: Pairs, temperature: float | Tensor) -> Sums:
    """See `Sums`; they can be differentiated any number of times."""
    check_kind("dense", pairs.by_cluster, Table, Factors)
    by_cosine, log_totals = _by_cosine(pairs)
    plain = is_eager() and not is_dual(pairs.embeddings) and not may_overflow(temperature)
    function: Any = _PlainSums.apply if plain else _sums
    return Sums(function(pairs.embeddings, pairs, by_cosine, temperature), log_totals)


# The embeddings I whose sums the columns of a matrix [J, I] give, and their partners J.
Side = tuple[slice, slice]


def _sides(pairs: Pairs) -> list[Side]:
    """All embeddings with all; or, where there are two sets and no others, each with the other."""
    if pairs.compared == ((0, 1),) and len(pairs.lengths) == 2 and min(pairs.lengths) > 0:
        first, second = pairs.sets()
        return [(first, second), (second, first)]
    return [(slice(0, pairs.embeddings.shape[0]),) * 2]


def _by_cosine(pairs: Pairs) -> tuple[Tensor | None, Tensor | None]:
    """Log2 of the pair weight ``[J, I]`` for all pairs, and the log of its total ``[I]``."""
    if pairs.by_cosine is None:
        return None, None
    with torch.no_grad():
        embeddings = pairs.embeddings.detach()  # also for forward mode
        cosines = embeddings @ embeddings.T
        numbers = pairs.by_cosine.numbers(1.0)
        logs = pairs.by_cosine.formula(cosines, *numbers, out=cosines if is_eager() else None)
        return logs, logs.exp2().sum(0).log_()


def _log2_weights(pairs: Pairs, by_cosine: Tensor | None, side: Side) -> Tensor:
    """Log2 W ``[J, I]``, -inf for what is no negative: the matrix to which logits are added."""
    i, j = side
    if pairs.by_cluster is None:
        weights = pairs.embeddings.new_zeros(j.stop - j.start, i.stop - i.start)
    else:
        blocks = BlockWeights(pairs.by_cluster, logarithms=True)
        weights = blocks.of(Run(i, range(0)), Run(j, range(0)), 0)
        if weights.shape[0] != j.stop - j.start:
            weights = weights.repeat(j.stop - j.start, 1)
    if by_cosine is not None:
        weights += by_cosine[j, i]
    pairs.fill_items(weights, j, i, -torch.inf)
    if i == j and not pairs.compares_all():
        sets = pairs.sets()
        for a, b in set(couples(len(sets))).difference(pairs.compared):
            weights[sets[a], sets[b]] = weights[sets[b], sets[a]] = -torch.inf
    return weights


def _sums(
    embeddings: Tensor, pairs: Pairs, by_cosine: Tensor | None, temperature: float | Tensor
) -> Tensor:
    """Log S ``[M]``, in steps that autograd can take."""
    of_sides = []
    limits = torch.finfo(embeddings.dtype)
    for i, j in _sides(pairs):
        with torch.no_grad():
            log_weights = _log2_weights(pairs, by_cosine, (i, j)).div_(LOG2_E)
        logits = log_weights + embeddings[j] @ embeddings[i].T / temperature
        peaks = logits.detach().amax(0)  # [I] -inf where there is no negative
        # Smaller exponentials take a CPU up to thirty times as long, and are nothing beside a 1.
        above = (logits - peaks.clamp_min(limits.min)).clamp_min_(1 + math.log(limits.tiny))
        # Elsewhere sums are 1 or more; log 0 would have no gradient but NaN.
        of_sides.append(above.exp().sum(0).clamp_min(limits.tiny).log() + peaks)
    return torch.cat(of_sides)


class _PlainSums(torch.autograd.Function):
    """`_sums` with a gradient of its own, for temperatures at which nothing overflows."""

    @staticmethod
    def forward(
        ctx: Any, embeddings: Tensor, pairs: Pairs, by_cosine: Tensor | None, temperature: float
    ) -> Tensor:
        of_sides, saved = [], []
        tiny, scale = torch.finfo(embeddings.dtype).tiny, LOG2_E / as_number(temperature)
        for i, j in _sides(pairs):
            logits = _log2_weights(pairs, by_cosine, (i, j))
            logits.addmm_(embeddings[j], embeddings[i].T, alpha=scale)
            terms = logits.exp2_()
            if not (pairs.by_cluster is None and by_cosine is None):
                torch.threshold_(terms, tiny, 0.0)  # denormal numbers make matrix products slow
            sums = terms.sum(0)
            of_sides.append(sums.log())
            # A sum without negatives has no gradient.
            saved += [terms, torch.threshold_(sums, tiny, torch.inf)]
        ctx.save_for_backward(embeddings, *saved)
        ctx.pairs, ctx.temperature = pairs, temperature
        return torch.cat(of_sides)

    @staticmethod
    def backward(ctx: Any, d_log_s: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, *saved = ctx.saved_tensors
        pairs, temperature = ctx.pairs, ctx.temperature
        of_temperature = ctx.needs_input_grad[3]
        if torch.is_grad_enabled():  # it is to be differentiated again
            log_s = _sums(embeddings, pairs, _by_cosine(pairs)[0], temperature)
            inputs = (embeddings, temperature) if of_temperature else (embeddings,)
            again = torch.autograd.grad(log_s, inputs, d_log_s, create_graph=True)
            return again[0], None, None, again[1] if of_temperature else None
        d_embeddings = _gradient(pairs, embeddings, temperature, saved, d_log_s)
        d_tau = d_temperature(embeddings, d_embeddings, temperature) if of_temperature else None
        return d_embeddings, None, None, d_tau


def _gradient(
    pairs: Pairs,
    embeddings: Tensor,
    temperature: float | Tensor,
    saved: list[Tensor],
    d_log_s: Tensor,
) -> Tensor:
    """Of the sum of d_log_s_i log S_i; ``saved``: terms and sums of each side."""
    sides = _sides(pairs)
    (i, j), terms, sums = sides[0], saved[0], saved[1]
    if i == j and terms.numel() <= _IN_CACHE:  # a pair serves both its embeddings
        scales = d_log_s / (sums * temperature)  # [I]
        d_pairs = terms.T.clone(memory_format=torch.contiguous_format)
        d_pairs.mul_(scales.unsqueeze(1)).addcmul_(terms, scales)
        return d_pairs @ embeddings
    d_embeddings = torch.zeros_like(embeddings)
    for (i, j), terms, sums in zip(sides, saved[::2], saved[1::2], strict=True):
        scales = d_log_s[i] / (sums * temperature)
        d_embeddings[j].addmm_(terms, embeddings[i] * scales.unsqueeze(1))
        d_embeddings[i].addcmul_(terms.T @ embeddings[j], scales.unsqueeze(1))
    return d_embeddings
