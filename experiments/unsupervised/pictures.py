"""Trains PGCL once on each set and draws clusters, their classes and weights.

python -m experiments.unsupervised.pictures --datasets motifs MUTAG --root data --output mine.png
"""

import argparse
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from sklearn.manifold import TSNE
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from tqdm import tqdm

from experiments.common.rows import PGCL

from .data import SYNTHETIC, fetch, load
from .model import GIN
from .train import SETTING, build, embed, train_epoch

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "unsupervised.png"  # made here
CLASSES = plt.get_cmap("tab10")


def train(name: str, graphs: list[Data]) -> dict[str, Any]:
    """A PGCL run with the options of the tables: its embeddings, prototypes and clusters."""
    torch.manual_seed(0)
    loader = DataLoader(graphs, SETTING["batch_size"], shuffle=True)
    config = {**SETTING, "row": PGCL}
    model = build(config, GIN(graphs[0].num_node_features), len(loader))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    epochs = tqdm(range(config["epochs"]), desc=name, unit="epoch")
    for _ in epochs:
        train_epoch(model, loader, optimizer)
    embeddings = F.normalize(torch.from_numpy(embed(model.encoder, graphs)))
    prototypes = model.loss.prototypes.eval()
    (balanced,) = prototypes(embeddings)
    return {
        "embeddings": embeddings,
        "labels": torch.cat([graph.y for graph in graphs]),
        "clusters": balanced.clusters,
        "prototypes": F.normalize(prototypes.weight.detach()),
    }


def draw_clusters(axes: Axes, trained: dict[str, Any]) -> None:
    """t-SNE of all embeddings, coloured by class, with the prototypes as stars."""
    both = torch.cat([trained["embeddings"], trained["prototypes"]]).numpy()
    flat = TSNE(metric="cosine", init="pca", random_state=0).fit_transform(both)
    count = len(trained["embeddings"])
    points, stars = flat[:count], flat[count:]
    axes.scatter(*points.T, c=CLASSES(trained["labels"].numpy() % 10), s=6, alpha=0.6, linewidths=0)
    axes.scatter(*stars.T, marker="*", s=140, c="black", edgecolors="white", linewidths=0.8)
    axes.set(xticks=[], yticks=[])


def draw_sizes(axes: Axes, trained: dict[str, Any]) -> None:
    """Graphs of each class that Sinkhorn assigns to each prototype, the largest cluster first."""
    labels, clusters = trained["labels"].numpy(), trained["clusters"].numpy()
    num_prototypes = len(trained["prototypes"])
    order = np.argsort(-np.bincount(clusters, minlength=num_prototypes))
    below = np.zeros(num_prototypes)
    for label in np.unique(labels):
        sizes = np.bincount(clusters[labels == label], minlength=num_prototypes)[order]
        axes.bar(range(num_prototypes), sizes, bottom=below, color=CLASSES(label % 10), width=0.85)
        below += sizes
    axes.set(xticks=[], xlabel="prototypes", ylabel="graphs")


def draw_weights(axes: Axes, trained: dict[str, Any]) -> None:
    """M w of a negative by its prototype's distance, a line for each cluster of queries.

    Behind it a histogram of the distances, over pairs of graphs of different clusters.
    """
    prototypes = trained["prototypes"].double().numpy()
    fractions = np.bincount(trained["clusters"].numpy(), minlength=len(prototypes))
    fractions = fractions / fractions.sum()
    distances = 1 - prototypes @ prototypes.T
    many = axes.twinx()
    apart = ~np.eye(len(prototypes), dtype=bool)
    pairs = np.outer(fractions, fractions)
    many.hist(distances[apart], weights=pairs[apart], bins=30, color="0.85")
    many.set(yticks=[])
    axes.set_zorder(many.get_zorder() + 1)
    axes.patch.set_visible(False)
    grid = np.linspace(0, distances.max(), 200)
    for cluster in np.flatnonzero(fractions):
        mean = fractions @ distances[cluster]
        deviation = np.sqrt(fractions @ (distances[cluster] - mean) ** 2)
        if deviation == 0:
            continue
        scale = 1 / (fractions @ np.exp(-((distances[cluster] - mean) ** 2) / (2 * deviation**2)))
        curve = scale * np.exp(-((grid - mean) ** 2) / (2 * deviation**2))
        axes.plot(grid, curve, color="tab:blue", alpha=0.5, linewidth=1)
    axes.axhline(1, color="black", linewidth=0.6, linestyle=":")
    axes.set(xlabel="distance of prototypes", ylabel="weight", ylim=0)


ROWS_OF_PANELS = (draw_clusters, draw_sizes, draw_weights)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.unsupervised.pictures", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--datasets", nargs="+", default=[SYNTHETIC])
    parser.add_argument("--root", type=Path, help="folder of the sets; default: download")
    parser.add_argument("--cache", type=Path, default=Path("runs/data"))
    parser.add_argument("--output", type=Path, default=Path("runs/pictures.png"), help="a new file")
    args = parser.parse_args()
    if args.output.exists() and args.output.resolve() != PICTURE:
        parser.error(f"--output {args.output} is there already: choose another")
    try:
        sets = {name: load(fetch(name, args.root, args.cache)[0]) for name in args.datasets}
    except ValueError as error:
        parser.error(str(error))

    shape = len(ROWS_OF_PANELS), len(sets)
    figure, panels = plt.subplots(
        *shape, figsize=(3 * shape[1] + 0.4, 7.5), squeeze=False, layout="constrained"
    )
    for column, (name, graphs) in zip(panels.T, sets.items(), strict=True):
        trained = train(name, graphs)
        column[0].set_title(name)
        for axes, draw in zip(column, ROWS_OF_PANELS, strict=True):
            draw(axes, trained)
            axes.spines[["top", "right"]].set_visible(False)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.output, dpi=130)
    print(f"written to {args.output}")


if __name__ == "__main__":
    main()
