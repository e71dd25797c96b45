"""Tables and the picture of few labels, from the records beside this file."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from docs.programs.tables import markdown
from experiments.common.graphs import GRAPH_CL, INFO_NCE, PGCL, UNTRAINED
from experiments.common.pictures import curves
from experiments.common.results import Config, Run, read
from experiments.common.tables import (
    FALSE_NEGATIVES,
    RESULTS,
    Verdict,
    difference,
    listed,
    paired,
    paragraph,
    significant_after_holm,
    sourced,
    spread,
)
from pgcl_losses import InfoNCE

from . import study
from .study import AT_BEST, MEASURES, OF_PAPER, SETS, values

BOTH = INFO_NCE, PGCL
DEFAULT = PGCL, INFO_NCE
MINUS = f"{PGCL} minus {INFO_NCE}"
IN_DEPTH = [name for name, of_set in SETS.items() if of_set.in_depth]
ROUNDING = {"two threads": "threads", "no vector instructions": "vectors"}
Seeds = dict[int, float]


class Results:
    """The held-out half of a set, in the settings of its record: of its runs, or of others."""

    def __init__(self, name: str, runs: Iterable[Run] | None = None) -> None:
        self.name, self.record = name, [*read(study.RECORDS / f"{name}.jsonl").values()]
        of_seeds = self.record if runs is None else runs
        self.runs = [run for run in of_seeds if run["config"]["seed"] in SETS[name].seeds]
        selected_by = "labels_1", "all"
        self.rows = {m: study.rows(name, self.record, m) for m in selected_by}

    def config(self, row: str, measure: str = "labels_1") -> Config:
        """The options of a row, of which the best are the best by all labels for that measure."""
        return self.rows["all" if measure == "all" else "labels_1"][row]

    def of(self, row: str, measure: str = "labels_1") -> Seeds:
        return values(self.runs, self.config(row, measure), "held_out", measure)

    def at(self, row: str, temperature: float) -> Seeds:
        """One-shot accuracy of a loss with its defaults at another temperature."""
        (config,) = study.at_temperatures(self.name, row, [temperature], times=1)
        by_seed = values(self.runs, config, "held_out", "labels_1")
        return {seed: by_seed[seed] for seed in SETS[self.name].seeds[: study.OF_CURVE]}

    def longer(self, row: str, times: int) -> tuple[float, Seeds]:
        """The best temperature after so many times the epochs, and one-shot accuracy there."""
        config = study.best(self.record, study.of_length(self.name, row, times))
        by_seed = values(self.runs, config, "held_out", "labels_1")
        few = SETS[self.name].seeds[: study.FEW]
        return config["temperature"], {seed: by_seed[seed] for seed in few}


def verdict(every: Iterable[Results], ours: str, other: str, measure: str = "labels_1") -> Verdict:
    """One row minus another, on all sets that have both."""
    deltas = {}
    for results in every:
        if {ours, other} <= results.rows["labels_1"].keys():
            delta = paired(results.of(ours, measure), results.of(other, measure))
            if delta is None:
                raise ValueError(f"the record of {results.name} has fewer than three seeds")
            deltas[results.name] = delta
    return Verdict.of(deltas)


def table(every: Iterable[Results]) -> str:
    """Means of the losses at their defaults and at their best, and PGCL minus InfoNCE."""
    lines = []
    for results in every:
        for measure in ("labels_1", "all"):  # five labels lie between them
            cells = [spread(results.of(UNTRAINED, measure).values())]
            for best in ("", f" {AT_BEST}"):
                is_there = not best or SETS[results.name].is_tuned
                pair = [results.of(f"{row}{best}", measure) if is_there else {} for row in BOTH]
                cells += [*(spread(of.values()) for of in pair), difference(*reversed(pair))]
            lines.append([f"{results.name}, {MEASURES[measure]}", *cells])
    head = [UNTRAINED, *BOTH, MINUS, *(f"{row} {AT_BEST}" for row in BOTH), f"{MINUS}, {AT_BEST}"]
    return sourced(markdown(["set", *head], lines), [run for of in every for run in of.runs])


def further(every: Iterable[Results]) -> str:
    """What the options of the paper, and GraphCL's own loss, change in one-shot accuracy."""
    lines = []
    for results in every:
        of_paper = difference(results.of(OF_PAPER), results.of(INFO_NCE))
        own = ""
        if SETS[results.name].in_depth:
            own = difference(*(results.of(f"{row} {AT_BEST}") for row in (GRAPH_CL, INFO_NCE)))
        trained = (difference(results.of(row), results.of(UNTRAINED)) for row in BOTH)
        lines.append([results.name, *trained, of_paper, own])
    head = [f"{row} minus {UNTRAINED}" for row in BOTH]
    head.append(f"{OF_PAPER}, minus {INFO_NCE}")
    return markdown([MEASURES["labels_1"], *head, f"{GRAPH_CL} minus {INFO_NCE}, {AT_BEST}"], lines)


def over_temperatures(every: Iterable[Results]) -> str:
    """PGCL minus InfoNCE in one-shot accuracy, both at each temperature."""
    lines = []
    for results in every:
        pairs = ([results.at(row, tau) for row in (PGCL, INFO_NCE)] for tau in study.CURVE)
        lines.append([results.name, *(difference(*pair) for pair in pairs)])
    return markdown([MINUS, *(f"tau={tau:g}" for tau in study.CURVE)], lines)


