"""Curves of means over seeds, with their standard deviations, and embeddings by t-SNE."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from sklearn.manifold import TSNE
from torch_geometric.data import Data

from pgcl_losses.adapters.pyg import ContrastiveModel

from .graphs import embed


def curves(
    axes: Axes, ticks: Sequence[float], seeds: Mapping[str, Sequence[Collection[float]]]
) -> None:
    """A curve for each label, from the values of all seeds at each tick."""
    for label, at_ticks in seeds.items():
        several = [[*values] for values in at_ticks]
        means = [np.mean(values) for values in several]
        deviations = [np.std(values, ddof=1) for values in several]
        axes.errorbar(range(len(ticks)), means, deviations, fmt="o-", capsize=3, label=label)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.spines[["top", "right"]].set_visible(False)


def flat(model: ContrastiveModel, graphs: list[Data]) -> list[list[float]]:
    """t-SNE of the projections of all graphs, and behind them of the prototypes, if any."""
    points = F.normalize(torch.from_numpy(embed(model.encoder, graphs)))
    prototypes = getattr(model.loss, "prototypes", None)
    stars = points[:0] if prototypes is None else F.normalize(prototypes.weight.detach())
    tsne = TSNE(metric="cosine", init="pca", random_state=0)
    return tsne.fit_transform(torch.cat([points, stars]).numpy()).astype(float).round(2).tolist()
