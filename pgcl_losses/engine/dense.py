"""One matrix of logits, in operations that autograd, torch.func and torch.compile can take."""

import math

import torch
from torch import Tensor

from pgcl_losses.engine.pairs import LOG2_E, Factors, Pairs, Table


def log_sums(pairs: Pairs, temperature: float | Tensor) -> Tensor:
    """log S ``[Q]``, -inf where a query has no negatives; differentiable any number of times."""
    pairs.check_weights("dense", Table, Factors)
    queries, keys = pairs.embeddings[: pairs.num_queries()], pairs.keys()
    with torch.no_grad():
        log_weights = _log_weights(pairs, keys.detach() @ queries.detach().T)
    logits = log_weights + keys @ queries.T / temperature  # [M + B, Q]
    peaks = logits.detach().amax(0)  # [Q] -inf where a query has no negatives
    limits = torch.finfo(logits.dtype)
    # Denormal exponentials are slow on a CPU, and negligible beside a 1.
    above = (logits - peaks.clamp_min(limits.min)).clamp_min(1 + math.log(limits.tiny))
    # Other sums are 1 or more; the gradient of log 0 is NaN.
    return above.exp().sum(0).clamp_min(limits.tiny).log() + peaks


def _log_weights(pairs: Pairs, cosines: Tensor) -> Tensor:
    """log W ``[M + B, Q]`` by key and query, -inf for pairs that are no negatives."""
    queries, keys = (slice(0, count) for count in reversed(cosines.shape))
    left_out = pairs.left_out()
    log_weights = torch.zeros_like(cosines)
    if pairs.pair_weight is not None:
        numbers = [of_all[queries] for of_all in pairs.pair_weight.numbers(1.0)]
        by_cosine = pairs.pair_weight.formula(cosines, *numbers) / LOG2_E
        totals = (by_cosine + left_out.log_present.unsqueeze(1)).logsumexp(0)
        log_weights = by_cosine - totals + pairs.num_samples().log()
    if pairs.weights is not None:
        lines = pairs.weights.lines(pairs.weights.scaled(logs=True), queries, axis=0)
        log_weights = log_weights + pairs.weights.fill(lines, keys, logs=True) / LOG2_E
    log_weights = log_weights + left_out.log_present.unsqueeze(1)
    i = torch.arange(cosines.shape[1], device=cosines.device)
    j = torch.arange(len(cosines), device=cosines.device).unsqueeze(1)
    log_weights = log_weights.masked_fill(left_out.mask(i, j), -math.inf)
    if pairs.listed is not None:
        query, key = pairs.listed
        log_weights = log_weights.index_put((key, query), log_weights.new_full((), -math.inf))
    return log_weights
