"""The reweighted contrast between the views of each graph.

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086. Eq. 12
says which samples are negatives. The reweighted loss, Eq. 13, is InfoNCE (`info_nce.py`) with the
weights of Eq. 14 for its negatives (`weights.py`).
"""

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from pgcl_losses import _checks as check
from pgcl_losses._modes import is_capturing
from pgcl_losses._module import Check, LossModule
from pgcl_losses._normalize import full_precision, unit_vectors
from pgcl_losses.batch import (
    REDUCTIONS,
    AnyBatch,
    AssignedBatch,
    Assignment,
    Negatives,
    Reduction,
    assigned,
    batch_of,
    check_assignments,
    given_batch,
    sets_of,
    stacked_clusters,
    with_memory,
)
from pgcl_losses.engine.contract import Factors, Gaussian, Table
from pgcl_losses.engine.dispatch import ENGINE_CHOICES, Engine, choice_facts
from pgcl_losses.info_nce import NEGATIVES, check_loss_views, weighted_info_nce
from pgcl_losses.weights import (
    cluster_counts,
    cosine_moments,
    one_hot,
    present_mean,
    prototype_log_weights,
    within_positions,
)

Weighting = Literal["prototype", "sample", "uniform"]
WEIGHTINGS = get_args(Weighting)


