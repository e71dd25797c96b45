"""The batch that the modules of a loss pass to each other."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pgcl_losses import _checks as check
from pgcl_losses._normalize import computing_dtype, full_precision, unit_vectors
from pgcl_losses.distributed import Processes

Negatives = Literal["all", "cross", "memory"]
Queries = Literal["all", "first"]
Reduction = Literal["mean", "sum", "none"]
NOT_ASSIGNED = "the batch has no prototypes and targets: call SinkhornPrototypes on it first"
Items = Tensor | Sequence[Tensor]  # one tensor for all sets, or one for each


class Listed(NamedTuple):
    """Pairs given by index; a weight of 0 leaves a pair out."""

    query: Tensor  # [P] positions among all M embeddings
    key: Tensor  # [P]
    weights: Tensor  # [P]


def listed_pairs(
    processes: Processes, pairs: Tensor | None, weights: Tensor | None, like: Tensor
) -> Listed | None:
    """Pairs of all processes, from positions ``[2, P]`` among this process's embeddings."""
    if pairs is None:
        return None
    weights = like.new_ones(pairs.shape[1]) if weights is None else weights.to(like.dtype)
    if processes.num_ranks() > 1:
        of_all = torch.arange(sum(processes.lengths()), device=pairs.device)
        pairs = processes.own(of_all)[pairs]
        processes = processes.of_sets([len(weights)], pairs.device)
        pairs, weights = processes.gather(pairs.T).T, processes.gather(weights)
    return Listed(pairs[0], pairs[1], weights)


class Related(NamedTuple):
    """Which embeddings are positives of each other, given to a loss beside its sets."""

    items: Items | None = None
    positives: Tensor | None = None  # [2, P] positions in the concatenated sets
    positive_weights: Tensor | None = None  # [P]

    def facts(self) -> dict[str, Any]:
        """What must be the same in all processes."""
        learned = getattr(self.positive_weights, "requires_grad", False)
        return {"learned positive_weights": learned} | {
            name: value is not None for name, value in self._asdict().items()
        }


class Assignment(NamedTuple):
    """The assignment of the samples of one view to the prototypes.

    The columns of several heads lie side by side: ``targets.split(heads, dim=1)`` gives those of
    each head. In each head rows sum to 1, and clusters are numbered from 0. An assignment without
    ``heads`` has one head.
    """

    log_probs: Tensor  # [N, K] log p, the prediction, with gradient
    targets: Tensor  # [N, K] q, the balanced assignment, no gradient
    clusters: Tensor  # [N] argmax_k q; [N, H] with several heads
    heads: tuple[int, ...] = ()  # how many prototypes each head has
    ranking: Tensor | None = None  # [N, K] orders clusters as q does, without underflow

    def all_heads(self) -> tuple[int, ...]:
        """How many prototypes each head has, also of a single head."""
        return self.heads or (self.targets.shape[1],)


