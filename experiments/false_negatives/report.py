"""Tables and the picture of false negatives, from the records beside this file."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure
from scipy import stats

from docs.tables import markdown
from experiments.common.graphs import INFO_NCE, PGCL, UNTRAINED
from experiments.common.pictures import curves
from experiments.common.results import Run, matching, read
from experiments.common.tables import (
    FALSE_NEGATIVES,
    RESULTS,
    Delta,
    difference,
    paired,
    sourced,
    spread,
)

from . import study
from .study import ONE, ORACLE, RANDOM, RANDOM_PUSH, SHUFFLED, SUPCON, THREE

MEASURES = {
    "labels_1": "1 label",
    "labels_5": "5 labels",
    "all": "all labels",
    "labels_1 after the head": "1 label, after the head",
}
PLACES = {"PGCL's own": PGCL, "InfoNCE's, prototypes by k-means": INFO_NCE}
Seeds = dict[int, float]


def file_of(name: str, part: str) -> Path:
    return study.RECORDS / f"{name}-{part}.jsonl"


def record(name: str, part: str) -> list[Run]:
    """The runs by seed, in the order in which the program takes the means that it runs by."""
    runs = read(file_of(name, part)).values()
    return sorted(runs, key=lambda run: int(run["config"]["seed"]))


def measured(part: str) -> list[str]:
    """The sets that have a record of this part."""
    return [name for name in study.SETS if file_of(name, part).exists()]


class Results:
    """The reported seeds of questions 1 to 4, at the temperatures that the others choose."""

    def __init__(self, name: str) -> None:
        runs = record(name, "masks")
        self.name, self.temperatures = name, study.SETS[name].temperatures
        self.runs = [run for run in runs if run["config"]["seed"] in study.SETS[name].seeds]
        configs = study.reported_masks(name, runs)
        self.configs = {(config["row"], config["temperature"]): config for config in configs}
        self.best = {
            row: study.best(runs, study.of_row(name, row), "held_out")["temperature"]
            for row in study.rows_of(name)
        }
        self.best |= {UNTRAINED: 1.0, SHUFFLED: self.best[INFO_NCE]}
        self.best |= dict.fromkeys((RANDOM, RANDOM_PUSH), self.best[PGCL])

    def of(self, row: str, temperature: float | None = None, measure: str = "labels_1") -> Seeds:
        """A measure by seed, at this temperature or at the best of the row."""
        name, after_head, _ = measure.partition(" after the head")
        config = self.configs[row, temperature or self.best[row]]
        values = study.values(self.runs, config, name, "held_out" + after_head)
        if not values:
            raise ValueError(f"the record has no runs of {config}")
        return values

    def gap(self, temperature: float) -> Seeds:
        """Oracle minus InfoNCE by seed."""
        oracle, info_nce = (self.of(row, temperature) for row in (ORACLE, INFO_NCE))
        return {seed: oracle[seed] - info_nce[seed] for seed in oracle}

    def left_out(self, row: str, temperature: float) -> tuple[float, float]:
        """Which push PGCL's clusters leave out within and between classes, as means over seeds."""
        runs = matching(self.runs, self.configs[row, temperature]).values()
        within, between = (
            float(np.mean([run["push"][f"left_out_{group}"] for run in runs]))
            for group in ("within", "between")
        )
        return within, between


def by_temperature(every: list[Results], rows: Iterable[str], at_best: bool = True) -> str:
    """InfoNCE, and how far other rows are from it at the same temperature, with one label."""

    def cell(results: Results, row: str, temperature: float | None) -> str:
        ours, others = (results.of(x, temperature) for x in (row, INFO_NCE))
        return spread(ours.values()) if row == INFO_NCE else difference(ours, others)

    lines = []
    for results in every:
        labels = {INFO_NCE: f"{results.name}: {INFO_NCE}"}
        labels |= {row: f"{row} minus {INFO_NCE}" for row in rows}
        for row, label in labels.items():
            taus = {tau for of, tau in results.configs if of == row}
            cells = [cell(results, row, tau) if tau in taus else "" for tau in study.FIVE]
            lines.append([label, *cells, *([cell(results, row, None)] if at_best else [])])
    head = ["1 label per class", *(f"tau={tau:g}" for tau in study.FIVE)]
    return markdown(head + ["each at its best"] * at_best, lines)


def answers(every: list[Results]) -> str:
    """The intervals that the plan decides by, with one label."""

    def minus(row: str, other: str, results: Results, temperature: float | None = None) -> str:
        if not {row, other} <= results.best.keys():
            return ""
        return difference(results.of(row, temperature), results.of(other, temperature))

    def narrowed(results: Results) -> str:
        lowest, best = results.temperatures[0], results.best[INFO_NCE]
        return difference(results.gap(lowest), results.gap(best)) if lowest != best else ""

    variants = [row for row in study.PGCLS if row != PGCL]
    randoms = RANDOM, RANDOM_PUSH  # at PGCL's best temperature
    pairs = [
        *((SUPCON, UNTRAINED), (ORACLE, INFO_NCE), (PGCL, INFO_NCE)),
        *((row, PGCL) for row in (*variants, *randoms)),
    ]
    lines = [
        [f"{row} minus {other}", *(minus(row, other, results) for results in every)]
        for row, other in pairs
    ]
    gap = f"{ORACLE} minus {INFO_NCE}, at the lowest temperature minus at InfoNCE's best"
    lines.insert(2, [gap, *map(narrowed, every)])
    for row, other in ((row, study.DETACHED_MASK) for row in randoms):
        cells = (minus(row, other, results, results.best[PGCL]) for results in every)
        lines.append([f"{row} minus {other}, both at PGCL's best", *cells])
    return markdown(["1 label per class", *(results.name for results in every)], lines)