class PrototypeReweightedNCE(LossModule):
    r"""InfoNCE that leaves out likely false negatives and favours moderately distant ones.

    The mean over all 2N queries i of

    .. math:: -\log \frac{e^{s_{ii'} / \tau}}
        {e^{s_{ii'} / \tau} + M_i \sum_{j \in Neg(i)} w_{ij} e^{s_{ij} / \tau}}

    where i' is the positive, the other view of the query's graph, and Neg(i) are samples of other
    graphs. w is a Gaussian around the mean distance, and M_i scales the weights of a query to an
    average of 1. Weights and clusters are constants for the gradient. A query without negatives has
    loss 0. With several heads, the weight of a pair is the mean over heads.

    Args:
        options: as in :class:`PGCLLoss`, by the same names.

    Shape:
        - z1, z2: ``[N, D]``; row i of both is graph i, with a norm of at most 1e18. In place of z1,
          a list of two views or more.
        - clusters1, clusters2: ``[N]`` int64, needed by ``weighting="prototype"`` and by
          ``exclude_same_cluster=True``
        - prototypes: ``[K, D]``, needed by ``weighting="prototype"``. Otherwise they only give the
          number of clusters. Without them the loss reads the cluster numbers, and waits for a
          GPU to do so. A compiled or CUDA graph cannot read them and allows for as many clusters as
          embeddings: its memory grows with their square.
        - assignments: one for each view, from :class:`SinkhornPrototypes`, in place of clusters.
          Several heads, more than two views, ``negative_ranks`` and ``soft_clusters`` need them.
        - output: scalar, or ``[V * N]`` for ``reduction="none"``

    Examples:
        >>> import torch
        >>> from pgcl_losses import PrototypeReweightedNCE, SinkhornPrototypes
        >>> z1 = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> z2 = torch.tensor([[1.0, 0.0], [0.6, 0.8], [-0.8, 0.6]])
        >>> clusters = torch.tensor([0, 0, 1])
        >>> PrototypeReweightedNCE(weighting="uniform")(z1, z2, clusters, clusters)
        tensor(0.1154)
        >>> prototypes = SinkhornPrototypes(dim=2, num_prototypes=3)
        >>> contrast = PrototypeReweightedNCE(soft_clusters=True, reduction="none")
        >>> contrast([z1, z2], assignments=prototypes(z1, z2), prototypes=prototypes.weight).shape
        torch.Size([6])

    """

    options: ClassVar[dict[str, Check]] = {
        "temperature": check.temperature,
        "weighting": partial(check.choice, choices=WEIGHTINGS),
        "exclude_same_cluster": check.flag,
        "negative_ranks": check.window,
        "soft_clusters": check.flag,
        "negatives": partial(check.choice, choices=NEGATIVES),
        "reduction": partial(check.choice, choices=REDUCTIONS),
        "engine": partial(check.choice, choices=ENGINE_CHOICES),
    }

    temperature: float | Tensor
    weighting: Weighting
    exclude_same_cluster: bool
    negative_ranks: tuple[int, int] | None
    soft_clusters: bool
    negatives: Negatives
    reduction: Reduction
    engine: Engine

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.2,
        weighting: Weighting = "prototype",
        exclude_same_cluster: bool = True,
        negative_ranks: tuple[int, int] | None = None,
        soft_clusters: bool = False,
        negatives: Negatives = "all",
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._assign_options(locals())

    def forward(
        self,
        z1: Tensor | Sequence[Tensor] | AnyBatch,
        z2: Tensor | None = None,
        clusters1: Tensor | None = None,
        clusters2: Tensor | None = None,
        prototypes: Tensor | None = None,
        *,
        assignments: Sequence[Assignment] | None = None,
    ) -> Tensor:
        """The loss of two views, of a list of them, or of a batch."""
        given = z1, z2, clusters1, clusters2, prototypes, assignments
        return self.untraced(self._loss)(*given)

    if TYPE_CHECKING:
        __call__ = forward

    def _loss(self, *given: Any) -> Tensor:
        batch = given_batch([argument for argument in given if argument is not None])
        if batch is None:
            z1, z2, *clusters, prototypes, assignments = given
            listed = isinstance(z1, Sequence) and z2 is None
            views = tuple(z1) if listed else (z1, z2)
            batch = self._batch(views, clusters, prototypes, assignments)
        with torch.no_grad(), full_precision(batch.embeddings.device):
            by_cluster, by_cosine = self._by_cluster(batch), self._by_cosine(batch)
        return self._weighted(batch, by_cluster, by_cosine)

    def info_nce(self, batch: AnyBatch) -> Tensor:
        """InfoNCE of a batch: the loss with all weights 1 and no negative left out."""
        return self.untraced(self._weighted)(batch)

    def _weighted(
        self,
        batch: AnyBatch,
        by_cluster: Table | Factors | None = None,
        by_cosine: Gaussian | None = None,
    ) -> Tensor:
        return weighted_info_nce(
            sets_of(batch),
            self.temperature,
            self.negatives,
            self.engine,
            self.reduction,
            by_cluster,
            by_cosine,
        )

    def _by_cosine(self, batch: AnyBatch) -> Gaussian | None:
        """The weight of a pair by its own cosine."""
        if self.weighting != "sample":
            return None
        memory = batch.memory
        # Detached, also for forward mode.
        embeddings = with_memory(batch.embeddings.detach(), memory and memory.embeddings)
        return Gaussian(*cosine_moments(embeddings, _present(batch)))

    def _by_cluster(self, batch: AnyBatch) -> Table | Factors | None:
        """M w of two clusters, 0 for what is no negative."""
        if not self._needs_clusters():
            return None
        batch = assigned(batch)
        heads, memory = batch.heads, batch.memory
        clusters = with_memory(batch.clusters, memory and memory.clusters)  # [M, H]
        of_heads: Sequence[Tensor | None] = [None] * len(heads)
        if self._needs_targets():
            of_all = with_memory(batch.targets, memory and memory.targets)
            of_heads = of_all.split_with_sizes(heads, dim=1)
        tables = self._log_tables(batch, clusters, of_heads)
        left, right = [], []
        for table, of_head, targets in zip(tables, clusters.unbind(1), of_heads, strict=True):
            if targets is None:
                return Table(tuple(tables), clusters)
            by_cluster = targets if self.soft_clusters else one_hot(of_head, targets)
            weights = by_cluster @ table.exp()
            if self.negative_ranks is not None:
                weights.masked_fill_(~within_positions(targets, *self.negative_ranks), 0.0)
            left.append(weights / len(heads))
            right.append(by_cluster)
        return Factors(torch.cat(left, dim=1), torch.cat(right, dim=1))

    def _log_tables(
        self, batch: AssignedBatch, clusters: Tensor, targets: Sequence[Tensor | None]
    ) -> list[Tensor]:
        """Log of M w by the clusters of query and negative: ``[K, K]`` for each head."""
        heads, dtype, tables = batch.heads, batch.embeddings.dtype, []
        present = _present(batch)
        prototypes: Sequence[Tensor | None] = [None] * len(heads)
        if self.weighting == "prototype":
            prototypes = batch.prototypes.detach().split_with_sizes(heads)
        of_heads = zip(prototypes, clusters.unbind(1), targets, heads, strict=True)
        for of_head, numbers, q, size in of_heads:
            if of_head is None:
                table = torch.zeros(size, size, dtype=dtype, device=clusters.device)
            elif self.soft_clusters and q is not None:
                table = prototype_log_weights(of_head, present_mean(q, present))
            else:
                counts = cluster_counts(numbers, size, dtype, present)
                count = len(clusters) if present is None else present.sum()
                table = prototype_log_weights(of_head, counts.div_(count))
            tables.append(table.fill_diagonal_(-torch.inf) if self.exclude_same_cluster else table)
        return tables

    def check_window(self, heads: Sequence[int]) -> None:
        """Whether ``negative_ranks`` fits the number of prototypes in each head."""
        check.window_fits("negative_ranks", self.negative_ranks, heads)
        own_alone = self.negative_ranks == (0, 1) and not self.soft_clusters
        if own_alone and self.exclude_same_cluster:
            raise ValueError(
                "negative_ranks is (0, 1), which is only the query's own cluster, but "
                "exclude_same_cluster=True leaves that out: there would be no negatives"
            )

    def _needs_clusters(self) -> bool:
        chosen = self.exclude_same_cluster or self.negative_ranks is not None
        return self.weighting == "prototype" or chosen

    def _needs_targets(self) -> bool:
        return self._needs_clusters() and (self.soft_clusters or self.negative_ranks is not None)

    def _batch(self, views: Any, clusters: Any, prototypes: Any, assignments: Any) -> AnyBatch:
        if not self._needs_clusters():
            clusters = prototypes = assignments = None
        ranks = self.agree(
            "forward",
            partial(self._check, views, clusters, prototypes, assignments),
            views,
            lambda: {
                "prototypes": prototypes,
                "heads": assignments and assignments[0].all_heads(),
                **choice_facts(self.engine, views[0]),
            },
        )
        batch = batch_of(ranks, views, *(() if prototypes is None else (prototypes,)))
        if not self._needs_clusters():
            return batch
        heads: tuple[int, ...] = ()
        unused = units = targets = batch.embeddings.new_empty(0)
        if prototypes is not None:
            heads = (len(prototypes),)
            units = unit_vectors(prototypes.detach(), unused.dtype)
        if assignments is not None:
            heads = assignments[0].all_heads()
            clusters = [assignment.clusters for assignment in assignments]
        if self._needs_targets():
            of_views = [assignment.targets.detach() for assignment in assignments]
            targets = ranks.gather(torch.stack(of_views).to(unused.dtype))
        numbers = ranks.gather(stacked_clusters(clusters))
        if not heads:
            numbers, heads = _numbered(numbers)
        return AssignedBatch(ranks, batch.embeddings, units, unused, targets, numbers, heads)

    def _check(
        self, views: Any, clusters: Any, prototypes: Any, assignments: Any, may_be_empty: bool
    ) -> None:
        check_loss_views(views, None, self.engine, [self.temperature], None, 2, may_be_empty)
        if not self._needs_clusters():
            return
        if prototypes is not None:
            check.matrix("prototypes", prototypes, "[K, D]")
            check.prototypes("prototypes", prototypes, "z1", views[0])
        elif self.weighting == "prototype":
            raise ValueError("prototypes is None, but weighting='prototype' needs them: [K, D]")
        if assignments is None:
            self._check_clusters(views, clusters, () if prototypes is None else (len(prototypes),))
            return
        for name, of_view in zip(("clusters1", "clusters2"), clusters, strict=True):
            if of_view is not None:
                raise TypeError(f"{name} and assignments both hold clusters: give one of them")
        if len(assignments) != len(views):
            raise ValueError(
                f"assignments must be {len(views)}, one for each view, but got {len(assignments)}"
            )
        check_assignments(assignments, ("targets", "clusters"), may_be_empty=True)
        heads = assignments[0].all_heads()
        check.clusters("assignments[0].clusters", assignments[0].clusters, "z1", views[0], heads)
        if prototypes is not None and len(prototypes) != sum(heads):
            raise ValueError(
                f"prototypes are {len(prototypes)} but the assignments are to {sum(heads)} "
                "prototypes"
            )
        self.check_window(heads)

    def _check_clusters(self, views: Any, clusters: Any, heads: Sequence[int]) -> None:
        options = {"negative_ranks": self.negative_ranks, "soft_clusters": self.soft_clusters}
        needing = [f"{name}={value}" for name, value in options.items() if value]
        if len(views) > 2 or needing:
            raise ValueError(
                f"assignments is None, but {', '.join(needing) or 'more than two views'} needs one "
                "for each view: take those of SinkhornPrototypes"
            )
        for name, of_view in zip(("clusters1", "clusters2"), clusters, strict=True):
            if of_view is None:
                raise ValueError(
                    f"{name} is None, but weighting={self.weighting!r} with "
                    f"exclude_same_cluster={self.exclude_same_cluster} needs one cluster for each "
                    "embedding"
                )
            check.clusters(name, of_view, "z1", views[0], heads)


def _present(batch: AnyBatch) -> Tensor | None:
    """Which embeddings of all views and the memory count, ``[M]``; None if all do."""
    memory = batch.memory
    if memory is None or memory.present is None:
        return None
    return with_memory(torch.ones_like(batch.embeddings[..., 0], dtype=torch.bool), memory.present)


def _numbered(clusters: Tensor) -> tuple[Tensor, tuple[int]]:
    """Any cluster numbers, renumbered from 0 on, and how many there may be."""
    if torch.compiler.is_compiling() or is_capturing(clusters.device):
        # No value can be read there: at most as many as there are embeddings.
        in_order = clusters.flatten().sort().values
        number = F.pad(in_order[1:] != in_order[:-1], (1, 0)).cumsum(0)  # of each in order
        return number[torch.searchsorted(in_order, clusters)], (len(in_order),)
    different, numbers = torch.unique(clusters, return_inverse=True)
    return numbers, (len(different),)
