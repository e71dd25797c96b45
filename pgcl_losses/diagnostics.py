"""Plain numbers that tell how the prototypes are doing."""

from collections.abc import Sequence
from typing import TypedDict

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses._checks import check_cluster_range, check_clusters, check_matrix, check_views
from pgcl_losses.batch import Assignment
from pgcl_losses.pgcl import PGCLTerms
from pgcl_losses.rows import unit_rows
from pgcl_losses.weights import cluster_counts, prototype_log_weights


class Diagnostics(TypedDict, total=False):
    """What :func:`diagnostics` returns: an ordinary dict."""

    loss: float
    contrast: float
    consistency: float
    occupancy: list[float]
    entropy: float
    dead_prototypes: int
    agreement: float
    masked_negatives: float
    mean_weight: float


@torch.no_grad()
def diagnostics(
    source: PGCLTerms | Sequence[Assignment], prototypes: Tensor | None = None
) -> Diagnostics:
    """Numbers worth logging, from one step's terms or assignments. It waits for the device.

    Args:
        source: what ``PGCLLoss.terms`` returned, or the assignments of ``SinkhornPrototypes``.
        prototypes: ``[K, D]``, adds ``mean_weight``.

    Returns:
        A dict of

        - ``loss``, ``contrast``, ``consistency``: the terms, averaged if they were not reduced
        - ``occupancy``: each prototype's share of the samples
        - ``entropy`` of the occupancy in nats: log K if all clusters are alike, 0 if there is one
        - ``dead_prototypes``: how many have no sample
        - ``agreement``: how often two views of a graph have the same cluster; 1 says that as many
          clusters can be told apart, 1/K that clusters are chance
        - ``masked_negatives``: the share of negatives that ``exclude_same_cluster`` leaves out
        - ``mean_weight``: the mean of M w over the negatives that remain, for
          ``weighting="prototype"``; below 1 the negatives as a whole count less than in InfoNCE

        The last two speak of negatives from all views. Without negatives they are nan, and so is
        the agreement without a second view.

    Examples:
        >>> import torch
        >>> from pgcl_losses import Assignment, diagnostics
        >>> clusters = torch.tensor([0, 0, 1, 1])
        >>> view = Assignment(torch.zeros(4, 3), torch.eye(3)[clusters], clusters)
        >>> numbers = diagnostics([view, view])
        >>> numbers["occupancy"], numbers["dead_prototypes"], round(numbers["masked_negatives"], 3)
        ([0.5, 0.5, 0.0], 1, 0.333)

    """
    assignments = source.assignments if isinstance(source, PGCLTerms) else source
    if (
        not isinstance(assignments, Sequence)
        or len(assignments) == 0
        or not all(isinstance(assignment, Assignment) for assignment in assignments)
    ):
        raise TypeError(
            "source must be PGCLTerms or a sequence of Assignments, "
            f"but got {type(source).__name__}"
        )
    named = [(f"assignments[{v}]", assignment) for v, assignment in enumerate(assignments)]
    check_views([(f"{name}.targets", assignment.targets) for name, assignment in named], "[N, K]")
    num_prototypes = assignments[0].targets.shape[1]
    for name, (_, targets, clusters) in named:
        check_clusters(f"{name}.clusters", clusters, f"{name}.targets", targets)
        check_cluster_range(f"{name}.clusters", clusters, num_prototypes)
    clusters = torch.stack([a.clusters for a in assignments])  # [V, N]
    counts = cluster_counts(clusters.flatten(), num_prototypes).double()  # [K]
    occupancy = counts / counts.sum()

    # How many negatives the samples of cluster a have in cluster b: all pairs of samples but those
    # of one graph.
    per_graph = F.one_hot(clusters, num_prototypes).sum(0).double()  # [N, K]
    negatives = counts.outer(counts) - per_graph.T @ per_graph  # [K, K]
    remaining = negatives - negatives.diag().diag()

    pairs_of_views = clusters.numel() * (len(clusters) - 1)
    agreeing = per_graph.square().sum() - clusters.numel()

    numbers = Diagnostics(
        occupancy=occupancy.tolist(),
        entropy=torch.special.entr(occupancy).sum().item(),
        dead_prototypes=int((counts == 0).sum()),
        agreement=(agreeing / pairs_of_views).item(),
        masked_negatives=(1 - remaining.sum() / negatives.sum()).item(),
    )
    if prototypes is not None:
        check_matrix("prototypes", prototypes, "[K, D]")
        if len(prototypes) != num_prototypes:
            raise ValueError(
                f"prototypes has {len(prototypes)} rows but the assignments are to {num_prototypes}"
            )
        weights = prototype_log_weights(unit_rows(prototypes, torch.float64), occupancy).exp()
        numbers["mean_weight"] = ((remaining * weights).sum() / remaining.sum()).item()
    if isinstance(source, PGCLTerms):
        numbers["loss"] = source.loss.mean().item()
        numbers["contrast"] = source.contrast.mean().item()
        numbers["consistency"] = source.consistency.mean().item()
    return numbers
