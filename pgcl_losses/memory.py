"""A memory of past embeddings: further negatives for small batches.

As in MoCo (He et al., CVPR 2020) and GCC (Qiu et al., KDD 2020). Past embeddings are no queries and
have no gradient.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pgcl_losses._checks import check_device
from pgcl_losses._modes import can_be_read

# The item of what is stored without one. A caller's items are not that number.
NO_ITEM = torch.iinfo(torch.int64).min


class Remembered(NamedTuple):
    """What a memory holds; a batch has it beside its embeddings."""

    embeddings: Tensor  # [B, D] of unit length
    items: Tensor  # [B] int64
    present: Tensor | None  # [B] bool, False for slots that are not filled; None: all are
    targets: Tensor | None = None  # [B, K] the balanced assignment, by SinkhornPrototypes
    clusters: Tensor | None = None  # [B, H]


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

    def check(self, name: str, embeddings: Tensor) -> None:
        """Whether embeddings ``[N, D]`` can be compared with those of the memory."""
        dim = self.embeddings.shape[1]
        if dim == 0:
            return
        if embeddings.shape[1] != dim:
            raise ValueError(
                f"{name} has dimension {embeddings.shape[1]}, but the memory holds embeddings of "
                f"dimension {dim}"
            )
        check_device(name, embeddings, "the memory", self.embeddings)

    def state(self) -> dict[str, Tensor]:
        """What must be the same in all processes: of the embeddings a sample."""
        sample = self.embeddings[:: 1 + len(self.embeddings) // 256]
        return {"memory": sample, "written": self.written, "by_hand": self.by_hand}

    def contents(self, embeddings: Tensor) -> Remembered | None:
        """What it holds, to be compared with embeddings ``[..., D]``; None while it is empty."""
        self._fit(embeddings)
        size, dtype = len(self.embeddings), embeddings.dtype
        if not can_be_read(self.written):
            present = torch.arange(size, device=self.written.device) < self.written
            return Remembered(self.embeddings.to(dtype), self.items, present)
        filled = min(int(self.written), size)
        if filled == 0:
            return None
        return Remembered(self.embeddings[:filled].to(dtype), self.items[:filled], None)

    def remember(self, embeddings: Tensor, items: Tensor | None) -> None:
        """Store embeddings ``[M, D]`` of unit length by hand: from now on, only these."""
        self._fit(embeddings)
        self.written *= self.by_hand
        self.by_hand.fill_(True)
        self._store(embeddings, items, self.by_hand)

    def follow(self, embeddings: Tensor, items: Tensor | None) -> None:
        """Store those of a training forward, unless it is fed by hand."""
        self._store(embeddings, items, ~self.by_hand)

    @torch.no_grad()
    def _store(self, embeddings: Tensor, items: Tensor | None, wanted: Tensor) -> None:
        total = embeddings.sum()
        wanted = wanted & (total == total)  # a NaN or inf in a batch becomes NaN in unit vectors
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
            self.embeddings = torch.zeros(shape, dtype=embeddings.dtype, device=embeddings.device)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = state_dict.get(prefix + "embeddings")
        if saved is not None and self.embeddings.shape[1] == 0:
            self.embeddings = saved.new_zeros(len(self.embeddings), saved.shape[1])
        super()._load_from_state_dict(state_dict, prefix, *others)

    def extra_repr(self) -> str:
        return f"size={len(self.embeddings)}"
