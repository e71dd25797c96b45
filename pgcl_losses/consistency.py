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

from pgcl_losses import _checks as check
from pgcl_losses._module import Check, LossModule
from pgcl_losses._normalize import computing_dtype
from pgcl_losses.batch import (
    NOT_ASSIGNED,
    Assignment,
    Batch,
    Reduction,
    check_assignments,
    given_batch,
)
from pgcl_losses.distributed import Processes


class ConsistencyLoss(LossModule):
    r"""Cross-entropy between one view's assignment and the other's prediction, both ways.

    For two views :math:`\frac{1}{2N} \sum_i CE(q'_i, p_i) + CE(q_i, p'_i)`; for more, the mean over
    all ordered pairs of different views; with several heads, the mean over heads.

    Args:
        reduction, gather, process_group: as in :class:`InfoNCE`.

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

    options: ClassVar[dict[str, Check]] = {"reduction": check.one_of(Reduction)}

    reduction: Reduction

    def __init__(
        self,
        *,
        reduction: Reduction = "mean",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._assign_options(locals())

    def forward(self, *assignments: Assignment | Batch) -> Tensor:
        """The loss of two or more assignments, or of a batch that has them."""
        return self.traceable(self._loss)(assignments)

    if TYPE_CHECKING:
        __call__ = forward

    def _loss(self, assignments: tuple[Any, ...]) -> Tensor:
        batch = given_batch(assignments)
        if batch is not None:
            if batch.log_probs is None or batch.targets is None:
                raise ValueError(NOT_ASSIGNED)
            log_probs, targets = batch.views(batch.log_probs), batch.views(batch.targets)
            if len(targets) < 2:
                raise ValueError("the batch has 1 view, but the consistency is between two or more")
            return self._of(batch.processes, log_probs, targets, batch.heads)
        processes = self.agree(
            "forward",
            partial(self._check, assignments),
            [getattr(assignment, "log_probs", assignment) for assignment in assignments],
            lambda: {"heads": assignments[0].all_heads()},
        )
        dtype, heads = computing_dtype(assignments[0].log_probs), assignments[0].all_heads()
        of_views = [(view.log_probs, view.targets.detach()) for view in assignments]
        own = [torch.cat(parts).to(dtype) for parts in zip(*of_views, strict=True)]
        shape = len(assignments), -1, sum(heads)
        log_probs, targets = (processes.gather(part).view(shape) for part in own)
        return self._of(processes, log_probs, targets, heads)

    def _of(
        self, processes: Processes, log_probs: Tensor, targets: Tensor, heads: Sequence[int]
    ) -> Tensor:
        divisor = len(heads)
        if self.reduction == "mean":
            divisor *= targets.shape[0] * targets.shape[1]
        # The targets are divided, and not the sum: this adds no step to backward.
        terms = _cross_terms(log_probs, targets, divisor)
        if self.reduction == "none":
            return processes.own(terms.sum(-1).flatten())
        return terms.sum()

    def _check(self, assignments: tuple[Any, ...], may_be_empty: bool) -> None:
        if len(assignments) < 2:
            count = len(assignments)
            raise TypeError(f"assignments must be two or more, but got {count}: give *assignments")
        check_assignments(assignments, ("log_probs", "targets"), may_be_empty=may_be_empty)


def _cross_terms(log_probs: Tensor, targets: Tensor, divisor: float = 1) -> Tensor:
    """Terms that add up to the cross-entropies, each divided by ``divisor``: ``[V, N, K]``."""
    num_views = len(targets)
    others = targets.roll(1, 0)
    for shift in range(2, num_views):
        others += targets.roll(shift, 0)
    return log_probs * (others / (-divisor * (num_views - 1)))


def consistency_ratio(log_probs: Tensor, targets: Tensor, heads: Sequence[int]) -> Tensor:
    """The mean cross-entropy over log K, that of uniform predictions: both are ``[V, N, K]``.

    With several heads, over the sum of their log K. NaN with one view or one prototype.
    """
    log_k = sum(math.log(size) for size in heads)
    if len(targets) < 2 or log_k == 0:
        return log_probs.new_full((), math.nan)
    return _cross_terms(log_probs, targets).sum(-1).mean() / log_k
