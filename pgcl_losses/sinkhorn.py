"""Balanced assignment of samples to prototypes: Sinkhorn-Knopp (Eq. 7 to 11).

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086. Its
solution, Eq. 11, is Q = Diag(a) P^eta Diag(b); u and v here are its a and b.
"""

import math

import torch
from torch import Tensor

from pgcl_losses import _checks as check
from pgcl_losses._normalize import computing_dtype, full_precision

# An iteration can raise an entry by N * K against the others of its row and column. Over three,
# what is too small for float32 stays negligible for any N * K up to 1e9; then u and v are absorbed
# into the exponents, where nothing is too small.
_ITERATIONS_PER_ABSORPTION = 3

# Of cosines: far above rounding errors of float32, far below most differences.
_TILT = 1e-4


def sinkhorn(scores: Tensor, *, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    r"""Balanced assignment of samples to prototypes, by Sinkhorn-Knopp.

    Scales :math:`e^{s/\epsilon}` ``iterations`` times: first every prototype's total to
    :math:`1/K`, then every sample's to :math:`1/N`. No gradient flows.

    Args:
        scores: similarity of each sample to each prototype, any finite values. -inf rules a pair
            out; every row and column must keep one that is finite.
        epsilon: smaller is closer to a hard assignment; :math:`1/\epsilon` plays the role of the
            paper's exponent :math:`\eta`.
        iterations: how often columns and rows are scaled.

    Shape:
        - scores: ``[N, K]``
        - output: ``[N, K]``, every row sums to 1, every column to about N / K

    Examples:
        >>> import torch
        >>> from pgcl_losses import sinkhorn
        >>> scores = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.6], [0.6, 0.5]])
        >>> sinkhorn(scores).argmax(dim=1)  # the nearest prototype would be 0 for all of them
        tensor([0, 0, 1, 1])

    """
    check.matrix("scores", scores, "[N, K]")
    epsilon = check.scale("epsilon", epsilon)
    iterations = check.count("iterations", iterations, minimum=1)
    with full_precision(scores.device):
        scores = scores.detach().to(computing_dtype(scores))
        return balance(scores, epsilon, iterations)[0]


def balance(
    scores: Tensor, epsilon: float, iterations: int, filled: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sinkhorn-Knopp for ``[N, K]`` or a stack ``[V, N, K]``; scores without gradient.

    The result is diag(u) E diag(v) for a fixed matrix E, so an iteration is two matrix-vector
    products. The second result orders the columns of a row as q does, and does not underflow. If
    one sample has nearly all of several columns, their q differ by less than any precision can
    tell: there the scores decide, and not rounding.

    ``filled``: ``[N, 1]`` bool, False for samples that are ignored.
    """
    exponent, u, shift = _shifted(scores, epsilon, filled)
    product = torch.mm if scores.dim() == 2 else torch.bmm
    while True:
        # The exponents are kept only if a later iteration has to start from them again.
        last = iterations <= _ITERATIONS_PER_ABSORPTION
        kernel = _exp_(exponent if last else exponent.clone())
        by_prototype = kernel.mT  # [V, K, N]
        for _ in range(min(iterations, _ITERATIONS_PER_ABSORPTION)):
            mass = u if filled is None else u * filled
            v = product(by_prototype, mass).reciprocal_()  # [V, K, 1]
            u = product(kernel, v).reciprocal_()  # [V, N, 1]
        log_v = v.mT.log()
        shift = torch.sub(shift, log_v, alpha=epsilon)
        if last:
            # In a row, log q is (scores - shift) / epsilon up to a constant.
            return kernel.mul_(u).mul_(v.mT), torch.sub((1 + _TILT) * scores, shift)
        iterations -= _ITERATIONS_PER_ABSORPTION
        exponent.add_(u.log_()).add_(log_v)
        u = torch.ones_like(u)


def _shifted(
    scores: Tensor, epsilon: float, filled: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The exponents of E, shifted, the u that undoes the shift of its rows, and that of columns.

    Every column and every row of E has 1 as its largest entry: nothing overflows, and no sum over a
    row or column vanishes, however small epsilon is.
    """
    sharpness = 2 / epsilon  # of half scores: the difference of two halves is always finite
    peaks = scores if filled is None else scores.masked_fill(~filled, -torch.inf)
    peaks = peaks.amax(-2, keepdim=True)  # [V, 1, K]
    exponent = torch.add(-0.5 * peaks, scores, alpha=0.5)  # [V, N, K]
    row_peaks = exponent.amax(-1, keepdim=True)  # [V, N, 1], above 0 in rows that are not filled
    exponent = exponent.sub_(row_peaks).mul_(sharpness)
    u = row_peaks.mul_(sharpness).clamp_(_smallest(scores.dtype), 0).exp_()
    return exponent, u, peaks


def _exp_(exponents: Tensor) -> Tensor:
    """e^x in place; 0 if it would be near the smallest normal number or below it.

    Denormal numbers make exponentials and products slow on a CPU.
    """
    smallest = _smallest(exponents.dtype)
    return torch.threshold_(exponents.clamp_min_(smallest - 1).exp_(), math.exp(smallest), 0.0)


def _smallest(dtype: torch.dtype) -> float:
    """The smallest exponent x for which e^x can still be multiplied by about 1e-4."""
    return math.log(torch.finfo(dtype).tiny) + 9
