"""What the modules of the loss pass to each other: one batch, of one process or of many."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from pgcl_losses._checks import check_clusters, check_views
from pgcl_losses._normalize import computing_dtype, full_precision, unit_vectors
from pgcl_losses.ranks import Ranks

Negatives = Literal["all", "cross"]
Reduction = Literal["mean", "sum", "none"]
REDUCTIONS = get_args(Reduction)


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
        """How many prototypes each head has, of one head, too."""
        return self.heads or (self.targets.shape[1],)


class Batch(NamedTuple):
    """The embeddings of all views, of all processes that hold a batch together.

    ``SinkhornPrototypes()(batch)`` returns an :class:`AssignedBatch`; ``InfoNCE()(batch)`` its
    loss.
    """

    ranks: Ranks
    embeddings: Tensor  # [V, N, D] of unit length

    @property
    def leading(self) -> None:
        """There is no warm-up without prototypes."""


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
    leading: Tensor | None = None  # whether this is the warm-up: True or False, on the device

    def own_assignments(self) -> tuple[Assignment, ...]:
        """Those of this process's samples, one for each view."""
        log_probs, targets = self.ranks.own(self.log_probs), self.ranks.own(self.targets)
        clusters = self.ranks.own(self.clusters)
        if len(self.heads) == 1:
            clusters = clusters.squeeze(-1)
        of_views = zip(log_probs, targets, clusters, strict=True)
        return tuple([Assignment(*of_view, self.heads) for of_view in of_views])


AnyBatch = Batch | AssignedBatch


def batch_of(ranks: Ranks, views: tuple[Tensor, ...], *others: Tensor) -> Batch:
    """The embeddings of all processes, computed in the dtype that views and others ask for."""
    with full_precision(views[0].device):
        unit = unit_vectors(torch.stack(views), computing_dtype(views[0], *others))
        return Batch(ranks, ranks.gather(unit))


def stacked_clusters(of_views: list[Tensor]) -> Tensor:
    """``[V, N, H]``, of clusters ``[N, H]``, or ``[N]`` where there is one head."""
    clusters = torch.stack(of_views)
    return clusters if clusters.dim() == 3 else clusters.unsqueeze(-1)


def given_batch(given: Sequence[object]) -> AnyBatch | None:
    """The batch that a module is called with, if it is; a batch has all views in it."""
    batch = given[0] if given else None
    if not isinstance(batch, (Batch, AssignedBatch)):
        return None
    if len(given) > 1:
        raise TypeError(
            f"a batch has all views in it: give it alone, but got {len(given)} arguments"
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
    assignments: Sequence[Any], fields: Sequence[str], may_lack_rows: bool = False
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
    check_views(named, "[N, K]", may_lack_rows)
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
            check_clusters(f"assignments[{v}].clusters", assignment.clusters, name, matrix, heads)
