"""Draws the negatives of a query.

python -m docs.programs.draw  # writes docs/images/how.png
"""

import argparse
import math
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from pgcl_losses import SinkhornPrototypes
from pgcl_losses.base.normalize import unit_vectors
from pgcl_losses.pairs.weights import (
    cluster_counts,
    prototype_log_weights,
)

COLOURS = ["tab:blue", "tab:green", "tab:orange", "tab:red", "tab:purple", "tab:brown"]
DIRECTIONS = torch.tensor([0.0, 40.0, 85.0, 140.0, 200.0, 265.0]).deg2rad()


def on_circle(angles: torch.Tensor) -> torch.Tensor:
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def scene() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embeddings around six prototypes, their clusters, and the weights between clusters."""
    torch.manual_seed(3)
    prototypes = SinkhornPrototypes(dim=2, num_prototypes=len(DIRECTIONS))
    prototypes.weight.data = on_circle(DIRECTIONS)
    z = on_circle(DIRECTIONS.repeat(12) + 0.16 * torch.randn(12 * len(DIRECTIONS)))
    (view,) = prototypes.eval()(z)
    unit = unit_vectors(prototypes.weight.detach(), torch.float32)
    fractions = cluster_counts(view.clusters, len(unit)) / len(z)
    return z, view.clusters, unit, prototype_log_weights(unit, fractions).exp()


def draw_clusters(axes: Axes, query: int) -> None:
    z, clusters, prototypes, weights = scene()
    mine = int(clusters[query])
    z = z * (1 + 0.08 * torch.randn(len(z), 1))  # off the circle, or points would overlap
    for row, cluster in zip(z.tolist(), clusters.tolist(), strict=True):
        if cluster == mine:
            axes.plot(*row, "o", mfc="white", mec=COLOURS[cluster], ms=8)
        else:
            size = 50 * float(weights[mine, cluster]) ** 2
            axes.scatter(*row, s=size, color=COLOURS[cluster], alpha=0.7, linewidths=0)
    for cluster, prototype in enumerate(prototypes.tolist()):
        axes.plot(*prototype, "*", color=COLOURS[cluster], ms=20, mec="white")
    axes.plot(*z[query].tolist(), "o", color="black", ms=10)
    axes.annotate(
        "query", z[query].tolist(), xytext=(12, 10), textcoords="offset points", fontsize=11
    )
    axes.text(0, 0.1, "hollow: own cluster,\nno negatives", ha="center", va="center", fontsize=11)
    axes.text(0, -0.25, "larger: larger weight", ha="center", va="center", fontsize=11)
    axes.set_aspect("equal")
    axes.set_axis_off()


def draw_weights(axes: Axes, mine: int) -> None:
    _, clusters, prototypes, weights = scene()
    distances = 1 - prototypes @ prototypes[mine]
    fractions = cluster_counts(clusters, len(prototypes)) / len(clusters)
    mu = float(fractions @ distances)
    sigma = math.sqrt(float(fractions @ (distances - mu) ** 2))
    curve = torch.linspace(0, 2, 200)
    gaussian = torch.exp(-((curve - mu) ** 2) / (2 * sigma**2))
    scale = 1 / float(fractions @ torch.exp(-((distances - mu) ** 2) / (2 * sigma**2)))
    axes.plot(curve, scale * gaussian, color="0.6", zorder=0)
    axes.axhline(1, color="0.8", ls="--", zorder=0)
    axes.text(2.05, 1.03, "InfoNCE: 1 for all", ha="right", color="0.4", backgroundcolor="white")
    for cluster, distance in enumerate(distances.tolist()):
        weight = float(weights[mine, cluster])
        if cluster == mine:
            axes.plot(distance, weight, "*", mfc="white", mec=COLOURS[cluster], ms=20)
            axes.annotate(
                "own cluster:\nleft out", (distance, weight), xytext=(16, 0),
                textcoords="offset points",
            )  # fmt: skip
        else:
            axes.plot(distance, weight, "*", color=COLOURS[cluster], ms=20, mec="white")
    axes.axvline(mu, color="0.8", lw=1, zorder=0)
    axes.text(mu, 0.02, r" $\mu_i$", color="0.4", transform=axes.get_xaxis_transform())
    axes.spines[["top", "right"]].set_visible(False)
    axes.set(xlabel="distance of the prototypes, 1 - cosine", ylabel=r"weight $M_i w_{ij}$")
    axes.set_ylim(0)


def draw_query() -> Figure:
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.4), layout="constrained")
    query = 1
    draw_clusters(left, query)
    draw_weights(right, int(scene()[1][query]))
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    images = Path(__file__).parents[1] / "images"
    parser.add_argument("--output", type=Path, default=images, help="a new folder")
    args = parser.parse_args()
    if args.output.exists() and args.output != images:
        parser.error(f"--output {args.output} is there already: choose another folder")
    args.output.mkdir(parents=True, exist_ok=True)
    draw_query().savefig(args.output / "how.png", dpi=110)
