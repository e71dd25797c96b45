"""How much a negative counts: the weight w_ij (Eq. 14) and the scale M_i (Eq. 13), as logarithms.

A negative at distance d_ij from query i weighs w_ij = exp(-(d_ij - mu_i)^2 / (2 sigma_i^2)), with
mu_i and sigma_i the mean and standard deviation of d_ij over all samples j, and 1 where sigma_i is
no larger than rounding. M_i scales a query's weights to an average of 1 over all samples. With soft
clusters the weight of a pair is the mean of M w over the clusters of both, by their q.

Distances are 1 - cosine, and all is written in cosines: sigma and |d_ij - mu| are the same.
"""

import math

import torch
from torch import Tensor

# Cosines of unit vectors carry a few rounding errors each; a spread below this many is noise.
_ROUNDING_ERRORS = 32


def prototype_log_weights(prototypes: Tensor, fractions: Tensor) -> Tensor:
    """log(M_i w_ij) for d_ij = 1 - cos(C_{c_i}, C_{c_j}): one ``[K, K]`` table for all pairs.

    mu, sigma and M of a query follow from its cluster and the fraction of samples in each cluster.
    ``prototypes``: ``[K, D]`` of unit length; ``fractions``: ``[K]``, sum to 1.
    """
    column = fractions.unsqueeze(1)  # [K, 1]
    cosines = prototypes @ prototypes.T  # [K, K]
    squares = (cosines - cosines @ column).square_()  # (d - mu)^2
    variances = _above_noise(squares @ column)  # [K, 1]
    # M w fraction is a softmax. A cluster without samples has a negligible one.
    log_fractions = fractions.clamp_min(torch.finfo(fractions.dtype).tiny).log_()
    log_w = torch.addcdiv(log_fractions, squares, variances, value=-0.5)
    return log_w.log_softmax(1).sub_(log_fractions)


def within_positions(targets: Tensor, first: int, end: int) -> Tensor:
    """Whether a cluster is at positions first..end-1 of each q, best first: ``[M, K]``."""
    order = targets.argsort(stable=True, descending=True, dim=-1)
    return torch.zeros_like(targets, dtype=torch.bool).scatter_(-1, order[:, first:end], True)


def cosine_moments(embeddings: Tensor, filled: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """For d_ij = 1 - cos(z_i, z_j): mean and variance of each embedding's cosines, both ``[M]``.

    They follow from the moments of the embeddings, without a matrix of pairs. ``embeddings``: all
    samples, ``[M, D]`` of unit length, or zero where they are not ``filled``.
    """
    mean = filled_mean(embeddings, filled)  # [D]
    centered = embeddings - mean
    if filled is not None:
        centered *= filled.unsqueeze(1)
    count = len(embeddings) if filled is None else filled.sum()
    covariance = centered.T @ centered / count  # [D, D]
    variance = ((embeddings @ covariance) * embeddings).sum(1)  # [M]
    return embeddings @ mean, _above_noise(variance)


def filled_mean(values: Tensor, filled: Tensor | None) -> Tensor:
    """The mean of filled slots, ``[M, D] -> [D]``; the others are 0."""
    return values.mean(0) if filled is None else values.sum(0) / filled.sum()


def _above_noise(variance: Tensor) -> Tensor:
    """Infinity where sigma is at rounding level, which makes every weight 1."""
    noise = _ROUNDING_ERRORS * torch.finfo(variance.dtype).eps
    return torch.threshold(variance, noise**2, math.inf)


def cluster_counts(
    clusters: Tensor, size: int, dtype: torch.dtype = torch.long, filled: Tensor | None = None
) -> Tensor:
    """The histogram n_k of filled slots: ``[N]`` cluster numbers -> ``[K]`` counts."""
    counts = clusters.new_zeros(size, dtype=dtype)
    each = torch.ones_like(clusters, dtype=dtype) if filled is None else filled.to(dtype)
    return counts.scatter_add_(0, clusters, each)
