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
from pgcl_losses._module import Check
from pgcl_losses._normalize import full_precision, unit_vectors
from pgcl_losses.batch import (
    NOT_ASSIGNED,
    Assignment,
    Batch,
    Negatives,
    Queries,
    Reduction,
    batch_of,
    check_assignments,
    given_batch,
)
from pgcl_losses.engine.contrast import Engine
from pgcl_losses.engine.pairs import Factors, Gaussian, Table
from pgcl_losses.info_nce import WeightedInfoNCE
from pgcl_losses.weights import (
    cluster_counts,
    cosine_moments,
    filled_mean,
    prototype_log_weights,
    within_positions,
)

Weighting = Literal["prototype", "sample", "uniform"]
WEIGHTINGS = get_args(Weighting)


class PrototypeReweightedNCE(WeightedInfoNCE):
    r"""InfoNCE that leaves out likely false negatives and favours moderately distant ones.

    The mean over all 2N queries i of

    .. math:: -\log \frac{e^{s_{ii'} / \tau}}
        {e^{s_{ii'} / \tau} + M_i \sum_{j \in Neg(i)} w_{ij} e^{s_{ij} / \tau}}

    where i' is the positive, the other view of the query's graph, and Neg(i) are samples of other
    graphs. w is a Gaussian around the mean distance, and M_i scales the weights of a query to an
    average of 1. Weights and clusters are constants for the gradient. A query without negatives has
    loss 0. With several heads, the weight of a pair is the mean over heads.

    Args:
        options: as in :class:`PGCLLoss` and :class:`InfoNCE`, by the same names.

    Shape:
        - views: two or more, ``[N, D]`` each; row i of every view is graph i, with a norm of at
          most 1e18
        - assignments: one for each view, from :class:`SinkhornPrototypes`
        - clusters: in place of assignments, ``[N]`` int64 for each view. ``negative_ranks`` and
          ``soft_clusters`` need assignments.
        - prototypes: ``[K, D]``, needed by ``weighting="prototype"``. With clusters alone, the loss
          waits for a GPU and breaks a compiled graph.
        - output: scalar, or one value for each query for ``reduction="none"``

    Examples:
        >>> import torch
        >>> from pgcl_losses import PrototypeReweightedNCE, SinkhornPrototypes
        >>> z1 = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> z2 = torch.tensor([[1.0, 0.0], [0.6, 0.8], [-0.8, 0.6]])
        >>> clusters = torch.tensor([0, 0, 1])
        >>> PrototypeReweightedNCE(weighting="uniform")(z1, z2, clusters=(clusters, clusters))
        tensor(0.1154)
        >>> prototypes = SinkhornPrototypes(dim=2, num_prototypes=3)
        >>> contrast = PrototypeReweightedNCE(soft_clusters=True, reduction="none")
        >>> contrast(z1, z2, assignments=prototypes(z1, z2), prototypes=prototypes.weight).shape
        torch.Size([6])

    """

    options: ClassVar[dict[str, Check]] = {
        **WeightedInfoNCE.options,
        "weighting": check.one_of(Weighting),
        "exclude_same_cluster": check.flag,
        "negative_ranks": check.window,
        "soft_clusters": check.flag,
    }

    weighting: Weighting
    exclude_same_cluster: bool
    negative_ranks: tuple[int, int] | None
    soft_clusters: bool

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.2,
        weighting: Weighting = "prototype",
        exclude_same_cluster: bool = True,
        negative_ranks: tuple[int, int] | None = None,
        soft_clusters: bool = False,
        negatives: Negatives = "all",
        queries: Queries = "all",
        decoupled: bool = False,
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._assign_options(locals())

    def forward(
        self,
        *views: Tensor | Batch,
        clusters: Sequence[Tensor] | None = None,
        prototypes: Tensor | None = None,
        assignments: Sequence[Assignment] | None = None,
    ) -> Tensor:
        """The loss of two views or more, or of a batch."""
        return self.traceable(self._loss, views)(views, clusters, prototypes, assignments)

    if TYPE_CHECKING:
        __call__ = forward

    def _loss(self, views: tuple[Any, ...], *given: Any) -> Tensor:
        batch = given_batch(views, given)
        if batch is None:
            batch = self._batch(views, *given)
        with torch.no_grad(), full_precision(batch.embeddings.device):
            weights, pair_weight = self._weights(batch), self._pair_weight(batch)
        return self.of_batch(batch, weights, pair_weight)

    def _pair_weight(self, batch: Batch) -> Gaussian | None:
        """The weight of a pair by its own cosine."""
        if self.weighting != "sample":
            return None
        # Detached, also for forward mode.
        samples = batch.embeddings.detach()
        if batch.memory is not None:
            samples = torch.cat([samples, batch.memory])
        return Gaussian(*cosine_moments(samples, batch.filled))

    def _weights(self, batch: Batch) -> Table | Factors | None:
        """M w by the clusters of a pair, 0 for excluded pairs."""
        if not self._needs_clusters():
            return None
        heads, clusters, targets = batch.heads, batch.clusters, batch.targets
        missing = clusters is None or (self.weighting == "prototype" and batch.prototypes is None)
        if clusters is None or missing or (self._needs_targets() and targets is None):
            raise ValueError(NOT_ASSIGNED)
        tables = [self._log_table(batch, h) for h in range(len(heads))]
        if targets is None or not self._needs_targets():
            return Table(tuple(tables), clusters)
        ranking = targets if batch.ranking is None else batch.ranking
        of_heads = zip(
            targets.split_with_sizes(heads, 1),
            clusters.unbind(1),
            ranking.split_with_sizes(heads, 1),
            strict=True,
        )
        left, right = [], []
        for table, (q, numbers, key) in zip(tables, of_heads, strict=True):
            by_cluster = q if self.soft_clusters else F.one_hot(numbers, q.shape[1]).to(q)
            weights = by_cluster @ table.exp()
            if self.negative_ranks is not None:
                weights.masked_fill_(~within_positions(key, *self.negative_ranks), 0.0)
            left.append(weights / len(tables))
            right.append(by_cluster)
        return Factors(torch.cat(left, dim=1), torch.cat(right, dim=1))

    def _log_table(self, batch: Batch, head: int) -> Tensor:
        """Log of M w by the clusters of query and negative, ``[K, K]`` of a head."""
        assert batch.clusters is not None  # as checked
        size, clusters, dtype = batch.heads[head], batch.clusters[:, head], batch.embeddings.dtype
        if self.weighting == "prototype" and batch.prototypes is not None:
            filled = batch.filled
            if self.soft_clusters and batch.targets is not None:
                of_head = batch.targets.split_with_sizes(batch.heads, 1)[head]
                fractions = filled_mean(of_head, filled)
            else:
                fractions = cluster_counts(clusters, size, dtype, filled)
                fractions /= len(clusters) if filled is None else filled.sum()
            prototypes = batch.prototypes.detach().split_with_sizes(batch.heads)[head]
            table = prototype_log_weights(prototypes, fractions)
        else:
            table = torch.zeros(size, size, dtype=dtype, device=clusters.device)
        return table.fill_diagonal_(-torch.inf) if self.exclude_same_cluster else table

    def check_window(self, heads: Sequence[int]) -> None:
        """Whether ``negative_ranks`` fits the number of prototypes in each head."""
        if self.negative_ranks is not None and self.negative_ranks[1] > min(heads):
            raise ValueError(
                f"negative_ranks must lie in 0..{min(heads)}, as there are {min(heads)} "
                f"prototypes, but got {self.negative_ranks}"
            )
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

    def _batch(self, views: Any, clusters: Any, prototypes: Any, assignments: Any) -> Batch:
        processes = self.agree(
            "forward",
            partial(self._check, views, clusters, prototypes, assignments),
            views,
            lambda: {"prototypes": prototypes, "heads": assignments and assignments[0].all_heads()},
        )
        if not self._needs_clusters():
            return batch_of(processes, views)
        batch = batch_of(processes, views, *(() if prototypes is None else (prototypes,)))
        dtype, targets, ranking = batch.embeddings.dtype, None, None
        heads: tuple[int, ...] = ()
        if prototypes is not None:
            heads = (len(prototypes),)
            with full_precision(prototypes.device):
                prototypes = unit_vectors(prototypes.detach(), dtype)
        if assignments is not None:
            clusters = [assignment.clusters for assignment in assignments]
            heads = assignments[0].all_heads()
            if self._needs_targets():
                targets = torch.cat([assignment.targets.detach() for assignment in assignments])
                targets = processes.gather(targets.to(dtype))
                if assignments[0].ranking is not None:
                    ranking = torch.cat([assignment.ranking for assignment in assignments])
                    ranking = processes.gather(ranking.to(dtype))
        numbers = processes.gather(torch.cat(tuple(clusters)))
        if not heads:
            different, numbers = torch.unique(numbers, return_inverse=True)
            heads = (len(different),)
        return batch._replace(
            prototypes=prototypes,
            targets=targets,
            clusters=numbers.view(len(numbers), -1),
            heads=heads,
            ranking=ranking,
        )

    def _check(
        self, views: Any, clusters: Any, prototypes: Any, assignments: Any, may_be_empty: bool
    ) -> None:
        check.loss_views(views, None, 2, may_be_empty)
        check.temperature_value("temperature", self.temperature, views[0])
        heads: tuple[int, ...] = ()
        if prototypes is not None:
            check.matrix("prototypes", prototypes, "[K, D]")
            check.prototypes("prototypes", prototypes, "z1", views[0])
            heads = (len(prototypes),)
        elif self.weighting == "prototype":
            raise ValueError("prototypes is None, but weighting='prototype' needs them: [K, D]")
        if clusters is not None and assignments is not None:
            raise TypeError("clusters and assignments both hold clusters: give one of them")
        for name, given in (("clusters", clusters), ("assignments", assignments)):
            if given is not None and (isinstance(given, int) or len(given) != len(views)):
                raise ValueError(
                    f"{name} must be a sequence of {len(views)}, one for each view, but got "
                    f"{check.shown(given)}"
                )
        if assignments is not None:
            check_assignments(assignments, ("targets", "clusters"), prototypes, may_be_empty=True)
            heads, clusters = assignments[0].all_heads(), [assignments[0].clusters]
            self.check_window(heads)
        elif self._needs_targets():
            raise ValueError(
                "assignments is None, but negative_ranks and soft_clusters need one for each view: "
                "take those of SinkhornPrototypes"
            )
        elif clusters is None and self._needs_clusters():
            raise ValueError(
                "clusters and assignments are None: give one of them, or set weighting='uniform' "
                "and exclude_same_cluster=False"
            )
        name = "clusters[{}]" if assignments is None else "assignments[{}].clusters"
        for v, of_view in enumerate(() if clusters is None else clusters):
            check.clusters(name.format(v), of_view, "z1", views[0], heads)
