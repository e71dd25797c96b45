"""How this code is being run: eagerly or traced, captured or not, on numbers that can be read."""

import torch
from torch import Tensor
from torch.autograd import forward_ad


def is_eager() -> bool:
    """Whether operations run as Python meets them: no transform, no compiler."""
    return not (torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active())


def is_dual(values: Tensor) -> bool:
    """Whether forward mode differentiates these values."""
    tangent = forward_ad.unpack_dual(values).tangent  # type: ignore[no-untyped-call]  # torch has no type there
    return tangent is not None


def has_numbers(values: Tensor) -> bool:
    """Whether Python may read numbers, at once or later: in no graph and no transform."""
    plain = type(values) is Tensor and values.device.type in ("cpu", "cuda")
    return plain and is_eager() and not is_capturing(values.device)


def can_be_read(values: Tensor) -> bool:
    """Whether Python may read numbers at once: with no device to wait for."""
    return values.device.type == "cpu" and has_numbers(values)


def is_capturing(device: torch.device) -> bool:
    """Whether work for this device is recorded for a CUDA graph, and not done now."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
