"""Silent failures of a training: each is reported by one warning, which names the fix."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from pgcl_losses._modes import can_be_read, is_eager
from pgcl_losses._normalize import mean_cosine, unit_vectors
from pgcl_losses._warnings import warn
from pgcl_losses.batch import Batch
from pgcl_losses.consistency import consistency_ratio
from pgcl_losses.memory import Ring
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.weights import cluster_counts

# Gradients are rarely accumulated over more batches, and short trainings have few more steps.
_PATIENCE = 16
_EVERY = 20  # of so many training forwards, few are checked


class Step(NamedTuple):
    """A training forward."""

    views: Sequence[object]  # or sets, as the loss was called with
    batch: Batch
    contrast: Tensor
    prototypes: SinkhornPrototypes | None = None
    learns: bool = False  # whether the weight of the consistency is above 0
    contrasts: bool = True  # whether the weight of the contrast is above 0
    excludes: bool = False  # whether embeddings of one cluster are no negatives

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Of the batch; of the queue and the largest head, if clusters have an effect."""
        num_graphs = self.batch.processes.lengths()[0]
        if self.prototypes is None or not (self.learns or self.excludes):
            return num_graphs, 0, 0
        return num_graphs, self.prototypes.queue_size, max(self.prototypes.heads)

    @property
    def has_positives(self) -> bool:
        """Whether items or positives by index are given to the contrast."""
        is_given = self.batch.items is not None or self.batch.positives is not None
        return self.contrasts and is_given

    @property
    def is_alone(self) -> bool:
        """Whether the contrast has one graph and nothing to compare it with."""
        has_others = self.sizes[0] > 1 or self.batch.memory is not None or self.has_positives
        return self.contrasts and not has_others


class Watch:
    """Checks the training forwards of one loss, without waiting for a device."""

    def __init__(self, owner: str) -> None:
        self.owner = owner  # the loss, by the name that filters look for
        self.steps = 0
        self.steps_without_gradient = 0  # in a row
        self.start: tuple[int, Tensor] | None = None  # step and directions of prototypes, [K, D]
        self.has_compared = False  # these directions with later ones
        self.backward_in_eval = False
        self.bad_in_a_row: Counter[str] = Counter()
        self.reported: set[str] = set()
        self.pending: list[tuple[_Measure, Tensor, torch.cuda.Event | None]] = []

    def __reduce__(self) -> tuple[type["Watch"], tuple[str]]:
        return Watch, (self.owner,)  # a copy begins anew

    def is_due(self, module: nn.Module, loss: Tensor, batch: Batch) -> bool:
        """Count a forward of the module; whether to check its batch."""
        if not loss.requires_grad or batch.processes.rank > 0 or not is_eager(batch.embeddings):
            return False
        if not module.training:
            self._look_in_eval(module, loss)
            return False
        self.steps += 1
        self.backward_in_eval = False
        has_gradient = batch.embeddings.requires_grad
        self.steps_without_gradient = 0 if has_gradient else self.steps_without_gradient + 1
        if self.pending:
            self._read_pending()
        return self.steps % _EVERY < 4

    @torch.no_grad()
    def look(self, step: Step) -> None:
        """Check a batch, after all modules have processed it."""
        if self.steps % _EVERY > 0:
            for name, is_bad, text in _CONDITIONS:
                self._report(name, is_bad(self, step), 3, text, *step.sizes)
        if self.steps % _EVERY < 2:
            for measure in _MEASURES:
                values = measure.values(self, step)
                if values is not None:
                    copied, arrived = values.view(-1).to("cpu", non_blocking=True), None
                    if values.is_cuda:
                        arrived = torch.cuda.current_stream(values.device).record_event()
                    self.pending.append((measure, copied, arrived))
            self._read_pending()

    def _look_in_eval(self, module: nn.Module, loss: Tensor) -> None:
        rings = [(path, part) for path, part in module.named_modules() if isinstance(part, Ring)]
        if names := ["the " + path.split(".")[-1] for path, ring in rings if not _is_manual(ring)]:
            text = (
                "its loss is backpropagated in eval() mode, which does not update {}: call train() "
                "on it, or on the model that holds it"
            )
            self._report("eval", self.backward_in_eval, 1, text, " and ".join(sorted(names)))

            def hook(_: Tensor) -> None:
                self.backward_in_eval = True

            loss.register_hook(hook)  # type: ignore[no-untyped-call]  # torch has no type there

    def _report(self, name: str, is_bad: bool, patience: int, text: str, *values: object) -> None:
        """Warn once, if it was bad so many times in a row."""
        self.bad_in_a_row[name] = self.bad_in_a_row[name] + 1 if is_bad else 0
        if self.bad_in_a_row[name] >= patience and name not in self.reported:
            self.reported.add(name)
            warn(f"{self.owner}: " + text.format(*values, owner=self.owner))

    def _read_pending(self) -> None:
        while self.pending:
            measure, copied, arrived = self.pending[0]
            if arrived is not None and not arrived.query():  # type: ignore[no-untyped-call]  # torch has no type there
                return
            del self.pending[0]
            values, (name, patience, _, is_bad, text) = copied.tolist(), measure
            self._report(name, is_bad(*values), patience, text, *values)


def _is_manual(ring: Ring) -> bool:
    """Whether `remember` fills it, as far as that can be read."""
    is_manual = getattr(ring, "is_manual", None)
    return is_manual is not None and can_be_read(is_manual) and bool(is_manual)


