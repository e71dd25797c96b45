"""Tables and the picture of digits and MSRC_9, from the records beside this file."""

from collections.abc import Iterable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from docs.tables import markdown
from experiments.common.graphs import INFO_NCE, PGCL, UNTRAINED
from experiments.common.pictures import curves
from experiments.common.results import Run, read
from experiments.common.tables import FALSE_NEGATIVES, RESULTS, difference, sourced, spread

from .study import DIGITS, MEASURES, MSRC_9, PAPER, Options, Study, values

BOTH = INFO_NCE, PGCL
MINUS = f"{PGCL} minus {INFO_NCE}"
ROUNDING = {"two threads": "threads", "no vector instructions": "vectors"}
Seeds = dict[int, float]


class Results:
    """The held-out half of a set, in the settings of its record: of its runs, or of others."""

    def __init__(self, study: Study, runs: Iterable[Run] | None = None) -> None:
        record = read(study.record).values()
        self.study, self.rows = study, study.rows(record)
        of_seeds = record if runs is None else runs
        self.runs = [run for run in of_seeds if run["config"]["seed"] in study.seeds]

    def of(self, row: str, name: str = "labels_1", **options: float) -> Seeds:
        return values(self.runs, self.rows[row] | options, "held_out", name)

    def both(self, **options: float) -> tuple[Seeds, Seeds]:
        """One-shot accuracy of PGCL and of InfoNCE."""
        return self.of(PGCL, **options), self.of(INFO_NCE, **options)


def named(row: str, options: Options) -> str:
    parts = {"num_prototypes": "K", "consistency_weight": "lambda", "temperature": "tau"}
    shown = [f"{short}={options[name]:g}" for name, short in parts.items() if options.get(name)]
    return f"{row} ({', '.join(shown)})" if shown else row


def table(results: Results) -> str:
    """Means of the rows, and PGCL's differences from InfoNCE."""
    lines = [
        [named(row, results.rows[row]), *(spread(results.of(row, m).values()) for m in MEASURES)]
        for row in (UNTRAINED, INFO_NCE, PGCL, PAPER)
    ]
    deltas = (difference(results.of(PGCL, m), results.of(INFO_NCE, m)) for m in MEASURES)
    head = [results.study.name, *MEASURES.values()]
    return sourced(markdown(head, [*lines, [MINUS, *deltas]]), results.runs)


def over_temperatures(every: Iterable[Results]) -> str:
    """PGCL minus InfoNCE in one-shot accuracy, both at each temperature."""
    lines, temperatures = [], MSRC_9.temperatures
    for results in every:
        pairs = (results.both(temperature=tau) for tau in temperatures)
        lines.append([results.study.name, *(difference(*pair) for pair in pairs)])
    return markdown([MINUS, *(f"tau={tau:g}" for tau in temperatures)], lines)


def rounded() -> dict[str, Results]:
    """The first seeds of digits once more, on two threads and with other kernels of torch."""
    files = {name: DIGITS.record.with_stem(f"digits-{file}") for name, file in ROUNDING.items()}
    return {name: Results(DIGITS, read(file).values()) for name, file in files.items()}


def moved(again: Results, record: Results, row: str) -> float:
    """How far one-shot accuracy of a seed is from that of the record on average."""
    ours, theirs = again.of(row), record.of(row)
    return float(np.mean([abs(ours[seed] - theirs[seed]) for seed in ours]))


def pages() -> dict[Path, dict[str, str]]:
    """Tables by page and marker."""
    digits, msrc = Results(DIGITS), Results(MSRC_9)
    return {
        FALSE_NEGATIVES: {"temperatures": over_temperatures([digits, msrc])},
        RESULTS: {"digits": table(digits), "MSRC_9": table(msrc)},
    }


def draw() -> Figure:
    """One-shot accuracy over the temperature on both sets; whiskers are standard deviations."""
    figure, panels = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axes, study in zip(panels, (DIGITS, MSRC_9), strict=True):
        results, taus = Results(study), study.temperatures
        curves(
            axes,
            taus,
            {row: [results.of(row, temperature=tau).values() for tau in taus] for row in BOTH},
        )
        title = f"{study.name}, {MEASURES['labels_1']}"
        axes.set(xlabel="temperature", ylabel="accuracy, %", title=title)
    panels[0].legend(frameon=False)
    return figure
