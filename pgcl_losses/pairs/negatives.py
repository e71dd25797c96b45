"""Which keys are negatives of a query, and how much each counts."""

import math

import torch
from torch import Tensor

from pgcl_losses.base.modes import is_transformed
from pgcl_losses.pairs.partners import Partners
from pgcl_losses.pairs.rows import Pairs, Rows
from pgcl_losses.pairs.score_mod import Pair, modified


def add_log_weights(
    pairs: Pairs,
    rows: Rows,
    logits: Tensor,
    partners: Partners | None,
    temperature: float | Tensor,
) -> Tensor:
    """Add log W_ij to logits ``[I, K]``: how much key j counts as a negative of query i.

    The logits are scores / temperature, and become -inf where a key is not a negative. Of a matrix
    no other function decides this, except that partners are left out afterwards, and that kernels
    repeat the rule for plain views (`fused._logits`). Listed negatives are added up in `lists`.

    Logits are changed in place, so what depends on the scores comes first: the weights of pairs by
    their cosine, and the user's `score_mod`, which alone needs to know the partners.
    """
    log_weights = []  # [I, K] each
    if pairs.cosine_weights is not None:  # a constant for the gradient
        filled = None if pairs.filled is None else rows.pick(pairs.filled)[1]
        weight = pairs.cosine_weights.rows(rows.pick, logits.detach(), temperature, filled)
        log_weights.append(weight.detach())
    if pairs.cluster_weights is not None:
        log_weights.append(pairs.cluster_weights.rows(rows.pick))
    if pairs.score_mod is not None:
        assert partners is not None
        is_negative = fill_others(rows, partners, torch.ones_like(logits, dtype=torch.bool), False)
        for log_w in log_weights:
            is_negative &= log_w != -math.inf
        tau = logits.new_zeros(()) + temperature  # a tensor
        metadata = None if pairs.metadata is None else rows.pick(pairs.metadata)
        logits = modified(pairs.score_mod, logits, Pair(is_negative, tau, metadata))
        if log_weights:  # inf - inf would be NaN
            return sum(log_weights, logits).where(is_negative, -math.inf)
        return fill_others(rows, partners, logits.clone(), -math.inf)
    # In place, but vmap may have many weights for scores that all share.
    add = torch.add if is_transformed(logits) else torch.Tensor.add_
    for log_w in log_weights:
        logits = add(logits, log_w)
    # -inf is added and not assigned, because NaN must stay NaN.
    if pairs.memory is not None:
        size = len(pairs.memory)
        if pairs.filled is not None:
            past = logits[:, -size:]
            past += past.new_zeros(size).masked_fill_(~pairs.filled[-size:], -math.inf)
        if pairs.negatives == "memory":
            logits[:, :-size].add_(-math.inf)
    if rows.masked is not None:
        logits[:, slice(*rows.masked)].add_(-math.inf)
    return logits


def fill_others(rows: Rows, partners: Partners, values: Tensor, value: float) -> Tensor:
    """Set the values ``[I, K]`` of keys that are no negatives, whatever their weights."""
    if rows.masked is not None:
        values[:, slice(*rows.masked)] = value
    return partners.fill(values, value)
