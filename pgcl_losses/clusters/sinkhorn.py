"""Balanced assignment of samples to prototypes: the Sinkhorn-Knopp algorithm (Eq. 7 to 11).

The solution, Eq. 11, is Q = Diag(a) P^eta Diag(b). The code calls a and b u and v.
"""

import math

import torch
from torch import Tensor

from pgcl_losses.base import checks as check
from pgcl_losses.base.normalize import computing_dtype, full_precision

# log p and log q of a prototype that a call does not use. They are finite, as 0 * inf is NaN.
NOT_IN_USE = -1e30

# A sample whose e^{s / epsilon} is e^-100 of what other samples have does not change their sum.
_FAR = 100.0

# This fraction of the cosine, divided by epsilon like the cosine in log q, breaks ties. It lies far
# above the rounding errors of float32, and far below most differences between prototypes.
_TILT = 1e-4


def sinkhorn(
    scores: Tensor, *, epsilon: float = 0.05, iterations: int = 3, sizes: Tensor | None = None
) -> Tensor:
    r"""Assign samples to prototypes so that all get about equally many, by Sinkhorn-Knopp.

    It scales the matrix :math:`e^{s/\epsilon}` ``iterations`` times: first so that every
    prototype's total is :math:`1/K`, then so that every sample's total is :math:`1/N`. In the
    result every sample's total is 1. No gradient flows through it. With ``sizes``, prototypes get
    as many samples as their relative sizes say.

    Args:
        scores (Tensor): the similarity s of each sample to each prototype. Any finite values are
            allowed, and -inf rules a pair out; every row and every column must keep one finite
            value.
        epsilon (float): the sharpness. A smaller value is closer to a hard assignment.
            :math:`1/\epsilon` plays the role of the paper's exponent :math:`\eta`.
        iterations (int): how often columns and rows are scaled. With more iterations, the columns
            are balanced more exactly.
        sizes (Tensor): the relative size of each prototype's cluster; 0 for a prototype that gets
            no samples. By default all sizes are equal. They are constants.

    Shape:
        - scores: ``[N, K]`` for N samples and K prototypes
        - sizes: ``[K]``, numbers or bools
        - output: ``[N, K]``; every row sums to 1, every column to about N / K

    Examples:
        >>> import torch
        >>> from pgcl_losses import sinkhorn
        >>> scores = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.6], [0.6, 0.5]])
        >>> sinkhorn(scores).argmax(dim=1)  # the nearest prototype would be 0 for all of them
        tensor([0, 0, 1, 1])
        >>> sinkhorn(scores, epsilon=0.5, iterations=50, sizes=torch.tensor([1, 3])).sum(0).round()
        tensor([1., 3.])

    """
    check.matrix("scores", scores, "[N, K]")
    if len(scores) == 0:
        raise ValueError(f"scores must not be empty, but got shape {tuple(scores.shape)}")
    epsilon = check.scale("epsilon", epsilon)
    iterations = check.count("iterations", iterations, minimum=1)
    if sizes is not None:
        check.sizes("sizes", sizes, (scores.shape[1],), "scores", scores)
    with full_precision(scores.device):
        # Quotients may overflow, so differences are divided, which are finite if halved. The first
        # log-softmax ignores a constant of a column, and later ones a constant of a row. So let the
        # largest number of each column be 0, and the largest of each row no less than -_FAR.
        halves = scores.detach().to(computing_dtype(scores)) / 2
        halves = halves - halves.amax(0)
        unused = None if sizes is None else (sizes <= 0).expand_as(halves)
        counting = halves if unused is None else halves.masked_fill(unused, -math.inf)
        peaks = counting.amax(1, keepdim=True)
        halves = halves - peaks + peaks.clamp_min(-_FAR * epsilon / 2)
        if unused is not None:  # whatever the scores of a prototype that is not in use
            halves = halves.masked_fill(unused, 0.0)
        logs = None if sizes is None else log_sizes(sizes, halves.dtype)
        log_q = balance(halves.T, logs, epsilon=epsilon / 2, iterations=iterations)
        return probabilities(log_q).T.contiguous()


def log_sizes(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the logarithms of sizes ``[K]``; `NOT_IN_USE` for 0."""
    return sizes.detach().double().log().clamp_min(NOT_IN_USE).to(dtype)


def balance(
    scores: Tensor,
    log_sizes: Tensor | None = None,
    *,
    epsilon: float,
    iterations: int,
    filled: Tensor | None = None,
) -> Tensor:
    """Compute log q of scores ``[K, N]``, or of a stack of them ``[K, V, N]``, without gradient.

    An iteration is a log-softmax over samples and one over prototypes. The factors 1/K and 1/N of
    the totals are left out, since the next scaling undoes a constant factor. ``log_sizes``: ``[K]``
    of clusters that are not of equal size. ``filled``: ``[N]`` bool; samples where it is False are
    ignored, and their q is uniform.

    The samples of a prototype lie side by side, and not the prototypes of a sample: on a CPU, a
    log-softmax of many rows with ten numbers each takes ten times as long.
    """
    log_q = scores / epsilon
    for _ in range(iterations):
        if filled is not None:
            log_q = log_q.masked_fill(~filled, -math.inf)
        log_q = log_q.log_softmax(-1)
        if log_sizes is not None:
            log_q = log_q + log_sizes.view(-1, *[1] * (log_q.dim() - 1))
        log_q = log_q.log_softmax(0)
    if filled is not None:  # samples that are not filled have NaN here
        log_q = log_q.masked_fill(~filled, -math.log(len(scores)))
    return log_q


def probabilities(log_q: Tensor) -> Tensor:
    """Compute q from log q. Denormal numbers become 0: they make matrix products slow on a CPU."""
    return torch.threshold_(log_q.exp(), torch.finfo(log_q.dtype).tiny, 0.0)


def rank_clusters(log_q: Tensor, scores: Tensor, epsilon: float) -> Tensor:
    """Compute numbers ``[K, N]`` that sort the clusters of a sample as q does, best is largest.

    q itself cannot be sorted: many of its entries underflow to 0. If two clusters have the same q
    up to rounding, as for a sample between two prototypes, rounding must not decide, since it
    differs between processes and precisions. Then the larger score decides.
    """
    return log_q.add(scores, alpha=_TILT / epsilon)
