"""The contrast as one matrix, in operations that autograd and torch.func can take."""

import math
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.engine.pair_weights import LOG2_E
from pgcl_losses.engine.pairs import Pairs
from pgcl_losses.forms import Form, Mean, Term


def losses(pairs: Pairs, temperature: float | Tensor, form: Form) -> Mean:
    """The losses ``[Q]``, differentiable any number of times."""
    queries, keys = pairs.embeddings[: pairs.num_queries()], pairs.keys()
    negatives, positives, weights = pairs.masks()  # [M + B, Q]
    scores = keys @ queries.T / temperature
    with torch.no_grad():
        log_weights = _log_weights(pairs, keys.detach() @ queries.detach().T)
        log_weights = log_weights.masked_fill(~negatives, -torch.inf)
        log_count = negatives.sum(0).to(scores).log()
    log_s = _log_sum(log_weights + (1 + pairs.hardness) * scores)
    if pairs.hardness > 0:  # constant weights of a mean of 1 over the negatives
        with torch.no_grad():
            log_totals = _log_sum(log_weights + pairs.hardness * scores.detach())
            scale = log_count - log_totals.masked_fill(log_totals == -torch.inf, 0.0)
            scale = scale + log_s.detach() * (pairs.hardness / (1 + pairs.hardness))
        log_s = log_s / (1 + pairs.hardness) + scale

    def mean_of(term: Term, offsets: Tensor) -> Mean:
        totals = weights.sum(0)
        exist = totals > 0
        # Where there is no positive, an offset may be -inf, and its gradient NaN.
        gaps = offsets - scores
        values = term(gaps.where(positives, 0.0))[0]
        means = (values * weights).sum(0) / totals.where(exist, 1.0)
        return Mean(means.where(exist, offsets.where(offsets.isnan(), 0.0)), means, exist)

    return form(log_s, mean_of, temperature, log_count)[0]


def _log_sum(logits: Tensor) -> Tensor:
    """The log-sum-exp over keys, ``[M + B, Q] -> [Q]``; -inf where a query has no negatives."""
    peaks = logits.detach().amax(0)
    limits = torch.finfo(logits.dtype)
    # Denormal exponentials are slow on a CPU, and negligible beside a 1.
    above = (logits - peaks.clamp_min(limits.min)).clamp_min(1 + math.log(limits.tiny))
    # Other sums are 1 or more; the gradient of log 0 is NaN.
    return above.exp().sum(0).clamp_min(limits.tiny).log() + peaks


def _log_weights(pairs: Pairs, cosines: Tensor) -> Any:
    """log W of a table or factors, and of a pair weight, by key and query: ``[M + B, Q]``."""
    queries, keys = (slice(0, count) for count in reversed(cosines.shape))
    log_weights = torch.zeros_like(cosines)
    if pairs.pair_weight is not None:
        numbers = [of_all[queries] for of_all in pairs.pair_weight.numbers(1.0)]
        by_cosine = pairs.pair_weight.formula(cosines, *numbers) / LOG2_E
        samples = by_cosine
        if pairs.filled is not None:
            samples = by_cosine.masked_fill(~pairs.filled.unsqueeze(1), -torch.inf)
        log_weights = by_cosine - samples.logsumexp(0) + pairs.num_samples().log()
    if pairs.weights is not None:
        columns = pairs.weights.columns(pairs.weights.prepared(logs=True), queries, axis=0)
        log_weights = log_weights + pairs.weights.block(columns, keys, logs=True) / LOG2_E
    return log_weights
