"""Silent failures of a training: each is reported by one warning, which names the fix."""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses._normalize import mean_cosine, unit_vectors
from pgcl_losses.batch import AnyBatch, assigned
from pgcl_losses.consistency import consistency_ratio
from pgcl_losses.weights import cluster_counts

if TYPE_CHECKING:
    from pgcl_losses.prototypes import SinkhornPrototypes

Numbers = Tensor | tuple[float, ...] | None  # of any device; None where nothing is to be judged

# Gradients are hardly ever accumulated over more batches than this before an optimizer steps. And
# complete trainings on a small set have 20 to 40 steps: a later warning would come after their end.
_PATIENCE = 16
# Packages whose code stands between the user's line and ours; adapters add their frameworks.
# (Python 3.12 has `skip_file_prefixes` for this, but we support older ones.)
NOT_THE_USER = {"pgcl_losses", "torch", "weakref"}


class Step(NamedTuple):
    """One training forward, after all modules have processed its batch."""

    kept: dict[str, Any]  # what a measure keeps from one step to the next
    prototypes: "SinkhornPrototypes"
    batch: AnyBatch  # not assigned in the warm-up
    learning: bool  # whether the loss has a gradient for the prototypes
    excluding: bool  # whether clusters decide which samples are negatives

    def trains_encoder(self) -> bool:
        return self.batch.embeddings.requires_grad

    def uses_clusters(self) -> bool:
        """Not with fewer graphs than K."""
        enough = self.batch.embeddings.shape[1] >= max(self.prototypes.heads) > 1
        return self.trains_encoder() and enough


class Failure(NamedTuple):
    """A silent failure, and how it is measured."""

    measure: Callable[[Step], Numbers]
    is_bad: Callable[..., bool]  # judges the numbers
    text: str  # of the warning, with the numbers in it
    every: int = 1  # training forwards from one measurement to the next
    patience: int = 1  # bad measurements in a row before the warning
    unless: str = ""  # the failure that explains this one


def _gradient(step: Step) -> Numbers:
    # If nothing else needs a gradient either, backward raises an error that says so.
    others = step.prototypes.weight, step.prototypes.temperature
    needed = any(getattr(other, "requires_grad", False) for other in others)
    return (needed and not step.trains_encoder(),)


def _motion(step: Step) -> Numbers:
    weight, kept = step.prototypes.weight, step.kept
    can_move = step.learning and weight.requires_grad and max(step.prototypes.heads) > 1
    if not (can_move and step.trains_encoder()):
        return None
    kept["steps"] = kept.get("steps", 0) + 1
    if kept["steps"] == 1:
        kept["start"] = unit_vectors(weight.detach(), torch.float32)
    if "start" not in kept or kept["steps"] <= step.prototypes.freeze_steps + _PATIENCE:
        return None
    now, start = unit_vectors(weight.detach(), torch.float32), kept.pop("start")
    moved: Tensor = now - start.to(now.device)
    return moved.abs().max().view(1)


def _size(step: Step) -> Numbers:
    if not (step.trains_encoder() and (step.learning or step.excluding)):
        return None
    return step.batch.embeddings.shape[1], step.prototypes.queue_size, max(step.prototypes.heads)


def _largest_cluster(step: Step) -> Numbers:
    """Hardly any negatives are left only if every head has one cluster with nearly all samples."""
    if not (step.excluding and step.uses_clusters()):
        return None
    batch = assigned(step.batch)
    clusters = batch.clusters.flatten(0, 1)  # [M, H]
    of_heads = zip(clusters.unbind(1), batch.heads, strict=True)
    largest = torch.stack([cluster_counts(of_head, size).max() for of_head, size in of_heads])
    return largest.amin(0, keepdim=True) / len(clusters)


@torch.no_grad()
def _directions(step: Step) -> Numbers:
    if not (step.learning and step.uses_clusters()):
        return None
    batch = assigned(step.batch)
    ratio = consistency_ratio(batch.log_probs, batch.targets, batch.heads)
    return torch.stack([mean_cosine(batch.embeddings), ratio])


