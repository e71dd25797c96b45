"""Unit embeddings, in the precision in which losses are computed."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_SHORTEST = 1e-12  # F.normalize's own bound


def computing_dtype(*tensors: Any) -> torch.dtype:
    """float32, or float64 where a tensor is."""
    for tensor in tensors:
        if tensor.dtype == torch.float64:
            return torch.float64
    return torch.float32


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A block in which autocast does not lower the precision."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def unit_vectors(z: Tensor, dtype: torch.dtype) -> Tensor:
    """L2-normalise vectors ``[..., D]``, computed in that dtype.

    Like `F.normalize`, except for vectors shorter than 1e-12, which have no meaningful direction:
    they become zero without gradient. The gradient of F.normalize is 1e12 times as long there.
    Vectors whose squares overflow (in float32 from 1e19 on) become zero, as in F.normalize.
    """
    z = z.to(dtype)
    # Not vector_norm, whose second derivative is NaN at 0, nor rsqrt, whose backward cubes 1 / |z|.
    squares = (z * z).sum(-1, keepdim=True)
    return z * torch.threshold(squares, _SHORTEST**2, math.inf).sqrt().reciprocal()


def mean_cosine(units: Tensor) -> Tensor:
    """The mean cosine of two different unit vectors of ``[..., D]``; NaN if there is only one."""
    units = units.flatten(0, -2)  # [M, D]
    count = len(units)
    pairs = units.sum(0).square().sum() - units.square().sum()
    return pairs / (count * (count - 1)) if count > 1 else pairs.new_full((), math.nan)
