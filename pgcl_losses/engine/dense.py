"""The engine for batches that fit: plain torch operations on one matrix of logits."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.engine.pairs import Bells, Pairs, Table


def dense(pairs: Pairs, temperature: float) -> Tensor:
    """Each query's loss, a cross-entropy over columns whose logits are s / t + log W."""
    return F.cross_entropy(logits(pairs, temperature), pairs.positives, reduction="none")


def logits(pairs: Pairs, temperature: float) -> Tensor:
    """``[R, C]``: s / t + log W, without W for the positive, -inf for what is no negative."""
    with torch.no_grad():
        log_weights = _log_weights(pairs)  # [R, C]
        log_weights.scatter_(1, pairs.positives.unsqueeze(1), 0.0)
        if pairs.own is not None:
            log_weights.scatter_(1, pairs.own.unsqueeze(1), -torch.inf)
    return log_weights.addmm_(pairs.rows / temperature, pairs.columns.T)


def _log_weights(pairs: Pairs) -> Tensor:
    """Log W for every pair, a new ``[R, C]``."""
    weights = pairs.weights
    if isinstance(weights, Table):
        by_cluster = weights.log_weights.index_select(1, weights.columns)  # [T, C]
        log_weights = by_cluster.index_select(0, weights.rows)
    elif isinstance(weights, Bells):
        log_weights = _log_bells(weights, pairs.rows, pairs.columns)
        over_all = log_weights
        if weights.population is not pairs.columns:
            over_all = _log_bells(weights, pairs.rows, weights.population)
        log_sum = torch.logsumexp(over_all, dim=1, keepdim=True)
        log_weights -= log_sum - math.log(len(weights.population))
    else:
        log_weights = pairs.rows.new_zeros(len(pairs.rows), len(pairs.columns))
    if pairs.left_out is not None:
        same = pairs.left_out.rows.unsqueeze(1) == pairs.left_out.columns
        log_weights.masked_fill_(same, -torch.inf)
    return log_weights


def _log_bells(bells: Bells, rows: Tensor, columns: Tensor) -> Tensor:
    deviation = (rows @ columns.T).sub_(bells.mean.unsqueeze(1))
    return deviation.square_().div_(-2 * bells.variance.unsqueeze(1))
