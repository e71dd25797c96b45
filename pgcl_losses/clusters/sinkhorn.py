"""Balanced assignment of samples to prototypes: the Sinkhorn-Knopp algorithm (Eq. 7 to 11).

The solution, Eq. 11, is Q = Diag(a) P^eta Diag(b). It is found by scaling columns and rows in turn.
"""

import math

import torch
from torch import Tensor

from pgcl_losses.base import checks as check
from pgcl_losses.base.modes import is_transformed
from pgcl_losses.base.normalize import computing_dtype, full_precision

# log p and log q of a prototype that a call does not use, far below cosines / temperature. They are
# finite, as 0 * inf is NaN.
NOT_IN_USE = -1e35

# A sample whose e^{s / epsilon} is e^-100 of what other samples have does not change their sum.
_FAR = 100.0

# From this epsilon on, the powers e^{s / epsilon} of cosines lie between e^-20 and e^20, so that no
# scaling to sizes of one order comes near overflow or 0. Sharper powers need logarithms.
_NEEDS_NO_LOGS = 0.05

# This fraction of the exponent s / epsilon breaks ties, or less where epsilon is below 0.001. It
# lies far above the rounding errors of float32, and far below most differences of prototypes.
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
        return _balance_by_logs(halves / (epsilon / 2), sizes, iterations, None)


def log_sizes(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute the logarithms of sizes ``[K]``; `NOT_IN_USE` for 0."""
    return sizes.detach().double().log().clamp_min(NOT_IN_USE).to(dtype)


def balance(
    exponents: Tensor,
    sizes: Tensor | None = None,
    *,
    epsilon: float,
    iterations: int,
    filled: Tensor | None = None,
) -> Tensor:
    """Compute q without gradient, from s / epsilon ``[..., N, K]`` with cosines s.

    An iteration scales the columns and then the rows. The factors 1/K and 1/N of the totals are
    left out, since the next scaling undoes a constant factor. ``sizes``: ``[K]`` of clusters that
    are not of equal size. ``filled``: ``[N]`` bool; samples where it is False are ignored, and
    their q means nothing, and may be NaN.
    """
    if epsilon < _NEEDS_NO_LOGS:
        return _balance_by_logs(exponents, sizes, iterations, filled)
    q, tiny = exponents.exp(), torch.finfo(exponents.dtype).tiny
    if filled is not None:
        q = q.masked_fill(~filled.unsqueeze(-1), 0.0)
    if sizes is not None:
        large = sizes.detach().double()
        sizes = (large / large.amax()).to(q.dtype)
    scale = torch.mul if is_transformed(q) else torch.Tensor.mul_  # vmap may have many sizes
    for _ in range(iterations):
        totals = q.sum(-2, keepdim=True)
        if sizes is None:
            q.div_(totals)
        else:  # a column that is not in use is 0
            q = scale(q, sizes / totals.clamp_min(tiny))
        totals = q.sum(-1, keepdim=True)
        q.div_(totals if filled is None else totals.clamp_min(tiny))
    return q


def _balance_by_logs(
    log_q: Tensor, sizes: Tensor | None, iterations: int, filled: Tensor | None
) -> Tensor:
    """Compute q as `balance` does, for any epsilon: scaling is a log-softmax of log q."""
    logs = None if sizes is None else log_sizes(sizes, log_q.dtype)
    for _ in range(iterations):
        if filled is not None:
            log_q = log_q.masked_fill(~filled.unsqueeze(-1), -math.inf)
        log_q = log_q.log_softmax(-2)
        if logs is not None:
            log_q = log_q + logs
        log_q = log_q.log_softmax(-1)
    # A CPU computes powers of 2 that underflow ten times faster than powers of e. Denormal numbers
    # become 0: they make matrix products slow.
    q = (log_q * math.log2(math.e)).exp2_()
    return torch.threshold_(q, torch.finfo(q.dtype).tiny, 0.0)


def largest(q: Tensor, exponents: Tensor, epsilon: float) -> Tensor:
    """Find the prototype with the largest q of each sample, ``[..., N, K] -> [..., N, 1]``.

    If two prototypes have the same q up to rounding, as for a sample between them, rounding must
    not decide, since it differs between processes and precisions. Then the larger cosine decides.
    ``exponents``: s / epsilon, which are overwritten.
    """
    tilted = exponents.mul_(min(_TILT, 0.1 * epsilon)).add_(1)  # stays positive
    tilted = tilted * q if is_transformed(q) else tilted.mul_(q)
    return tilted.argmax(-1, keepdim=True)
