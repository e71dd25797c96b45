"""The table of digits, and accuracy over temperature, from the record beside this file."""

from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.common.graphs import GRAPH_CL, INFO_NCE, PGCL, UNTRAINED
from experiments.common.pictures import curves
from experiments.common.results import Run, read
from experiments.common.tables import CHOOSING, RESULTS, comparison, markdown

from . import study


def reported(runs: list[Run], options: dict[str, Any], name: str) -> dict[int, float]:
    """A measure of the held-out half by seed."""
    runs = [run for run in runs if run["config"]["seed"] in study.REPORTED]
    return study.means(runs, options, "held_out", name)


def table(runs: list[Run]) -> str:
    settings = study.chosen(runs)
    measures = {**study.MEASURES, "labels_1_scaled": "1 label, standardised"}
    options = {UNTRAINED: {"row": UNTRAINED}, study.FREE: study.never_frozen(settings), **settings}
    rows = {
        row: {name: reported(runs, options[row], name) for name in measures}
        for row in (UNTRAINED, INFO_NCE, GRAPH_CL, PGCL, study.FREE, study.PAPER)
    }
    pairs = [(row, INFO_NCE) for row in (PGCL, study.FREE, study.PAPER, GRAPH_CL)]
    pairs.append((INFO_NCE, UNTRAINED))
    labels = {row: named(row, options[row]) for row in rows}
    return comparison("digits", measures, rows, pairs, labels)


def named(row: str, options: dict[str, Any]) -> str:
    parts = {"num_prototypes": "K", "consistency_weight": "lambda", "temperature": "tau"}
    shown = [f"{short}={options[name]:g}" for name, short in parts.items() if name in options]
    return f"{row} ({', '.join(shown)})" if shown else row


def grid(runs: list[Run]) -> str:
    """One-shot accuracy of all candidates on the development half."""
    runs = [run for run in runs if run["config"]["seed"] in study.CHOOSING]
    lines: dict[str, list[str]] = {}
    for row in (INFO_NCE, PGCL):
        for options in study.candidates(row):
            values = study.means(runs, options, "development", "labels_1").values()
            label = named(row, {k: v for k, v in options.items() if k != "temperature"})
            lines.setdefault(label, []).append(f"{np.mean([*values]):.1f}")
    head = ["1 label per class", *(f"tau={tau:g}" for tau in study.TEMPERATURES)]
    return markdown(head, ([label, *cells] for label, cells in lines.items()))


def pages() -> dict[Path, dict[str, str]]:
    """The tables by page and marker."""
    runs = list(read(study.RECORD).values())
    return {CHOOSING: {"digits grid": grid(runs)}, RESULTS: {"digits": table(runs)}}


def draw() -> Figure:
    """Accuracy of both losses over the temperature; whiskers are standard deviations."""
    runs = list(read(study.RECORD).values())
    settings = study.chosen(runs)
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axes, name in zip(panels, ("labels_1", "labels_5"), strict=True):
        seeds = {
            row: [
                reported(runs, settings[row] | {"temperature": tau}, name).values()
                for tau in study.TEMPERATURES
            ]
            for row in (INFO_NCE, PGCL)
        }
        curves(axes, study.TEMPERATURES, seeds)
        axes.set(xlabel="temperature", ylabel="accuracy, %", title=study.MEASURES[name])
    panels[0].legend(frameon=False)
    return figure
