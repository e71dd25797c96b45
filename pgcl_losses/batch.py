"""The batch that the modules of a loss pass to each other."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from pgcl_losses import _checks as check
from pgcl_losses._normalize import computing_dtype, full_precision, unit_vectors
from pgcl_losses.distributed import Processes

Negatives = Literal["all", "cross", "memory"]
OverPositives = Literal["mean", "supcon", "sum"]
Queries = Literal["all", "first"]
Reduction = Literal["mean", "sum", "none"]
NOT_ASSIGNED = "the batch has no prototypes and targets: call SinkhornPrototypes on it first"
Items = Tensor | Sequence[Tensor]  # one tensor for all sets, or one for each


class Assignment(NamedTuple):
    """The assignment of the samples of one view to the prototypes.

    The columns of several heads lie side by side, see ``targets.split(heads, dim=1)``. In each head
    rows sum to 1, and clusters are numbered from 0. Without ``heads`` there is one.
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

    Sets lie one after the other, and those of a memory behind: ``[M + B]``.
    :class:`SinkhornPrototypes` fills the fields from ``prototypes`` to ``ranking``. Each loss takes
    a batch in place of tensors.
    """

    processes: Processes
    embeddings: Tensor  # [M, D]
    items: Tensor | None = None  # [M + B] int64; None: row i of every view is item i
    memory: Tensor | None = None  # [B, D] further negatives; empty slots are 0
    filled: Tensor | None = None  # [M + B] bool, False for empty slots of the memory; None: all
    prototypes: Tensor | None = None  # [K, D] of unit length, one head after the other
    log_probs: Tensor | None = None  # [M, K] log p, the prediction, with gradient
    targets: Tensor | None = None  # [M + B, K] q, the balanced assignment, no gradient
    clusters: Tensor | None = None  # [M + B, H] numbered from 0 in each head
    heads: tuple[int, ...] = ()  # how many of the K prototypes each head has
    ranking: Tensor | None = None  # [M + B, K] orders clusters as q does, without underflow
    positives: Tensor | None = None  # [2, P] positions (query, key) among the M, of all processes
    positive_weights: Tensor | None = None  # [P]
    negative_pairs: Tensor | None = None  # [2, P] as positives
    is_unit: bool = True  # whether embeddings and memory are of unit length

    @classmethod
    def of(
        cls,
        views: Sequence[Any],
        items: Items | None = None,
        positives: Tensor | None = None,
        positive_weights: Tensor | None = None,
        negative_pairs: Tensor | None = None,
        *,
        is_unit: bool = True,
        prototypes: Tensor | None = None,
        clusters: Sequence[Tensor] | None = None,
        assignments: Sequence[Any] | None = None,
        dtype: torch.dtype | None = None,
        processes: Processes | None = None,
    ) -> "Batch":
        """Views or sets of this process, as checked, and of them all, with those of all processes.

        Without views it has assignments alone, and embeddings ``[M, 0]``. ``is_unit``: whether they
        are normalised. ``dtype``: of embeddings and prototypes, float64 if one of them is.
        """
        sets = views or [assignment.log_probs for assignment in assignments or ()]
        dtype = dtype or computing_dtype(sets[0], prototypes)
        processes = processes or Processes([(of_set.shape[0],) for of_set in sets])
        if items is not None or positives is not None:
            processes = processes.of_sets([len(of_set) for of_set in sets], sets[0].device)
            if 0 in processes.lengths():
                empty = f"z{processes.lengths().index(0) + 1}"
                raise ValueError(f"{empty} must not be empty on every rank")
        if items is not None:
            items = (items,) * len(sets) if isinstance(items, Tensor) else items
            items = processes.gather(torch.cat(tuple(items)))
        fields: dict[str, Any] = {}
        if prototypes is not None or clusters is not None or assignments is not None:
            fields = _assigned(processes, dtype, prototypes, clusters, assignments)
        if views:
            with full_precision(sets[0].device):
                embeddings = torch.cat(tuple(views))
                embeddings = unit_vectors(embeddings, dtype) if is_unit else embeddings.to(dtype)
                embeddings = processes.gather(embeddings)
        else:
            embeddings = fields["log_probs"][:, :0].detach()
        if positives is not None:
            if positive_weights is None:
                positive_weights = positives.new_ones(positives.shape[1], dtype=dtype)
            fields["positives"] = processes.numbers_of_own(sets[0].device)[positives]
            fields["positive_weights"] = positive_weights.to(dtype)
        if negative_pairs is not None:
            fields["negative_pairs"] = processes.numbers_of_own(sets[0].device)[negative_pairs]
        return cls(processes, embeddings, items, is_unit=is_unit, **fields)

    @staticmethod
    def check(
        views: Any, prototypes: Any, clusters: Any, assignments: Any, may_be_empty: bool
    ) -> dict[str, Any]:
        """Check what :meth:`of` is given of checked views, or without; return what must agree."""
        heads: tuple[int, ...] = ()
        if prototypes is not None:
            check.matrix("prototypes", prototypes, "[K, D]")
            if views:
                check.prototypes("prototypes", prototypes, "z1", views[0])
            heads = (len(prototypes),)
        if clusters is not None and assignments is not None:
            raise TypeError("clusters and assignments both hold clusters: give one of them")
        name = "clusters" if assignments is None else "assignments"
        given = clusters if assignments is None else assignments
        if views and given is not None and (isinstance(given, int) or len(given) != len(views)):
            each = f"a sequence of {len(views)}, one for each view"
            raise ValueError(f"{name} must be {each}, but got {check.shown(given)}")
        ranking = None
        if assignments is not None:
            heads = _check_heads(assignments, prototypes, may_be_empty)
            clusters, ranking = [x.clusters for x in assignments], assignments[0].ranking
        z_name, z = ("z1", views[0]) if views else (f"{name}[0].log_probs", given[0].log_probs)
        for v, of_view in enumerate(() if clusters is None else clusters):
            of_name = f"clusters[{v}]" if assignments is None else f"assignments[{v}].clusters"
            check.clusters(of_name, of_view, z_name, z, heads)
        which = {"given": given is not None and name, "ranking": ranking is not None}
        return {"heads": heads, "prototypes": prototypes, **which}

    def views(self, of_all: Tensor) -> Tensor:
        """The part of a tensor that belongs to the views, ``[M (+ B), ...] -> [V, N, ...]``."""
        if of_all.shape[0] > self.embeddings.shape[0]:
            of_all = of_all[: self.embeddings.shape[0]]
        return of_all.view(len(self.processes.counts), -1, *of_all.shape[1:])

    def is_finite(self) -> Tensor:
        """Whether no embedding has a NaN or inf: ``[]`` bool."""
        total = self.embeddings.detach().sum()
        return total - total == 0

    def assignments(self) -> tuple[Assignment, ...]:
        """Assignments of this process's samples, one per view; none without prototypes."""
        if self.log_probs is None or self.targets is None or self.clusters is None:
            return ()
        count, num_views = len(self.embeddings), len(self.processes.counts)
        clusters = self.clusters.squeeze(-1) if len(self.heads) == 1 else self.clusters
        ranking = self.targets if self.ranking is None else self.ranking
        parts = [
            self.processes.own(part[:count]).tensor_split(num_views)
            for part in (self.log_probs, self.targets, clusters, ranking)
        ]
        of_views = zip(*parts, strict=True)
        return tuple([Assignment(p, q, c, self.heads, keys) for p, q, c, keys in of_views])


