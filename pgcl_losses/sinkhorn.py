"""Balanced assignment of samples to prototypes: Sinkhorn-Knopp (Eq. 7 to 11).

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086. Its
solution, Eq. 11, is Q = Diag(a) P^eta Diag(b); u and v here are its a and b.
"""

import torch
from torch import Tensor

from pgcl_losses._checks import check_count, check_matrix, check_scale
from pgcl_losses.rows import computing_dtype, full_precision

# An iteration can raise an entry by N * K against the others of its row and column. Over three,
# what is too small for float32 stays negligible for any N * K up to 1e9; then u and v are absorbed
# into the exponents, where nothing is too small.
_ITERATIONS_PER_ABSORPTION = 3


def sinkhorn(scores: Tensor, *, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    r"""Spread samples evenly over prototypes, as close to their scores as that allows.

    Sinkhorn-Knopp on :math:`e^{s/\epsilon}`: ``iterations`` times, first every prototype's total
    mass is scaled to :math:`1/K`, then every sample's to :math:`1/N`. No gradient flows.

    Args:
        scores: similarity of each sample to each prototype, any finite values; -inf rules a pair
            out, as long as every row and column keeps one that is possible.
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
    check_matrix("scores", scores, "[N, K]")
    epsilon = check_scale("epsilon", epsilon)
    iterations = check_count("iterations", iterations, minimum=1)
    with full_precision(scores.device):
        return balance(scores.detach().to(computing_dtype(scores)), epsilon, iterations)


def balance(
    scores: Tensor, epsilon: float, iterations: int, present: Tensor | None = None
) -> Tensor:
    """Sinkhorn-Knopp for ``[N, K]`` or a stack ``[V, N, K]``; scores without gradient.

    The result is diag(u) E diag(v) for a fixed matrix E, so an iteration is two matrix-vector
    products. E is the exponential shifted so that every column and every row has 1 as its largest
    entry: nothing overflows, and no sum over a row or column vanishes, however small epsilon is.

    ``present`` (``[N, 1]``, 0 or 1) tells which samples take part; the others have no say.
    """
    sharpness = 2 / epsilon  # of half scores: the difference of two halves is always finite
    peaks = scores if present is None else scores.masked_fill(present == 0, -torch.inf)
    exponent = torch.add(-0.5 * peaks.amax(-2, keepdim=True), scores, alpha=0.5)  # [V, N, K]
    row_peaks = exponent.amax(-1, keepdim=True)  # [V, N, 1]
    exponent = exponent.sub_(row_peaks).mul_(sharpness)
    if present is not None:
        row_peaks.clamp_(max=0)  # nothing to do for rows that are present
    u = row_peaks.mul_(sharpness).exp_()  # undoes the shift of the rows
    # The exponents are kept only if a later iteration has to start from them again.
    kernel = exponent.exp() if iterations > _ITERATIONS_PER_ABSORPTION else exponent.exp_()
    by_prototype = kernel.mT  # [V, K, N]
    product = torch.mm if kernel.dim() == 2 else torch.bmm
    while True:
        for _ in range(min(iterations, _ITERATIONS_PER_ABSORPTION)):
            mass = u if present is None else u * present
            v = product(by_prototype, mass).reciprocal_()  # [V, K, 1]
            u = product(kernel, v).reciprocal_()  # [V, N, 1]
        iterations -= _ITERATIONS_PER_ABSORPTION
        if iterations <= 0:
            return kernel.mul_(v.mT).mul_(u)
        exponent.add_(u.log_()).add_(v.mT.log())
        torch.exp(exponent, out=kernel)
        u = torch.ones_like(u)
