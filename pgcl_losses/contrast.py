"""The reweighted contrast between the views of each graph.

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086. InfoNCE
is its Eq. 3; which samples are negatives, Eq. 12; the reweighted loss, Eq. 13; its weights, Eq. 14,
are in `weights.py`, and the sums over pairs in `engine/`.
"""

from functools import partial
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

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
from pgcl_losses.batch import Batch, Negatives, check_alone
from pgcl_losses.engine import (
    ENGINE_CHOICES,
    Engine,
    Factors,
    Gaussian,
    Pairs,
    Weight,
    check_engine,
    log_weighted_sums,
)
from pgcl_losses.part import Check, Part
from pgcl_losses.reduction import REDUCTIONS, Reduction, reduce
from pgcl_losses.rows import computing_dtype, full_precision, unit_rows
from pgcl_losses.weights import cluster_counts, cosine_moments, prototype_log_weights

Weighting = Literal["prototype", "sample", "uniform"]
WEIGHTINGS, NEGATIVES = get_args(Weighting), get_args(Negatives)

# log(1 + e^x) is x from here on, even for float64.
_LINEAR_FROM = 40.0


class PrototypeReweightedNCE(Part):
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
        gather, process_group: with several processes, the loss over the batches of all of them;
            see :class:`PGCLLoss`.

    Shape:
        - z1, z2: ``[N, D]``; row i of both is graph i, of any length up to 1e18
        - clusters1, clusters2: ``[N]`` int64, needed by ``weighting="prototype"`` and by
          ``exclude_same_cluster=True``
        - prototypes: ``[K, D]``, needed by ``weighting="prototype"``. Elsewhere they tell how many
          clusters there are. Without them the numbers are looked at, for which a GPU has to be
          waited for, or, in a compiled or CUDA graph, as many clusters as rows are expected:
          memory grows with rows times clusters.
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

    options: ClassVar[dict[str, Check]] = {
        "temperature": check_scale,
        "weighting": partial(check_choice, choices=WEIGHTINGS),
        "exclude_same_cluster": check_flag,
        "negatives": partial(check_choice, choices=NEGATIVES),
        "reduction": partial(check_choice, choices=REDUCTIONS),
        "engine": partial(check_choice, choices=ENGINE_CHOICES),
    }

    temperature: float
    weighting: Weighting
    exclude_same_cluster: bool
    negatives: Negatives
    reduction: Reduction
    engine: Engine

    def __init__(
        self,
        *,
        temperature: float = 0.2,
        weighting: Weighting = "prototype",
        exclude_same_cluster: bool = True,
        negatives: Negatives = "all",
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self.temperature = temperature
        self.weighting = weighting
        self.exclude_same_cluster = exclude_same_cluster
        self.negatives = negatives
        self.reduction = reduction
        self.engine = engine
        self.gather = gather
        self.process_group = process_group

    def forward(
        self,
        z1: Tensor | Batch,
        z2: Tensor | None = None,
        clusters1: Tensor | None = None,
        clusters2: Tensor | None = None,
        prototypes: Tensor | None = None,
    ) -> Tensor:
        """The loss of two views, or of a batch of any number of views."""
        return self.untraced(self._loss)(z1, z2, clusters1, clusters2, prototypes)

    def _loss(
        self,
        z1: Tensor | Batch,
        z2: Tensor | None,
        clusters1: Tensor | None,
        clusters2: Tensor | None,
        prototypes: Tensor | None,
    ) -> Tensor:
        batch = z1
        if not isinstance(batch, Batch):
            batch = self._batch(batch, z2, clusters1, clusters2, prototypes)
        else:
            others = (z2, clusters1, clusters2, prototypes)
            check_alone((batch, *[given for given in others if given is not None]))
        negatives = batch.negatives or self.negatives
        with full_precision(batch.need("rows").device):
            losses = self._per_query(batch, across_views=negatives == "cross")
            return reduce(losses, self.reduction, batch.ranks)

    def _per_query(self, batch: Batch, across_views: bool) -> Tensor:
        """Each query's loss ``[V, N]``: the mean over its positives, one in each other view."""
        rows = batch.need("rows")  # [V, N, D]
        num_views = len(rows)
        with torch.no_grad():
            weights = self._weights(batch)
        pairs = Pairs(rows.flatten(0, 1), num_views, across_views, weights)
        log_sums = log_weighted_sums(pairs, self.temperature, self.engine, batch.ranks)
        log_sums = log_sums.view(rows.shape[:2])
        if num_views == 2:
            first, second = rows.unbind()
            positives = (first * second).sum(-1)  # [N] of both
            return _with_positive(log_sums, positives, self.temperature)
        losses = [
            _with_positive(log_sums, (rows * rows.roll(shift, 0)).sum(-1), self.temperature)
            for shift in range(1, num_views)
        ]
        return torch.stack(losses).mean(0)

    def _weights(self, batch: Batch) -> tuple[Weight, ...]:
        """M w of each pair, none for what is in the query's own cluster."""
        rows = batch.need("rows").detach().flatten(0, 1)  # detached for forward mode, too
        weights: list[Weight] = []
        if self.weighting == "sample":
            weights.append(Gaussian(*cosine_moments(rows)))
        if self._needs_clusters():
            clusters = batch.need("clusters").flatten()
            if batch.prototypes is None:
                clusters, num_clusters = _numbered(clusters)
            else:
                num_clusters = len(batch.prototypes)
            if self.weighting == "prototype":
                shares = cluster_counts(clusters, num_clusters).to(rows.dtype) / len(clusters)
                table = prototype_log_weights(batch.need("prototypes").detach(), shares)
            else:
                table = rows.new_zeros(num_clusters, num_clusters)
            if self.exclude_same_cluster:
                table.fill_diagonal_(-torch.inf)
            symmetric = self.weighting != "prototype"
            weights.append(Factors(table, clusters, lines=clusters, symmetric=symmetric))
        return tuple(weights)

    def _needs_clusters(self) -> bool:
        return self.weighting == "prototype" or self.exclude_same_cluster

    def _batch(
        self,
        z1: Tensor,
        z2: Tensor | None,
        clusters1: Tensor | None,
        clusters2: Tensor | None,
        prototypes: Tensor | None,
    ) -> Batch:
        if not self._needs_clusters():
            clusters1 = clusters2 = prototypes = None
        clusters_of = clusters1, clusters2
        check = partial(self._check, z1, z2, clusters_of, prototypes)
        ranks = self.share(
            check, (z1, z2), lambda: () if prototypes is None else (prototypes.detach(),)
        )
        assert z2 is not None
        with full_precision(z1.device):
            dtype = computing_dtype(z1) if prototypes is None else computing_dtype(z1, prototypes)
            rows = ranks.gather(unit_rows(torch.stack([z1, z2]), dtype))
            clusters = None
            if clusters1 is not None and clusters2 is not None:
                clusters = ranks.gather(torch.stack([clusters1, clusters2]))
            if prototypes is not None:
                prototypes = unit_rows(prototypes.detach(), dtype)
            return Batch(ranks, rows, prototypes, clusters=clusters)

    def _check(
        self,
        z1: Tensor,
        z2: Tensor | None,
        clusters_of: tuple[Tensor | None, Tensor | None],
        prototypes: Tensor | None,
        may_lack_rows: bool,
    ) -> None:
        check_views([("z1", z1), ("z2", z2)], may_lack_rows=may_lack_rows)
        check_engine(self.engine, z1)
        if self.weighting == "prototype" and prototypes is None:
            raise ValueError("prototypes is None, but weighting='prototype' needs them: [K, D]")
        if prototypes is not None:
            check_matrix("prototypes", prototypes, "[K, D]")
            check_prototypes("prototypes", prototypes, "z1", z1)
        if not self._needs_clusters():
            return
        for name, clusters in zip(("clusters1", "clusters2"), clusters_of, strict=True):
            if clusters is None:
                raise ValueError(
                    f"{name} is None, but weighting={self.weighting!r} with "
                    f"exclude_same_cluster={self.exclude_same_cluster} needs one cluster per row"
                )
            check_clusters(name, clusters, "z1", z1)
            if prototypes is not None and len(clusters) > 0:
                check_cluster_range(name, clusters, len(prototypes))


def _with_positive(log_sums: Tensor, positives: Tensor, temperature: float) -> Tensor:
    """-log( e^{s_ip / tau} / (e^{s_ip / tau} + S_i) ) from log S_i and s_ip."""
    gaps = torch.sub(log_sums, positives, alpha=1 / temperature)
    return F.softplus(gaps, threshold=_LINEAR_FROM)


def _numbered(clusters: Tensor) -> tuple[Tensor, int]:
    """Any cluster numbers ``[M]`` as numbers from 0 on, and how many there may be."""
    capturing = clusters.is_cuda and torch.cuda.is_current_stream_capturing()
    if capturing or torch.compiler.is_compiling():
        # No value can be read there: at most as many as there are rows.
        return torch.searchsorted(clusters.sort().values, clusters), len(clusters)
    low, high = (int(bound) for bound in clusters.aminmax())
    if low >= 0 and high < len(clusters):
        return clusters, high + 1
    different, numbers = torch.unique(clusters, return_inverse=True)
    return numbers, len(different)
