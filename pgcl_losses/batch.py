"""What the parts of the loss pass to each other: one batch, of one process or of many."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pgcl_losses._checks import check_cluster_range, check_clusters, check_views
from pgcl_losses.ranks import Ranks

Negatives = Literal["all", "cross"]


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

    def each_head(self) -> tuple[tuple[int, ...], Tensor]:
        """How many prototypes each head has; the clusters ``[N, H]``, also where there is one."""
        if len(self.heads) > 1:
            return self.heads, self.clusters
        return (self.targets.shape[1],), self.clusters.unsqueeze(-1)


class Batch(NamedTuple):
    """The samples of all ranks, view by view. Each part adds its results for the next ones.

    ``SinkhornPrototypes()(batch)`` returns the batch with all fields; ``ConsistencyLoss()(batch)``
    and ``PrototypeReweightedNCE()(batch)`` return their loss.
    """

    ranks: Ranks
    embeddings: Tensor | None = None  # [V, N, D] unit
    prototypes: Tensor | None = None  # [K, D] unit rows, one head after the other
    log_probs: Tensor | None = None  # [V, N, K]
    targets: Tensor | None = None  # [V, N, K]
    clusters: Tensor | None = None  # [V, N, H] numbered from 0 in each head
    heads: tuple[int, ...] = ()  # how many of the K are each head's
    leading: Tensor | None = None  # whether prototypes learn alone: True or False, on the device

    def need(self, name: str) -> Tensor:
        """One of the fields; an error if no part has made it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"the batch has no {name}: call SinkhornPrototypes on it first")
        return value

    def own_assignments(self) -> tuple[Assignment, ...]:
        """Those of this rank's samples, one for each view."""
        log_probs, targets, clusters = (
            self.ranks.own(self.need(name)) for name in ("log_probs", "targets", "clusters")
        )
        if len(self.heads) == 1:
            clusters = clusters.squeeze(-1)
        of_views = zip(log_probs, targets, clusters, strict=True)
        return tuple([Assignment(*of_view, self.heads) for of_view in of_views])


def check_alone(given: Sequence[object]) -> None:
    """A batch has all views in it."""
    if len(given) > 1:
        raise TypeError(
            f"a batch has all views in it: give it alone, but got {len(given)} arguments"
        )


def check_assignments(
    assignments: Sequence[Any], fields: Sequence[str], may_lack_rows: bool = False
) -> None:
    """Assignments of the same graphs to the same heads; ``fields`` have one shape and dtype."""
    for v, assignment in enumerate(assignments):
        if not isinstance(assignment, Assignment):
            kind = type(assignment).__name__
            raise TypeError(f"assignments[{v}] must be an Assignment, but got {kind}")
    named = [
        (f"assignments[{v}].{field}", getattr(assignment, field))
        for v, assignment in enumerate(assignments)
        for field in fields
    ]
    check_views(named, "[N, K]", may_lack_rows)
    heads, columns = assignments[0].heads, named[0][1].shape[1]
    if heads and sum(heads) != columns:
        raise ValueError(
            f"assignments[0].heads is {heads}, {sum(heads)} prototypes in all, "
            f"but {named[0][0]} has {columns} columns"
        )
    for v, assignment in enumerate(assignments):
        if (assignment.heads or (columns,)) != (heads or (columns,)):
            raise ValueError(
                f"assignments[{v}].heads is {assignment.heads} but assignments[0].heads is {heads}"
            )


def check_clusters_of(assignments: Sequence[Assignment]) -> None:
    """A cluster for each row, in each head."""
    for v, assignment in enumerate(assignments):
        name, clusters = f"assignments[{v}].clusters", assignment.clusters
        if len(assignment.heads) > 1:
            shape = len(assignment.targets), len(assignment.heads)
            if not isinstance(clusters, Tensor) or clusters.shape != shape:
                got = getattr(clusters, "shape", type(clusters).__name__)
                raise ValueError(
                    f"{name} must have shape {shape}, a column for each head, but got {got}"
                )
            of_heads = list(zip(assignment.heads, clusters.unbind(1), strict=True))
        else:
            of_heads = [(assignment.targets.shape[1], clusters)]
        for num_prototypes, of_head in of_heads:
            check_clusters(name, of_head, f"assignments[{v}].targets", assignment.targets)
            if len(of_head) > 0:
                check_cluster_range(name, of_head, num_prototypes)
