"""Pictures of the synthetic grid: PGCL's difference from InfoNCE, and what it goes with."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.rows import INFO_NCE

from .settings import AGREEMENT, CLASSES, COMPARED, PROTOTYPES, VALUES, WEIGHTS, Grid

COLOURS = dict(zip(CLASSES, ("tab:blue", "tab:orange", "tab:green"), strict=True))
LABELS = {
    "spread": "spread of a class",
    "duplicates": "originals per class",
    "imbalance": "class imbalance",
    "batch_size": "batch size N",
    "epochs": "epochs",
    "temperature": "temperature",
    "epsilon": "epsilon",
}
POINTS = "points above InfoNCE"
WIDTH = 5  # inches, so that text of 10 points can be read at 400 pixels


def draw_grid(runs: Grid) -> Figure:
    """Heat maps over K and lambda, one for each number of classes."""
    figure, panels = plt.subplots(
        len(CLASSES), figsize=(WIDTH, 6.5), sharex=True, layout="constrained"
    )
    for axes, classes in zip(panels, CLASSES, strict=True):
        gains = [
            [runs.gain(classes=classes, num_prototypes=k, consistency_weight=w) for k in PROTOTYPES]
            for w in WEIGHTS
        ]
        image = axes.imshow(gains, cmap="RdBu", vmin=-8, vmax=8, origin="lower", aspect="auto")
        for (row, column), gain in np.ndenumerate(gains):
            colour = "white" if abs(gain) > 5 else "black"
            axes.text(column, row, f"{gain:+.1f}", ha="center", va="center", color=colour)
        base = runs.mean("accuracy", classes=classes, row=INFO_NCE)
        axes.set_title(f"{classes} classes (InfoNCE {base:.1f} %)")
        axes.set_xticks(range(len(PROTOTYPES)), PROTOTYPES)
        axes.set_yticks(range(len(WEIGHTS)), WEIGHTS)
        axes.set_ylabel("lambda")
    panels[-1].set_xlabel("prototypes K")
    figure.colorbar(image, ax=panels, label=POINTS)
    return figure


def draw_options(runs: Grid, names: tuple[str, ...]) -> Figure:
    """Two options side by side, a panel for each number of classes below each other."""
    pairs = [names[first : first + 2] for first in range(0, len(names), 2)]
    rows = len(CLASSES) * len(pairs)
    figure, panels = plt.subplots(
        rows, 2, figsize=(WIDTH, 1.3 * rows + 1), sharey="row", squeeze=False, layout="constrained"
    )
    for pair, of_pair in zip(pairs, np.split(panels, len(pairs)), strict=True):
        for classes, row in zip(CLASSES, of_pair, strict=True):
            row[0].set_ylabel(f"{classes} classes")
            for name, axes in itertools.zip_longest(pair, row):
                if name is None:
                    axes.set_axis_off()
                else:
                    draw_option(axes, runs, classes, name)
        for name, axes in zip(pair, of_pair[0], strict=False):
            axes.set_title(LABELS[name])
    figure.supylabel(POINTS, fontsize="medium")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", frameon=False)
    return figure


def draw_option(axes: Axes, runs: Grid, classes: int, name: str) -> None:
    values = VALUES[name]
    axes.axhline(0, color="black", linewidth=0.8)
    for (label, options_of), line in zip(COMPARED.items(), ("o-", "s-", "^--"), strict=True):
        gains = [runs.gain(**options_of({"classes": classes, name: value})) for value in values]
        axes.plot(range(len(values)), gains, line, label=label)
    axes.set_xticks(range(len(values)), values)
    axes.spines[["top", "right"]].set_visible(False)


def draw_diagnostics(runs: Grid) -> Figure:
    """Two diagnostics that need no labels, against the difference from InfoNCE."""
    figure, panels = plt.subplots(2, figsize=(WIDTH, 6), layout="constrained")
    diagnostics = {
        "agreement": "agreement: fraction of views in the same cluster",
        "gradient_share": "the consistency's fraction of the gradient",
    }
    for axes, (name, label) in zip(panels, diagnostics.items(), strict=True):
        for classes, colour in COLOURS.items():
            settings = [
                {"classes": classes, "num_prototypes": k, "consistency_weight": w}
                for k, w in itertools.product(PROTOTYPES, WEIGHTS[1:])
            ]
            values = [runs.mean(name, **setting) for setting in settings]
            gains = [runs.gain(**setting) for setting in settings]
            axes.scatter(values, gains, color=colour, label=f"{classes} classes")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.set(xlabel=label, ylabel=POINTS)
    panels[0].axvline(AGREEMENT, color="black", linewidth=0.8, linestyle=":")
    panels[0].legend(frameon=False, loc="lower left")
    return figure
