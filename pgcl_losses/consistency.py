"""Swapped prediction (Eq. 5 and 6): each view predicts the other's balanced assignment.

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgcl_losses._checks import check_choice
from pgcl_losses._module import Check, LossModule
from pgcl_losses._normalize import computing_dtype
from pgcl_losses.batch import Assignment, Batch, check_alone, check_assignments
from pgcl_losses.reduction import REDUCTIONS, Reduction, reduce


class ConsistencyLoss(LossModule):
    r"""Cross-entropy between one view's assignment and the other's prediction, both ways.

    For two views :math:`\frac{1}{2N} \sum_i CE(q'_i, p_i) + CE(q_i, p'_i)`; for more, the mean over
    all ordered pairs of different views; with several heads, the mean over heads.

    Args:
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value per row, view 1 first.
        gather, process_group: with several processes, the loss over the batches of all of them;
            see :class:`PGCLLoss`.

    Shape:
        - assignments: two or more, of ``[N, K]`` each
        - output: scalar, or ``[V * N]`` for ``reduction="none"``

    Examples:
        >>> import torch
        >>> from pgcl_losses import Assignment, ConsistencyLoss
        >>> log_probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
        >>> targets = torch.eye(2)
        >>> view = Assignment(log_probs, targets, targets.argmax(1))
        >>> ConsistencyLoss()(view, view)
        tensor(0.1643)

    """

    options: ClassVar[dict[str, Check]] = {"reduction": partial(check_choice, choices=REDUCTIONS)}

    reduction: Reduction

    def __init__(
        self,
        *,
        reduction: Reduction = "mean",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.reduction = reduction
        self.gather = gather
        self.process_group = process_group

    def forward(self, *assignments: Assignment | Batch) -> Tensor:
        """The loss of two or more assignments, or of a batch that has them."""
        return self.untraced(self._loss)(assignments)

    if TYPE_CHECKING:
        __call__ = forward

    def _loss(self, assignments: tuple[Assignment | Batch, ...]) -> Tensor:
        batch = assignments[0] if assignments else None
        if isinstance(batch, Batch):
            check_alone(assignments)
        else:
            batch = self._batch(assignments)
        log_probs, targets = batch.need("log_probs"), batch.need("targets")
        divisor = max(1, len(batch.heads))
        if self.reduction == "mean":
            divisor *= targets.shape[0] * targets.shape[1]
        # The targets are divided, and not the sum: this adds no step to backward.
        terms = _cross_terms(log_probs, targets, divisor)
        if self.reduction == "none":
            return reduce(terms.sum(-1), "none", batch.ranks)
        return terms.sum()

    def _batch(self, assignments: tuple[Any, ...]) -> Batch:
        ranks = self.share(
            partial(self._check, assignments),
            [getattr(a, "log_probs", a) for a in assignments],
            this_call=lambda: {"heads": assignments[0].each_head()[0]},
        )
        dtype = computing_dtype(assignments[0].log_probs)
        log_probs = torch.stack([assignment.log_probs.to(dtype) for assignment in assignments])
        targets = torch.stack([assignment.targets.to(dtype) for assignment in assignments])
        return Batch(
            ranks,
            log_probs=ranks.gather(log_probs),
            targets=ranks.gather(targets.detach()),
            heads=assignments[0].heads,
        )

    def _check(self, assignments: tuple[Any, ...], may_lack_rows: bool) -> None:
        if len(assignments) < 2:
            raise TypeError(f"assignments must be two or more, but got {len(assignments)}")
        check_assignments(assignments, ("log_probs", "targets"), may_lack_rows)


def swapped_cross_entropy(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Each row's mean cross-entropy with the other views' targets: ``[V, N, K] -> [V, N]``.

    With several heads, whose columns lie side by side, the sum over heads.
    """
    return _cross_terms(log_probs, targets).sum(-1)


def _cross_terms(log_probs: Tensor, targets: Tensor, divisor: float = 1) -> Tensor:
    """Terms that add up to the cross-entropies, each divided by ``divisor``: ``[V, N, K]``."""
    num_views = len(targets)
    others = targets.roll(1, 0)
    for shift in range(2, num_views):
        others += targets.roll(shift, 0)
    return log_probs * (others / (-divisor * (num_views - 1)))


def share_of_a_guess(log_probs: Tensor, targets: Tensor, heads: Sequence[int]) -> Tensor:
    """The mean cross-entropy as a share of log K, that of a guess; NaN where nothing is guessed.

    Both ``[V, N, K]``. With several heads, as a share of the sum of their log K.
    """
    log_k = sum(math.log(size) for size in heads)
    if len(targets) < 2 or log_k == 0:
        return log_probs.new_full((), math.nan)
    return swapped_cross_entropy(log_probs, targets).mean() / log_k
