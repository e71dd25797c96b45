"""Swapped prediction (Eq. 5 and 6): each view predicts the balanced assignment of the others."""

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pgcl_losses.base.module import LossModule, called_by_all
from pgcl_losses.base.normalize import computing_dtype
from pgcl_losses.base.options import Group, checked
from pgcl_losses.pairs.batch import (
    NOT_ASSIGNED,
    Assignment,
    Assignments,
    Batch,
    Reduction,
    batch_argument,
    check_assignments,
)


class ConsistencyLoss(LossModule):
    r"""PGCL's consistency: each view of a graph predicts the balanced assignment of the other view.

    This is the second term of :class:`PGCLLoss`, the swapped prediction of SwAV. Call it with the
    assignments of :class:`SinkhornPrototypes` to use it alone or with a contrast of your own. For
    two views it is the cross-entropy

    .. math:: \frac{1}{2N} \sum_i [CE(q'_i, p_i) + CE(q_i, p'_i)]

    where p is the prediction and q the balanced assignment (the target, which has no gradient). For
    more views it is the mean over all ordered pairs of different views, and for several heads the
    mean over heads.

    Args:
        reduction (str): ``"mean"``, ``"sum"`` of the cross-entropies of all graphs and views, or
            ``"none"`` for one value per graph and view, view 1 first.
        gather, process_group: as in :class:`InfoNCE`.

    Shape:
        - assignments: :class:`Assignments`, or two or more :class:`Assignment`, each of N graphs to
          K prototypes
        - output: a scalar, or ``[V * N]`` with ``reduction="none"`` for V views

    Examples:
        >>> import torch
        >>> from pgcl_losses import Assignment, ConsistencyLoss, SinkhornPrototypes
        >>> a = SinkhornPrototypes(dim=16, num_prototypes=4)(torch.randn(8, 16), torch.randn(8, 16))
        >>> ConsistencyLoss()(a).shape
        torch.Size([])
        >>> log_probs = torch.tensor([[0.9, 0.1], [0.2, 0.8]]).log()
        >>> targets = torch.eye(2)
        >>> view = Assignment(log_probs, targets, targets.argmax(1))
        >>> ConsistencyLoss()(view, view)
        tensor(0.1643)

    """

    reduction: Reduction

    @checked
    def __init__(
        self, *, reduction: Reduction = "mean", gather: bool = True, process_group: Group = None
    ) -> None:
        super().__init__()
        self.set_options(locals())

    @called_by_all("forward")
    def forward(self, *assignments: Assignment | Assignments | Batch) -> Tensor:
        """Compute the loss of what :class:`SinkhornPrototypes` returned.

        It also takes two or more assignments of your own, by position, or a :class:`Batch`.
        """
        batch = batch_argument(self, assignments)
        if batch is None:
            log_probs = [getattr(given, "log_probs", given) for given in assignments]
            processes = self.check_on_all("forward", log_probs, lambda: self._check(assignments))
            first: Any = assignments[0]
            dtype, heads = computing_dtype(first.log_probs), first.all_heads()
            predicted, targets = (
                processes.gather(torch.cat([getattr(view, name) for view in assignments]).to(dtype))
                for name in ("log_probs", "targets")
            )
        elif batch.log_probs is None or batch.targets is None:
            raise ValueError(NOT_ASSIGNED)
        else:
            processes, heads = batch.processes, batch.heads
            predicted, targets = batch.log_probs, batch.targets
        num_views, num_prototypes = len(processes.counts), sum(heads)
        if num_views < 2:
            raise ValueError("the batch has 1 view, but the consistency needs two or more")
        shape = num_views, -1, num_prototypes
        terms = cross_entropy_terms(predicted.view(shape), targets.detach().view(shape))
        divisor = (1 - num_views) * len(heads)
        if self.reduction == "none":
            return processes.own(terms.sum(-1).flatten() / divisor)
        return terms.sum() / (divisor * (len(predicted) if self.reduction == "mean" else 1))

    if TYPE_CHECKING:
        __call__ = forward

    def _check(self, assignments: tuple[Any, ...]) -> dict[str, object]:
        if (count := len(assignments)) < 2:
            raise TypeError(
                f"assignments must be two or more, but got {count}: give what SinkhornPrototypes "
                "returned as it is, as in consistency(a)"
            )
        check_assignments(assignments)
        return {"heads": assignments[0].all_heads()}


def cross_entropy_terms(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Compute terms ``[V, N, K]`` of the cross-entropy of each view and graph.

    Their sum over K, divided by 1 - V, is the mean over the targets of all other views.
    """
    others = targets.roll(1, 0)
    for shift in range(2, targets.shape[0]):
        others += targets.roll(shift, 0)
    return log_probs * others


def consistency_ratio(
    log_probs: Tensor, targets: Tensor, heads: tuple[int, ...] | list[Tensor]
) -> Tensor:
    """The mean cross-entropy divided by log K: 1 if all predictions are uniform.

    ``heads``: the number of prototypes in use in each head. For several heads it is the sum of
    their cross-entropies, divided by the sum of their log K. It is NaN with one view or one
    prototype.
    """
    if len(targets) < 2:
        return log_probs.new_full((), math.nan)
    log_k: float | Tensor
    if isinstance(heads, tuple):
        log_k = math.log(math.prod(heads))
    else:
        log_k = torch.stack([*heads]).log().sum()
    terms = cross_entropy_terms(log_probs, targets)
    return terms.sum(-1).mean() / (log_k * (1 - len(targets)))