# Bad in three steps in a row, as the last batch of an epoch may be small.
_CONDITIONS: tuple[tuple[str, Callable[[Watch, Step], bool], str], ...] = (
    (
        "gradient",
        lambda watch, step: watch.steps_without_gradient >= _PATIENCE,
        f"the embeddings had no gradient in {_PATIENCE} training forwards, so the encoder does not "
        "learn: take it out of torch.no_grad() and its embeddings out of detach(). If prototypes "
        'or temperature alone are to learn: warnings.filterwarnings("ignore", "{owner}: the '
        'embeddings had no gradient")',
    ),
    (
        "views",
        lambda watch, step: len(set(map(id, step.views))) < len(step.views),
        "two views are one tensor, so every query is its own positive: augment and encode twice",
    ),
    (
        "weights",
        lambda watch, step: not (step.contrasts or step.learns),
        "consistency_weight and contrast_weight are both 0, and so is the loss",
    ),
    (
        "prototypes",
        lambda watch, step: step.sizes[2] == 1,
        "num_prototypes is 1: clusters leave no negatives and the consistency is 0",
    ),
    (
        "negatives",
        lambda watch, step: step.is_alone,
        "batches of one graph have no negatives: use larger batches or memory_size",
    ),
    (
        "size",
        lambda watch, step: sum(step.sizes[:2]) < step.sizes[2] and not step.is_alone,
        "{} graphs of a batch and {} of the queue are balanced over {} prototypes, which is too "
        "many: use fewer prototypes, larger batches or a larger queue_size",
    ),
)


def _motion(watch: Watch, step: Step) -> Tensor | None:
    """How far the optimizer has moved the prototypes, once it had the time."""
    prototypes = step.prototypes
    if prototypes is None or not (step.learns and prototypes.weight.requires_grad):
        watch.start = None
        return None
    if watch.has_compared or step.sizes[2] == 1 or not step.batch.embeddings.requires_grad:
        return None
    directions = unit_vectors(prototypes.weight, torch.float32)
    first, start = watch.start = watch.start or (watch.steps, directions)
    if watch.steps - first < _PATIENCE + prototypes.freeze_steps:
        return None
    watch.has_compared, watch.start = True, None
    return (directions - start.to(directions.device)).abs().max()


def _clusters(watch: Watch, step: Step) -> Tensor | None:
    """The fraction of embeddings in one cluster, of the head that leaves the most negatives."""
    batch, (num_graphs, _, largest) = step.batch, step.sizes
    if batch.clusters is None or not (step.excludes and num_graphs >= largest > 1):
        return None
    clusters = batch.clusters[: len(batch.embeddings)]
    of_heads = zip(clusters.unbind(1), batch.heads, strict=True)
    counts = [cluster_counts(of_head, size).max() for of_head, size in of_heads]
    return torch.stack(counts).amin() / len(clusters) + 0 * batch.embeddings.sum()  # NaN stays


def _collapse(watch: Watch, step: Step) -> Tensor | None:
    """The mean cosine, and the consistency divided by log K."""
    batch, (num_graphs, _, largest) = step.batch, step.sizes
    if not (step.learns and num_graphs >= largest > 1) or "clusters" in watch.reported:
        return None
    if batch.log_probs is None or batch.targets is None:
        return None
    log_probs, targets = batch.views(batch.log_probs), batch.views(batch.targets)
    ratio = consistency_ratio(log_probs, targets, batch.heads)
    return torch.stack([mean_cosine(batch.embeddings), ratio])


class _Measure(NamedTuple):
    """What a device computes in the training forwards 1, 20, 21, 40, 41 and so on."""

    name: str
    patience: int  # how many times in a row
    values: Callable[[Watch, Step], Tensor | None]  # [] or [n]; None: does not apply
    is_bad: Callable[..., bool]
    text: str


_MEASURES = (
    _Measure(
        "finite",
        1,
        lambda watch, step: step.batch.embeddings.sum(),
        math.isnan,
        "the embeddings hold NaN or inf: check the input of the encoder and its gradients",
    ),
    _Measure(
        "positives",
        3,
        lambda watch, step: step.contrast.abs().sum() if step.has_positives else None,
        lambda total: total == 0,
        "the contrast is 0, as no query has both positives and negatives: give one item to all "
        "embeddings of a graph or class, and another item to others",
    ),
    _Measure(
        "motion",
        1,
        _motion,
        lambda moved: moved < 1e-6,
        f"the prototypes have not moved in {_PATIENCE} training forwards: does the optimizer have "
        "them? Adam([*encoder.parameters(), *pgcl.parameters()])",
    ),
    _Measure(
        "clusters",
        2,
        _clusters,
        lambda fraction: fraction > 0.9,
        "one cluster has {:.0%} of the embeddings, so hardly any negatives are left: if all "
        "embeddings point in one direction, lower the learning rate or normalise in the encoder; "
        "if not, lower epsilon",
    ),
    _Measure(
        "collapse",
        6,  # in many good trainings embeddings are collapsed at first, and prototypes random
        _collapse,
        lambda cosine, ratio: cosine > 0.9 and ratio > 0.95,
        "the embeddings are collapsed: their mean cosine is {:.2f}, and no prototype tells them "
        "apart (the consistency is {:.0%} of log K). Initialise the prototypes from embeddings, "
        "before training: pgcl.prototypes.start_from_(embeddings)",
    ),
)
