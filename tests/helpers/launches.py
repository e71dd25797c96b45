"""What a GPU would be started for, on a machine without one."""

from contextlib import AbstractContextManager, nullcontext
from unittest import mock

from torch.utils._python_dispatch import TorchDispatchMode

from pgcl_losses import _normalize

# Those that start nothing: views of what is there, and memory with nothing in it yet.
FREE = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "detach",
    "empty",
    "empty_like",
    "expand",
    "new_empty",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "t",
    "transpose",
    "unbind",
    "unsqueeze",
    "view",
}


def elsewhere(really: bool = True) -> AbstractContextManager[object]:
    """A block in which no tensor is thought to be on a CPU: the ways of a GPU are taken."""
    return mock.patch.object(_normalize, "_CPU", "none") if really else nullcontext()


class Launches(TorchDispatchMode):
    """Counts, by name, the operations that start something on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name not in FREE:
            self.names.append(name)
        return function(*args, **(kwargs or {}))
