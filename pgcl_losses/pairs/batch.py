"""The batch that the modules of a loss pass to each other, and the assignment of one view."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from pgcl_losses.base import checks as check
from pgcl_losses.base.distributed import Processes
from pgcl_losses.base.modes import can_be_read
from pgcl_losses.base.module import LossModule
from pgcl_losses.base.normalize import computing_dtype, full_precision, unit_vectors
from pgcl_losses.pairs.given import Given, Labels, is_unknown
from pgcl_losses.pairs.rows import Listed, Pairs

Negatives = Literal["all", "cross", "memory"]
OverPositives = Literal["mean", "supcon", "sum"]
Queries = Literal["all", "first"]
Reduction = Literal["mean", "sum", "none"]
NOT_ASSIGNED = "the batch has no prototypes and targets: call SinkhornPrototypes on it first"


class Assignment(NamedTuple):
    """The assignment of the embeddings of one view to the prototypes.

    :class:`SinkhornPrototypes` returns one for each view, in :class:`Assignments`. ``log_probs`` is
    what the embedding of a graph predicts, and ``targets`` is the balanced assignment that the
    other views learn to predict.

    With several heads the columns of all heads lie side by side. ``targets.split(heads, dim=1)``
    separates them. Within each head, the rows of p and of q sum to 1, and clusters are numbered
    from 0. An empty ``heads`` means that there is one head. Read the fields by name: a later
    version may add some.

    Example:
        >>> from pgcl_losses import SinkhornPrototypes
        >>> prototypes = SinkhornPrototypes(dim=32, num_prototypes=10)
        >>> view1, view2 = prototypes(torch.randn(64, 32), torch.randn(64, 32))
        >>> view1.targets.shape, view1.clusters.shape
        (torch.Size([64, 10]), torch.Size([64]))
    """

    log_probs: Tensor  # [N, K] log p, the prediction, with gradient
    targets: Tensor  # [N, K] q, the balanced assignment, no gradient
    clusters: Tensor  # [N] argmax_k q; [N, H] with several heads
    heads: tuple[int, ...] = ()  # how many prototypes each head has

    def all_heads(self) -> tuple[int, ...]:
        """How many prototypes each head has, also if there is one head."""
        return self.heads or (self.targets.shape[1],)


class Batch(NamedTuple):
    """The embeddings of all views (or sets), of all processes, with what the modules add to them.

    A training loop needs no batch: losses make it from the views. It is for those who replace a
    module of :class:`PGCLLoss` by one of their own. All modules but PGCLLoss itself take a batch in
    place of tensors.

    The M embeddings lie one set after the other, and the B past embeddings of a memory follow them:
    ``[M + B]``. :class:`SinkhornPrototypes` fills the fields from ``prototypes`` to ``heads``, and
    a module of yours may replace them, by ``batch._replace(clusters=...)``. ``processes``,
    ``pairs`` and ``positive_weights`` are for this package alone.

    Example:
        >>> from pgcl_losses import PGCLLoss
        >>> pgcl = PGCLLoss(dim=32)
        >>> hook = pgcl.contrast.register_forward_pre_hook(
        ...     lambda module, batches: print(batches[0].embeddings.shape)
        ... )
        >>> loss = pgcl(torch.randn(64, 32), torch.randn(64, 32))
        torch.Size([128, 32])
    """

    embeddings: Tensor  # [M, D]
    processes: Processes
    pairs: Pairs  # labels, listed pairs, metadata and memory, which have no gradient
    positive_weights: Tensor | None = None  # [P] one for each pair of `pairs.positives`
    prototypes: Tensor | None = None  # [K, D] of unit length, one head after the other
    log_probs: Tensor | None = None  # [M, K] log p, the prediction, with gradient
    targets: Tensor | None = None  # [M, K] q, the balanced assignment, no gradient
    clusters: Tensor | None = None  # [M + B, H] numbered from 0 in each head
    heads: tuple[int, ...] = ()  # how many of the K prototypes each head has
    sizes: Tensor | None = None  # [K] of clusters, 0: not in use; None: all are equal

    @classmethod
    def from_views(
        cls,
        views: Sequence[Any],  # Tensors [N, D]
        processes: Processes,
        given: Given,
        *,
        normalize: bool = True,
        later: bool = False,
        dtype: torch.dtype | None = None,
    ) -> "Batch":
        """Make a batch from views (or sets): gather them and what is given from all processes.

        Inputs are already checked. Listed pairs are positions in the concatenated sets of this
        process, and become positions in the gathered embeddings. Pairs are not gathered, since each
        process computes the losses of its own queries.

        ``normalize``: whether embeddings get unit length here; ``later``: whether the loss does it.
        ``dtype``: the dtype in which the loss is computed; by default float64 if the views are
        float64, else float32.
        """
        device, dtype = views[0].device, dtype or computing_dtype(views[0])
        pairs, weights = Pairs(processes.lengths(), normalize=later), given.positive_weights
        labels = None if given.labels is None else of_all_sets(given.labels, len(views))
        with full_precision(device):
            z = torch.cat(tuple(views))
            z = unit_vectors(z, dtype) if normalize else z.to(dtype)
            if labels is not None and not can_be_read(labels):  # elsewhere it is an error
                z = z.masked_fill(is_unknown(labels).unsqueeze(1), torch.nan)
            embeddings = processes.gather(z)
        if labels is not None:
            pairs = pairs._replace(labels=processes.gather(labels))
        if given.metadata is not None:
            metadata = of_all_sets(given.metadata, len(views))
            if processes.num_ranks() > 1:  # as bytes: backends do not know all dtypes
                own = metadata.unsqueeze(-1).contiguous().view(torch.uint8)
                metadata = processes.gather(own).view(metadata.dtype).squeeze(-1)
            pairs = pairs._replace(metadata=metadata)
        if given.positives is not None:
            if weights is None:
                weights = z.new_ones(given.positives.shape[1])
            listed, order = Listed.by_query(*processes.positions_of_own(device)[given.positives])
            pairs, weights = pairs._replace(positives=listed), weights[order].to(dtype)
        if given.negative_pairs is not None:
            listed, _ = Listed.by_query(*processes.positions_of_own(device)[given.negative_pairs])
            pairs = pairs._replace(negative_pairs=listed)
        return cls(embeddings, processes, pairs, weights)

    def assigned(self, prototypes: Tensor | None, clusters: Sequence[Tensor] | None) -> "Batch":
        """Add prototypes, and the clusters of this process's views, to the batch.

        Clusters are gathered from all processes. An argument that is None adds nothing.
        """
        dtype, batch = self.embeddings.dtype, self
        if prototypes is not None:
            with full_precision(prototypes.device):
                units = unit_vectors(prototypes.detach(), dtype)
            batch = batch._replace(prototypes=units, heads=(len(units),))
        if clusters is not None:
            numbers, heads = self.processes.gather(torch.cat(tuple(clusters))), batch.heads
            if not heads:  # no argument says how many clusters exist: count them
                different, numbers = torch.unique(numbers, return_inverse=True)
                heads = (len(different),)
            batch = batch._replace(clusters=numbers.view(len(numbers), -1), heads=heads)
        return batch

    def assigned_as(self, other: "Batch") -> "Batch":
        """Add the assignment of another batch, which has the same graphs; not of its memory."""
        prototypes, clusters = other.prototypes, other.clusters
        return self._replace(
            prototypes=None if prototypes is None else prototypes.to(self.embeddings.dtype),
            log_probs=other.log_probs,
            targets=other.targets,
            clusters=None if clusters is None else clusters[: len(self.embeddings)],
            heads=other.heads,
            sizes=other.sizes,
        )

    def num_in_use(self) -> tuple[int, ...] | list[Tensor]:
        """How many prototypes of each head the batch uses, as numbers or as tensors ``[]``."""
        if self.sizes is None:
            return self.heads
        return [(head > 0).sum() for head in self.sizes.split_with_sizes(self.heads)]

    @property
    def labels(self) -> Tensor | None:
        """The labels ``[M + B]`` int64; None: row i of every view is graph i."""
        return self.pairs.labels

    @property
    def metadata(self) -> Tensor | None:
        """What a `score_mod` may know of each embedding, ``[M, ...]``."""
        return self.pairs.metadata

    @property
    def memory(self) -> Tensor | None:
        """Past embeddings ``[B, D]``, as negatives; empty slots are 0."""
        return self.pairs.memory

    def views(self, values: Tensor) -> Tensor:
        """Split values of the embeddings by view: ``[M, ...] -> [V, N, ...]``.

        If ``values`` also has rows for the memory, ``[M + B, ...]``, these rows are left out.
        """
        if len(values) > len(self.embeddings):
            values = values[: len(self.embeddings)]
        return values.view(len(self.processes.counts), -1, *values.shape[1:])

    def is_finite(self) -> Tensor:
        """Whether all embeddings are free of NaN and inf, as a bool tensor ``[]``."""
        total = self.embeddings.detach().sum()
        return total - total == 0


@dataclass(eq=False)
class Assignments(Sequence[Assignment]):
    """The assignment of all views to the prototypes, as :class:`SinkhornPrototypes` returns it.

    Give it to the losses as it is: it knows the prototypes, and with several processes the
    embeddings of all of them. It is also a sequence with an :class:`Assignment` of this process's
    embeddings for each view. These parts do not know the prototypes.

    Example:
        >>> from pgcl_losses import ConsistencyLoss, PrototypeReweightedNCE, SinkhornPrototypes
        >>> prototypes = SinkhornPrototypes(dim=32)
        >>> contrast, consistency = PrototypeReweightedNCE(), ConsistencyLoss()
        >>> z1, z2 = torch.randn(64, 32), torch.randn(64, 32)
        >>> a = prototypes(z1, z2)
        >>> loss = contrast(z1, z2, a) + 0.3 * consistency(a)
        >>> first, second = a
        >>> first.clusters.shape
        torch.Size([64])
    """

    batch: Batch  # with the assignment of all its embeddings, without labels and memory
    _by_view: tuple[Assignment, ...] | None = field(default=None, init=False, repr=False)

    @overload
    def __getitem__(self, index: int) -> Assignment: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Assignment, ...]: ...
    def __getitem__(self, index: int | slice) -> Assignment | tuple[Assignment, ...]:
        return self._parts()[index]

    def __len__(self) -> int:
        return len(self._parts())

    def _parts(self) -> tuple[Assignment, ...]:
        """One assignment for each view, made once; none if the batch has not been assigned."""
        # This is no cached_property, whose lock torch.compile cannot trace before Python 3.12.
        if self._by_view is None:
            self._by_view = tuple(self._split())
        return self._by_view

    def _split(self) -> Iterator[Assignment]:
        batch, processes = self.batch, self.batch.processes
        if batch.log_probs is None or batch.targets is None or batch.clusters is None:
            return
        clusters = batch.clusters.squeeze(-1) if len(batch.heads) == 1 else batch.clusters
        parts = [
            processes.own(part).tensor_split(len(processes.counts))
            for part in (batch.log_probs, batch.targets, clusters)
        ]
        for p, q, c in zip(*parts, strict=True):
            yield Assignment(p.contiguous(), q.contiguous(), c.contiguous(), batch.heads)

    def check(self, module: LossModule) -> None:
        """Raise an error if the processes of a module are not the processes of the assignment."""
        processes, owner = self.batch.processes, type(module).__name__
        group = module.process_group if module.is_distributed() else None
        if (processes.num_ranks() > 1, processes.group) != (module.is_distributed(), group):
            raise ValueError(
                f"assignments are of {processes.num_ranks()} process(es), but {owner} has "
                f"gather={module.gather}: make it and the prototypes with the same gather and "
                "process_group"
            )


class PGCLTerms(NamedTuple):
    """The loss of :class:`PGCLLoss`, with its two terms and the assignments, to log them.

    :meth:`PGCLLoss.terms` returns it. ``loss`` is what you call backward on; :func:`diagnostics`
    turns all of it into metrics. Read the fields by name: a later version may add some.

    Example:
        >>> from pgcl_losses import PGCLLoss
        >>> pgcl = PGCLLoss(dim=32, consistency_weight=6.0)
        >>> terms = pgcl.terms(torch.randn(64, 32), torch.randn(64, 32))
        >>> torch.allclose(terms.loss, terms.contrast + 6.0 * terms.consistency)
        True
    """

    loss: Tensor
    contrast: Tensor  # before it is multiplied by its weight; 0 if the weight is 0
    consistency: Tensor  # before it is multiplied by lambda; 0 if lambda is 0
    assignments: Assignments  # of the views alone, without labels and memory
    mean_cosine: Tensor  # [] the mean cosine of two different embeddings of the batch


def of_all_sets(values: Labels, num_sets: int) -> Tensor:
    """Concatenate the values of all sets, ``[N, ...]`` each, or one tensor that is repeated."""
    return torch.cat((values,) * num_sets if isinstance(values, Tensor) else tuple(values))


def batch_argument(
    module: LossModule, given: Sequence[object], others: Sequence[object] = ()
) -> Batch | None:
    """Return the batch that a module is called with, or None if it is called with tensors.

    Assignments hold a batch, which counts. ``given``: the arguments by position. ``others``: the
    arguments by name, which must be None beside a batch.
    """
    first = given[0] if given else None
    batch = first.batch if isinstance(first, Assignments) else first
    if not isinstance(batch, Batch):
        return None
    assigned = first if isinstance(first, Assignments) else None
    if len(given) > 1 or others.count(None) < len(others):
        raise TypeError(
            "a batch already holds all views and labels: give it alone"
            if assigned is None
            else "Assignments hold the embeddings of all views, which are assigned in one call: "
            "give them alone, or to a contrast after the views, as in contrast(z1, z2, a)"
        )
    if assigned is not None:
        assigned.check(module)
    return batch


def check_assignments(assignments: Sequence[Any], prototypes: Tensor | None = None) -> None:
    """Check that assignments are of the same graphs to the same heads.

    If ``prototypes`` ``[K, D]`` are given, also check that the assignments are to K prototypes.
    """
    named = []
    for v, assignment in enumerate(assignments):
        if not isinstance(assignment, Assignment):
            came = type(assignment).__name__
            raise TypeError(f"assignments[{v}] must be an Assignment, but got {came}")
        named.append((f"assignments[{v}].log_probs", assignment.log_probs))
        named.append((f"assignments[{v}].targets", assignment.targets))
    check.matrices(named, "[N, K]")
    size, heads = assignments[0].targets.shape[1], assignments[0].all_heads()
    if prototypes is not None and len(prototypes) != size:
        raise ValueError(f"prototypes has {len(prototypes)} rows, but assignments need {size}")
    for v, assignment in enumerate(assignments):
        if assignment.all_heads() != heads or sum(heads) != size:
            rule = f"the same in all assignments, and add up to {size}"
            raise ValueError(f"assignments[{v}].heads must be {rule}, but got {assignment.heads}")
        name, log_probs = named[2 * v]
        clusters = assignment.clusters
        check.clusters(f"assignments[{v}].clusters", clusters, name, log_probs, heads)
