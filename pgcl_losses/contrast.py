"""The reweighted contrast between the two views of each graph."""

import torch
from torch import Tensor, nn

from pgcl_losses._checks import (
    check_choice,
    check_cluster_range,
    check_clusters,
    check_flag,
    check_matrix,
    check_prototypes,
    check_scale,
    check_views,
)
from pgcl_losses.engine import (
    ENGINE_CHOICES,
    Bells,
    Pairs,
    SameCluster,
    Table,
    contrast_pairs,
)
from pgcl_losses.reduction import REDUCTIONS, reduce
from pgcl_losses.rows import computing_dtype, full_precision, unit_rows
from pgcl_losses.weights import cluster_counts, prototype_log_weights, sample_bells

WEIGHTINGS = ("prototype", "sample", "uniform")
NEGATIVES = ("all", "cross")


class PrototypeReweightedNCE(nn.Module):
    r"""InfoNCE that leaves out likely false negatives and favours moderately distant ones.

    For each query i with positive i', the mean over all 2N queries of

    .. math:: -\log \frac{e^{s_{ii'} / \tau}}
        {e^{s_{ii'} / \tau} + M_i \sum_{j \in Neg(i)} w_{ij} e^{s_{ij} / \tau}}

    where Neg(i) are the samples of other graphs, w is a Gaussian around the mean distance and M_i
    scales the weights of a query to an average of 1. Weights and clusters are constants for the
    gradient. A query without negatives has loss 0.

    Args:
        temperature: tau.
        weighting: ``"prototype"`` weighs a pair by the distance of the two clusters' prototypes,
            ``"sample"`` by the distance of the two rows, ``"uniform"`` makes every weight 1.
        exclude_same_cluster: leave samples of the query's own cluster out of its negatives.
        negatives: ``"all"`` takes them from both views, ``"cross"`` from the other view alone.
        reduction: ``"mean"``, ``"sum"``, or ``"none"`` for one value per row (2N, view 1 first).
        engine: how the pairs are computed, with the same result: ``"dense"`` as one matrix,
            ``"streaming"`` by blocks, for batches of any size, ``"triton"`` by fused kernels on
            CUDA (correct in Triton's interpreter, not yet measured on a GPU); ``"auto"`` takes
            dense for small batches and streaming for large ones. All but dense are differentiable
            once.

    Shape:
        - z1, z2: ``[N, D]``; row i of both is graph i, of any length up to 1e18
        - clusters1, clusters2: ``[N]`` int64, needed by ``weighting="prototype"`` and by
          ``exclude_same_cluster=True``
        - prototypes: ``[K, D]``, needed by ``weighting="prototype"``
        - output: scalar, or ``[2N]`` for ``reduction="none"``

    Examples:
        >>> import torch
        >>> from pgcl_losses import PrototypeReweightedNCE
        >>> z1 = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z2 = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> info_nce = PrototypeReweightedNCE(weighting="uniform", exclude_same_cluster=False)
        >>> info_nce(z1, z2)
        tensor(0.2133)

    """

    def __init__(
        self,
        *,
        temperature: float = 0.2,
        weighting: str = "prototype",
        exclude_same_cluster: bool = True,
        negatives: str = "all",
        reduction: str = "mean",
        engine: str = "auto",
    ) -> None:
        super().__init__()
        self.temperature = check_scale("temperature", temperature)
        self.weighting = check_choice("weighting", weighting, WEIGHTINGS)
        self.exclude_same_cluster = check_flag("exclude_same_cluster", exclude_same_cluster)
        self.negatives = check_choice("negatives", negatives, NEGATIVES)
        self.reduction = check_choice("reduction", reduction, REDUCTIONS)
        self.engine = check_choice("engine", engine, ENGINE_CHOICES)

    def extra_repr(self) -> str:
        return (
            f"temperature={self.temperature}, weighting={self.weighting!r}, "
            f"exclude_same_cluster={self.exclude_same_cluster}, negatives={self.negatives!r}, "
            f"reduction={self.reduction!r}, engine={self.engine!r}"
        )

    def forward(
        self,
        z1: Tensor,
        z2: Tensor,
        clusters1: Tensor | None = None,
        clusters2: Tensor | None = None,
        prototypes: Tensor | None = None,
    ) -> Tensor:
        check_views([("z1", z1), ("z2", z2)])
        if self.weighting == "prototype":
            if prototypes is None:
                raise ValueError("prototypes is None, but weighting='prototype' needs them: [K, D]")
            check_matrix("prototypes", prototypes, "[K, D]")
            check_prototypes("prototypes", prototypes, "z1", z1)
        else:
            prototypes = None
        clusters = None
        if self.weighting == "prototype" or self.exclude_same_cluster:
            both = [("clusters1", clusters1), ("clusters2", clusters2)]
            clusters = torch.cat([self._checked(*one, z1, prototypes) for one in both])
        with full_precision(z1.device):
            dtype = computing_dtype(z1) if prototypes is None else computing_dtype(z1, prototypes)
            rows = unit_rows(torch.cat([z1, z2]), dtype)
            if prototypes is not None:
                prototypes = unit_rows(prototypes.detach(), dtype)
            return reduce(self.per_query(rows, clusters, prototypes), self.reduction)

    def _checked(
        self, name: str, clusters: Tensor | None, z1: Tensor, prototypes: Tensor | None
    ) -> Tensor:
        if clusters is None:
            raise ValueError(
                f"{name} is None, but weighting={self.weighting!r} with "
                f"exclude_same_cluster={self.exclude_same_cluster} needs one cluster per row"
            )
        check_clusters(name, clusters, "z1", z1)
        if prototypes is not None:
            check_cluster_range(name, clusters, len(prototypes))
        return clusters

    def per_query(
        self,
        rows: Tensor,
        clusters: Tensor | None,
        prototypes: Tensor | None,
        graphs: slice | None = None,
    ) -> Tensor:
        """Each query's loss ``[2N]``, from both views' unit rows ``[2N, D]``, their clusters
        ``[2N]`` and unit prototypes ``[K, D]``, where the options need them.

        ``graphs`` makes queries of these graphs alone; the others are still columns for them.
        """
        num_graphs = len(rows) // 2
        index = torch.arange(len(rows), device=rows.device)
        with torch.no_grad():
            weights, left_out = self._weights(rows, clusters, prototypes)
        pairs = Pairs(rows, rows, index.roll(num_graphs), index, weights, left_out)
        graphs = graphs or slice(0, num_graphs)
        if self.negatives == "all" and graphs == slice(0, num_graphs):
            return contrast_pairs(pairs, self.temperature, self.engine)
        losses = []
        for own, other in ((0, num_graphs), (num_graphs, 0)):
            some = pairs.of_queries(slice(own + graphs.start, own + graphs.stop))
            if self.negatives == "cross":
                some = some.against(slice(other, other + num_graphs), index[graphs])
            losses.append(contrast_pairs(some, self.temperature, self.engine))
        return torch.cat(losses)

    def _weights(
        self, rows: Tensor, clusters: Tensor | None, prototypes: Tensor | None
    ) -> tuple[Table | Bells | None, SameCluster | None]:
        if self.weighting == "prototype":
            assert clusters is not None
            assert prototypes is not None
            counts = cluster_counts(clusters, len(prototypes))
            table = prototype_log_weights(prototypes, counts.to(rows.dtype) / len(clusters))
            if self.exclude_same_cluster:
                table.fill_diagonal_(-torch.inf)
            return Table(table, clusters, clusters), None
        bells = None
        if self.weighting == "sample":
            bells = Bells(*sample_bells(rows, rows), population=rows)
        if not self.exclude_same_cluster:
            return bells, None
        assert clusters is not None
        return bells, SameCluster(clusters, clusters)
