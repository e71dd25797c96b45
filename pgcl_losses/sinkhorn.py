"""Balanced assignment of samples to prototypes: Sinkhorn-Knopp (Eq. 7 to 11).

The solution, Eq. 11, is Q = Diag(a) P^eta Diag(b); u and v here are its a and b.
"""

import math

import torch
from torch import Tensor

from pgcl_losses import _checks as check
from pgcl_losses._normalize import computing_dtype, full_precision

# An iteration can raise an entry by N * K against others. Over three, what is too small for float32
# stays negligible for N * K up to 1e9; then u and v are absorbed into the exponents.
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
        # Half of both: the difference of two halves is always finite.
        halves = scores.detach().to(computing_dtype(scores)) / 2
        return balance(halves, epsilon / 2, iterations)[0]


def balance(
    scores: Tensor, epsilon: float, iterations: int, filled: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Sinkhorn-Knopp for ``[N, K]`` or a stack ``[V, N, K]``; scores without gradient.

    The result is diag(u) E diag(v) for a fixed matrix E, so an iteration is two matrix-vector
    products. The second result orders the columns of a row as q does, without underflow; where q of
    several columns are equal up to rounding, by their scores. ``filled``: ``[N, 1]`` bool, False
    for samples that are ignored.
    """
    # The smallest exponent x for which e^x can still be multiplied by about 1e-4.
    smallest = math.log(torch.finfo(scores.dtype).tiny) + 9
    # Shifted exponents of E: 0 is the largest of every column and row. Nothing overflows, and no
    # sum over a row or column vanishes, however small epsilon is.
    shift = scores if filled is None else scores.masked_fill(~filled, -torch.inf)
    shift = shift.amax(-2, keepdim=True)  # [V, 1, K]
    exponent = scores - shift  # [V, N, K]
    row_peaks = exponent.amax(-1, keepdim=True)  # [V, N, 1], above 0 in rows that are not filled
    exponent = exponent.sub_(row_peaks).mul_(1 / epsilon)
    u = row_peaks.mul_(1 / epsilon).clamp_(smallest, 0).exp_()  # undoes the shift of rows
    product = torch.mm if scores.dim() == 2 else torch.bmm
    while True:
        # The exponents are kept only if a later iteration has to start from them again.
        last = iterations <= _ITERATIONS_PER_ABSORPTION
        kernel = exponent if last else exponent.clone()
        # 0 where it would be denormal, which makes exponentials and products slow on a CPU.
        kernel = kernel.clamp_min_(smallest - 1).exp_()
        kernel = torch.threshold_(kernel, math.exp(smallest), 0.0)
        by_prototype = kernel.mT  # [V, K, N]
        for _ in range(min(iterations, _ITERATIONS_PER_ABSORPTION)):
            mass = u if filled is None else u * filled
            v = product(by_prototype, mass).reciprocal_()  # [V, K, 1]
            u = product(kernel, v).reciprocal_()  # [V, N, 1]
        row_v = v.mT  # [V, 1, K]
        log_v = row_v.log()
        shift = torch.sub(shift, log_v, alpha=epsilon)
        if last:
            # In a row, log q is (scores - shift) / epsilon up to a constant. Of equal q the larger
            # score is the first: the order is that of (1 + tilt) scores - shift.
            return kernel.mul_(u).mul_(row_v), torch.sub(scores, shift, alpha=1 / (1 + _TILT))
        iterations -= _ITERATIONS_PER_ABSORPTION
        exponent.add_(u.log_()).add_(log_v)
        u = torch.ones_like(u)
