"""Measure the memory that tensors take, on any device."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors made in its block and still alive; remembers the most.

    What an operator allocates and frees within itself is not seen, nor is compiled code.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[StorageWeakRef, int] = {}
        self._from_before: set[StorageWeakRef] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._from_before |= self._storages((args, kwargs)).keys() - self._made.keys()
        result = func(*args, **kwargs)
        made = self._made | self._storages(result)
        self._made = {
            storage: size
            for storage, size in made.items()
            if storage not in self._from_before and not storage.expired()
        }
        self.peak = max(self.peak, sum(self._made.values()))
        return result

    @staticmethod
    def _storages(tree: Any) -> dict[StorageWeakRef, int]:
        storages = [x.untyped_storage() for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]
        return {StorageWeakRef(storage): storage.nbytes() for storage in storages}
