"""Past embeddings: a memory of further negatives, and a queue that helps to balance small batches.

The memory is the one of MoCo (He et al., CVPR 2020) and GCC (Qiu et al., KDD 2020): its embeddings
have no gradient and are never queries. The queue is the one of SwAV (Caron et al., NeurIPS 2020).
"""

import torch
from torch import Tensor, nn

from pgcl_losses.base import checks as check
from pgcl_losses.base.module import LossModule, called_by_all
from pgcl_losses.pairs.batch import Batch
from pgcl_losses.pairs.given import Given, check_labels
from pgcl_losses.pairs.rows import NO_LABEL


class Ring(nn.Module):
    """A ring buffer: new embeddings overwrite the oldest embeddings. Empty slots are zero."""

    embeddings: Tensor  # [B, D], or [V, B, D] for each of V views
    num_stored: Tensor  # [] how many embeddings were ever stored (of each view)

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(shape))
        self.register_buffer("num_stored", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        """Empty the buffer."""
        for buffer in self.buffers():
            buffer.zero_()

    def filled(self, num_before: int) -> Tensor:
        """The mask ``[M + B]`` of filled slots; the first ``num_before`` = M entries are True.

        They stand for the embeddings of a batch, which precede the memory.
        """
        size = self.embeddings.shape[-2]
        return torch.arange(-num_before, size, device=self.num_stored.device) < self.num_stored

    @torch.no_grad()
    def store(self, embeddings: Tensor, wanted: Tensor) -> Tensor:
        """Store embeddings ``[..., N, D]``, the last as the newest, if ``wanted``, a bool ``[]``.

        If there are more embeddings than slots, only the last ones are stored. Return their slots.
        """
        size = self.embeddings.shape[-2]
        newest = embeddings.detach()[..., -size:, :].to(self.embeddings.dtype)
        slots = torch.arange(newest.shape[-2], device=newest.device).add_(self.num_stored) % size
        old = self.embeddings.index_select(-2, slots)
        self.embeddings.index_copy_(-2, slots, newest.where(wanted, old))
        self.num_stored += wanted * len(slots)
        return slots


class Memory(Ring):
    """A ring buffer of the embeddings of all processes, with their labels."""

    labels: Tensor  # [B]
    is_manual: Tensor  # [] 1 after the first `remember`: only `remember` stores then

    def __init__(self, size: int, dim: int) -> None:
        super().__init__(size, dim)
        self.register_buffer("labels", torch.full((size,), NO_LABEL))
        # This is a number and no bool: AveragedModel(use_buffers=True) cannot average bools.
        self.register_buffer("is_manual", torch.zeros((), dtype=torch.long))

    def reset_parameters(self) -> None:
        """Empty the memory, with its labels."""
        super().reset_parameters()
        self.labels.fill_(NO_LABEL)

    def check(self, name: str, embeddings: Tensor) -> None:
        """Check that the memory has the dimension and the device of embeddings ``[N, D]``."""
        dim, came = self.embeddings.shape[1], embeddings.shape[-1]
        if came != dim:
            raise ValueError(f"{name} has dimension {came}, but the memory holds dimension {dim}")
        check.device(name, embeddings, "the memory", self.embeddings)

    @torch.no_grad()
    def store_batch(self, batch: Batch, manually: bool) -> None:
        """Store the embeddings of a batch, if they are finite.

        ``manually``: whether `remember` stores them. The first such call empties the memory. From
        then on the embeddings of training forwards are not stored.
        """
        wanted = batch.is_finite()
        if manually:
            is_first = wanted & (self.is_manual == 0)
            for buffer in (self.embeddings, self.num_stored):
                buffer.masked_fill_(is_first, 0)
            self.labels.masked_fill_(is_first, NO_LABEL)
            self.is_manual.masked_fill_(is_first, 1)
        else:
            wanted = wanted & (self.is_manual == 0)
        slots = self.store(batch.embeddings, wanted)
        labels = torch.full_like(slots, NO_LABEL)
        if batch.labels is not None:
            labels = batch.labels[: len(batch.embeddings)][-len(slots) :]
        self.labels.index_copy_(0, slots, labels.where(wanted, self.labels[slots]))


class LossWithMemory(LossModule):
    """A loss that may have a memory: embeddings of past batches as further negatives."""

    memory_size: int
    memory: Memory | None

    @called_by_all("remember")
    def remember(self, embeddings: Tensor, *, labels: Tensor | None = None) -> None:
        """Store embeddings ``[N, D]`` in the memory, such as the keys of a momentum encoder.

        If you never call this method, each training forward stores its own embeddings, except under
        ``torch.func``. The first call empties the memory. From then on only this method stores
        embeddings. With several processes, all of them must call it, each with its own embeddings.

        If you give ``labels`` ``[N]``, the stored embeddings are no negatives of queries that have
        the same label.

        ``AveragedModel(loss)`` copies the memory. Do not set ``use_buffers=True``: it would average
        stored embeddings of different graphs.
        """
        memory = self.memory

        def check_inputs() -> dict[str, object]:
            if memory is None:
                raise ValueError("memory_size is 0: make a loss with memory_size=... to remember")
            check.matrix("embeddings", embeddings, "[N, D]")
            memory.check("embeddings", embeddings)
            if labels is not None:
                check_labels("labels", labels, "embeddings", embeddings)
            return {"labels": labels is not None}

        processes = self.check_on_all("remember", (embeddings,), check_inputs)
        assert memory is not None  # it has been checked
        normalize = getattr(self, "similarity", "cosine") == "cosine"
        with torch.no_grad():
            batch = Batch.from_views((embeddings,), processes, Given(labels), normalize=normalize)
        memory.store_batch(batch, manually=True)

    def with_memory(self, batch: Batch) -> Batch:
        """Add the past embeddings to the batch, if this loss has a memory."""
        if self.memory is None:
            return batch
        past = self.memory.embeddings.to(batch.embeddings.dtype)
        filled = self.memory.filled(len(batch.embeddings))
        labels = None if batch.labels is None else torch.cat([batch.labels, self.memory.labels])
        pairs = batch.pairs._replace(labels=labels, memory=past, filled=filled)
        return batch._replace(pairs=pairs)
