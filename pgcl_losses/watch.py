"""Silent failures of a training: one warning reports each of them, and names the fix."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pgcl_losses.base.modes import is_eager
from pgcl_losses.base.normalize import mean_cosine, unit_vectors
from pgcl_losses.base.warnings import warn
from pgcl_losses.consistency import consistency_ratio
from pgcl_losses.pairs.batch import Batch

if TYPE_CHECKING:
    from pgcl_losses.prototypes import SinkhornPrototypes

# For how many training forwards a check waits. Gradients are rarely accumulated over more batches
# than this, and a short training has hardly more steps.
_PATIENCE = 16
_EVERY = 20  # of this many training forwards, the first three are checked

IsBad = Callable[..., bool]  # takes the values of a check; returns whether they are bad

_TEXTS = {
    "gradient": f"the embeddings had no gradient in {_PATIENCE} training forwards, so the encoder "
    "does not learn: take it out of torch.no_grad() and its embeddings out of detach(). If "
    'prototypes or temperature alone are to learn: warnings.filterwarnings("ignore", "{owner}: the '
    'embeddings had no gradient")',
    "views": "two views are one tensor, so every query is its own positive: augment and encode "
    "twice",
    "size": "{} graphs of a batch and {} of the queue are balanced over {} prototypes, which is "
    "too many: use fewer prototypes, larger batches or a larger queue_size",
    "finite": "the embeddings hold NaN or inf: check the input of the encoder and its gradients",
    "zero": "the contrast is 0, as no query has both positives and negatives: use larger batches, "
    "memory_size or more than one prototype; give one label to all embeddings of a graph or class, "
    "and another label to others. If all embeddings are in one cluster, normalise in the encoder",
    "motion": f"the prototypes have not moved in {_PATIENCE} training forwards: does the optimizer "
    "have them? Adam([*encoder.parameters(), *pgcl.parameters()])",
    "collapse": "the embeddings are collapsed: their mean cosine is {:.2f}, and no prototype tells "
    "them apart (the consistency is {:.0%} of log K). Initialise the prototypes from embeddings, "
    "before training: pgcl.prototypes.start_from_(embeddings)",
}


class Watch:
    """Checks the training forwards of one loss, without synchronising with a device."""

    def __init__(self, owner: str) -> None:
        self.owner = owner  # the name of the loss, with which each warning begins
        self.steps = 0
        self.steps_without_gradient = 0  # in a row
        self.start: tuple[int, Tensor] | None = None  # step and directions of prototypes, [K, D]
        self.bad_in_a_row: Counter[str] = Counter()
        self.reported: set[str] = set()
        self.pending: list[tuple[str, int, IsBad, Tensor, torch.cuda.Event | None]] = []

    def __reduce__(self) -> tuple[type["Watch"], tuple[str]]:
        return Watch, (self.owner,)  # a copy starts counting anew

    def is_due(self, module: nn.Module, loss: Tensor, batch: Batch) -> bool:
        """Count a forward of the module, and return whether to check its batch.

        All processes check, and not rank 0 alone: where warnings are errors, all of them must fail,
        or the others would wait for ever.
        """
        is_training = module.training and loss.requires_grad
        if not (is_training and is_eager(batch.embeddings)):
            return False
        self.steps += 1
        has_gradient = batch.embeddings.requires_grad
        self.steps_without_gradient = 0 if has_gradient else self.steps_without_gradient + 1
        self._read_pending()
        return 0 < self.steps % _EVERY < 4

    @torch.no_grad()
    def look(
        self,
        views: Sequence[object],  # the views or sets with which the loss was called
        batch: Batch,
        contrast: Tensor | None,  # None if its weight is 0
        prototypes: "SinkhornPrototypes | None" = None,  # whose consistency has a weight above 0
    ) -> None:
        """Check a batch, after all modules have processed it.

        Several warnings need three or more bad checks in a row, since the last batch of an epoch
        may be small.
        """
        self._check("gradient", 1, self.steps_without_gradient >= _PATIENCE)
        self._check("views", 3, len(set(map(id, views))) < len(views))
        self._measure("finite", 1, lambda total: not math.isfinite(total), batch.embeddings.sum())
        if contrast is not None:
            self._measure("zero", 3, lambda total: total == 0, contrast.abs().sum())
        if prototypes is None or batch.log_probs is None or batch.targets is None:
            return
        num_graphs, largest = batch.processes.lengths()[0], max(prototypes.heads)
        is_small = 1 < num_graphs < largest - prototypes.queue_size
        self._check("size", 3, is_small, num_graphs, prototypes.queue_size, largest)
        if largest > 1 and prototypes.weight.requires_grad and batch.embeddings.requires_grad:
            self._check_motion(prototypes)
        if num_graphs >= largest > 1 and "zero" not in self.reported:
            # In many good trainings the embeddings look collapsed at first, while the prototypes
            # are still random. So this warning needs seven bad checks in a row.
            log_probs, targets = batch.views(batch.log_probs), batch.views(batch.targets)
            ratio = consistency_ratio(log_probs, targets, batch.heads)
            values = mean_cosine(batch.embeddings), ratio
            self._measure("collapse", 7, lambda cos, ratio: cos > 0.9 and ratio > 0.95, *values)

    def _check_motion(self, prototypes: "SinkhornPrototypes") -> None:
        """Check how far the optimizer has moved the prototypes, after enough forwards."""
        directions = unit_vectors(prototypes.weight, torch.float32)
        first, start = self.start = self.start or (self.steps, directions)
        if self.steps - first >= _PATIENCE + prototypes.freeze_steps:
            moved = (directions - start.to(directions.device)).abs().max()
            self._measure("motion", 1, lambda moved: moved < 1e-6, moved)

    def _check(self, name: str, patience: int, is_bad: bool, *values: object) -> None:
        """Warn, once only, if a check was bad ``patience`` times in a row."""
        self.bad_in_a_row[name] = self.bad_in_a_row[name] + 1 if is_bad else 0
        if self.bad_in_a_row[name] >= patience and name not in self.reported:
            self.reported.add(name)
            warn(f"{self.owner}: " + _TEXTS[name].format(*values, owner=self.owner))

    def _measure(self, name: str, patience: int, is_bad: IsBad, *values: Tensor) -> None:
        """Check values ``[]`` on a device, after they have been copied to the host."""
        copied, arrived = torch.stack(values).to("cpu", non_blocking=True), None
        if values[0].is_cuda:
            arrived = torch.cuda.current_stream(values[0].device).record_event()
        self.pending.append((name, patience, is_bad, copied, arrived))
        self._read_pending()

    def _read_pending(self) -> None:
        """Check the values that have arrived on the host, in order, without waiting."""
        while self.pending:
            name, patience, is_bad, copied, arrived = self.pending[0]
            if arrived is not None and not arrived.query():  # type: ignore[no-untyped-call]  # torch has no type there
                return
            del self.pending[0]
            values = copied.tolist()
            self._check(name, patience, is_bad(*values), *values)