FAILURES = {
    "gradient": Failure(
        _gradient,
        bool,
        f"the embeddings had no gradient in {_PATIENCE} training forwards, so the encoder does "
        "not learn: take it out of torch.no_grad() and its embeddings out of detach(). If the "
        'prototypes alone are to learn: warnings.filterwarnings("ignore", "PGCLLoss: the '
        'embeddings had no gradient")',
        patience=_PATIENCE,
    ),
    "motion": Failure(
        _motion,
        lambda moved: moved < 1e-6,
        f"the prototypes have not moved in {_PATIENCE} training forwards: does the optimizer have "
        "them? Adam([*encoder.parameters(), *pgcl.parameters()])",
    ),
    "size": Failure(
        _size,
        lambda graphs, queue, prototypes: graphs + queue < prototypes,
        "{} graphs of a batch and {} of the queue are balanced over {} prototypes, which is too "
        "many: use fewer prototypes, larger batches or a larger queue_size",
        patience=3,  # the last batch of an epoch may be small; several in a row mean that all are
    ),
    "clusters": Failure(
        _largest_cluster,
        lambda fraction: fraction > 0.9,
        "one cluster has {:.0%} of the embeddings, so hardly any negatives are left: if all "
        "embeddings point in one direction, lower the learning rate or normalise in the encoder; "
        "if not, lower epsilon",
        every=20,
    ),
    "direction": Failure(
        _directions,
        lambda cosine, ratio: cosine > 0.9 and ratio > 0.95,
        "the embeddings are collapsed: their mean cosine is {:.2f}, and no prototype tells them "
        "apart (the consistency is {:.0%} of log K). Initialise the prototypes from embeddings, "
        "before training: pgcl.prototypes.start_from_(embeddings)",
        every=20,
        # In many trainings that go well, embeddings start in about one direction and prototypes at
        # random. Few trainings stay so for this many measurements.
        patience=3,
        unless="clusters",
    ),
}


class Watch:
    """Measures the training forwards of one loss, without waiting for a device."""

    def __init__(self) -> None:
        self.steps = 0
        self.backward_in_eval = False
        self.kept: dict[str, Any] = {}
        self.arriving: dict[str, Arrival] = {}
        self.bad_in_a_row = dict.fromkeys(FAILURES, 0)
        self.reported: set[str] = set()

    def __reduce__(self) -> tuple[type["Watch"], tuple[()]]:
        return Watch, ()  # a copy begins anew

    def look(self, *of_step: Any) -> None:
        """At a training forward: what :class:`Step` has after ``kept``."""
        self.steps += 1
        self.backward_in_eval = False
        step = Step(self.kept, *of_step)
        for name, failure in FAILURES.items():
            if self.steps % failure.every == 0:
                numbers = failure.measure(step)
                if isinstance(numbers, Tensor):
                    self.arriving[name] = Arrival(numbers)
                elif numbers is not None:
                    self._judge(name, failure, numbers)
            if name in self.arriving and (arrived := self.arriving[name].read()) is not None:
                del self.arriving[name]
                self._judge(name, failure, arrived)

    def look_in_eval(self, loss: Tensor, unchanged: str) -> None:
        """At a forward in eval() mode, which leaves state unchanged that training should update."""
        if self.backward_in_eval and "eval" not in self.reported:
            self.reported.add("eval")
            warn(
                f"PGCLLoss: its loss is backpropagated in eval() mode, which does not update "
                f"{unchanged}: call train() on it, or on the model that holds it"
            )

        def hook(_: Tensor) -> None:
            self.backward_in_eval = True

        loss.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no type there

    def _judge(self, name: str, failure: Failure, numbers: Sequence[float]) -> None:
        bad = failure.is_bad(*numbers) and failure.unless not in self.reported
        self.bad_in_a_row[name] = self.bad_in_a_row[name] + 1 if bad else 0
        if self.bad_in_a_row[name] == failure.patience and name not in self.reported:
            self.reported.add(name)
            warn("PGCLLoss: " + failure.text.format(*numbers))


class Arrival:
    """Numbers that are sent from their device to be read later."""

    def __init__(self, numbers: Tensor) -> None:
        self.numbers = numbers.to("cpu", non_blocking=True)
        self.arrived: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self.arrived = torch.cuda.current_stream(numbers.device).record_event()

    def read(self) -> Any:
        """Plain numbers; None until they have arrived."""
        if self.arrived is not None and not self.arrived.query():  # type: ignore[no-untyped-call]  # torch has no type there
            return None
        return self.numbers.tolist()


def warn(message: str) -> None:
    """A warning that points to the user's own line."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in NOT_THE_USER:
            break
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
