"""Whether the recommended setting keeps its promise in places that were not used to choose it.

python -m experiments.recipe           # from the committed runs; fills docs/where_it_helps.md

The runs are made by experiments.map.recipe, experiments.unsupervised.recipe and experiments.nodes.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.shelf import results
from experiments.shelf.probes import NAMES
from experiments.shelf.tables import fill

from .places import Delta, Place, all_places

DOCS = Path(__file__).parents[2] / "docs"
KINDS = {"map": "planted classes", "graphs": "whole graphs", "nodes": "nodes"}
HALVES = {True: "chosen on", False: "confirmed on"}
ALLOWED = 0.5  # points below InfoNCE


def is_better(delta: Delta) -> bool:
    """Above InfoNCE beyond the noise."""
    return delta.low > 0


def is_worse(delta: Delta) -> bool:
    """Below InfoNCE beyond the noise."""
    return delta.high < 0


def is_broken(delta: Delta) -> bool:
    """Below by more than is allowed, beyond the noise."""
    return delta.high < -ALLOWED


def is_open(delta: Delta) -> bool:
    """Neither above nor below, and maybe below by more than is allowed."""
    return delta.low < -ALLOWED and delta.high >= 0


def summary(places: list[Place]) -> str:
    """Markdown: a line for each kind of data and half, a cell for each measure."""
    lines = [
        f"| | | places | {' | '.join(NAMES.values())} |",
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
    """Mean gain, and how many places are better, worse and open."""
    counts = [sum(map(test, deltas)) for test in (is_better, is_worse, is_open)]
    return f"{np.mean([delta.mean for delta in deltas]):+.1f} ({', '.join(map(str, counts))})"


def by_set(places: list[Place]) -> str:
    """Markdown: the gains on every set that is not planted."""
    lines = [f"| | | {' | '.join(NAMES.values())} |", "| --- |" + " --- |" * (1 + len(NAMES))]
    for p in places:
        if p.kind != "map":
            cells = [f"{d}" for d in p.deltas.values()]
            lines.append(f"| {p.name} | {HALVES[p.chosen]} | {' | '.join(cells)} |")
    return "\n".join(lines)


def exceptions(places: list[Place]) -> str:
    """Markdown: every place and measure below InfoNCE beyond the noise; bold, if by too much."""
    worse = [
        f"| {KINDS[p.kind]} | {p.name} | {HALVES[p.chosen]} | {NAMES[name]} | "
        + (f"**{delta}** |" if is_broken(delta) else f"{delta} |")
        for p in places
        for name, delta in p.deltas.items()
        if is_worse(delta)
    ]
    head = ["| | place | | measure | minus InfoNCE |", "| --- |" + " --- |" * 4]
    return "\n".join([*head, *worse]) if worse else "None."


def draw(places: list[Place]) -> Figure:
    """A panel for each measure: all places in the order of their gains, with intervals."""
    figure, panels = plt.subplots(1, len(NAMES), figsize=(13, 6), sharey=True, layout="constrained")
    colours = {True: "tab:grey", False: "tab:blue"}
    for axes, (name, label) in zip(panels, NAMES.items(), strict=True):
        ordered = sorted(places, key=lambda p: p.deltas[name].mean)
        for height, p in enumerate(ordered):
            delta = p.deltas[name]
            axes.plot([delta.low, delta.high], [height, height], color=colours[p.chosen], alpha=0.5)
            marker = {"map": ".", "graphs": "s", "nodes": "D"}[p.kind]
            axes.plot(delta.mean, height, marker, color=colours[p.chosen], markersize=5)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.axvline(-ALLOWED, color="black", linewidth=0.8, linestyle=":")
        axes.set_xlim(-10, 20)
        axes.set_title(label)
        axes.set_xlabel("points above InfoNCE")
        axes.set_yticks([])
        axes.spines[["top", "right", "left"]].set_visible(False)
    for chosen, half in HALVES.items():
        panels[-1].plot([], [], color=colours[chosen], label=half)
    for kind, marker in {"map": ".", "graphs": "s", "nodes": "D"}.items():
        panels[-1].plot([], [], marker, color="black", label=KINDS[kind])
    figure.legend(
        *panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False
    )
    return figure


TABLES: dict[str, Callable[[list[Place]], str]] = {
    "confirmed": summary,
    "by_set": by_set,
    "exceptions": exceptions,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.recipe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.parse_args()
    places = all_places()
    tables = {name: made(places) for name, made in TABLES.items()}
    page = DOCS / "where_it_helps.md"
    text = fill(page.read_text(), tables)
    results.write(page, lambda part: part.write_text(text))
    draw(places).savefig(DOCS / "images" / "recommended.png", dpi=110)
    for name, table in tables.items():
        print(f"\n{name}\n\n{table}")


if __name__ == "__main__":
    main()