def lengths(every: Iterable[Results]) -> str:
    """One-shot accuracy after longer trainings, each loss at its best temperature there."""
    lines = []
    for results in every:
        for times in study.LONGER:
            found = [results.longer(row, times) for row in BOTH]
            cells = (f"{spread(seeds.values())} (tau={tau:g})" for tau, seeds in found)
            delta = difference(found[1][1], found[0][1])
            epochs = times * SETS[results.name].epochs
            lines.append([f"{results.name}, {epochs} epochs", *cells, delta])
    return markdown([MEASURES["labels_1"], *BOTH, MINUS], lines)


def rounded() -> dict[str, Results]:
    """The first seeds of digits once more, on two threads and with other kernels of torch."""
    files = {name: study.RECORDS / f"digits-{file}.jsonl" for name, file in ROUNDING.items()}
    return {name: Results("digits", read(file).values()) for name, file in files.items()}


def moved(again: Results, record: Results, row: str) -> float:
    """How far one-shot accuracy of a seed is from that of the record on average."""
    ours, theirs = again.of(row), record.of(row)
    return float(np.mean([abs(ours[seed] - theirs[seed]) for seed in ours]))


def answers(every: Sequence[Results]) -> str:
    """What to train with few labels and with all, at which temperature, and what to hope for."""
    lines = []
    for measure, words in (("labels_1", "one label per class"), ("all", "all labels")):
        rows = ([of.of(row, measure) for row in (INFO_NCE, UNTRAINED)] for of in every)
        gains = [delta.mean for delta in itertools.starmap(paired, rows) if delta]
        tau = InfoNCE().temperature
        lines.append(
            f"- **With {words}**, train with `InfoNCE()`, at temperature {tau:g}: hope "
            f"for {min(gains):.1f} to {max(gains):.1f} points over an untrained encoder. Against "
            f"`InfoNCE()`, `PGCLLoss(dim)` is {verdict(every, *DEFAULT, measure)}."
        )
    return "\n".join(paragraph(line, "  ") for line in lines)


def comparisons(every: Sequence[Results]) -> str:
    """What remains of the differences after a correction, and beside other measures and halves."""
    remain = []
    for measure, name in MEASURES.items():
        pairs = {of.name: (of.of(PGCL, measure), of.of(INFO_NCE, measure)) for of in every}
        found = [of.name for of in every if of.name in significant_after_holm(pairs)]
        remain.append(f"on {listed(found)} ({name})")
    nmi = verdict(every, *DEFAULT, "nmi")
    of_untrained = verdict(every, PGCL, UNTRAINED, "all")
    halves = []
    for of in every:
        rows = (values(of.runs, of.config(row), "development", "labels_1") for row in DEFAULT)
        halves.append(f"{of.name} {difference(*rows).split()[0]}")
    return paragraph(
        f"These tables make many comparisons. After Holm's correction over the {len(every)} sets "
        f"of a measure, {MINUS} remains significant {listed(remain)}. In {MEASURES['nmi']}, PGCL "
        f"is {nmi}. The split into halves is one split: on the other half, which selected "
        f"settings, the differences with one label per class are {listed(halves)}. With all "
        f"labels, PGCL is {of_untrained}, against an untrained GIN."
    )


def rounding() -> str:
    """How far another CPU would move a seed, and the difference of ten."""
    record, parts = Results("digits"), []
    seeds = SETS["digits"].seeds[: study.FEW]

    def minus(results: Results) -> str:
        pair = ({seed: results.of(row)[seed] for seed in seeds} for row in (PGCL, INFO_NCE))
        return difference(*pair)

    for name, again in rounded().items():
        moves = np.mean([moved(again, record, row) for row in BOTH])
        parts.append(f"{moves:.1f} points with {name} ({MINUS} became {minus(again)})")
    return paragraph(
        "On your machine, the same seed gives another accuracy: another CPU or number of threads "
        "rounds differently, and training amplifies the rounding. We repeated ten seeds of digits. "
        f"The accuracy of a seed with one label per class changed on average by "
        f"{listed(parts)}, in place of {minus(record)}."
    )


def pages() -> dict[Path, dict[str, str]]:
    """Tables and sentences by page and marker."""
    every = [Results(name) for name in SETS]
    in_depth = [results for results in every if results.name in IN_DEPTH]
    tables = {"few labels": table(every), "further": further(every), "lengths": lengths(in_depth)}
    tables |= {"answers": answers(every), "rounding": rounding()}
    tables["comparisons"] = comparisons(every)
    of_negatives = {"temperatures": over_temperatures(in_depth)}
    return {RESULTS: tables, FALSE_NEGATIVES: of_negatives}


def draw() -> Figure:
    """One-shot accuracy over the temperature on both sets; whiskers are standard deviations."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axes, results in zip(panels, map(Results, IN_DEPTH), strict=True):
        by_row = {row: [results.at(row, tau).values() for tau in study.CURVE] for row in BOTH}
        curves(axes, study.CURVE, by_row)
        title = f"{results.name}, {MEASURES['labels_1']}"
        axes.set(xlabel="temperature", ylabel="accuracy, %", title=title)
    panels[0].legend(frameon=False)
    return figure
