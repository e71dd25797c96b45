"""Unit rows, in the precision the losses compute in."""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

# F.normalize's own bound.
_SHORTEST = 1e-12


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """float32, or float64 where a tensor is."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A block in which autocast, where it is on, lowers no precision."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def unit_rows(z: Tensor, dtype: torch.dtype) -> Tensor:
    """L2-normalise the rows of ``[..., D]``, computed in that dtype.

    As `F.normalize`, but for rows shorter than 1e-12. They have no direction to speak of: they
    become zero rows without gradient, where F.normalize would return one blown up by 1e12. So do,
    there as well, rows whose squares overflow: from 1e19 on in float32.
    """
    z = z.to(dtype)
    lengths = torch.linalg.vector_norm(z, dim=-1, keepdim=True)
    return z / F.threshold(lengths, _SHORTEST, math.inf)


def mean_cosine(rows: Tensor) -> Tensor:
    """The mean cosine of two different rows, of unit rows ``[..., D]``; NaN where there is one."""
    rows = rows.flatten(0, -2)  # [M, D]
    count = len(rows)
    pairs = rows.sum(0).square().sum() - rows.square().sum()
    return pairs / (count * (count - 1)) if count > 1 else pairs.new_full((), math.nan)
