"""Numbers to log: they describe the clusters, negatives and embeddings of one step."""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.base import checks as check
from pgcl_losses.base.normalize import computing_dtype, unit_vectors
from pgcl_losses.consistency import consistency_ratio
from pgcl_losses.pairs.batch import Assignment, Assignments, PGCLTerms, check_assignments
from pgcl_losses.pairs.weights import cluster_counts, prototype_log_weights


@torch.no_grad()
def diagnostics(
    source: PGCLTerms | Sequence[Assignment], prototypes: Tensor | None = None
) -> dict[str, float]:
    """Compute metrics to log, which show whether embeddings or clusters have collapsed.

    The call synchronises with the device, so call it every few steps rather than in each step.

    Args:
        source (PGCLTerms, Assignments or sequence of Assignment): the result of
            :meth:`PGCLLoss.terms` or of :class:`SinkhornPrototypes`, or assignments of your own.
        prototypes (Tensor or None): ``[K, D]``, of assignments of your own, which do not know them.
            Without prototypes the metrics do not include ``mean_weight``.

    Returns:
        A dict of metrics by name.

        From PGCLTerms only:

        - loss, contrast, consistency: the loss and its terms, or their means if
          ``reduction="none"``
        - mean_cosine: the mean cosine of two embeddings; near 1 if the embeddings are collapsed

        From the assignments. With several heads, all names but ``consistency_ratio`` have a prefix
        for each head, such as ``head0/largest_cluster``:

        - consistency_ratio: the consistency divided by log K, of the K prototypes in use. It is 1
          if all predictions are uniform, and nan with one view or one prototype.
        - largest_cluster: the fraction of samples in the largest cluster; near 1 if clusters are
          collapsed
        - entropy: the entropy of the cluster sizes in nats; log K if all clusters have equal size
        - dead_prototypes: the number of prototypes in use without samples
        - used: how many prototypes the batch predicts, the exponential of the entropy of its mean
          prediction; K if all are predicted equally often, 1 if one of them always is
        - spread: over how many prototypes the target of a sample is spread, the exponential of the
          mean entropy of the targets; near 1 where assignments are hard, near K where nothing is
          learned. Predictions that are all uniform have a perfect ``used``, but not ``spread``.
        - agreement: how often two views of a graph are in the same cluster; about 1/K for random
          clusters, nan with one view
        - masked_negatives: the fraction of negatives that ``exclude_same_cluster`` leaves out
        - mean_weight: the mean of M w over the remaining negatives, for ``weighting="prototype"``

        The last two assume negatives from all views. They are nan without negatives.

        From PGCLTerms and Assignments, which know the embeddings of all processes:

        - effective_rank: in how many directions the unit embeddings extend, the exponential of the
          entropy of their singular values, divided by the sum of them; 1 if the embeddings are
          collapsed, at most D
        - within, for each head: the fraction of the variance of the unit embeddings, of all views,
          that lies inside their clusters. It falls towards 0 as clusters collapse to points. More
          clusters and fewer embeddings also make it smaller: without any structure it is about 0.9
          for 10 clusters of 1,000 embeddings, and 0.1 for 50 clusters of 60. So compare it with
          itself over a training, or between losses at the same K and batch size.

    Examples:
        >>> import torch
        >>> from pgcl_losses import Assignment, diagnostics
        >>> clusters = torch.tensor([0, 0, 1, 1])
        >>> view = Assignment(torch.zeros(4, 3), torch.eye(3)[clusters], clusters)
        >>> numbers = diagnostics([view, view])
        >>> numbers["largest_cluster"], numbers["dead_prototypes"], numbers["agreement"]
        (0.5, 1, 1.0)

    """
    numbers: dict[str, float] = {}
    assignments: Any = source
    if isinstance(source, PGCLTerms):
        assignments = source.assignments
        for name in ("loss", "contrast", "consistency", "mean_cosine"):
            numbers[name] = getattr(source, name).mean().item()
    batch = assignments.batch if isinstance(assignments, Assignments) else None
    if batch is not None and prototypes is None:
        prototypes = batch.prototypes
    if not isinstance(assignments, Sequence) or len(assignments) == 0:
        expected, came = "PGCLTerms or a sequence of Assignments", type(source).__name__
        raise TypeError(f"source must be {expected}, but got {came}")
    check_assignments(assignments, prototypes)
    heads, dtype = assignments[0].all_heads(), computing_dtype(assignments[0].log_probs)
    if len(assignments[0].targets) == 0:
        raise ValueError("source must not be empty, but its assignments have no graphs")
    log_probs = torch.stack([view.log_probs.to(dtype) for view in assignments])  # [V, N, K]
    targets = torch.stack([view.targets.to(dtype) for view in assignments])
    clusters = torch.stack([view.clusters.view(len(view.targets), -1) for view in assignments])
    in_use = torch.ones_like(log_probs[0, 0], dtype=torch.bool)  # [K]
    if batch is not None and batch.sizes is not None:
        in_use = batch.sizes > 0
    num_in_use = [part.sum() for part in in_use.split_with_sizes(heads)]
    numbers["consistency_ratio"] = consistency_ratio(log_probs, targets, num_in_use).item()
    centers: Sequence[Tensor | None] = [None] * len(heads)
    if prototypes is not None:
        check.matrix("prototypes", prototypes, "[K, D]")
        centers = unit_vectors(prototypes, torch.float64).split_with_sizes(heads)
    each = zip(clusters.unbind(-1), in_use.split_with_sizes(heads), centers, strict=True)
    for h, head in enumerate(each):
        prefix = f"head{h}/" if len(heads) > 1 else ""
        numbers |= {prefix + name: value for name, value in _numbers_of_head(*head).items()}
        p, q = (x.split_with_sizes(heads, -1)[h] for x in (log_probs.exp(), targets))
        numbers[f"{prefix}used"] = _entropy(p.flatten(0, 1).mean(0)).exp().item()
        numbers[f"{prefix}spread"] = _entropy(q).mean().exp().item()
        if batch is not None and batch.clusters is not None:
            clusters_of_all = batch.clusters[: len(batch.embeddings), h]  # [M], of all processes
            numbers[f"{prefix}within"] = _within(batch.embeddings, clusters_of_all, heads[h])
    if batch is not None:
        numbers["effective_rank"] = _effective_rank(batch.embeddings)
    return numbers


