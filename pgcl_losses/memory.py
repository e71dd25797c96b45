"""A memory of past embeddings: further negatives for small batches.

As in MoCo (He et al., CVPR 2020) and GCC (Qiu et al., KDD 2020): without gradient, never queries.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pgcl_losses import _checks as check
from pgcl_losses._module import LossModule
from pgcl_losses.batch import Batch, Related, batch_of
from pgcl_losses.engine.pairs import NO_ITEM


class Memory(nn.Module):
    """The last ``size`` embeddings, of all processes; the oldest ones are overwritten."""

    embeddings: Tensor  # [B, D] of unit length
    items: Tensor  # [B]
    written: Tensor  # how many were ever stored
    by_hand: Tensor  # 1 if only `remember` stores embeddings, else 0

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(size, dim))
        self.register_buffer("items", torch.full((size,), NO_ITEM))
        # Numbers, as AveragedModel(use_buffers=True) cannot average bools.
        self.register_buffer("written", torch.zeros((), dtype=torch.long))
        self.register_buffer("by_hand", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        for buffer in (self.embeddings, self.written, self.by_hand):
            buffer.zero_()
        self.items.fill_(NO_ITEM)

    def check(self, name: str, embeddings: Tensor) -> None:
        """Whether embeddings ``[N, D]`` can be compared with those of the memory."""
        dim = self.embeddings.shape[1]
        if embeddings.shape[-1] != dim:
            raise ValueError(
                f"{name} has dimension {embeddings.shape[-1]}, but the memory holds embeddings of "
                f"dimension {dim}"
            )
        check.device(name, embeddings, "the memory", self.embeddings)

    def state(self) -> dict[str, Tensor]:
        """What must be the same in all processes: a sample of the embeddings."""
        sample = self.embeddings[:: 1 + len(self.embeddings) // 256]
        return {"memory": sample, "written": self.written, "by_hand": self.by_hand}

    @torch.no_grad()
    def remember(self, embeddings: Tensor, items: Tensor | None) -> None:
        """Store embeddings ``[M, D]`` of unit length by hand: from now on, only these."""
        finite = _is_finite(embeddings)
        first = finite & (self.by_hand == 0)
        self.by_hand.masked_fill_(first, 1)
        self.written.masked_fill_(first, 0)
        self.items.masked_fill_(first, NO_ITEM)
        self._store(embeddings, items, finite)

    @torch.no_grad()
    def follow(self, embeddings: Tensor, items: Tensor | None) -> None:
        """Store those of a training forward, unless `remember` is in use."""
        self._store(embeddings, items, _is_finite(embeddings) & (self.by_hand == 0))

    def _store(self, embeddings: Tensor, items: Tensor | None, wanted: Tensor) -> None:
        """Store them if ``wanted``, a bool tensor, is True."""
        size = len(self.embeddings)
        embeddings = embeddings.detach()[-size:].to(self.embeddings.dtype)
        slots = torch.arange(len(embeddings), device=embeddings.device).add_(self.written) % size
        stored = embeddings.where(wanted, self.embeddings[slots])
        self.embeddings.index_copy_(0, slots, stored)
        items = torch.full_like(slots, NO_ITEM) if items is None else items[-size:]
        self.items.index_copy_(0, slots, items.where(wanted, self.items[slots]))
        self.written += wanted * len(slots)


def _is_finite(embeddings: Tensor) -> Tensor:
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
        ones, except under a transform of ``torch.func``. From the first call on, only this method
        does; that call empties the memory first. With several processes, all of them call it, each
        with embeddings of its own. With ``items`` ``[N]``, those stored are no negatives of queries
        of the same item.
        """
        self.traceable(self._remember)(embeddings, items)

    def _remember(self, embeddings: Tensor, items: Tensor | None) -> None:
        memory, related = self.memory, Related(None if items is None else (items,))

        def checked(may_be_empty: bool) -> None:
            if memory is None:
                name = type(self).__name__
                raise ValueError(f"memory_size is 0: make {name}(memory_size=...) to remember")
            check.matrices([("embeddings", embeddings)], may_be_empty=may_be_empty)
            memory.check("embeddings", embeddings)
            if items is not None:
                check.clusters("items", items, "embeddings", embeddings, rule="one for each")

        same = partial(self.memory_facts, related)
        processes = self.agree("remember", checked, (embeddings,), same)
        assert memory is not None  # as checked
        with torch.no_grad():
            batch = batch_of(processes, (embeddings,), related=related)
            memory.remember(batch.embeddings, batch.items)

    def past(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """The memory's embeddings ``[B, D]``, their items and which are present, ``[B]``."""
        if self.memory is None:
            return None
        embeddings, items = self.memory.embeddings, self.memory.items
        slots = torch.arange(len(items), device=items.device)
        return embeddings, items, slots < self.memory.written

    def remember_batch(self, batch: Batch) -> None:
        """Store the embeddings of a training forward."""
        if self.memory is not None:
            items = None if batch.items is None else batch.items[: len(batch.embeddings)]
            self.memory.follow(batch.embeddings, items)

    def memory_facts(self, related: Related) -> dict[str, Any]:
        """What must be the same in all processes."""
        state = {} if self.memory is None else self.memory.state()
        return {**related.facts(), **state}
