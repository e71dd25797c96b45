"""The contract of the engines word by word: in float64, with [M, M + B] matrices and autograd."""

import math

import torch
from torch import Tensor

from pgcl_losses.engine.pairs import Factors, Pairs, Table


def exact(pairs: Pairs, temperature: float, d_log_s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """log S ``[Q]``, and the gradient of sum_i d_log_s_i log S_i to embeddings and temperature.

    A query without negatives has log S = -inf, of which no gradient comes.
    """
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    embeddings = pairs.embeddings.detach().requires_grad_()
    queries = embeddings[: pairs.num_queries()]
    keys = embeddings if pairs.past is None else torch.cat([embeddings, pairs.past])
    cosines, log_weights = queries @ keys.T, log_of_weights(pairs)
    if pairs.pair_weight is not None:
        numbers = [of_each[: len(queries), None] for of_each in pairs.pair_weight.numbers(1.0)]
        by_cosine = pairs.pair_weight.formula(cosines.detach(), *numbers) * math.log(2)
        present = torch.tensor(are_present(pairs))
        totals = by_cosine.masked_fill(~present, -torch.inf).logsumexp(1, keepdim=True)
        log_weights = log_weights + by_cosine - totals + present.sum().double().log()
    counts = torch.tensor(are_negatives(pairs)) & (log_weights != -torch.inf)
    logits = (cosines / tau + log_weights).masked_fill(~counts, -torch.inf)
    some = counts.any(1)
    log_s = cosines.new_full(some.shape, -torch.inf)
    log_s[some] = logits[some].logsumexp(1)
    gradient, d_temperature = torch.zeros_like(embeddings), torch.zeros_like(tau)
    if some.any():
        total = (d_log_s * log_s)[some].sum()
        gradient, d_temperature = torch.autograd.grad(total, (embeddings, tau))
    return log_s.detach(), gradient, d_temperature


def are_present(pairs: Pairs) -> list[bool]:
    """Which embeddings of the batch and of the past take part: ``[M + B]``."""
    if pairs.present is None:
        return [True] * (len(pairs.embeddings) + pairs.num_past())
    return pairs.present.tolist()


def are_negatives(pairs: Pairs) -> list[list[bool]]:
    """Whether j is of another item than i, in a set compared with i's or past, and not listed."""
    count, num_past = len(pairs.embeddings), pairs.num_past()
    sets = [a for a, length in enumerate(pairs.lengths) for _ in range(length)]
    items = [place for length in pairs.lengths for place in range(length)] + [None] * num_past
    if pairs.items is not None:
        items = pairs.items.tolist()
    present = are_present(pairs)
    listed = [] if pairs.listed is None else torch.stack(pairs.listed, 1).tolist()
    return [
        [
            present[j]
            and items[i] != items[j]
            and (j >= count or pairs.negatives != "memory")
            and (j >= count or pairs.negatives == "all" or sets[i] != sets[j])
            and [i, j] not in listed
            for j in range(count + num_past)
        ]
        for i in range(pairs.num_queries())
    ]


def log_of_weights(pairs: Pairs) -> Tensor:
    """Of a table or factors, ``[M, M + B]``."""
    weights, count = pairs.weights, pairs.num_queries()
    if isinstance(weights, Table):
        of_heads = [
            log_table[clusters[:count].unsqueeze(1), clusters]
            for log_table, clusters in zip(
                weights.log_weights, weights.clusters.unbind(1), strict=True
            )
        ]
        return torch.stack(of_heads).logsumexp(0) - math.log(len(of_heads))
    if isinstance(weights, Factors):
        return (weights.left[:count] @ weights.right.T).log()
    return pairs.embeddings.new_zeros(count, len(pairs.keys()))
