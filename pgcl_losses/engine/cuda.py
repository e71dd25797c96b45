"""Which engine "auto" takes on a CUDA device: by free memory, and by whether kernels are trusted.

This module marks a function as constant for graphs, which makes torch import its compiler. So it is
imported only when it is needed.
"""

import torch

from pgcl_losses._modes import is_capturing
from pgcl_losses.engine import trial
from pgcl_losses.engine.pairs import Pairs

# Up to so many pairs we do not ask for the free memory: the answer would take longer than they do.
_ALWAYS_DENSE = 1 << 22
# The dense engine holds about four matrices, and others in training need memory, too.
_MATRICES, _PART_OF_FREE = 4, 4

_free: dict[torch.device, int] = {}  # when last asked


def choose(pairs: Pairs, temperature: float) -> str:
    """For a single process: several may differ in memory and in their trust in the kernels."""
    num_pairs = len(pairs.rows) ** 2
    needed = _MATRICES * _PART_OF_FREE * pairs.rows.element_size() * num_pairs
    if num_pairs <= _ALWAYS_DENSE or needed <= free_memory(pairs.rows.device):
        return "dense"
    return "triton" if trial.is_trusted(pairs, temperature) else "streaming"


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch has no type there
def free_memory(device: torch.device) -> int:
    """In bytes, with what PyTorch's allocator holds unused.

    While a CUDA graph is captured, the value from before. In a compiled graph, the value at
    compilation.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch has no type there
        return 0  # these are tensors without numbers
    if not is_capturing(device):
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        _free[device] = torch.cuda.mem_get_info(device)[0] + unused
    if device not in _free:
        return torch.cuda.get_device_properties(device).total_memory
    return _free[device]
