"""PyTorch's three reductions."""

from typing import Literal, get_args

from torch import Tensor

from pgcl_losses.ranks import Ranks

Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)


def reduce(losses: Tensor, reduction: str, ranks: Ranks) -> Tensor:
    """A value for each row ``[V, N]`` -> their mean or sum, or those of this rank ``[V * n]``."""
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else ranks.own(losses).flatten()
