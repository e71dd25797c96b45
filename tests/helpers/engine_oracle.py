"""The contract of the engines word by word: in float64, with [M, M] matrices and autograd."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.engine.contract import Factors, Pairs, Past, Sums, Table


class Exact(NamedTuple):
    """What an engine's results are compared with."""

    log_sums: Tensor  # [M] without the pair weight's scale, as engines return them
    log_totals: Tensor | None  # [M] of the pair weight
    gradient: Tensor  # [M, D] of the sum of d_log_sums_i log S_i
    d_temperature: Tensor


def exact(pairs: Pairs, temperature: float, d_log_sums: Tensor, past: Past | None = None) -> Exact:
    """An embedding without a negative has log S = -inf, of which no gradient comes."""
    pairs, past = of_dtype(pairs, torch.float64), of_dtype(past, torch.float64)
    tau = torch.tensor(temperature, dtype=torch.float64, device=pairs.embeddings.device)
    tau.requires_grad_()
    embeddings = pairs.embeddings.detach().requires_grad_()
    others = embeddings if past is None else torch.cat([embeddings, past.embeddings])
    cosines = embeddings @ others.T
    log_weights, log_totals = log_by_cluster(pairs, past), None
    if pairs.by_cosine is not None:
        log_of_cosines = log_by_cosine(pairs, cosines.detach())
        there = are_present(pairs, past)  # all embeddings, itself among them
        log_totals = log_of_cosines.masked_fill(~there, -torch.inf).logsumexp(1)
        log_weights = log_weights + log_of_cosines
    counts = are_negatives(pairs, past) & (log_weights != -torch.inf)
    logits = (cosines / tau + log_weights).masked_fill(~counts, -torch.inf)
    some = counts.any(1)
    log_sums = cosines.new_full(some.shape, -torch.inf)
    log_sums[some] = logits[some].logsumexp(1)
    total = (d_log_sums.double() * log_sums)[some].sum()
    gradient, d_temperature = torch.zeros_like(embeddings), torch.zeros_like(tau)
    if some.any():
        gradient, d_temperature = torch.autograd.grad(total, (embeddings, tau))
    return Exact(log_sums.detach(), log_totals, gradient, d_temperature)


def log_scaled(sums: Exact | Sums, pairs: Pairs, past: Past | None = None) -> Tensor:
    """Log S whose pair weight has the mean 1 over all embeddings."""
    if sums.log_totals is None:
        return sums.log_sums
    return sums.log_sums + are_present(pairs, past).sum().double().log() - sums.log_totals


def are_present(pairs: Pairs, past: Past | None) -> Tensor:
    """Which embeddings of the pairs and of the past take part: ``[M + B]``."""
    device = pairs.embeddings.device
    present = [torch.ones(len(pairs.embeddings), dtype=torch.bool, device=device)]
    if past is not None:
        all_of_past = torch.ones(len(past.embeddings), dtype=torch.bool, device=device)
        present.append(all_of_past if past.present is None else past.present)
    return torch.cat(present)


def are_negatives(pairs: Pairs, past: Past | None = None) -> Tensor:
    """Whether j is of another item than i, and in a set that the set of i is compared with.

    Or of the past, which is compared with all. ``[M, M + B]``.
    """
    sets = [number for number, length in enumerate(pairs.lengths) for _ in range(length)]
    items = [place for length in pairs.lengths for place in range(length)]
    if pairs.items is not None:
        items = pairs.items.tolist()
    compared = {*pairs.compared, *((b, a) for a, b in pairs.compared)}
    each = list(zip(sets, items, strict=True))
    of_past = []
    if past is not None:
        of_past = [None] * len(past.embeddings) if pairs.items is None else past.items.tolist()
    are = [
        [(a, b) in compared and of_i != of_j for b, of_j in each] + [of_i != j for j in of_past]
        for a, of_i in each
    ]
    device = pairs.embeddings.device
    return torch.tensor(are, dtype=torch.bool, device=device) & are_present(pairs, past)


def log_by_cluster(pairs: Pairs, past: Past | None) -> Tensor:
    weights, count = pairs.by_cluster if past is None else past.by_cluster, len(pairs.embeddings)
    if isinstance(weights, Table):
        of_heads = [
            log_table[clusters[:count].unsqueeze(1), clusters]  # [M, M + B]
            for log_table, clusters in zip(
                weights.log_weights, weights.clusters.unbind(1), strict=True
            )
        ]
        return torch.stack(of_heads).logsumexp(0) - math.log(len(of_heads))
    if isinstance(weights, Factors):
        return (weights.left[:count] @ weights.right.T).log()
    return pairs.embeddings.new_zeros(count, len(are_present(pairs, past)))


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
