"""What the modules of the loss pass to each other: one batch, of one process or of many."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pgcl_losses import _checks as check
from pgcl_losses._normalize import computing_dtype, full_precision, unit_vectors
from pgcl_losses.ranks import Ranks

Negatives = Literal["all", "cross"]
Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)
Items = Tensor | Sequence[Tensor]  # one tensor for all sets, or one for each


class Assignment(NamedTuple):
    """How the samples of one view belong to the prototypes.

    The columns of several heads lie side by side: ``targets.split(heads, dim=1)`` gives those of
    each head. In each head rows sum to 1, and clusters are numbered from 0. An assignment without
    ``heads`` has one head.
    """

    log_probs: Tensor  # [N, K] log p, the prediction, with gradient
    targets: Tensor  # [N, K] q, the balanced assignment, without
    clusters: Tensor  # [N] argmax_k q; [N, H] with several heads
    heads: tuple[int, ...] = ()  # how many prototypes each head has

    def all_heads(self) -> tuple[int, ...]:
        """How many prototypes each head has, also of a single head."""
        return self.heads or (self.targets.shape[1],)


class Remembered(NamedTuple):
    """What a memory holds; a batch has it beside its embeddings."""

    embeddings: Tensor  # [B, D] of unit length
    items: Tensor  # [B] int64
    present: Tensor | None  # [B] bool, False for slots that are not filled; None: all are
    targets: Tensor | None = None  # [B, K] the balanced assignment, by SinkhornPrototypes
    clusters: Tensor | None = None  # [B, H]


class Batch(NamedTuple):
    """The embeddings of all views, of all processes that hold a batch together.

    ``SinkhornPrototypes()(batch)`` returns an :class:`AssignedBatch`; ``InfoNCE()(batch)`` its
    loss.
    """

    ranks: Ranks
    embeddings: Tensor  # [V, N, D] of unit length
    items: Tensor | None = None  # [V, N] int64; None: row i of every view is item i
    memory: Remembered | None = None  # further negatives

    def own_assignments(self) -> tuple[Assignment, ...]:
        """None, without prototypes."""
        return ()


class AssignedBatch(NamedTuple):
    """A batch and its assignment to prototypes.

    ``ConsistencyLoss()(batch)`` and ``PrototypeReweightedNCE()(batch)`` return their loss.
    """

    ranks: Ranks
    embeddings: Tensor  # [V, N, D] of unit length
    prototypes: Tensor  # [K, D] of unit length, one head after the other
    log_probs: Tensor  # [V, N, K] log p, the prediction, with gradient
    targets: Tensor  # [V, N, K] q, the balanced assignment, without
    clusters: Tensor  # [V, N, H] numbered from 0 in each head
    heads: tuple[int, ...]  # how many of the K prototypes each head has
    items: Tensor | None = None  # [V, N] int64; None: row i of every view is item i
    memory: Remembered | None = None  # further negatives, with their assignment

    def own_assignments(self) -> tuple[Assignment, ...]:
        """Those of this process's samples, one for each view."""
        log_probs, targets = self.ranks.own(self.log_probs), self.ranks.own(self.targets)
        clusters = self.ranks.own(self.clusters)
        if len(self.heads) == 1:
            clusters = clusters.squeeze(-1)
        of_views = zip(log_probs, targets, clusters, strict=True)
        return tuple([Assignment(*of_view, self.heads) for of_view in of_views])


AnyBatch = Batch | AssignedBatch


class Sets(NamedTuple):
    """Sets of embeddings of all processes, one after the other: views, or sets of any lengths."""

    ranks: tuple[Ranks, ...]  # that hold each set
    embeddings: Tensor  # [M, D] of unit length
    items: Tensor | None  # [M] int64; None: row i of every set is item i
    memory: Remembered | None

    def reduce(self, losses: Tensor, exist: Tensor | None, reduction: str) -> Tensor:
        """The mean of losses that exist, their sum, or those of this process; others are 0."""
        if reduction == "none":
            lengths = [sum(ranks.counts) for ranks in self.ranks]
            own = zip(self.ranks, losses.flatten().split_with_sizes(lengths), strict=True)
            return torch.cat([ranks.own(of_set.unsqueeze(0))[0] for ranks, of_set in own])
        if reduction == "sum":
            return losses.sum()
        return losses.mean() if exist is None else losses.sum() / exist.sum().clamp_min(1)


