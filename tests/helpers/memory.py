"""The largest tensor that is made, and what is kept for a backward: all pairs would show."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that one tensor made within the block has."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [
            x.untyped_storage().nbytes() // x.element_size()
            for x in tree_leaves(result)
            if isinstance(x, torch.Tensor)
        ]
        self.numel = max(self.numel, *sizes, 0)
        return result


def largest_tensor(function):
    """Elements of the largest tensor that ``function()`` makes or returns."""
    with LargestTensor() as largest:
        function()
    return largest.numel


def kept_for_backward(function):
    """What ``function()`` returns, and how many elements autograd keeps for its backward."""
    sizes = []

    def keep(tensor):
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = function()
    return result, sum(sizes)
