"""Whether InfoNCE, then PGCL, is non-inferior to InfoNCE, in development and held-out settings.

python -m experiments.non_inferiority   # from the committed runs; fills docs/where_it_helps.md

The runs are made by experiments.synthetic.recipe, experiments.unsupervised.recipe and
experiments.nodes.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.probes import NAMES
from experiments.common.tables import (
    MARGIN,
    Delta,
    holm,
    is_better,
    is_met,
    is_missed,
    is_worse,
    markdown,
    refill,
)

from .settings import Setting, all_settings

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {
    "synthetic": "synthetic clusters",
    "sbm": "nodes, synthetic graph (SBM)",
    "graphs": "whole graphs, real",
    "nodes": "nodes, real graphs",
}
SPLITS = {True: "development", False: "held out"}
COLOURS = {True: "tab:grey", False: "tab:blue"}


def groups(settings: list[Setting]) -> Iterator[tuple[list[str], list[Setting]]]:
    """The settings of each kind and split, with its two labels."""
    for kind, label in KINDS.items():
        for development, split in SPLITS.items():
            here = [s for s in settings if s.kind == kind and s.development == development]
            if here:
                yield [label, split], here


def summary(settings: list[Setting]) -> str:
    """Mean differences, a line for each kind and split, a column for each measure."""
    lines = [
        [*labels, len(here), *(cell([s.deltas[name] for s in here]) for name in NAMES)]
        for labels, here in groups(settings)
    ]
    return markdown(["data", "split", "settings", *NAMES.values()], lines)


def cell(deltas: list[Delta]) -> str:
    """Mean difference, and in how many settings the interval is above and below 0."""
    counts = [sum(map(test, deltas)) for test in (is_better, is_worse)]
    return f"{np.mean([delta.mean for delta in deltas]):+.1f} ({', '.join(map(str, counts))})"


def margin(settings: list[Setting]) -> str:
    """How many comparisons meet the margin, and how many are significant after correction."""
    significant = {id(delta) for delta in holm([d for s in settings for d in s.deltas.values()])}
    lines = []
    for labels, here in groups(settings):
        deltas = [delta for s in here for delta in s.deltas.values()]
        met, missed = sum(map(is_met, deltas)), sum(map(is_missed, deltas))
        signs = [delta.mean > 0 for delta in deltas if id(delta) in significant]
        numbers = [len(here), len(deltas), met, len(deltas) - met - missed, missed]
        lines.append([*labels, *numbers, signs.count(True), signs.count(False)])
    head = ["data", "split", "settings", "comparisons", "margin met", "inconclusive"]
    head += ["margin missed", "above InfoNCE after Holm's correction", "below"]
    return markdown(head, lines)


def exceptions(settings: list[Setting]) -> str:
    """Every setting and measure below InfoNCE; bold where the margin is missed."""
    worse = [
        [
            *(KINDS[s.kind], s.name, SPLITS[s.development], NAMES[name]),
            f"**{delta}**" if is_missed(delta) else delta,
        ]
        for s in settings
        for name, delta in s.deltas.items()
        if is_worse(delta)
    ]
    head = ["data", "setting", "split", "measure", "minus InfoNCE"]
    return markdown(head, worse) if worse else "None."


def draw_synthetic(settings: list[Setting]) -> Figure:
    """A panel for each measure: all synthetic settings in the order of their differences."""
    settings = [s for s in settings if s.kind == "synthetic"]
    return forest(
        {name: sorted(settings, key=lambda s: s.deltas[name].mean) for name in NAMES}, height=2.6
    )


def draw_graphs(settings: list[Setting]) -> Figure:
    """A panel for each measure: all other settings by their names."""
    settings = [s for s in settings if s.kind != "synthetic"]
    settings.sort(key=lambda s: (list(KINDS).index(s.kind), s.name), reverse=True)
    figure = forest(dict.fromkeys(NAMES, settings), height=2.2)
    for axes in figure.axes[:-1:2]:
        axes.set_yticks(range(len(settings)), [s.name for s in settings], fontsize=9)
    return figure


def forest(ordered: dict[str, list[Setting]], height: float) -> Figure:
    """Differences with intervals, two panels side by side; at 400 pixels text can be read."""
    rows = -(-len(ordered) // 2)
    figure, panels = plt.subplots(
        rows, 2, figsize=(5, height * rows + 0.6), sharex=True, sharey=True, layout="constrained"
    )
    for axes, (name, settings) in zip(panels.flat, ordered.items(), strict=False):
        for y, setting in enumerate(settings):
            draw(axes, y, setting.deltas[name], COLOURS[setting.development])
        axes.axvline(0, color="black", linewidth=0.8)
        axes.axvline(-MARGIN, color="black", linewidth=0.8, linestyle=":")
        axes.set(xlim=(-10, 20), yticks=[], title=NAMES[name])
        axes.tick_params(labelbottom=True)
        axes.spines[["top", "right", "left"]].set_visible(False)
    *_, last = panels.flat
    last.set_axis_off()
    for development, split in SPLITS.items():
        last.plot([], [], ".-", color=COLOURS[development], label=split)
    last.legend(loc="center", frameon=False)
    figure.supxlabel("points above InfoNCE", fontsize="medium")
    return figure


def draw(axes: Axes, y: int, delta: Delta, colour: str) -> None:
    axes.plot([delta.low, delta.high], [y, y], color=colour, alpha=0.5)
    axes.plot(delta.mean, y, ".", color=colour)


TABLES: dict[str, Callable[[list[Setting]], str]] = {
    "differences": summary,
    "margin": margin,
    "exceptions": exceptions,
}
PICTURES = {"synthetic": draw_synthetic, "graphs": draw_graphs}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.non_inferiority",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    settings = all_settings()
    tables = {name: table(settings) for name, table in TABLES.items()}
    refill({DOCS / "where_it_helps.md": tables})
    for name, picture in PICTURES.items():
        picture(settings).savefig(DOCS / "images" / f"recommended-{name}.png", dpi=160)
    for name, table in tables.items():
        print(f"\n{name}\n\n{table}")


if __name__ == "__main__":
    main()
