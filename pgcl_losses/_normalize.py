"""Unit rows, in the precision in which losses are computed."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pgcl_losses._modes import is_eager

_CPU = "cpu"
# F.normalize's own bound.
_SHORTEST = 1e-12


def computing_dtype(*tensors: Tensor) -> torch.dtype:
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
    """L2-normalise the rows of ``[..., D]``, computed in that dtype.

    Like `F.normalize`, except for rows shorter than 1e-12. They have no meaningful direction: they
    become zero rows without gradient. F.normalize would return a gradient blown up by 1e12. Rows
    whose squares overflow (in float32 from 1e19 on) become zero rows, too, as in F.normalize.
    """
    z = z.to(dtype)
    if z.requires_grad and backward_alone():
        unit: Tensor = _UnitRows.apply(z)  # type: ignore[no-untyped-call]  # torch has no type there
        return unit
    return z / _lengths(z)


def _lengths(z: Tensor) -> Tensor:
    """Lengths of rows; infinite for rows without a meaningful direction."""
    return torch.threshold(torch.linalg.vector_norm(z, dim=-1, keepdim=True), _SHORTEST, math.inf)


class _UnitRows(torch.autograd.Function):
    """Unit rows, with the same gradient in fewer steps."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        lengths = _lengths(z)
        unit = z / lengths
        ctx.save_for_backward(z, unit, lengths)
        return unit

    @staticmethod
    def backward(ctx: Any, d_unit: Tensor) -> Tensor:
        z, unit, lengths = ctx.saved_tensors
        if torch.is_grad_enabled():  # it will be differentiated again
            d_z: Tensor
            (d_z,) = torch.autograd.grad(z / _lengths(z), z, d_unit, create_graph=True)
            return d_z
        along = (unit * d_unit).sum(-1, keepdim=True)
        return torch.addcmul(d_unit, unit, along, value=-1).div_(lengths)


def scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """``scale * a @ b`` of two matrices, in one step."""
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=scale)  # with beta=0 nothing is added


def backward_alone() -> bool:
    """Whether only backward passes will ask for a gradient."""
    return is_eager() and forward_ad._current_level < 0


def on_cpu(values: Tensor) -> bool:
    """Whether values are on a CPU: there operations start quickly and work slowly."""
    return values.device.type == _CPU


def mean_cosine(rows: Tensor) -> Tensor:
    """The mean cosine of two different rows, of unit rows ``[..., D]``; NaN if there is one."""
    rows = rows.flatten(0, -2)  # [M, D]
    count = len(rows)
    pairs = rows.sum(0).square().sum() - rows.square().sum()
    return pairs / (count * (count - 1)) if count > 1 else pairs.new_full((), math.nan)
