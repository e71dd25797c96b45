"""A warm-up by InfoNCE: the forwards that are counted, and the embeddings that are kept of them."""

import weakref

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
        # The prototypes before and after their initialisation, until a later forward compares them.
        self._written: tuple[Tensor, Tensor] | None = None
        self._end = _End(steps)

    def reset_parameters(self) -> None:
        self.step.zero_()
        self.over, self._count, self._written = False, None, None

    def read(self, initialised: Tensor) -> None:
        """Read from a checkpoint that was loaded whether the warm-up is over."""
        known = not self.step.is_meta
        self.over = known and bool(initialised) and int(self.step) >= self.steps
        self._count = self._written = None

    def check(self, device: torch.device) -> None:
        """Whether numbers can be read, so that the end can be reached."""
        if is_capturing(device) or not is_eager():
            raise RuntimeError(
                "the warm-up cannot be captured in a CUDA graph, nor run in a transform of "
                f"torch.func: do so after warmup_steps={self.steps} training forwards and one more"
            )

    def goes_on(self, prototypes: SinkhornPrototypes, ranks: Ranks, learning: bool) -> bool:
        """Whether the next forward is InfoNCE; initialises the prototypes when none is any more.

        Waits for the device only at the end, and at first and after a checkpoint.
        """
        if self.over:
            return False
        if self._written is not None:
            if learning:
                self._look_again(prototypes, *self._written)
            return False
        if self._count is None or self._count >= self.steps:
            # Numbers of the meta device are unknown.
            self._count = 0 if self.step.is_meta else int(self.step)
        if self._count < self.steps or not learning:
            return True
        before = prototypes.weight.detach().clone()
        if not prototypes.initialised:
            filled = min(int(self.kept.written), len(self.kept.embeddings))
            if filled == 0:  # in a checkpoint from the middle of a longer warm-up
                return True
            if len(ranks.counts) == 1 < count_ranks(None):
                warn(
                    "PGCLLoss: with gather=False each process initialises prototypes of its own, "
                    "and DistributedDataParallel does not make them the same: after the warm-up, "
                    "broadcast pgcl.prototypes.weight from one process"
                )
            generator = torch.Generator("cpu").manual_seed(0)  # the user's do not move
            prototypes.initialise_(self.kept.embeddings[:filled], ranks, generator)
        self._written = before, prototypes.weight.detach().clone()
        self._end.numbers["here"] = 0
        return False

    def _look_again(self, prototypes: SinkhornPrototypes, before: Tensor, after: Tensor) -> None:
        """SAM, LBFGS and some wrappers put parameters back that they saved before a forward."""
        self.over, self._written = True, None
        weight = prototypes.weight.detach()
        if torch.dist(weight, before) < 0.25 * torch.dist(after, before):
            prototypes.write_(after)
            warn(
                "PGCLLoss: after the forward that initialised the prototypes something put the "
                "former ones back (SAM, LBFGS, a wrapper). They are initialised once more; if "
                "pgcl.prototypes.weight does not change, call pgcl.prototypes.start_from_("
                "embeddings) between two steps of the optimizer"
            )

    @torch.no_grad()
    def keep(self, embeddings: Tensor, ranks: Ranks) -> None:
        """Count a training forward with embeddings ``[V, N, D]`` and keep them, if finite."""
        assert self._count is not None  # as `goes_on` has read
        embeddings, size = embeddings.flatten(0, 1), len(self.kept.embeddings)
        finite = is_finite(embeddings)
        if self._count >= self.steps - 1 - size // max(1, len(embeddings)):  # what will be used
            every = -(-len(embeddings) // size)  # of a large batch a sample
            self.kept.store(embeddings[::every], None, finite)
        self.step += finite
        self._count += 1
        if ranks.rank == 0:
            self._end.numbers.update(here=self._end.numbers["here"] + 1, count=self._count)


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
            "forwards, so PGCL did not begin: unless you go on from a checkpoint, lower "
            "warmup_steps, which counts training forwards"
        )
