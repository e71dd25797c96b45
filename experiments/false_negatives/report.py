"""Tables and the picture of false negatives, from the records beside this file."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from docs.programs.tables import markdown
from experiments.common.graphs import INFO_NCE, PGCL, UNTRAINED
from experiments.common.pictures import curves
from experiments.common.results import read
from experiments.common.tables import (
    FALSE_NEGATIVES,
    RESULTS,
    difference,
    paired,
    paragraph,
    sourced,
    spread,
)

from . import study
from .study import ORACLE, SUPCON

PROJECTIONS = "held_out after the head"  # every temperature is selected before the head
Seeds = dict[int, float]


class Results:
    """One-shot accuracy of the reported seeds, at the temperatures that the others choose."""

    def __init__(self, name: str) -> None:
        runs = [*read(study.RECORDS / f"{name}-masks.jsonl").values()]
        self.name, self.temperatures = name, study.SETS[name].temperatures
        self.runs = [run for run in runs if run["config"]["seed"] in study.SETS[name].seeds]
        self.best = {
            row: study.best(runs, study.of_row(name, row), "held_out")["temperature"]
            for row in study.LOSSES
        }
        self.best[UNTRAINED] = 1.0

    def of(self, row: str, temperature: float | None = None, place: str = "held_out") -> Seeds:
        """Accuracy by seed, at this temperature or at the best of the row."""
        config = study.config_of(self.name, row, temperature or self.best[row], "half")
        values = study.values(self.runs, config, part=place)
        if not values:
            raise ValueError(f"the record has no runs of {config}")
        return values

    def minus(self, row: str, other: str, temperature: float | None = None) -> str:
        return difference(self.of(row, temperature), self.of(other, temperature))


def ceiling(every: list[Results]) -> str:
    """InfoNCE, and what the oracle gains, at each temperature and each at its best."""
    lines = []
    for results in every:
        at = *results.temperatures, None
        means = (spread(results.of(INFO_NCE, tau).values()) for tau in at)
        gains = (results.minus(ORACLE, INFO_NCE, tau) for tau in at)
        lines += [[f"{results.name}: {INFO_NCE}", *means], [f"{ORACLE} minus {INFO_NCE}", *gains]]
    temperatures = (f"tau={tau:g}" for tau in every[0].temperatures)
    return markdown(["1 label per class", *temperatures, "each at its best"], lines)


def at_best(every: list[Results]) -> str:
    """What labels, the oracle and PGCL gain on each set, each at its best temperature."""
    pairs = (SUPCON, UNTRAINED), (ORACLE, INFO_NCE), (PGCL, INFO_NCE)
    lines = [
        [of.name, len(of.of(INFO_NCE)), spread(of.of(INFO_NCE).values())]
        + [of.minus(*pair) for pair in pairs]
        + [difference(*(of.of(row, place=PROJECTIONS) for row in (ORACLE, INFO_NCE)))]
        for of in every
    ]
    head = ["1 label per class", "seeds", INFO_NCE, *(f"{a} minus {b}" for a, b in pairs)]
    head.append(f"{ORACLE} minus {INFO_NCE}, after the head")
    return markdown(head, lines)


def last_batch(digits: Results) -> str:
    """What a last batch of two graphs cost at each temperature."""
    runs = read(study.RECORDS / "digits-last-batch.jsonl").values()
    costs = []
    for row in (INFO_NCE, PGCL):
        with_two = {c["temperature"]: study.values(runs, c) for c in study.of_row("digits", row)}
        deltas = [paired(digits.of(row, tau), seeds) for tau, seeds in with_two.items()]
        means = [delta.mean for delta in deltas if delta]
        costs.append(f"{min(means):.1f} to {max(means):.1f} points with `{row}`")
    return paragraph(
        "Half of the digits are seven batches of 128 graphs and one batch of two. Leaving out the "
        f"last gains {' and '.join(costs)}, depending on the temperature (one label per class, "
        "10 seeds; we did not plan this comparison)."
    )


def pages() -> dict[Path, dict[str, str]]:
    """Tables by page and marker."""
    every = [Results(name) for name in study.SETS]
    at_all = [results for results in every if study.SETS[results.name].has_variants]
    runs = [run for results in every for run in results.runs]
    return {
        FALSE_NEGATIVES: {"ceiling": ceiling(at_all)},
        RESULTS: {"at best": sourced(at_best(every), runs), "last batch": last_batch(every[0])},
    }


def draw() -> Figure:
    """One-shot accuracy over the temperature; whiskers are standard deviations."""
    names = [name for name in study.SETS if study.SETS[name].has_variants]
    figure, panels = plt.subplots(1, len(names), figsize=(8, 3.2), layout="constrained")
    for axes, results in zip(np.atleast_1d(panels), map(Results, names), strict=True):
        taus = results.temperatures
        by_row = {row: [results.of(row, tau).values() for tau in taus] for row in study.LOSSES}
        curves(axes, taus, by_row)
        axes.axhline(np.mean([*results.of(UNTRAINED).values()]), color="grey", linestyle=":")
        title = f"{results.name}, 1 label per class"
        axes.set(xlabel="temperature", ylabel="accuracy, %", title=title)
    figure.axes[0].legend(frameon=False, fontsize="small")
    return figure
