"""The contract of the engines word by word: in float64, with [M, M] matrices and autograd."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.engine.contract import Factors, Pairs, Sums, Table


class Exact(NamedTuple):
    """What an engine's results are compared with."""

    log_sums: Tensor  # [M] without the pair weight's scale, as engines return them
    log_totals: Tensor | None  # [M] of the pair weight
    gradient: Tensor  # [M, D] of the sum of d_log_sums_i log S_i
    d_temperature: Tensor


def exact(pairs: Pairs, temperature: float, d_log_sums: Tensor) -> Exact:
    """An embedding without a negative has log S = -inf, of which no gradient comes."""
    pairs = of_dtype(pairs, torch.float64)
    tau = torch.tensor(temperature, dtype=torch.float64, device=pairs.embeddings.device)
    tau.requires_grad_()
    embeddings = pairs.embeddings.detach().requires_grad_()
    cosines = embeddings @ embeddings.T
    log_weights, log_totals = log_by_cluster(pairs), None
    if pairs.by_cosine is not None:
        log_of_cosines = log_by_cosine(pairs, cosines.detach())
        there = is_present(pairs)  # all embeddings, itself among them
        log_totals = log_of_cosines.masked_fill(~there, -torch.inf).logsumexp(1)
        log_totals[is_memory(pairs)] = -torch.inf
        log_weights = log_weights + log_of_cosines
    counts = are_negatives(pairs) & (log_weights != -torch.inf)
    logits = (cosines / tau + log_weights).masked_fill(~counts, -torch.inf)
    some = counts.any(1)
    log_sums = cosines.new_full(some.shape, -torch.inf)
    log_sums[some] = logits[some].logsumexp(1)
    total = (d_log_sums.double() * log_sums)[some].sum()
    gradient, d_temperature = torch.zeros_like(embeddings), torch.zeros_like(tau)
    if some.any():
        gradient, d_temperature = torch.autograd.grad(total, (embeddings, tau))
    return Exact(log_sums.detach(), log_totals, gradient, d_temperature)


def log_scaled(sums: Exact | Sums, pairs: Pairs) -> Tensor:
    """Log S of the queries, whose pair weight has the mean 1 over all embeddings present."""
    log_sums = sums.log_sums[~is_memory(pairs)]
    if sums.log_totals is None:
        return log_sums
    return log_sums + is_present(pairs).sum().double().log() - sums.log_totals[~is_memory(pairs)]


def is_memory(pairs: Pairs) -> Tensor:
    count = len(pairs.embeddings)
    return torch.arange(count, device=pairs.embeddings.device) >= count - pairs.memory_size


def is_present(pairs: Pairs) -> Tensor:
    return torch.ones_like(is_memory(pairs)) if pairs.present is None else pairs.present


def are_negatives(pairs: Pairs) -> Tensor:
    """Whether j is of another item than i, and in a set that the set of i is compared with.

    And i is a query, and j is present.
    """
    sets = [number for number, length in enumerate(pairs.lengths) for _ in range(length)]
    items = [place for length in pairs.lengths for place in range(length)]
    if pairs.memory_size:  # items of its own
        items[-pairs.memory_size :] = range(-pairs.memory_size, 0)
    if pairs.items is not None:
        items = pairs.items.tolist()
    compared = {*pairs.compared, *((b, a) for a, b in pairs.compared)}
    each = list(zip(sets, items, strict=True))
    negatives = [[(a, b) in compared and of_i != of_j for b, of_j in each] for a, of_i in each]
    are = torch.tensor(negatives, dtype=torch.bool, device=pairs.embeddings.device)
    return are & ~is_memory(pairs).unsqueeze(1) & is_present(pairs)


def log_by_cluster(pairs: Pairs) -> Tensor:
    weights = pairs.by_cluster
    if isinstance(weights, Table):
        of_heads = [
            log_table[clusters.unsqueeze(1), clusters]  # [M, M]
            for log_table, clusters in zip(
                weights.log_weights, weights.clusters.unbind(1), strict=True
            )
        ]
        return torch.stack(of_heads).logsumexp(0) - math.log(len(of_heads))
    if isinstance(weights, Factors):
        return (weights.left @ weights.right.T).log()
    count = len(pairs.embeddings)
    return pairs.embeddings.new_zeros(count, count)


def log_by_cosine(pairs: Pairs, cosines: Tensor) -> Tensor:
    assert pairs.by_cosine is not None
    numbers = (of_each.double().unsqueeze(1) for of_each in pairs.by_cosine.numbers(1.0))
    return pairs.by_cosine.formula(cosines, *numbers) * math.log(2)


def of_dtype(value: Any, dtype: torch.dtype) -> Any:
    """The same pairs with floating-point numbers of another type."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple):
        parts = [of_dtype(part, dtype) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value
