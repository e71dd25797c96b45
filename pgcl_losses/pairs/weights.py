"""How much a negative counts: the weight w_ij (Eq. 14) and the scale M_i (Eq. 13), as logarithms.

w_ij = exp(-(d_ij - mu_i)^2 / (2 sigma_i^2)) is the weight of a negative j at distance d_ij from
query i. mu_i and sigma_i are the mean and the standard deviation of d_ij over all samples j. If
sigma_i is no larger than rounding errors, w_ij is 1. M_i scales the weights of a query to an
average of 1 over all samples.

Distances are 1 - cosine. The code uses cosines in place of distances, since sigma and |d_ij - mu|
are the same for both.

There are two kinds of weights: `Table` and `Gaussian`. Each has a method `rows`, which returns
log W ``[I, K]`` for some queries and keys. If a loss has both kinds, their logarithms are added.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

# The cosine of two unit vectors has a few rounding errors. A standard deviation of fewer rounding
# errors than this is noise.
_ROUNDING_ERRORS = 32


def prototype_log_weights(prototypes: Tensor, fractions: Tensor) -> Tensor:
    """Compute log(M_i w_ij) for d_ij = 1 - cos(C_{c_i}, C_{c_j}): a table ``[K, K]`` by cluster.

    mu, sigma and M of a query follow from its cluster and from the fraction of samples in each
    cluster, so one table holds the weights of all pairs. ``prototypes``: ``[K, D]`` of unit length.
    ``fractions``: ``[K]``, which sum to 1.
    """
    column = fractions.unsqueeze(1)  # [K, 1]
    cosines = prototypes @ prototypes.T  # [K, K]
    squares = (cosines - cosines @ column).square_()  # (d - mu)^2
    variances = _above_noise(squares @ column)  # [K, 1]
    # M * w * fraction is a softmax over clusters. A cluster without samples gets a negligible
    # fraction in place of 0, whose logarithm would be -inf.
    log_fractions = fractions.clamp_min(torch.finfo(fractions.dtype).tiny).log_()
    log_w = torch.addcdiv(log_fractions, squares, variances, value=-0.5)
    return log_w.log_softmax(1).sub_(log_fractions)


def cosine_moments(embeddings: Tensor, filled: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute the mean and variance of each embedding's cosines with all embeddings, ``[M]`` each.

    They give mu and sigma^2 of d_ij = 1 - cos(z_i, z_j). The moments follow from the mean and the
    covariance of the embeddings, without a matrix of pairs. ``embeddings``: all samples ``[M, D]``,
    of unit length, or zero where they are not ``filled``.
    """
    count = len(embeddings) if filled is None else filled.sum()
    mean = embeddings.sum(0) / count  # [D]
    centered = embeddings - mean
    if filled is not None:
        centered *= filled.unsqueeze(1)
    covariance = centered.T @ centered / count  # [D, D]
    variance = ((embeddings @ covariance) * embeddings).sum(1)  # [M]
    return embeddings @ mean, _above_noise(variance)


def _above_noise(variance: Tensor) -> Tensor:
    """Return the variance, or infinity if sigma is at rounding level: then each weight is 1."""
    noise = _ROUNDING_ERRORS * torch.finfo(variance.dtype).eps
    return torch.threshold(variance, noise**2, math.inf)


def cluster_counts(
    clusters: Tensor, size: int, dtype: torch.dtype = torch.long, filled: Tensor | None = None
) -> Tensor:
    """Count the samples in each cluster, without empty slots: cluster numbers ``[N] -> [K]``."""
    counts = clusters.new_zeros(size, dtype=dtype)
    each = torch.ones_like(clusters, dtype=dtype) if filled is None else filled.to(dtype)
    return counts.scatter_add_(0, clusters, each)


# Pick the values of some queries [I, ...] and of their keys [K, ...] from values [M + B, ...].
Pick = Callable[[Tensor], tuple[Tensor, Tensor]]


class Table(NamedTuple):
    """Weights by the clusters of both embeddings: W_ij is the mean over heads h of T_h[c_ih, c_jh].

    An entry of -inf in log T is a weight of 0. A pair is left out if its weight is 0 in all heads.
    """

    log_weights: tuple[Tensor, ...]  # log T_h, [K_h, K_h] for each of H heads
    clusters: Tensor  # [M + B, H] int64

    def rows(self, pick: Pick) -> Tensor:
        """log W ``[I, K]`` for the queries and keys that ``pick`` picks."""
        i, j = pick(self.clusters)  # [I, H] and [K, H]
        if len(self.log_weights) == 1:
            return _looked_up(self.log_weights[0], i[:, 0], j[:, 0])
        heads = zip(self.log_weights, i.unbind(1), j.unbind(1), strict=True)
        weights = [_looked_up(log_w.exp(), *clusters) for log_w, *clusters in heads]
        return sum(weights[1:], weights[0]).div_(len(weights)).log_()


def _looked_up(table: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Look up a table ``[K, K]`` by the clusters of queries and keys: ``[I, K]``.

    Copying whole rows of the table is faster than picking single entries. So the rows or columns of
    the smaller side are copied first.
    """
    if len(table) < len(i):
        return table.index_select(1, j).index_select(0, i)
    return table.index_select(0, i).index_select(1, j)


class Gaussian(NamedTuple):
    """The paper's weight by the cosine of a pair: exp(-(s_ij - mean_i)^2 / (2 variance_i)).

    To weight by another formula of the cosine, write another class with the method `rows`.
    """

    mean: Tensor  # [M + B]
    variance: Tensor  # [M + B] infinite where every weight is 1

    def rows(
        self, pick: Pick, scores: Tensor, temperature: float | Tensor, filled: Tensor | None
    ) -> Tensor:
        """log W ``[I, K]`` for queries, from their scores s / temperature with all embeddings."""
        mean = (pick(self.mean)[0] / temperature).unsqueeze(1)
        # Scale before squaring: the squares of scores would overflow at low temperatures.
        sharpness = ((0.5 / pick(self.variance)[0]).sqrt() * temperature).unsqueeze(1)
        return mean_of_one((scores - mean).mul_(sharpness).square_().neg_(), filled)


def mean_of_one(log_w: Tensor, filled: Tensor | None) -> Tensor:
    """Scale weights ``[I, K]``, so that their mean over the filled keys of each row is 1."""
    if filled is None:
        return log_w.log_softmax(1).add_(math.log(log_w.shape[1]))
    count = filled.sum().to(log_w.dtype)
    return log_w.masked_fill_(~filled, -math.inf).log_softmax(1).add_(count.log())