def measures(every: list[Results]) -> str:
    lines = [
        [results.name, row, f"{results.best[row]:g}" if row != UNTRAINED else "", *cells]
        for results in every
        for row in (UNTRAINED, *dict.fromkeys((*study.LOSSES, *study.rows_of(results.name))))
        for cells in [[spread(results.of(row, measure=m).values()) for m in MEASURES]]
    ]
    return markdown(["set", "row", "tau", *MEASURES.values()], lines)


class Case(NamedTuple):
    """A set at a temperature."""

    results: Results
    temperature: float

    def left_out(self, place: str) -> tuple[float, float]:
        return self.results.left_out(PLACES[place], self.temperature)

    def predictor(self, place: str) -> float:
        within, between = self.left_out(place)
        return within - between

    def gain(self) -> Delta:
        ours, others = (self.results.of(row, self.temperature) for row in (PGCL, INFO_NCE))
        delta = paired(ours, others)
        assert delta is not None
        return delta


def predicted(every: list[Results]) -> str:
    """What PGCL's clusters leave out beside what PGCL gains, and how both correlate."""
    cases = [Case(results, tau) for results in every for tau in results.temperatures]
    lines = [
        [
            case.results.name,
            f"{case.temperature:g}",
            *(
                f"{100 * within:.0f} and {100 * between:.0f} %, {within - between:.2f}"
                for within, between in map(case.left_out, PLACES)
            ),
            str(case.gain()),
        ]
        for case in cases
    ]
    table = markdown(["set", "tau", *PLACES, f"{PGCL} minus {INFO_NCE}"], lines)
    groups = {"all": cases} | {
        results.name: [case for case in cases if case.results is results]
        for results in every
        if study.SETS[results.name].has_variants
    }
    predictors = {
        **{place: partial(Case.predictor, place=place) for place in PLACES},
        "minus the temperature": lambda case: -case.temperature,
    }
    by_group = [
        [name, *(correlation(of, group) for group in groups.values())]
        for name, of in predictors.items()
    ]
    correlations = markdown(["Spearman's correlation", *groups], by_group)
    return f"{table}\n\n{correlations}"


def correlation(predictor: Callable[[Case], float], cases: list[Case]) -> str:
    gains = [case.gain().mean for case in cases]
    found = stats.spearmanr([predictor(case) for case in cases], gains)
    return f"{found.statistic:+.2f} (p = {found.pvalue:.2g}, {len(cases)} cases)"


def last_batch(name: str) -> str:
    """The gain of leaving out a last batch of two graphs, by loss and temperature."""
    results, with_it = Results(name), record(name, "last-batch")

    def gain(row: str, temperature: float) -> str:
        config = study.config_of(name, row, temperature, "half")
        return difference(results.of(row, temperature), study.values(with_it, config))

    lines = [
        [row, *(gain(row, temperature) for temperature in results.temperatures)]
        for row in study.LOSSES
    ]
    head = [f"{name}, 1 label per class", *(f"tau={tau:g}" for tau in results.temperatures)]
    return sourced(markdown(head, lines), with_it)


def two_trainings() -> str:
    """Two trainings, and losses that train for as many steps, with one label."""
    lines, every_run = [], []
    for name in measured("trainings"):
        runs, seeds = record(name, "trainings"), study.SETS[name].seeds
        reported = [run for run in runs if run["config"]["seed"] in seeds]
        choosing = [run for run in runs if run["config"]["seed"] in study.CHOOSING_SEEDS]
        rows = study.tuned(name, runs)
        of = {row: study.values(reported, config) for row, config in rows.items()}
        every_run += reported
        for row, values in of.items():
            of_choosing = study.values(choosing, rows[row], part="development").values()
            times = {ONE: 2, THREE: 4}.get(row)
            others = [f"{loss}, {times} x the epochs" for loss in (INFO_NCE, PGCL)]
            cells = [difference(values, of.get(other, {})) for other in others]
            first = [name, named(row, rows[row]), spread(of_choosing), spread(values.values())]
            lines.append(first + cells)
    head = ["set", "1 label per class", "choosing seeds, development half", "held-out half"]
    head += [f"minus {loss} of as many steps" for loss in (INFO_NCE, PGCL)]
    return sourced(markdown(head, lines), every_run)


def named(row: str, config: Mapping[str, object]) -> str:
    size = f"K={config['clusters']}, " if "clusters" in config else ""
    return f"{row} ({size}tau={config['temperature']:g})"


def pages() -> dict[Path, dict[str, str]]:
    """Tables by page and marker."""
    every = [Results(name) for name in measured("masks")]
    of_all = [results for results in every if study.SETS[results.name].has_variants]
    masks = SHUFFLED, RANDOM, RANDOM_PUSH, *(row for row in study.PGCLS if row != PGCL)
    runs = [run for results in every for run in results.runs]
    ceiling = sourced(by_temperature(every, (ORACLE, PGCL)), runs)
    return {
        FALSE_NEGATIVES: {"ceiling": ceiling, "two trainings": two_trainings()},
        RESULTS: {
            "answers": answers(every),
            "masks": by_temperature(of_all, masks, at_best=False),
            "measures": measures(every),
            "left out": predicted(every),
            "last batch": "\n\n".join(map(last_batch, measured("last-batch"))),
        },
    }


def draw() -> Figure:
    """One-shot accuracy over the temperature; whiskers are standard deviations."""
    names = [name for name in measured("masks") if study.SETS[name].has_variants]
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
