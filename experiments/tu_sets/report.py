"""Table I, Figures 4 and 5, from the records beside this file."""

from collections.abc import Collection, Iterable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from docs.programs.tables import markdown
from experiments.common.graphs import INFO_NCE, PGCL, UNTRAINED
from experiments.common.pictures import curves
from experiments.common.results import Run, matching, read
from experiments.common.tables import PUBLISHED_CODE, difference, sourced

from . import study
from .study import config_of

SETS = (*study.SMALL, *study.LARGE)
# The paper's Table I: GraphCL, PGCL.
PAPER = {
    "MUTAG": (86.8, 91.1),
    "PTC_MR": (58.4, 63.3),
    "PROTEINS": (74.4, 75.7),
    "NCI1": (77.9, 78.8),
    "COLLAB": (71.4, 76.0),
    "REDDIT-BINARY": (89.5, 91.5),
}
Seeds = dict[int, float]


def values(runs: Iterable[Run], name: str, measure: str, row: str, **options: object) -> Seeds:
    """A measure by seed, without the seeds that choose temperatures."""
    by_seed = matching(runs, config_of(name, row, 0, **options))
    return {seed: run[measure] for seed, run in by_seed.items() if seed not in study.CHOOSING}


class AtItsBest:
    """The runs of Table I: each loss at its chosen temperature."""

    def __init__(self, runs: Collection[Run]) -> None:
        self.runs, self.temperatures = runs, study.temperatures(runs, SETS)

    def of(self, name: str, row: str, measure: str) -> Seeds:
        options = {} if row == UNTRAINED else {"temperature": self.temperatures[name][row]}
        return values(self.runs, name, measure, row, **options)


def table_1(best: AtItsBest) -> str:
    """Accuracy with all labels beside the paper's figures."""
    lines = []
    for name in SETS:
        seeds = {row: best.of(name, row, "svm") for row in (UNTRAINED, INFO_NCE, PGCL)}
        means = [f"{np.mean([*of_row.values()]):.1f}" for of_row in seeds.values()]
        lines.append([name, *PAPER[name], *means, difference(seeds[PGCL], seeds[INFO_NCE])])
    head = ["accuracy in %", "GraphCL, paper", "PGCL, paper", UNTRAINED, INFO_NCE, PGCL]
    return markdown([*head, "PGCL minus InfoNCE"], lines)


def pages() -> dict[Path, dict[str, str]]:
    """The tables by page and marker."""
    runs = list(read(study.RECORD).values())
    return {PUBLISHED_CODE: {"table 1": sourced(table_1(AtItsBest(runs)), runs)}}


def draw() -> Figure:
    """Figures 4 and 5: accuracy over K and N; whiskers are standard deviations over seeds."""
    runs = list(read(study.RECORD).values())
    shape = len(study.CURVES), len(study.OPTIONS)
    figure, panels = plt.subplots(*shape, figsize=(5, 4.5), sharey="row", layout="constrained")
    labels = {"num_prototypes": "prototypes K (Figure 4)", "batch_size": "batch size N (Figure 5)"}
    for name, axes_of in zip(study.CURVES, panels, strict=True):
        for (option, ticks), axes in zip(study.OPTIONS.items(), axes_of, strict=True):
            seeds = {
                row: [values(runs, name, "svm", row, **{option: t}).values() for t in ticks]
                for row in (INFO_NCE, PGCL)
            }
            curves(axes, ticks, seeds)
            axes.set(xlabel=labels[option], title=name)
        axes_of[0].set_ylabel("accuracy, %")
    handles = panels[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=2, frameon=False)
    return figure
