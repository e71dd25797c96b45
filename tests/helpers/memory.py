"""Which tensors a call makes, how long they are alive, and what is kept for a backward."""

import weakref

import torch
from torch.multiprocessing.reductions import StorageWeakRef
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


class AliveTensors(TorchDispatchMode):
    """Counts the memories that tensors made within the block hold, and the ``most`` at a time."""

    def __init__(self):
        super().__init__()
        self.made, self.most = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self.made[StorageWeakRef(x.untyped_storage())] = None
        self.made = {ref: None for ref in self.made if not ref.expired()}
        self.most = max(self.most, len(self.made))
        return result


class Kept:
    """A tensor that autograd keeps, as long as it does."""

    def __init__(self, tensor):
        self.tensor = tensor


def kept_for_backward(function):
    """What ``function()`` returns, and how many elements autograd keeps for its backward."""
    alive = weakref.WeakSet()

    def keep(tensor):
        kept = Kept(tensor)
        alive.add(kept)
        return kept

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda kept: kept.tensor):
        result = function()
    sizes = {StorageWeakRef(x.tensor.untyped_storage()): x.tensor.numel() for x in alive}
    return result, sum(sizes.values())
