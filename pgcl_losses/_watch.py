"""What goes wrong in training without an error: one warning for each, which names the cure."""

import torch
from torch import Tensor

from pgcl_losses._normalize import mean_cosine, unit_vectors
from pgcl_losses._warn import warn
from pgcl_losses.arrival import Arrival, can_arrive
from pgcl_losses.batch import Batch
from pgcl_losses.consistency import share_of_a_guess
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.weights import cluster_counts

# Gradients are hardly ever accumulated over more batches than this before an optimizer steps. And
# whole trainings on a small set have 20 to 40 steps: a later warning would come after their end.
_PATIENCE = 16
_STANDSTILL = 1e-6
# The last batch of an epoch may be small; several in a row mean that all are.
_SMALL_BATCHES = 3
_LOOK_EVERY = 20
_NEARLY_ALL = 0.9
# In many trainings that go well, rows start in about one direction and prototypes at random. Few
# trainings stay so for this many looks.
_LOOKS_IN_ONE_DIRECTION = 3
_ONE_DIRECTION = 0.9
_CHANCE = 0.95


def can_look(rows: Tensor) -> bool:
    """Whether this is a training forward in Python, on numbers that can be read."""
    return torch.is_grad_enabled() and can_arrive(rows)


class Watch:
    """Looks at the training forwards of one loss, without waiting for a device."""

    def __init__(self) -> None:
        self.calls = 0
        self.learning_calls = 0
        self.calls_without_gradient = 0  # for the rows, one after the other
        self.small_batches = 0
        self.start: Tensor | None = None  # unit prototypes, when first seen
        self.motion: Arrival | None = None  # how far one has gone since, at most
        self.largest: Arrival | None = None  # share of a cluster
        self.cosine: Arrival | None = None  # of two rows
        self.chance: Arrival | None = None  # the consistency as a share of log K, a guess's
        self.looks_in_one_direction = 0
        self.said: set[str] = set()

    def __reduce__(self) -> tuple[type["Watch"], tuple[()]]:
        return Watch, ()  # a copy begins anew

    def look(
        self, prototypes: SinkhornPrototypes, batch: Batch, learning: bool, excluding: bool
    ) -> None:
        """At one forward, with its batch after all parts have seen it.

        ``learning``: whether the loss has a gradient for the prototypes; ``excluding``: whether
        clusters decide who is a negative.
        """
        self._look_for_gradient(prototypes, batch)
        if not batch.need("embeddings").requires_grad:
            return  # what follows is about rows that learn
        self.calls += 1
        clusters = batch.need("clusters")  # [V, N, H]
        num_rows, num_prototypes = clusters.shape[1], max(prototypes.heads)
        if learning and prototypes.weight.requires_grad and num_prototypes > 1:
            self._look_for_motion(prototypes)
        if learning or excluding:
            self._look_at_size(num_rows, prototypes.queue_size, num_prototypes)
        if num_rows >= num_prototypes > 1 and self.calls % _LOOK_EVERY == 0:
            led = self.calls > prototypes.lead_steps  # until then the contrast is InfoNCE
            if excluding and led:
                self._look_at_clusters(clusters, prototypes.heads)
            if learning and led:
                self._look_at_directions(batch)
        self._read()

    def _look_for_gradient(self, prototypes: SinkhornPrototypes, batch: Batch) -> None:
        """Without it for prototypes either, backward is an error that says so."""
        rests = prototypes.weight.requires_grad and not batch.need("embeddings").requires_grad
        self.calls_without_gradient = self.calls_without_gradient + 1 if rests else 0
        if self.calls_without_gradient == _PATIENCE:
            self._say(
                "gradient",
                f"the rows had no gradient in {_PATIENCE} training forwards, so the encoder does "
                "not learn: take it out of torch.no_grad() and its rows out of detach(). If the "
                'prototypes alone are to learn: warnings.filterwarnings("ignore", "PGCLLoss: the '
                'rows had no gradient")',
            )

    def _look_for_motion(self, prototypes: SinkhornPrototypes) -> None:
        self.learning_calls += 1
        if self.learning_calls == 1:
            self.start = unit_vectors(prototypes.weight.detach(), torch.float32)
        elif self.learning_calls > prototypes.freeze_steps + _PATIENCE and self.start is not None:
            now = unit_vectors(prototypes.weight.detach(), torch.float32)
            self.motion = Arrival((now - self.start.to(now.device)).abs().max())
            self.start = None

    def _look_at_size(self, num_rows: int, queue_size: int, num_prototypes: int) -> None:
        few = num_rows + queue_size < num_prototypes
        self.small_batches = self.small_batches + 1 if few else 0
        if self.small_batches == _SMALL_BATCHES:
            self._say(
                "size",
                f"{num_rows} rows of a batch and {queue_size} of the queue are balanced over "
                f"{num_prototypes} prototypes, which is too many: use fewer prototypes, larger "
                "batches or a larger queue_size",
            )

    def _look_at_clusters(self, clusters: Tensor, heads: tuple[int, ...]) -> None:
        """Hardly any negatives are left only if, in every head, one cluster has nearly all rows."""
        of_heads = zip(clusters.flatten(0, 1).unbind(1), heads, strict=True)
        counts = [cluster_counts(of_head, size).max() for of_head, size in of_heads]
        self.largest = Arrival(torch.stack(counts).min() / clusters[..., 0].numel())

    def _look_at_directions(self, batch: Batch) -> None:
        with torch.no_grad():
            self.cosine = Arrival(mean_cosine(batch.need("embeddings")))
            self.chance = Arrival(
                share_of_a_guess(batch.need("log_probs"), batch.need("targets"), batch.heads)
            )

    def _read(self) -> None:
        """What has arrived by now."""
        if self.motion is not None and (moved := self.motion.read()) is not None:
            self.motion = None
            if moved < _STANDSTILL:
                self._say(
                    "motion",
                    f"the prototypes have not moved in {_PATIENCE} training forwards: does the "
                    "optimizer have them? Adam([*encoder.parameters(), *pgcl.parameters()])",
                )
        if self.largest is not None and (share := self.largest.read()) is not None:
            self.largest = None
            if share > _NEARLY_ALL:
                self._say(
                    "clusters",
                    f"one cluster has {share:.0%} of the rows, so hardly any negatives are left: "
                    "if all rows point in one direction, lower the learning rate or normalise in "
                    "the encoder; if not, lower epsilon",
                )

        if self.cosine is not None and self.chance is not None:
            cosine, chance = self.cosine.read(), self.chance.read()
            if cosine is not None and chance is not None:
                self.cosine = self.chance = None
                stuck = cosine > _ONE_DIRECTION and chance > _CHANCE and "clusters" not in self.said
                self.looks_in_one_direction = self.looks_in_one_direction + 1 if stuck else 0
                if self.looks_in_one_direction == _LOOKS_IN_ONE_DIRECTION:
                    self._say(
                        "direction",
                        f"rows stay in one direction (their mean cosine is {cosine:.2f}) and no "
                        f"prototype tells them apart (the consistency is {chance:.0%} of "
                        "a guess): start the prototypes where rows are, before training, with "
                        "pgcl.prototypes.start_from_(rows)",
                    )

    def _say(self, about: str, message: str) -> None:
        if about not in self.said:
            self.said.add(about)
            warn(f"PGCLLoss: {message}")
