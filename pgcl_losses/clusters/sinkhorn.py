"""Balanced assignment of samples to prototypes: the Sinkhorn-Knopp algorithm (Eq. 7 to 11).

The solution, Eq. 11, is Q = Diag(a) P^eta Diag(b). The code calls a and b u and v.
"""

import math

import torch
from torch import Tensor

from pgcl_losses.base import checks as check
from pgcl_losses.base.normalize import computing_dtype, full_precision

# An iteration can raise an entry by a factor of N * K relative to the others. For N * K up to 1e9,
# an entry that is too small for float32 stays negligible over three iterations. After these, u and
# v are absorbed into the exponents.
_ITERATIONS_PER_ABSORPTION = 3

# This fraction of the cosine, divided by epsilon like the cosine in log q, breaks ties. It lies far
# above the rounding errors of float32, and far below most differences between prototypes.
_TILT = 1e-4


def sinkhorn(scores: Tensor, *, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    r"""Assign samples to prototypes so that all get about equally many, by Sinkhorn-Knopp.

    It scales the matrix :math:`e^{s/\epsilon}` ``iterations`` times: first so that every
    prototype's total is :math:`1/K`, then so that every sample's total is :math:`1/N`. In the
    result every sample's total is 1. No gradient flows through it.

    Args:
        scores (Tensor): the similarity s of each sample to each prototype. Any finite values are
            allowed, and -inf rules a pair out; every row and every column must keep one finite
            value.
        epsilon (float): the sharpness. A smaller value is closer to a hard assignment.
            :math:`1/\epsilon` plays the role of the paper's exponent :math:`\eta`.
        iterations (int): how often columns and rows are scaled. With more iterations, the columns
            are balanced more exactly.

    Shape:
        - scores: ``[N, K]`` for N samples and K prototypes
        - output: ``[N, K]``; every row sums to 1, every column to about N / K

    Examples:
        >>> import torch
        >>> from pgcl_losses import sinkhorn
        >>> scores = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.6], [0.6, 0.5]])
        >>> sinkhorn(scores).argmax(dim=1)  # the nearest prototype would be 0 for all of them
        tensor([0, 0, 1, 1])

    """
    check.matrix("scores", scores, "[N, K]")
    if len(scores) == 0:
        raise ValueError(f"scores must not be empty, but got shape {tuple(scores.shape)}")
    epsilon = check.scale("epsilon", epsilon)
    iterations = check.count("iterations", iterations, minimum=1)
    with full_precision(scores.device):
        # Halve scores and epsilon: the difference of two halved numbers is always finite.
        halves = scores.detach().to(computing_dtype(scores)) / 2
        return probabilities(balance(halves, epsilon / 2, iterations))


def balance(
    scores: Tensor, epsilon: float, iterations: int, filled: Tensor | None = None
) -> Tensor:
    """Compute log q of scores ``[N, K]``, or of a stack of them ``[V, N, K]``, without gradient.

    q is diag(u) E diag(v) for a fixed matrix E, so an iteration is two products of a matrix with a
    vector. ``filled``: ``[N, 1]`` bool; samples where it is False are ignored, and their q is
    uniform.
    """
    # The smallest exponent x for which e^x is still a normal number when multiplied by about 1e-4.
    smallest = math.log(torch.finfo(scores.dtype).tiny) + 9
    # Shift the exponents of E so that the largest exponent of every column and every row is 0. Then
    # nothing overflows, and no sum over a row or column vanishes, however small epsilon is.
    shift = scores if filled is None else scores.masked_fill(~filled, -torch.inf)
    exponent = scores - shift.amax(-2, keepdim=True)  # [V, N, K]
    row_peaks = exponent.amax(-1, keepdim=True)  # [V, N, 1], above 0 in rows that are not filled
    exponent = exponent.sub_(row_peaks).mul_(1 / epsilon)
    u = row_peaks.mul_(1 / epsilon).clamp_(smallest, 0).exp_()  # this undoes the shift of rows
    product = torch.mm if scores.dim() == 2 else torch.bmm
    kernel, v = exponent, u  # the first iteration sets both
    for iteration in range(iterations):
        if iteration > 0:
            u = product(kernel, v).reciprocal_()  # [V, N, 1]
        if iteration % _ITERATIONS_PER_ABSORPTION == 0:
            if iteration > 0:
                exponent += u.log_() + v.mT.log()
                u = torch.ones_like(u)
            # Leave denormal numbers out: they make matrix products slow on a CPU.
            kernel = torch.threshold(exponent, smallest, -math.inf).exp_()
        v = product(kernel.mT, u if filled is None else u * filled).reciprocal_()  # [V, K, 1]
    exponent += v.mT.log()
    log_q = exponent.log_softmax(-1)
    if filled is not None:  # without any filled sample, q is NaN
        log_q = log_q.masked_fill_(~filled, -math.log(scores.shape[-1]))
    return log_q


def probabilities(log_q: Tensor) -> Tensor:
    """Compute q from log q. Denormal numbers become 0: they make matrix products slow on a CPU."""
    return torch.threshold_(log_q.exp(), torch.finfo(log_q.dtype).tiny, 0.0)


def rank_clusters(log_q: Tensor, scores: Tensor, epsilon: float) -> Tensor:
    """Compute numbers ``[..., K]`` that sort the clusters of a sample as q does, best is largest.

    q itself cannot be sorted: many of its entries underflow to 0. If two clusters have the same q
    up to rounding, as for a sample between two prototypes, rounding must not decide, since it
    differs between processes and precisions. Then the larger score decides.
    """
    return log_q.add(scores, alpha=_TILT / epsilon)