def sets_of(batch: AnyBatch) -> Sets:
    """The views of a batch."""
    items = None if batch.items is None else batch.items.flatten()
    ranks = (batch.ranks,) * len(batch.embeddings)
    return Sets(ranks, batch.embeddings.flatten(0, 1), items, batch.memory)


def batch_of(
    ranks: Ranks, views: tuple[Tensor, ...], *others: Tensor, items: Items | None = None
) -> Batch:
    """The embeddings of all processes, computed in the dtype that views and others ask for."""
    with full_precision(views[0].device):
        unit = unit_vectors(torch.stack(views), computing_dtype(views[0], *others))
        embeddings = ranks.gather(unit)
    if items is not None:
        items = torch.stack(_of_each(items, len(views)))
        items = ranks.gather(items.unsqueeze(-1)).squeeze(-1)
    return Batch(ranks, embeddings, items)


def _of_each(items: Items, num_sets: int) -> tuple[Tensor, ...]:
    """The items of each set."""
    return (items,) * num_sets if isinstance(items, Tensor) else tuple(items)


def with_memory(of_views: Tensor, of_memory: Tensor | None) -> Tensor:
    """What all views have ``[V, N, ...]``, and the memory after them: ``[M, ...]``."""
    of_views = of_views.flatten(0, 1)
    return of_views if of_memory is None else torch.cat([of_views, of_memory])


def stacked_clusters(of_views: list[Tensor]) -> Tensor:
    """``[V, N, H]``, of clusters ``[N, H]``, or ``[N]`` where there is one head."""
    clusters = torch.stack(of_views)
    return clusters if clusters.dim() == 3 else clusters.unsqueeze(-1)


def unit_sets(ranks: Ranks, views: tuple[Tensor, ...], items: Items | None) -> Sets:
    """The embeddings of all processes, of unit length: of views, or of sets with items."""
    if items is None:
        return sets_of(batch_of(ranks, views))
    of_sets = ranks.of_sets([len(view) for view in views], views[0].device)
    with full_precision(views[0].device):
        units = [unit_vectors(view, computing_dtype(view)).unsqueeze(0) for view in views]
        embeddings = [ranks.gather(unit)[0] for ranks, unit in zip(of_sets, units, strict=True)]
        columns = [numbers.view(1, -1, 1) for numbers in _of_each(items, len(views))]
        numbers = [ranks.gather(own).flatten() for ranks, own in zip(of_sets, columns, strict=True)]
        return Sets(of_sets, torch.cat(embeddings), torch.cat(numbers), None)


def given_batch(given: Sequence[object], items: object = None) -> AnyBatch | None:
    """The batch that a module is called with, if it is; a batch has all views in it."""
    batch = given[0] if given else None
    if not isinstance(batch, (Batch, AssignedBatch)):
        return None
    num_given = len(given) + (items is not None)
    if num_given > 1:
        raise TypeError(
            f"a batch has all views and items in it: give it alone, but got {num_given} arguments"
        )
    return batch


def assigned(batch: AnyBatch) -> AssignedBatch:
    """The batch, if it has assignments."""
    if isinstance(batch, AssignedBatch):
        return batch
    raise ValueError(
        "the batch has no prototypes, log_probs, targets and clusters: call SinkhornPrototypes on "
        "it first"
    )


def check_assignments(
    assignments: Sequence[Any], fields: Sequence[str], may_be_empty: bool = False
) -> None:
    """Assignments of the same graphs to the same heads, with these fields."""
    for v, assignment in enumerate(assignments):
        if not isinstance(assignment, Assignment):
            kind = type(assignment).__name__
            raise TypeError(f"assignments[{v}] must be an Assignment, but got {kind}")
    named = [
        (f"assignments[{v}].{field}", getattr(assignment, field))
        for v, assignment in enumerate(assignments)
        for field in fields
        if field != "clusters"
    ]
    check.views(named, "[N, K]", may_be_empty)
    name, matrix = named[0]
    heads = assignments[0].heads or (matrix.shape[1],)
    if sum(heads) != matrix.shape[1]:
        raise ValueError(
            f"assignments[0].heads is {heads}, {sum(heads)} prototypes in all, "
            f"but {name} has {matrix.shape[1]} columns"
        )
    for v, assignment in enumerate(assignments):
        if (assignment.heads or (matrix.shape[1],)) != heads:
            raise ValueError(
                f"assignments[{v}].heads is {assignment.heads} but assignments[0].heads is {heads}"
            )
        if "clusters" in fields:
            check.clusters(f"assignments[{v}].clusters", assignment.clusters, name, matrix, heads)
