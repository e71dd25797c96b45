"""What goes wrong in training without an error; each is said once, as a warning with the cure."""

import warnings

import torch
from torch import Tensor

from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.weights import cluster_counts

# Gradients are hardly ever accumulated over more batches than this before an optimizer steps.
_PATIENCE = 50
_CLUSTERS_EVERY = 20
# The last batch of an epoch may be small; several in a row mean that all are.
_SMALL_BATCHES = 3
_NEARLY_ALL = 0.9


def can_look(rows: Tensor) -> bool:
    """At training steps that run in Python, on numbers that are there to be read."""
    return (
        not torch.compiler.is_compiling()
        and torch.is_grad_enabled()
        and rows.requires_grad
        and not torch._C._are_functorch_transforms_active()
        and not (rows.is_cuda and torch.cuda.is_current_stream_capturing())
    )


class Watch:
    """Looks at the training steps of one loss, and never makes one wait for a device."""

    def __init__(self) -> None:
        self.steps = 0
        self.small_batches = 0
        self.start: tuple[int, Tensor] | None = None  # the prototypes, when first seen
        self.largest: _Largest | None = None
        self.said: set[str] = set()

    def __reduce__(self) -> tuple[type["Watch"], tuple[()]]:
        return Watch, ()  # a copy begins anew

    def look(self, prototypes: SinkhornPrototypes, learning: bool, clusters: Tensor) -> None:
        """At a training step: ``clusters`` ``[V, N]``; ``learning`` if the loss has a gradient for
        the prototypes.
        """
        self.steps += 1
        num_prototypes = prototypes.num_prototypes
        balanced = clusters.shape[1] + prototypes.queue_size
        if learning and prototypes.weight.requires_grad:
            self._look_for_motion(prototypes.weight, self.steps - prototypes.freeze_steps)
        self._look_at_size(balanced, num_prototypes)
        if self.steps % _CLUSTERS_EVERY == 0 and balanced >= num_prototypes > 1:
            self._look_at_clusters(clusters.flatten(), num_prototypes)

    def _look_for_motion(self, prototypes: Tensor, free_steps: int) -> None:
        if free_steps == 1:
            self.start = prototypes._version, prototypes.detach().clone()
        elif free_steps == _PATIENCE and self.start is not None:
            # Optimizers write in place, which raises the version. Where one goes around that, the
            # values tell: comparing them makes the host wait, once, and only if nothing was raised.
            version, values = self.start
            if version == prototypes._version and torch.equal(values.to(prototypes), prototypes):
                self._say(
                    "motion",
                    f"the prototypes have not moved in {_PATIENCE} training steps: does the "
                    "optimizer have them? Adam([*encoder.parameters(), *pgcl.parameters()])",
                )
            self.start = None

    def _look_at_size(self, num_rows: int, num_prototypes: int) -> None:
        self.small_batches = self.small_batches + 1 if num_rows < num_prototypes else 0
        if self.small_batches == _SMALL_BATCHES:
            self._say(
                "size",
                f"batches of {num_rows} rows are balanced over {num_prototypes} prototypes: use "
                "fewer prototypes, larger batches, or queue_size",
            )

    def _look_at_clusters(self, clusters: Tensor, num_prototypes: int) -> None:
        if self.largest is not None and self.largest.share() > _NEARLY_ALL:
            self._say(
                "clusters",
                f"one cluster has {self.largest.share():.0%} of the rows, which leaves hardly a "
                "negative: if all rows point in one direction, lower the learning rate or "
                "normalise in the encoder; if not, lower epsilon",
            )
        self.largest = _Largest(clusters, num_prototypes)

    def _say(self, about: str, message: str) -> None:
        if about not in self.said:
            self.said.add(about)
            warnings.warn(f"PGCLLoss: {message}", stacklevel=2)


class _Largest:
    """The largest cluster's share of the rows, on its way from a device."""

    def __init__(self, clusters: Tensor, num_prototypes: int) -> None:
        largest = cluster_counts(clusters, num_prototypes).max()
        self.num_rows = len(clusters)
        self.arrived: torch.cuda.Event | None = None
        self.count = largest
        if largest.is_cuda:
            self.count = torch.empty((), dtype=largest.dtype, pin_memory=True)
            self.count.copy_(largest, non_blocking=True)
            self.arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's gap
            self.arrived.record()

    def share(self) -> float:
        """0 as long as it has not arrived."""
        if self.arrived is not None and not self.arrived.query():  # type: ignore[no-untyped-call]  # as above
            return 0.0
        return int(self.count) / self.num_rows
