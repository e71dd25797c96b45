"""A warm-up by InfoNCE: the forwards that are counted, and the embeddings that are kept of them."""

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from pgcl_losses._modes import is_capturing, is_eager
from pgcl_losses._warnings import warn
from pgcl_losses.memory import Memory, is_finite
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.ranks import Ranks, count_ranks

_FEW = 16  # forwards of a trial, and not of a training


class WarmUp(nn.Module):
    """Counts training forwards, and initialises the prototypes after ``steps`` of them.

    It keeps embeddings of the last batches, of all processes: ``max(4096, 8 * K)`` of them.
    """

    step: Tensor  # training forwards with finite embeddings

    def __init__(self, steps: int, num_prototypes: int, dim: int) -> None:
        super().__init__()
        self.steps = steps
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.kept = Memory(max(4096, 8 * num_prototypes), dim)
        self.over = False
        # At least `step`, which has its number on a device; None: not known.
        self._count: int | None = None
        self._end = _End(steps)

    def state(self) -> dict[str, Tensor]:
        """What must be the same in all processes."""
        if self.over:
            return {}
        kept = {f"kept {name}": tensor for name, tensor in self.kept.state().items()}
        return {"warm-up step": self.step, **kept}

    def check(self, name: str, embeddings: Tensor) -> None:
        """Whether they can be kept, and numbers be read, so that the end can be reached."""
        self.kept.check(name, embeddings)
        if is_capturing(embeddings.device) or not is_eager():
            raise RuntimeError(
                "the warm-up cannot be captured in a CUDA graph, nor run in a transform of "
                f"torch.func: do so after warmup_steps={self.steps} training forwards"
            )

    def goes_on(self, prototypes: SinkhornPrototypes, ranks: Ranks) -> bool:
        """Whether the next forward is InfoNCE; initialises the prototypes when none is any more.

        Waits for the device only if the end may be reached, and at first and after a checkpoint.
        """
        if self.over:
            return False
        if self._count is None or self._count >= self.steps:
            # Numbers of the meta device are unknown.
            self._count = 0 if self.step.is_meta else int(self.step)
        if self._count < self.steps:
            return True
        if not prototypes.initialised:
            if len(ranks.counts) == 1 < count_ranks(None):
                warn(
                    "PGCLLoss: with gather=False each process initialises prototypes of its own, "
                    "and DistributedDataParallel does not make them the same: after the warm-up, "
                    "broadcast pgcl.prototypes.weight from one process"
                )
            filled = min(int(self.kept.written), len(self.kept.embeddings))
            generator = torch.Generator("cpu").manual_seed(0)  # the user's do not move
            prototypes.initialise_(self.kept.embeddings[:filled], ranks, generator)
        self.over = True
        self._end.numbers["here"] = 0
        return False

    @torch.no_grad()
    def keep(self, embeddings: Tensor, ranks: Ranks) -> None:
        """Count a training forward with embeddings ``[V, N, D]`` and keep them, if finite."""
        assert self._count is not None  # as `goes_on` has read
        embeddings = embeddings.flatten(0, 1)
        finite = is_finite(embeddings)
        every = -(-len(embeddings) // len(self.kept.embeddings))  # of a large batch a sample
        self.kept.store(embeddings[::every], None, finite)
        self.step += finite
        self._count += 1
        if ranks.rank == 0:
            self._end.numbers.update(here=self._end.numbers["here"] + 1, count=self._count)

    def _load_from_state_dict(self, *given: Any) -> None:
        self.over, self._count = False, None
        super()._load_from_state_dict(*given)

    def extra_repr(self) -> str:
        return f"steps={self.steps}"


class _End:
    """Warns when it is no longer in use, or Python ends, in a warm-up. A copy begins anew."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.numbers = {"here": 0, "count": 0}
        weakref.finalize(self, _warn_of_end, self.numbers, steps)

    def __reduce__(self) -> tuple[type["_End"], tuple[int]]:
        return _End, (self.steps,)


def _warn_of_end(numbers: dict[str, int], steps: int) -> None:
    if numbers["here"] > _FEW:
        warn(
            f"PGCLLoss: training ended in the warm-up, after {numbers['count']} of {steps} "
            "forwards, so PGCL never began: lower warmup_steps, or give PGCLLoss.recommended the "
            "steps of this training"
        )