class Batch(NamedTuple):
    """The embeddings of all sets, of all processes that hold a batch together, and of a memory.

    Sets lie one after the other: views, or sets of any lengths. Tensors of ``[M + B]`` hold the
    past embeddings of a memory behind those of the batch. :class:`SinkhornPrototypes` fills the
    fields from ``prototypes`` on, for views; each loss takes a batch in place of tensors.
    """

    processes: Processes
    embeddings: Tensor  # [M, D] of unit length
    items: Tensor | None = None  # [M + B] int64; None: row i of every set is item i
    memory: Tensor | None = None  # [B, D] of unit length, further negatives; empty slots are 0
    filled: Tensor | None = None  # [M + B] bool, False for empty slots of the memory; None: all
    prototypes: Tensor | None = None  # [K, D] of unit length, one head after the other
    log_probs: Tensor | None = None  # [M, K] log p, the prediction, with gradient
    targets: Tensor | None = None  # [M + B, K] q, the balanced assignment, no gradient
    clusters: Tensor | None = None  # [M + B, H] numbered from 0 in each head
    heads: tuple[int, ...] = ()  # how many of the K prototypes each head has
    ranking: Tensor | None = None  # [M + B, K] orders clusters as q does, without underflow
    listed: Listed | None = None  # positives by index

    def views(self, of_all: Tensor) -> Tensor:
        """The part of a tensor that belongs to the views, ``[M (+ B), ...] -> [V, N, ...]``."""
        if of_all.shape[0] > self.embeddings.shape[0]:
            of_all = of_all[: self.embeddings.shape[0]]
        return of_all.view(len(self.processes.counts), -1, *of_all.shape[1:])

    def is_finite(self) -> Tensor:
        """Whether no embedding has a NaN, which an inf becomes at unit length: ``[]`` bool."""
        total = self.embeddings.detach().sum()
        return total == total

    def assignments(self) -> tuple[Assignment, ...]:
        """Assignments of this process's samples, one per view; none without prototypes."""
        if self.log_probs is None or self.targets is None or self.clusters is None:
            return ()
        count, num_views = len(self.embeddings), len(self.processes.counts)
        clusters = self.clusters.squeeze(-1) if len(self.heads) == 1 else self.clusters
        log_probs, targets, numbers, ranking = (
            [None] * num_views
            if part is None
            else self.processes.own(part[:count]).tensor_split(num_views)
            for part in (self.log_probs, self.targets, clusters, self.ranking)
        )
        fields: Any = zip(log_probs, targets, numbers, ranking, strict=True)
        return tuple([Assignment(p, q, c, self.heads, keys) for p, q, c, keys in fields])

    def own(self, losses: Tensor) -> Tensor:
        """Those of this process, of the losses ``[Q]`` of all embeddings or of the first set's."""
        is_first = len(losses) < len(self.embeddings)
        counts = self.processes.counts[:1] if is_first else self.processes.counts
        return self.processes._replace(counts=counts).own(losses)


def batch_of(
    processes: Processes,
    sets: Sequence[Tensor],
    *others: Tensor,
    related: Related | None = None,
) -> Batch:
    """The embeddings of all processes, in float64 if a set or another tensor is."""
    items: Tensor | None = None
    related = related or Related()
    if related.items is not None:
        processes = processes.of_sets([len(of_set) for of_set in sets], sets[0].device)
        if 0 in processes.lengths():
            empty = f"z{processes.lengths().index(0) + 1}"
            raise ValueError(f"{empty} must not be empty on every rank")
        given = related.items
        each = (given,) * len(sets) if isinstance(given, Tensor) else given
        items = processes.gather(torch.cat(tuple(each)))
    with full_precision(sets[0].device):
        units = unit_vectors(torch.cat(tuple(sets)), computing_dtype(sets[0], *others))
        embeddings = processes.gather(units)
    listed = listed_pairs(processes, *related[1:], embeddings)
    return Batch(processes, embeddings, items, listed=listed)


def given_batch(given: Sequence[object], others: Sequence[object] = ()) -> Batch | None:
    """The batch that a module is called with; None if it is called with tensors."""
    if not given or not isinstance(given[0], Batch):
        return None
    if len(given) > 1 or [value for value in others if value is not None]:
        raise TypeError("a batch has all views and items in it: give it alone")
    return given[0]


def check_assignments(
    assignments: Sequence[Any],
    fields: Sequence[str],
    prototypes: Any = None,
    may_be_empty: bool = False,
) -> None:
    """Check that assignments are of the same graphs to the same heads."""
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
    check.matrices(named, "[N, K]", may_be_empty)
    name, matrix = named[0]
    heads = assignments[0].heads or (matrix.shape[1],)
    if sum(heads) != matrix.shape[1]:
        raise ValueError(
            f"assignments[0].heads is {heads}, {sum(heads)} prototypes in all, "
            f"but {name} has {matrix.shape[1]} columns"
        )
    if prototypes is not None and len(prototypes) != sum(heads):
        raise ValueError(
            f"prototypes are {len(prototypes)} but the assignments are to {sum(heads)} prototypes"
        )
    for v, assignment in enumerate(assignments):
        if (assignment.heads or (matrix.shape[1],)) != heads:
            raise ValueError(
                f"assignments[{v}].heads is {assignment.heads} but assignments[0].heads is {heads}"
            )
        if "clusters" in fields:
            check.clusters(f"assignments[{v}].clusters", assignment.clusters, name, matrix, heads)
