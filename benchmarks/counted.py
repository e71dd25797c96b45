"""Count the operations that a block of code asks PyTorch for, on any device."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = {
    getattr(torch.ops.aten, name)
    for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_")
}
_NOTHING = ("empty", "new_empty", "lift", "_unsafe_view", "resize")


class Work(TorchDispatchMode):
    """Counts operations, the multiplications of matrix products, and what the others move."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = 0  # each is a launch on a GPU, or a few
        self.multiplications = 0
        self.bytes = 0  # read and written by all but products

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.is_view or name.startswith(_NOTHING) or name == "detach":
            return result
        self.operations += 1
        if func.overloadpacket in PRODUCTS:
            *_, left, right = args
            self.multiplications += left.numel() * right.shape[-1]
        else:
            self.bytes += _bytes(args) + _bytes(result)
        return result


def _bytes(values: Any) -> int:
    tensors = [value for value in tree_leaves(values) if isinstance(value, Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
