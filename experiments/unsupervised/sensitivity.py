"""Accuracy against the number of prototypes and the size of batches (the paper's figures 4, 5)."""

from collections.abc import Iterable

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.common.results import Run
from experiments.common.rows import INFO_NCE

from . import table
from .train import SETTING

DATASETS = ("PTC_MR", "PROTEINS")
OPTIONS = {"num_prototypes": "prototypes K", "batch_size": "batch size N"}


def curve(runs: Iterable[Run], dataset: str, row: str, option: str) -> dict[int, list[float]]:
    """Value of the option -> last epochs of all seeds, other options as in the tables."""
    fixed = {k: value for k, value in SETTING.items() if k not in (option, "look_every")}
    fixed |= {"dataset": dataset, "row": row}
    accuracies: dict[int, dict[int, float]] = {}
    for run in runs:
        config = run["config"]
        if fixed.items() <= config.items():
            accuracies.setdefault(config[option], {})[config["seed"]] = table.last_epoch(run)
    return {value: list(seeds.values()) for value, seeds in sorted(accuracies.items())}


def draw_curves(axes: Axes, curves: dict[str, dict[int, list[float]]]) -> None:
    """Values of the option at equal distances."""
    ticks = sorted({value for seeds in curves.values() for value in seeds})
    for label, seeds in curves.items():
        means = [np.mean(values) for values in seeds.values()]
        deviations = [np.std(values, ddof=1) if len(values) > 1 else 0 for values in seeds.values()]
        positions = [ticks.index(value) for value in seeds]
        axes.errorbar(positions, means, deviations, fmt="o-", capsize=3, label=label)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.spines[["top", "right"]].set_visible(False)


def draw(runs: list[Run]) -> Figure:
    """A row of panels for each set; whiskers are standard deviations over seeds."""
    shape = len(DATASETS), len(OPTIONS)
    figure, panels = plt.subplots(*shape, figsize=(5, 4.5), sharey="row", layout="constrained")
    for dataset, row in zip(DATASETS, panels, strict=True):
        for (option, label), axes in zip(OPTIONS.items(), row, strict=True):
            # InfoNCE has no prototypes.
            rows = ["PGCL"] if option == "num_prototypes" else ["PGCL", INFO_NCE]
            draw_curves(axes, {name: curve(runs, dataset, name, option) for name in rows})
            axes.set(xlabel=label, title=dataset)
        row[0].set_ylabel("accuracy, last epoch, %")
    handles = panels[0, 1].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    return figure
