"""The contrast as one matrix, in operations that autograd and torch.func can take."""

import math
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.engine.pair_weights import LOG2_E
from pgcl_losses.engine.pairs import Pairs
from pgcl_losses.forms import Form, Mean, Term, largest_exponent, of_existing


class _Positives:
    """Means over the positives of each query, for autograd."""

    def __init__(self, scores: Tensor, are_positives: Tensor, weights: Tensor) -> None:
        self.scores, self.are_positives, self.weights = scores, are_positives, weights  # [M + B, Q]
        self.totals = weights.sum(0)
        self.exist = self.totals > 0

    def mean(self, term: Term, offsets: Tensor) -> Mean:
        # Where there is no positive, an offset may be -inf, and its gradient NaN.
        gaps = (offsets - self.scores).where(self.are_positives, 0.0)
        means = (term(gaps)[0] * self.weights).sum(0) / self.totals.where(self.exist, 1.0)
        return of_existing(means, means, self.exist, offsets)

    def log_sum(self) -> Mean:
        count = self.weights > 0
        peaks = self.scores.detach().masked_fill(~count, -torch.inf).amax(0)
        above = (self.scores - peaks.where(self.exist, 0.0)).where(self.are_positives, -torch.inf)
        powers = above.clamp_max(largest_exponent(above)).exp()
        sums = (powers * self.weights).sum(0).where(self.exist, 1.0)
        log_e = (sums.log() + peaks).where(self.exist, 0.0)
        return Mean(log_e, log_e, self.exist)


def losses(pairs: Pairs, temperature: float | Tensor, form: Form) -> Mean:
    """The losses ``[Q]``, differentiable any number of times."""
    queries, keys = pairs.embeddings[: pairs.num_queries()], pairs.keys()
    counts, are_positives, weights = pairs.masks()  # [M + B, Q]
    scores = keys @ queries.T / temperature
    with torch.no_grad():
        log_weights = _log_weights(pairs, keys.detach() @ queries.detach().T) + counts.log()
        log_count = counts.sum(0).log()
    log_s = _log_sum(log_weights + (1 + pairs.hardness) * scores)
    if pairs.hardness > 0:  # weights of a mean of 1 over the negatives
        log_totals = _log_sum(log_weights + pairs.hardness * scores)
        log_s = log_s + log_count - log_totals.where(log_count > -torch.inf, 0.0)
    return form(log_s, _Positives(scores, are_positives, weights), temperature, log_count)[0]


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
