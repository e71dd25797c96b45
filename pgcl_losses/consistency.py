"""Swapped prediction: each view predicts the other's balanced assignment."""

import torch
from torch import Tensor, nn

from pgcl_losses._checks import check_choice, check_views
from pgcl_losses.prototypes import Assignment
from pgcl_losses.reduction import REDUCTIONS, reduce
from pgcl_losses.rows import computing_dtype


class ConsistencyLoss(nn.Module):
    r"""Cross-entropy between one view's assignment and the other's prediction, both ways.

    For two views :math:`\frac{1}{2N} \sum_i CE(q'_i, p_i) + CE(q_i, p'_i)`; for more, the mean over
    all ordered pairs of different views.

    Args:
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value per row, view 1 first.

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

    def __init__(self, *, reduction: str = "mean") -> None:
        super().__init__()
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)

    def extra_repr(self) -> str:
        return f"reduction={self.reduction!r}"

    def forward(self, *assignments: Assignment) -> Tensor:
        if len(assignments) < 2:
            raise TypeError(f"assignments must be two or more, but {len(assignments)} came")
        for v, assignment in enumerate(assignments):
            if not isinstance(assignment, Assignment):
                came = type(assignment).__name__
                raise TypeError(f"assignments[{v}] must be an Assignment, but got {came}")
        named = [
            (f"assignments[{v}].{field}", getattr(assignment, field))
            for v, assignment in enumerate(assignments)
            for field in ("log_probs", "targets")
        ]
        check_views(named, "[N, K]")
        dtype = computing_dtype(assignments[0].log_probs)
        log_probs = torch.stack([assignment.log_probs.to(dtype) for assignment in assignments])
        targets = torch.stack([assignment.targets.to(dtype) for assignment in assignments])
        return reduce(swapped_cross_entropy(log_probs, targets).flatten(), self.reduction)


def swapped_cross_entropy(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Each row's mean cross-entropy with the other views' targets: ``[V, N, K] -> [V, N]``."""
    num_views = len(targets)
    others = targets.roll(1, 0)
    if num_views > 2:
        rolled = [targets.roll(shift, 0) for shift in range(2, num_views)]
        others = torch.stack([others, *rolled]).mean(0)
    return -(log_probs * others).sum(-1)
