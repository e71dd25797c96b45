"""Silent failures of a training: each is reported by one warning, which names the fix."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pgcl_losses._normalize import mean_cosine, unit_vectors
from pgcl_losses._warnings import warn
from pgcl_losses.batch import Batch
from pgcl_losses.consistency import consistency_ratio
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.weights import cluster_counts

if TYPE_CHECKING:
    from pgcl_losses.pgcl import PGCLLoss

# Gradients are rarely accumulated over more batches, and short trainings have few more steps.
_PATIENCE = 16
_EVERY = 20  # training forwards between two checks of clusters and directions
_NOT_FINITE = "the embeddings hold NaN or inf: check the input of the encoder and its gradients"
_NO_WEIGHTS = "consistency_weight and contrast_weight are both 0, and so is the loss"
_ONE_PROTOTYPE = "num_prototypes is 1: clusters leave no negatives and the consistency is 0"
_ONE_GRAPH = "batches of one graph have no negatives: use larger batches or memory_size"


class Watch:
    """Checks the training forwards of one loss, without waiting for a device."""

    def __init__(self) -> None:
        self.steps = 0
        self.steps_of_prototypes = 0
        self.start: Tensor | None = None  # directions of the prototypes, [K, D]
        self.backward_in_eval = False
        self.bad_in_a_row: dict[str, int] = {}
        self.reported: set[str] = set()
        self.pending: list[tuple[Tensor, torch.cuda.Event | None, Callable[..., None]]] = []

    def __reduce__(self) -> tuple[type["Watch"], tuple[()]]:
        return Watch, ()  # a copy begins anew

    def look(self, pgcl: "PGCLLoss", loss: Tensor, batch: Batch) -> None:
        """At a forward, after all modules have processed its batch."""
        if pgcl.training and torch.is_grad_enabled():
            self._look_in_training(pgcl, batch)
        elif loss.requires_grad and not pgcl.training:
            state = {"the memory": pgcl.memory_size, "the queue": pgcl.prototypes.queue_size}
            if names := [name for name, size in state.items() if size > 0]:
                self._look_in_eval(loss, " and ".join(names))

    def _look_in_training(self, pgcl: "PGCLLoss", batch: Batch) -> None:
        self.steps += 1
        self.backward_in_eval = False
        prototypes, learns = pgcl.prototypes, pgcl.consistency_weight > 0
        contrasts = pgcl.contrast_weight > 0
        excludes = contrasts and pgcl.excludes_clusters()
        if self.steps == 1 or self.steps % _EVERY == 0:
            total = batch.embeddings.detach().sum().view(1)
            self._later(total, "finite", math.isnan, _NOT_FINITE)
        trains_encoder = batch.embeddings.requires_grad
        # If nothing else needs a gradient either, backward raises an error that says so.
        others = prototypes.weight, prototypes.temperature
        if any(getattr(other, "requires_grad", False) for other in others):
            self._report(
                "gradient",
                not trains_encoder,
                f"the embeddings had no gradient in {_PATIENCE} training forwards, so the encoder "
                "does not learn: take it out of torch.no_grad() and its embeddings out of "
                "detach(). If the prototypes alone are to learn: warnings.filterwarnings("
                '"ignore", "PGCLLoss: the embeddings had no gradient")',
                patience=_PATIENCE,
            )
        if trains_encoder:
            self._look_at_prototypes(prototypes, learns)
            num_graphs, largest = batch.processes.lengths()[0], max(prototypes.heads)
            alone = contrasts and num_graphs == 1 and batch.memory is None
            self._report("weights", not (learns or contrasts), _NO_WEIGHTS, 3)
            self._report("prototypes", largest == 1 and (learns or excludes), _ONE_PROTOTYPE, 3)
            self._report("negatives", alone, _ONE_GRAPH, 3)
            if (learns or excludes) and not alone:
                self._report(
                    "size",
                    num_graphs + prototypes.queue_size < largest,
                    f"{num_graphs} graphs of a batch and {prototypes.queue_size} of the queue are "
                    f"balanced over {largest} prototypes, which is too many: use fewer prototypes, "
                    "larger batches or a larger queue_size",
                    patience=3,  # the last batch of an epoch may be small
                )
            if self.steps % _EVERY == 0 and num_graphs >= largest > 1:
                self._look_at_clusters(batch, learns, excludes)
        self._read_pending()

    def _look_at_prototypes(self, prototypes: SinkhornPrototypes, learns: bool) -> None:
        """Whether the optimizer moves them."""
        weight = prototypes.weight.detach()
        if not (learns and prototypes.weight.requires_grad and max(prototypes.heads) > 1):
            return
        self.steps_of_prototypes += 1
        if self.steps_of_prototypes == 1:
            self.start = unit_vectors(weight, torch.float32)
        waited = self.steps_of_prototypes - prototypes.freeze_steps > _PATIENCE
        if self.start is not None and waited:
            moved = unit_vectors(weight, torch.float32) - self.start.to(weight.device)
            self.start = None
            self._later(
                moved.abs().max().view(1),
                "motion",
                lambda moved: moved < 1e-6,
                f"the prototypes have not moved in {_PATIENCE} training forwards: does the "
                "optimizer have them? Adam([*encoder.parameters(), *pgcl.parameters()])",
            )

    @torch.no_grad()
    def _look_at_clusters(self, batch: Batch, learns: bool, excludes: bool) -> None:
        if batch.clusters is None or batch.log_probs is None or batch.targets is None:
            return
        if excludes:
            # Few negatives are left only if every head has one cluster with nearly all embeddings.
            # A NaN embedding makes the fraction NaN.
            clusters = batch.clusters[: len(batch.embeddings)]
            of_heads = zip(clusters.unbind(1), batch.heads, strict=True)
            counts = [cluster_counts(of_head, size).max() for of_head, size in of_heads]
            self._later(
                torch.stack(counts).amin(0, True) / len(clusters) + 0 * batch.embeddings.sum(),
                "clusters",
                lambda fraction: fraction > 0.9,
                "one cluster has {:.0%} of the embeddings, so hardly any negatives are left: if "
                "all embeddings point in one direction, lower the learning rate or normalise in "
                "the encoder; if not, lower epsilon",
            )
        if learns:
            log_probs, targets = batch.views(batch.log_probs), batch.views(batch.targets)
            ratio = consistency_ratio(log_probs, targets, batch.heads)
            self._later(
                torch.stack([mean_cosine(batch.embeddings), ratio]),
                "direction",
                lambda cosine, ratio: (
                    cosine > 0.9 and ratio > 0.95 and "clusters" not in self.reported
                ),
                "the embeddings are collapsed: their mean cosine is {:.2f}, and no prototype tells "
                "them apart (the consistency is {:.0%} of log K). Initialise the prototypes from "
                "embeddings, before training: pgcl.prototypes.start_from_(embeddings)",
                # In many good trainings embeddings are collapsed at first, and prototypes random.
                # Few trainings stay so for this many checks.
                patience=3,
            )

    def _look_in_eval(self, loss: Tensor, unchanged: str) -> None:
        self._report(
            "eval",
            self.backward_in_eval,
            f"its loss is backpropagated in eval() mode, which does not update {unchanged}: call "
            "train() on it, or on the model that holds it",
        )

        def hook(_: Tensor) -> None:
            self.backward_in_eval = True

        loss.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no type there

    def _report(self, name: str, bad: bool, text: str, patience: int = 1) -> None:
        """Warn once, if it was bad so many times in a row."""
        self.bad_in_a_row[name] = self.bad_in_a_row.get(name, 0) + 1 if bad else 0
        if self.bad_in_a_row[name] >= patience and name not in self.reported:
            self.reported.add(name)
            warn("PGCLLoss: " + text)

    def _later(
        self, numbers: Tensor, name: str, bad: Callable[..., bool], text: str, patience: int = 1
    ) -> None:
        """Report numbers of a device once they are copied."""
        copied, arrived = numbers.to("cpu", non_blocking=True), None
        if numbers.is_cuda:
            arrived = torch.cuda.current_stream(numbers.device).record_event()

        def report(*values: float) -> None:
            self._report(name, bad(*values), text.format(*values), patience)

        self.pending.append((copied, arrived, report))

    def _read_pending(self) -> None:
        while self.pending:
            numbers, arrived, report = self.pending[0]
            if arrived is not None and not arrived.query():  # type: ignore[no-untyped-call]  # torch has no type there
                return
            del self.pending[0]
            report(*numbers.tolist())