def mean_cosine(units: Tensor) -> Tensor:
    """The mean cosine of two different unit vectors of ``[M, D]``; NaN if there is only one."""
    count = len(units)
    pairs = units.sum(0).square().sum() - units.square().sum()
    return pairs / (count * (count - 1)) if count > 1 else pairs.new_full((), math.nan)


def _effective_rank(embeddings: Tensor) -> float:
    """Compute the effective rank of embeddings ``[M, D]`` (Roy and Vetterli, EUSIPCO 2007)."""
    if not embeddings.isfinite().all():  # which have no singular values
        return math.nan
    values = torch.linalg.svdvals(embeddings.double())
    return _entropy(values / values.sum()).exp().item()


def _entropy(probabilities: Tensor) -> Tensor:
    """Compute the entropy in nats along the last dimension."""
    entropy: Tensor = torch.special.entr(probabilities).sum(-1)
    return entropy


def _within(embeddings: Tensor, clusters: Tensor, num_prototypes: int) -> float:
    """Compute the share of the variance of embeddings ``[M, D]`` that is inside clusters ``[M]``.

    It is nan if all embeddings are the same.
    """
    z, counts = embeddings.double(), cluster_counts(clusters, num_prototypes).double()  # [M, D]
    means = z.new_zeros(num_prototypes, z.shape[1]).index_add_(0, clusters, z)
    means = means / counts.clamp_min(1).unsqueeze(1)  # [K, D]
    inside = (z - means[clusters]).square().sum()
    return (inside / (z - z.mean(0)).square().sum()).item()


def _numbers_of_head(
    clusters: Tensor, in_use: Tensor, prototypes: Tensor | None
) -> dict[str, float]:
    """Compute the metrics of one head, from clusters ``[V, N]`` and unit prototypes ``[K, D]``.

    ``in_use``: which prototypes embeddings can be assigned to, ``[K]`` bool.
    """
    num_prototypes = len(in_use)
    counts = cluster_counts(clusters.flatten(), num_prototypes).double()  # [K]
    fractions = counts / counts.sum()

    # negatives[a, b]: how many negatives in cluster b the samples of cluster a have together. The
    # embeddings of the sample's own graph are no negatives.
    per_graph = F.one_hot(clusters, num_prototypes).sum(0).double()  # [N, K]
    negatives = counts.outer(counts) - per_graph.T @ per_graph  # [K, K]
    remaining = negatives - negatives.diag().diag()

    pairs_of_views = clusters.numel() * (len(clusters) - 1)
    agreeing = per_graph.square().sum() - clusters.numel()
    numbers = {
        "largest_cluster": fractions.max().item(),
        "entropy": _entropy(fractions).item(),
        "dead_prototypes": int(((counts == 0) & in_use).sum()),
        "agreement": (agreeing / pairs_of_views).item(),
        "masked_negatives": (1 - remaining.sum() / negatives.sum()).item(),
    }
    if prototypes is not None:
        weights = prototype_log_weights(prototypes, fractions).exp()
        numbers["mean_weight"] = ((remaining * weights).sum() / remaining.sum()).item()
    return numbers