def _assigned(
    processes: Processes, dtype: torch.dtype, prototypes: Any, clusters: Any, assignments: Any
) -> dict[str, Any]:
    """The fields of a batch that :class:`SinkhornPrototypes` fills, as far as they are given."""
    given: dict[str, Any] = {"heads": () if prototypes is None else (len(prototypes),)}
    if prototypes is not None:
        with full_precision(prototypes.device):
            given["prototypes"] = unit_vectors(prototypes.detach(), dtype)
    if assignments is not None:
        log_probs, targets, clusters, _, ranking = zip(*assignments, strict=True)
        given["heads"] = assignments[0].all_heads()
        given["log_probs"] = processes.gather(torch.cat(log_probs).to(dtype))
        given["targets"] = processes.gather(torch.cat(targets).detach().to(dtype))
        if ranking[0] is not None:
            given["ranking"] = processes.gather(torch.cat(ranking).to(dtype))
    if clusters is not None:
        numbers = processes.gather(torch.cat(tuple(clusters)))
        if not given["heads"]:
            different, numbers = torch.unique(numbers, return_inverse=True)
            given["heads"] = (len(different),)
        given["clusters"] = numbers.view(len(numbers), -1)
    return given


def batch_argument(given: Sequence[object], others: tuple[object, ...] = ()) -> Batch | None:
    """The batch that a module is called with; None if it is called with tensors."""
    if not given or not isinstance(given[0], Batch):
        return None
    if len(given) > 1 or others.count(None) < len(others):
        raise TypeError("a batch has all views and items in it: give it alone")
    return given[0]


def _check_heads(assignments: Any, prototypes: Any, may_be_empty: bool) -> tuple[int, ...]:
    """Check that assignments are of the same graphs to the same heads, and return these."""
    named = []
    for v, assignment in enumerate(assignments):
        if not isinstance(assignment, Assignment):
            came = type(assignment).__name__
            raise TypeError(f"assignments[{v}] must be an Assignment, but got {came}")
        named.append((f"assignments[{v}].log_probs", assignment.log_probs))
        named.append((f"assignments[{v}].targets", assignment.targets))
    check.matrices(named, "[N, K]", may_be_empty)
    size, heads = assignments[0].targets.shape[1], assignments[0].all_heads()
    if prototypes is not None and len(prototypes) != size:
        raise ValueError(f"prototypes are {len(prototypes)}, but assignments are to {size}")
    for v, assignment in enumerate(assignments):
        if assignment.all_heads() != heads or sum(heads) != size:
            rule = f"the same in all assignments, {size} prototypes together"
            raise ValueError(f"assignments[{v}].heads must be {rule}, but got {assignment.heads}")
    return tuple(heads)
