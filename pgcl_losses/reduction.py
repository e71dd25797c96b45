"""PyTorch's three reductions."""

from torch import Tensor

REDUCTIONS = ("mean", "sum", "none")


def reduce(losses: Tensor, reduction: str) -> Tensor:
    """One value per row ``[M]`` -> their mean, their sum, or the values themselves."""
    if reduction == "mean":
        return losses.mean()
    return losses.sum() if reduction == "sum" else losses
