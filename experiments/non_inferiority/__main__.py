"""Whether the recommended setting is non-inferior to InfoNCE, in development and held-out settings.

python -m experiments.non_inferiority           # from the committed runs; fills docs/where_it_helps.md

The runs are made by experiments.synthetic.recipe, experiments.unsupervised.recipe and experiments.nodes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.common.probes import NAMES
from experiments.common.tables import MARGIN, holm, is_better, is_met, is_missed, is_worse, refill

from .settings import Delta, Place, all_places

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {
    "map": "synthetic clusters",
    "sbm": "nodes, synthetic graph (SBM)",
    "graphs": "whole graphs, real",
    "nodes": "nodes, real graphs",
}
MARKERS = {"map": ".", "sbm": "^", "graphs": "s", "nodes": "D"}
HALVES = {True: "development", False: "held out"}


def summary(places: list[Place]) -> str:
    """Markdown: a line for each kind of data and half, a cell for each measure."""
    lines = [
        f"| | | settings | {' | '.join(NAMES.values())} |",
        "| --- |" + " --- |" * (2 + len(NAMES)),
    ]
    for kind, label in KINDS.items():
        for chosen, half in HALVES.items():
            here = [p for p in places if p.kind == kind and p.chosen == chosen]
            if here:
                cells = [cell([p.deltas[name] for p in here]) for name in NAMES]
                lines.append(f"| {label} | {half} | {len(here)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(deltas: list[Delta]) -> str:
    """Mean gain, and in how many settings it is above and below InfoNCE."""
    counts = [sum(map(test, deltas)) for test in (is_better, is_worse)]
    return f"{np.mean([delta.mean for delta in deltas]):+.1f} ({', '.join(map(str, counts))})"


def margin(places: list[Place]) -> str:
    """Markdown: in how many comparisons the margin is met, and which differ after Holm's."""
    lines = [
        "| | | settings | comparisons | margin met | inconclusive | margin missed "
        "| above InfoNCE after Holm's correction | below |",
        "| --- |" + " --- |" * 8,
    ]
    left = {id(delta) for delta in holm([d for p in places for d in p.deltas.values()])}
    for kind, label in KINDS.items():
        for chosen, half in HALVES.items():
            here = [p for p in places if p.kind == kind and p.chosen == chosen]
            deltas = [delta for p in here for delta in p.deltas.values()]
            met, missed = sum(map(is_met, deltas)), sum(map(is_missed, deltas))
            signs = [delta.mean > 0 for delta in deltas if id(delta) in left]
            numbers = [len(here), len(deltas), met, len(deltas) - met - missed, missed]
            numbers += [signs.count(True), signs.count(False)]
            if here:
                lines.append(f"| {label} | {half} | {' | '.join(map(str, numbers))} |")
    return "\n".join(lines)


def exceptions(places: list[Place]) -> str:
    """Markdown: every setting and measure below InfoNCE; bold, where the margin is missed."""
    worse = [
        f"| {KINDS[p.kind]} | {p.name} | {HALVES[p.chosen]} | {NAMES[name]} | "
        + (f"**{delta}** |" if is_missed(delta) else f"{delta} |")
        for p in places
        for name, delta in p.deltas.items()
        if is_worse(delta)
    ]
    head = ["| | setting | | measure | minus InfoNCE |", "| --- |" + " --- |" * 4]
    return "\n".join([*head, *worse]) if worse else "None."


def draw(places: list[Place]) -> Figure:
    """A panel for each measure: all settings in the order of their gains, with intervals."""
    figure, panels = plt.subplots(1, len(NAMES), figsize=(13, 6), sharey=True, layout="constrained")
    colours = {True: "tab:grey", False: "tab:blue"}
    for axes, (name, label) in zip(panels, NAMES.items(), strict=True):
        ordered = sorted(places, key=lambda p: p.deltas[name].mean)
        for height, p in enumerate(ordered):
            delta = p.deltas[name]
            axes.plot([delta.low, delta.high], [height, height], color=colours[p.chosen], alpha=0.5)
            axes.plot(delta.mean, height, MARKERS[p.kind], color=colours[p.chosen], markersize=5)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.axvline(-MARGIN, color="black", linewidth=0.8, linestyle=":")
        axes.set_xlim(-10, 20)
        axes.set_title(label)
        axes.set_xlabel("points above InfoNCE")
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    for chosen, half in HALVES.items():
        panels[-1].plot([], [], color=colours[chosen], label=half)
    for kind, marker in MARKERS.items():
        panels[-1].plot([], [], marker, color="black", label=KINDS[kind])
    figure.legend(
        *panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False
    )
    return figure


TABLES: dict[str, Callable[[list[Place]], str]] = {
    "confirmed": summary,
    "margin": margin,
    "exceptions": exceptions,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.non_inferiority",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    places = all_places()
    tables = {name: made(places) for name, made in TABLES.items()}
    refill({DOCS / "where_it_helps.md": tables})
    draw(places).savefig(DOCS / "images" / "recommended.png", dpi=110)
    for name, table in tables.items():
        print(f"\n{name}\n\n{table}")


if __name__ == "__main__":
    main()
