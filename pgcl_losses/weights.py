"""How much a negative counts: w_ij and M_i of the paper's reweighting (its Eq. 13), as logarithms.

A negative at distance d_ij from query i weighs exp(-(d_ij - mu_i)^2 / (2 sigma_i^2)), with mu_i and
sigma_i the mean and standard deviation of d_ij over all samples j. M_i scales a query's weights to
an average of 1 over all samples. Where sigma_i is no larger than rounding, all samples are equally
far and all weights are 1.

Distances are 1 - cosine. Everything here is written in cosines: mirroring and shifting all d_ij
changes neither sigma nor |d_ij - mu|.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Cosines of unit rows carry a few rounding errors each; a spread below this many is noise.
_ROUNDING_ERRORS = 32


def prototype_log_weights(prototypes: Tensor, shares: Tensor) -> Tensor:
    """log(M_i w_ij) for d_ij = 1 - cos(C_{c_i}, C_{c_j}): one ``[K, K]`` table for all pairs.

    d_ij depends on the two clusters alone, so mu, sigma and M of a query depend on its cluster and
    on each cluster's share of the samples: mu_a = sum_k share_k d_ak, and so on.

    ``prototypes``: unit rows ``[K, D]``; ``shares``: ``[K]``, sum to 1.
    """
    cosines = prototypes @ prototypes.T  # [K, K]
    squares = (cosines - (cosines @ shares).unsqueeze(1)).square_()  # [K, K]
    variance = _above_noise(squares @ shares)  # [K]
    log_w = squares / (-2 * variance).unsqueeze(1)
    return log_w - (log_w.exp() @ shares).log_().unsqueeze(1)


def sample_bells(rows: Tensor, population: Tensor) -> tuple[Tensor, Tensor]:
    """Where d_ij = 1 - cos(z_i, z_j): mean and variance of each query's cosines, both ``[R]``.

    They follow from the moments of the population, without a matrix of pairs.

    ``rows``: unit queries ``[R, D]``; ``population``: all samples, unit rows ``[P, D]``.
    """
    mean = population.mean(0)  # [D]
    centered = population - mean
    covariance = centered.T @ centered / len(population)  # [D, D]
    variance = ((rows @ covariance) * rows).sum(1)  # [R]
    return rows @ mean, _above_noise(variance)


def _above_noise(variance: Tensor) -> Tensor:
    """Infinity where sigma is at rounding level, which makes every weight 1."""
    noise = _ROUNDING_ERRORS * torch.finfo(variance.dtype).eps
    return F.threshold(variance, noise**2, math.inf)


def cluster_counts(clusters: Tensor, num_prototypes: int) -> Tensor:
    """The histogram n_k: ``[N]`` cluster numbers -> ``[K]`` counts."""
    counts = clusters.new_zeros(num_prototypes)
    return counts.scatter_add_(0, clusters, torch.ones_like(clusters))
