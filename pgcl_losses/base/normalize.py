"""Normalisation of embeddings to unit length, and the precision in which losses are computed."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.base.modes import is_transformed

_SHORTEST = 1e-12  # the bound of F.normalize


def computing_dtype(*tensors: Any) -> torch.dtype:
    """float64 if one of the tensors is float64, else float32. Tensors may be None."""
    is_double = torch.float64 in [x.dtype for x in tensors if x is not None]
    return torch.float64 if is_double else torch.float32


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a block in which autocast does not lower the precision."""
    if device.type != "meta" and torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return nullcontext()


def unit_vectors(z: Tensor, dtype: torch.dtype) -> Tensor:
    """L2-normalise vectors ``[..., D]``. ``dtype``: the dtype of the computation and of the result.

    This is `F.normalize`, except for vectors shorter than 1e-12. Such vectors have no meaningful
    direction: they become zero, and their gradient is zero, whereas F.normalize multiplies the
    gradient by 1e12. Vectors whose squares overflow (in float32 from norms of about 1e19 on) become
    zero, as in F.normalize.
    """
    z = z.to(dtype)
    if torch.compiler.is_compiling() or is_transformed(z):
        return _by_operations(z)
    units: Tensor = _UnitVectors.apply(z)  # type: ignore[no-untyped-call]  # torch has no type there
    return units


def _by_operations(z: Tensor) -> Tensor:
    """Normalise with operations that autograd can differentiate any number of times."""
    # vector_norm has a second derivative of NaN at 0, and the backward of rsqrt computes 1 / |z|^3,
    # which leaves the range of float32 much earlier than 1 / |z|.
    squares = (z * z).sum(-1, keepdim=True)
    return z * torch.threshold(squares, _SHORTEST**2, math.inf).sqrt().reciprocal()


class _UnitVectors(torch.autograd.Function):
    """Normalise with fewer operations than `_by_operations`.

    The time of a small batch is mostly spent on starting operations, not on arithmetic.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        lengths = lengths_of(z)
        units = z / lengths
        ctx.save_for_backward(z, units, lengths)
        return units

    @staticmethod
    def backward(ctx: Any, d_units: Tensor) -> Tensor:
        z, units, lengths = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: this gradient is differentiated again
            d_z: Tensor
            (d_z,) = torch.autograd.grad(_by_operations(z), z, d_units, create_graph=True)
            return d_z
        return through_lengths(d_units, units, lengths)


def lengths_of(z: Tensor) -> Tensor:
    """The lengths ``[..., 1]`` that vectors are divided by: infinity if they are below 1e-12."""
    return torch.threshold_(torch.linalg.vector_norm(z, dim=-1, keepdim=True), _SHORTEST, math.inf)


def through_lengths(d_units: Tensor, units: Tensor, lengths: Tensor) -> Tensor:
    """Compute the gradient by vectors from the gradient by their directions, the unit vectors."""
    along = (units * d_units).sum(-1, keepdim=True)
    return torch.addcmul(d_units, units, along, value=-1).div_(lengths)


def finite_or_nan(z: Tensor) -> Tensor:
    """Replace inf in embeddings ``[N, D]`` by NaN.

    An embedding with inf may have scores of -inf, which would silently count as negligible
    negatives.
    """
    return z + (z - z)
