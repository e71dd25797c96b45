"""Unit rows, in the precision the losses compute in."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

# F.normalize's own bound: rows shorter than this are only divided by it.
_SHORTEST = 1e-12


def computing_dtype(*tensors: Tensor) -> torch.dtype:
    """float32, or float64 where a tensor is."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def unit_rows(z: Tensor, dtype: torch.dtype) -> Tensor:
    """`F.normalize` for the rows of ``[..., D]``, computed in that dtype.

    Only the gradient differs: a row shorter than 1e-12 has no direction to speak of and gets none,
    where F.normalize would return one blown up by 1e12.
    """
    rows: Tensor = _UnitRows.apply(z.to(dtype))[0]  # type: ignore[no-untyped-call]  # torch's gap
    return rows


class _UnitRows(torch.autograd.Function):
    """z -> (u, n) with n = max(|z|, 1e-12) and u = z / n.

    Half the time of F.normalize's backward pass. Both are outputs, so that the gradient, which is
    made of them, can be differentiated again.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> tuple[Tensor, Tensor]:
        norms = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp_min_(_SHORTEST)
        rows = z / norms
        ctx.save_for_backward(rows, norms)
        ctx.set_materialize_grads(False)
        return rows, norms

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor | None, d_norms: Tensor | None) -> Tensor:
        rows, norms = ctx.saved_tensors
        if d_rows is None:
            d_rows = torch.zeros_like(rows)
        along = torch.linalg.vecdot(d_rows, rows).unsqueeze(-1)
        if d_norms is not None:
            along = along - d_norms * norms
        return torch.addcmul(d_rows, along, rows, value=-1) / F.threshold(
            norms, _SHORTEST, math.inf
        )
