"""How code runs: eagerly, compiled, captured or transformed; and whether Python may read values."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad

Result = TypeVar("Result")


def is_transformed(*values: object) -> bool:
    """Whether torch.func transforms this code, or forward mode differentiates one of the values."""
    if torch._C._are_functorch_transforms_active():
        return True
    if forward_ad._current_level < 0:  # outside of forward mode, this skips slow unpacking
        return False
    tensors = [value for value in values if isinstance(value, Tensor)]
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)  # type: ignore[no-untyped-call]  # torch has no type there


def is_eager(values: Tensor) -> bool:
    """Whether Python may read the values of a tensor, now or after a copy to the host.

    It may not in a compiled graph, in a CUDA graph or under torch.func transforms, and a tensor on
    the meta device or a FakeTensor has no values. On devices other than CPU and CUDA the answer is
    always no. Subclasses of Tensor, such as PyG's EdgeIndex, can be read.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return False
    if isinstance(values, FakeTensor):
        return False
    if values.is_cuda:
        with torch.cuda.device(values.device):
            return not torch.cuda.is_current_stream_capturing()
    return values.device.type == "cpu"


def can_be_read(values: Tensor) -> bool:
    """Whether Python may read values without synchronising: they are on the host."""
    return values.device.type == "cpu" and is_eager(values)


def keeps_graph() -> bool:
    """Whether the backward that runs now keeps autograd's graph, for another one (retain_graph)."""
    keeps = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps is None or keeps()  # private: without it, assume that the graph is kept


def may_overwrite(d: Tensor) -> bool:
    """Whether the backward that runs now, with derivatives ``d``, may overwrite what was saved.

    It may not if it can be repeated, or if vmap computes many gradients (``is_grads_batched``).
    """
    return not (is_batched(d) or keeps_graph())


def is_batched(d: Tensor) -> bool:
    """Whether a derivative stands for many, which vmap computes at once (``is_grads_batched``)."""
    return is_transformed(d) or torch._C._functorch.is_legacy_batchedtensor(d)


def remembered(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorate a pure function of numbers and names: it computes the results of latest calls once.

    A number of graphs may be a symbol, as of a FakeTensor, which has no hash; and torch.compile
    warns of a cache, which it does not trace.
    """
    cached = functools.lru_cache(function)

    @functools.wraps(function)
    def wrapped(*args: Any) -> Result:
        if torch.compiler.is_compiling():
            return function(*args)
        try:
            return cached(*args)
        except TypeError:
            return function(*args)

    return wrapped
