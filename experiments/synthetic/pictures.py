"""Pictures of the map: what PGCL gains over InfoNCE, and what that goes with."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.rows import INFO_NCE

from .settings import AGREEMENT, CLASSES, COMPARED, KNOB_VALUES, PROTOTYPES, WEIGHTS, Map

COLOURS = dict(zip(CLASSES, ("tab:blue", "tab:orange", "tab:green"), strict=True))


def draw_grid(runs: Map) -> Figure:
    """Heat maps over K and lambda, one for each number of classes."""
    figure, panels = plt.subplots(1, len(CLASSES), figsize=(10, 3.2), layout="constrained")
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
        axes.set(xlabel="prototypes K", ylabel="lambda" if axes is panels[0] else "")
    figure.colorbar(image, ax=panels, label="PGCL minus InfoNCE, points")
    return figure


def draw_knobs(runs: Map) -> Figure:
    """A column for each knob, a row of panels for each number of classes."""
    shape = len(CLASSES), len(KNOB_VALUES)
    figure, panels = plt.subplots(
        *shape, figsize=(13, 6.5), sharey="row", sharex="col", layout="constrained"
    )
    for classes, row in zip(CLASSES, panels, strict=True):
        row[0].set_ylabel(f"{classes} classes\npoints above InfoNCE")
        for knob, axes in zip(KNOB_VALUES, row, strict=True):
            draw_knob(axes, runs, classes, knob)
    for knob, axes in zip(KNOB_VALUES, panels[0], strict=True):
        axes.set_title(knob.replace("_", " "))
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def draw_knob(axes: Axes, runs: Map, classes: int, knob: str) -> None:
    places = [{"classes": classes, knob: value} for value in KNOB_VALUES[knob]]
    axes.axhline(0, color="black", linewidth=0.8)
    for (label, setting), marks in zip(COMPARED.items(), ("o-", "s-", "^--"), strict=True):
        axes.plot([runs.gain(**setting(place)) for place in places], marks, label=label)
    axes.set_xticks(range(len(places)), KNOB_VALUES[knob])
    axes.spines[["top", "right"]].set_visible(False)


def draw_rule(runs: Map) -> Figure:
    """What can be seen without labels, against what is gained."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, layout="constrained")
    seen = {
        "agreement": "views with the same cluster",
        "gradient_share": "share of consistency in the gradient",
    }
    for axes, (name, label) in zip(panels, seen.items(), strict=True):
        draw_against(axes, runs, name)
        axes.set(xlabel=label)
    panels[0].axvline(AGREEMENT, color="black", linewidth=0.8, linestyle=":")
    panels[0].set_ylabel("PGCL minus InfoNCE, points")
    panels[0].legend(frameon=False, loc="lower left")
    return figure


def draw_against(axes: Axes, runs: Map, name: str) -> None:
    for classes, colour in COLOURS.items():
        places = [
            {"classes": classes, "num_prototypes": k, "consistency_weight": w}
            for k, w in itertools.product(PROTOTYPES, WEIGHTS[1:])
        ]
        seen = [runs.mean(name, **place) for place in places]
        gains = [runs.gain(**place) for place in places]
        axes.scatter(seen, gains, color=colour, label=f"{classes} classes")
    axes.axhline(0, color="black", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
