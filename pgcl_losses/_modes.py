"""How this code runs: eagerly, traced or captured; and whether Python may read values."""

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad


def is_transformed(*values: object) -> bool:
    """Whether torch.func or forward mode differentiates one of these values."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:  # faster than to unpack tensors outside of forward mode
        return False
    tensors = [value for value in values if isinstance(value, Tensor)]
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)  # type: ignore[no-untyped-call]  # torch has no type there


def is_eager(values: Tensor) -> bool:
    """Whether Python may read numbers, now or later.

    It may not in a compiled or CUDA graph and within transforms, nor of tensors without numbers.
    Subclasses of Tensor, such as PyG's EdgeIndex, can be read.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if values.is_cuda:
        with torch.cuda.device(values.device):
            return not torch.cuda.is_current_stream_capturing()
    return values.device.type == "cpu" and not isinstance(values, FakeTensor)


def can_be_read(values: Tensor) -> bool:
    """Whether Python may read values without synchronising a device."""
    return values.device.type == "cpu" and is_eager(values)
