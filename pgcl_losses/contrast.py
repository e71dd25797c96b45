"""The reweighted contrast (Eq. 13): InfoNCE whose negatives (Eq. 12) have weights (Eq. 14)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from pgcl_losses.base import checks as check
from pgcl_losses.base.module import called_by_all
from pgcl_losses.base.normalize import computing_dtype
from pgcl_losses.base.options import Group, Temperature, checked
from pgcl_losses.info_nce import WeightedInfoNCE
from pgcl_losses.pairs.batch import (
    NOT_ASSIGNED,
    Assignment,
    Assignments,
    Batch,
    Negatives,
    OverPositives,
    Queries,
    Reduction,
    batch_argument,
)
from pgcl_losses.pairs.given import Given, Labels
from pgcl_losses.pairs.loss import Engine
from pgcl_losses.pairs.rows import Pairs
from pgcl_losses.pairs.score_mod import Function
from pgcl_losses.pairs.weights import (
    Gaussian,
    Table,
    cluster_counts,
    cosine_moments,
    prototype_log_weights,
)

Weighting = Literal["prototype", "sample", "uniform"]
WEIGHTINGS = get_args(Weighting)


class PrototypeReweightedNCE(WeightedInfoNCE):
    r"""PGCL's contrast: InfoNCE that leaves out likely false negatives and weights the others.

    This is the first term of :class:`PGCLLoss`. Call it with what :class:`SinkhornPrototypes`
    returned, or with clusters of your own. It is the mean over all 2N queries i of

    .. math:: -\log \frac{e^{s_{ii'} / \tau}}
        {e^{s_{ii'} / \tau} + M_i \sum_{j \in Neg(i)} w_{ij} e^{s_{ij} / \tau}}

    where s is the cosine of two embeddings, i' is the other view of the query's graph, and Neg(i)
    are the embeddings of other graphs, by default only those in other clusters than the query. The
    weight w is a Gaussian around the mean distance: it favours negatives that are neither very near
    nor very far. M_i scales the weights of a query to an average of 1. Weights have no gradient.
    With several heads, the weight of a pair is the mean over heads. A query without negatives has
    loss 0.

    Args:
        weighting, exclude_same_cluster: as in :class:`PGCLLoss`.
        temperature, negatives, queries, over_positives: as in :class:`InfoNCE`.
        score_mod: as in :class:`InfoNCE`; the weights are added to what it returns. It may read
            ``metadata``.
        decoupled, reduction, engine, gather, process_group: as in :class:`InfoNCE`.

    Shape:
        - views: two or more, ``[N, D]`` each, with norms up to 1e18; row i of each view is graph i
        - assignments: :class:`Assignments`, which :class:`SinkhornPrototypes` returns
        - clusters: ``[N]`` int64 for each view, in place of assignments
        - prototypes: ``[K, D]``, which ``weighting="prototype"`` needs. If you give clusters
          without prototypes, the loss counts the clusters, which synchronises with a GPU and breaks
          a compiled graph
        - output: a scalar, or with ``reduction="none"`` one value for each query

    Examples:
        >>> import torch
        >>> from pgcl_losses import PrototypeReweightedNCE, SinkhornPrototypes
        >>> z1 = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]])
        >>> z2 = torch.tensor([[1.0, 0.0], [0.6, 0.8], [-0.8, 0.6]])
        >>> clusters = torch.tensor([0, 0, 1])
        >>> PrototypeReweightedNCE(weighting="uniform")(z1, z2, clusters=(clusters, clusters))
        tensor(0.3158)
        >>> prototypes = SinkhornPrototypes(dim=2, num_prototypes=3)
        >>> contrast = PrototypeReweightedNCE(reduction="none")
        >>> contrast(z1, z2, prototypes(z1, z2)).shape
        torch.Size([6])

    """

    weighting: Weighting
    exclude_same_cluster: bool

    @checked
    def __init__(
        self,
        *,
        temperature: Temperature = 0.5,
        negatives: Negatives = "all",
        queries: Queries = "all",
        over_positives: OverPositives = "mean",
        decoupled: bool = False,
        score_mod: Function = None,
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        weighting: Weighting = "prototype",
        exclude_same_cluster: bool = True,
        gather: bool = True,
        process_group: Group = None,
    ) -> None:
        super().__init__()
        self.set_options(locals())

    @called_by_all("forward")
    def forward(
        self,
        *views: Tensor | Assignments | Batch,
        assignments: Assignments | None = None,
        clusters: Sequence[Tensor] | None = None,
        prototypes: Tensor | None = None,
        metadata: Labels | None = None,
    ) -> Tensor:
        """Compute the loss of two or more views and, as the last argument, of their assignments.

        The assignments alone are enough if they are of the views. In their place you may give
        ``clusters``, and ``prototypes`` for ``weighting="prototype"``. With another weighting and
        ``exclude_same_cluster=False`` the views are enough. A :class:`Batch` must have assignments.
        """
        last = views[-1] if len(views) > 1 else None
        if isinstance(last, Assignments) and assignments is None:
            views, assignments = views[:-1], last
        batch = batch_argument(self, views, (assignments, clusters, prototypes, metadata))
        if batch is None:
            batch = self.batch_of(views, assignments, clusters, prototypes, metadata)
        elif (num_views := len(batch.processes.counts)) < 2:
            raise ValueError(f"views must be two or more, but the batch has {num_views}")
        if isinstance(views[0], Batch):
            return self.loss_of_batch(batch)
        # The prototypes have checked whether two of the views are one tensor.
        return self.loss_of_views(batch, views if assignments is None else ())

    if TYPE_CHECKING:
        __call__ = forward

    def batch_of(
        self,
        views: Sequence[Any],
        assignments: Assignments | None = None,
        clusters: Sequence[Tensor] | None = None,
        prototypes: Tensor | None = None,
        metadata: Labels | None = None,
    ) -> Batch:
        """Check what the loss is called with, and make a batch of it."""
        given, others = (assignments, clusters, prototypes), Given(metadata=metadata)

        def check_inputs() -> dict[str, object]:
            claims = self._check(views, *given)
            return claims | others.check(views, "all", "all", self.score_mod is not None)

        processes = self.check_on_all("forward", views, check_inputs)
        dtype = computing_dtype(views[0], prototypes)
        batch = Batch.from_views(views, processes, others, dtype=dtype)
        if not self._needs_clusters():
            return batch
        if assignments is None:
            return batch.assigned(prototypes, clusters)
        return batch.assigned_as(assignments.batch)

    def pairs_of(self, batch: Batch, **more: Any) -> Pairs:
        with torch.no_grad():
            if self._needs_clusters():
                more["cluster_weights"] = self._cluster_weights(batch)
            if self.weighting == "sample":
                samples = batch.embeddings.detach()  # also from the tangents of forward mode
                if batch.memory is not None:
                    samples = torch.cat([samples, batch.memory])
                more["cosine_weights"] = Gaussian(*cosine_moments(samples, batch.pairs.filled))
        return super().pairs_of(batch, **more)

    def _cluster_weights(self, batch: Batch) -> Table:
        """Make a table of M w by the clusters of both embeddings; excluded pairs have weight 0."""
        if batch.clusters is None or (self.weighting == "prototype" and batch.prototypes is None):
            raise ValueError(NOT_ASSIGNED)
        tables = []
        for head, (size, clusters) in enumerate(
            zip(batch.heads, batch.clusters.unbind(1), strict=True)
        ):
            if self.weighting == "prototype" and batch.prototypes is not None:
                prototypes = batch.prototypes.detach().split_with_sizes(batch.heads)[head]
                dtype, filled = batch.embeddings.dtype, batch.pairs.filled
                counts = cluster_counts(clusters, size, dtype, filled)
                table = prototype_log_weights(prototypes, counts / counts.sum())
            else:
                table = batch.embeddings.new_zeros(size, size)
            if self.exclude_same_cluster:
                table.fill_diagonal_(-torch.inf)
            tables.append(table)
        return Table(tuple(tables), batch.clusters)

    def _needs_clusters(self) -> bool:
        """Whether the weights depend on the clusters of embeddings."""
        return self.weighting == "prototype" or self.exclude_same_cluster

    def _check(
        self, views: Any, assignments: Any, clusters: Any, prototypes: Any
    ) -> dict[str, object]:
        for view in views:
            first = view[0] if type(view) in (tuple, list) and view else view
            if isinstance(first, Assignment):
                raise TypeError(
                    "views must be Tensors, but got parts of Assignments: give what "
                    "SinkhornPrototypes returned as it is, as in contrast(z1, z2, a)"
                )
        check.loss_views(views, 2)
        check.temperature(self.temperature, views[0])
        if assignments is not None:
            return self._check_assignments(views, assignments, clusters, prototypes)
        if prototypes is not None:
            check.matrix("prototypes", prototypes, "[K, D]")
            check.prototypes("prototypes", prototypes, "z1", views[0])
        if self._needs_clusters() and clusters is None:
            raise ValueError(
                "assignments is None: give the output of SinkhornPrototypes, or clusters, or set "
                "weighting='uniform' and exclude_same_cluster=False"
            )
        if self.weighting == "prototype" and prototypes is None:
            raise ValueError("prototypes is None, but weighting='prototype' needs them: [K, D]")
        if clusters is not None:
            if isinstance(clusters, int) or len(clusters) != len(views):
                each = f"a sequence of {len(views)}, one for each view"
                raise ValueError(f"clusters must be {each}, but got {check.shown(clusters)}")
            heads = () if prototypes is None else (len(prototypes),)
            for v, numbers in enumerate(clusters):
                check.clusters(f"clusters[{v}]", numbers, f"z{v + 1}", views[v], heads)
        return {"clusters": clusters is not None, "prototypes": prototypes}

    def _check_assignments(
        self, views: Any, assignments: Any, clusters: Any, prototypes: Any
    ) -> dict[str, object]:
        if not isinstance(assignments, Assignments):
            came = type(assignments).__name__
            raise TypeError(
                "assignments must be Assignments, which SinkhornPrototypes returns for all views, "
                f"but got {came}: of your own, give clusters= and prototypes="
            )
        for name, other in (("clusters", clusters), ("prototypes", prototypes)):
            if other is not None:
                raise TypeError(f"assignments already hold the {name}: leave {name}= out")
        processes = assignments.batch.processes
        own = [counts[processes.rank] for counts in processes.counts]
        if own != [len(view) for view in views]:
            came = f"{len(views)} views of {len(views[0])} graphs"
            raise ValueError(
                f"assignments are of {len(own)} views of {own[0]} graphs, but this loss has got "
                f"{came}: they must describe the same graphs"
            )
        if not assignments:
            raise ValueError(NOT_ASSIGNED)
        assignments.check(self)
        check.device("assignments", assignments.batch.embeddings, "z1", views[0])
        return {"heads": assignments.batch.heads}
