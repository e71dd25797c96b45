"""A memory of past embeddings: further negatives for small batches.

As in MoCo (He et al., CVPR 2020) and GCC (Qiu et al., KDD 2020). Past embeddings are no queries and
have no gradient.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pgcl_losses import _checks as check
from pgcl_losses._modes import can_be_read
from pgcl_losses._module import LossModule
from pgcl_losses.batch import Remembered, unit_sets

# The item of what is stored without one. A caller's items are not that number.
NO_ITEM = torch.iinfo(torch.int64).min


class Memory(nn.Module):
    """The last ``size`` embeddings, of all processes; the oldest ones are overwritten.

    The embedding dimension is that of the first batch, or of a checkpoint that is loaded.
    """

    embeddings: Tensor  # [B, D] of unit length
    items: Tensor  # [B]
    written: Tensor  # how many were ever stored
    by_hand: Tensor  # whether only `remember` stores embeddings

    def __init__(self, size: int, dim: int = 0) -> None:
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(size, dim))
        self.register_buffer("items", torch.full((size,), NO_ITEM))
        self.register_buffer("written", torch.zeros((), dtype=torch.long))
        self.register_buffer("by_hand", torch.zeros((), dtype=torch.bool))

    def reset_parameters(self) -> None:
        for buffer in (self.embeddings, self.written, self.by_hand):
            buffer.zero_()
        self.items.fill_(NO_ITEM)

    def check(self, name: str, embeddings: Tensor) -> None:
        """Whether embeddings ``[N, D]`` can be compared with those of the memory."""
        dim = self.embeddings.shape[1]
        if dim == 0:
            return
        if embeddings.shape[-1] != dim:
            raise ValueError(
                f"{name} has dimension {embeddings.shape[-1]}, but the memory holds embeddings of "
                f"dimension {dim}"
            )
        check.device(name, embeddings, "the memory", self.embeddings)

    def state(self) -> dict[str, Tensor]:
        """What must be the same in all processes: of the embeddings a sample."""
        sample = self.embeddings[:: 1 + len(self.embeddings) // 256]
        return {"memory": sample, "written": self.written, "by_hand": self.by_hand}

    def contents(self, embeddings: Tensor) -> Remembered | None:
        """What it holds, to be compared with embeddings ``[..., D]``; None while it is empty."""
        size, dtype = len(self.embeddings), embeddings.dtype
        self.check("the batch", embeddings)
        if self.embeddings.shape[1] == 0:
            return None
        if not can_be_read(self.written):
            present = torch.arange(size, device=self.written.device) < self.written
            return Remembered(self.embeddings.to(dtype), self.items, present)
        filled = min(int(self.written), size)
        if filled == 0:
            return None
        return Remembered(self.embeddings[:filled].to(dtype), self.items[:filled], None)

    @torch.no_grad()
    def remember(self, embeddings: Tensor, items: Tensor | None) -> None:
        """Store embeddings ``[M, D]`` of unit length by hand: from now on, only these."""
        finite = is_finite(embeddings)
        first = finite & ~self.by_hand
        self.by_hand |= first
        self.written *= ~first
        self.items.masked_fill_(first, NO_ITEM)
        self.store(embeddings, items, finite)

    @torch.no_grad()
    def follow(self, embeddings: Tensor, items: Tensor | None) -> None:
        """Store those of a training forward, unless it is fed by hand."""
        self.store(embeddings, items, is_finite(embeddings) & ~self.by_hand)

    def store(self, embeddings: Tensor, items: Tensor | None, wanted: Tensor) -> None:
        """Store them if they are wanted, a bool of their device."""
        self._fit(embeddings)
        size = len(self.embeddings)
        embeddings = embeddings.detach()[-size:].to(self.embeddings.dtype)
        slots = torch.arange(len(embeddings), device=embeddings.device).add_(self.written) % size
        stored = embeddings.where(wanted, self.embeddings[slots])
        self.embeddings.index_copy_(0, slots, stored)
        items = torch.full_like(slots, NO_ITEM) if items is None else items[-size:]
        self.items.index_copy_(0, slots, items.where(wanted, self.items[slots]))
        self.written += wanted * len(slots)

    def _fit(self, embeddings: Tensor) -> None:
        if self.embeddings.shape[1] == 0:
            self.to(embeddings.device)
            shape = len(self.embeddings), embeddings.shape[-1]
            with torch.inference_mode(False):  # training steps write to it
                self.embeddings = embeddings.new_zeros(shape)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = state_dict.get(prefix + "embeddings")
        if saved is not None and 0 in (saved.shape[1], self.embeddings.shape[1]):
            shape = len(self.embeddings), saved.shape[1]
            self.embeddings = saved.new_zeros(shape, device=self.items.device)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        return f"size={len(self.embeddings)}"


def is_finite(embeddings: Tensor) -> Tensor:
    """Whether there is no NaN; a NaN or inf in a batch becomes one in unit vectors."""
    total = embeddings.sum()
    return total == total


class LossWithMemory(LossModule):
    """A loss that may have negatives of past batches."""

    memory_size: int
    memory: Memory | None

    def remember(self, embeddings: Tensor, items: Tensor | None = None) -> None:
        """Store embeddings ``[N, D]`` in the memory by hand, such as those of a momentum encoder.

        Without this, each training forward stores the embeddings of its batch over the oldest
        ones. From the first call on, only this method does; that call empties the memory
        first. With several processes, all of them call it, each with embeddings of its own. With
        ``items`` ``[N]``, those stored are no negatives of queries of the same item.
        """
        self.untraced(self._remember)(embeddings, items)

    def _remember(self, embeddings: Tensor, items: Tensor | None) -> None:
        memory, of_set = self.memory, None if items is None else (items,)

        def checked(may_be_empty: bool) -> None:
            if memory is None:
                name = type(self).__name__
                raise ValueError(f"memory_size is 0: make {name}(memory_size=...) to remember")
            check.views([("embeddings", embeddings)], may_be_empty=may_be_empty)
            memory.check("embeddings", embeddings)
            if items is not None:
                check.clusters("items", items, "embeddings", embeddings, rule="one for each")

        ranks = self.agree("remember", checked, (embeddings,), partial(self.memory_facts, items))
        assert memory is not None  # as checked
        with torch.no_grad():
            sets = unit_sets(ranks, (embeddings,), of_set)
            memory.remember(sets.embeddings, sets.items)

    def memory_facts(self, items: object) -> dict[str, Any]:
        """What must be the same in all processes."""
        state = {} if self.memory is None else self.memory.state()
        return {"items": items is not None, **state}
