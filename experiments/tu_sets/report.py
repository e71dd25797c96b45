"""Tables I and III, Figures 4 and 5, from the records beside this file."""

from collections.abc import Collection, Iterable
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from docs.tables import markdown
from experiments.common.graphs import ABLATION, INFO_NCE, PGCL, UNTRAINED
from experiments.common.pictures import curves
from experiments.common.results import Run, matching, read
from experiments.common.tables import REPRODUCE, RESULTS, difference, sourced, spread

from . import study
from .evaluate import MEASURES
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
        seeds = {row: best.of(name, row, "svm") for row in (UNTRAINED, *study.LOSSES)}
        cells = [spread(of_row.values()) for of_row in seeds.values()]
        delta = difference(seeds[PGCL], seeds[INFO_NCE])
        lines.append([name, *PAPER[name], len(seeds[PGCL]), *cells, delta])
    head = ["accuracy in %", "GraphCL, paper", "PGCL, paper", "seeds", UNTRAINED, *study.LOSSES]
    return markdown([*head, "PGCL minus InfoNCE"], lines)


def temperatures(best: AtItsBest) -> str:
    lines = [
        [row, *(f"{best.temperatures[name][row]:g}" for name in (*study.SMALL, study.LARGE[0]))]
        for row in study.LOSSES
    ]
    return markdown(["temperature", *study.SMALL, "the three large sets"], lines)


def differences(best: AtItsBest) -> str:
    """PGCL minus InfoNCE by all measures, and what training gains with all labels."""
    pairs = [(PGCL, INFO_NCE, measure) for measure in MEASURES]
    lines = []
    for one, other, measure in [*pairs, (INFO_NCE, UNTRAINED, "svm")]:
        both = ([best.of(name, row, measure) for row in (one, other)] for name in SETS)
        label = f"{one} minus {other}, {MEASURES[measure]}"
        lines.append([label, *(difference(*pair) for pair in both)])
    return markdown(["points of accuracy", *SETS], lines)


def table_3(runs: Collection[Run]) -> str:
    """The ablation in the paper's setting."""
    lines = []
    for row in (INFO_NCE, *ABLATION):
        seeds = [values(runs, name, "svm", row) for name in study.SMALL]
        base = [values(runs, name, "svm", INFO_NCE) for name in study.SMALL]
        cells = [spread(of_set.values()) for of_set in seeds]
        if row != INFO_NCE:
            cells = [f"{c}, {difference(*p)}" for c, *p in zip(cells, seeds, base, strict=True)]
        lines.append([row, *cells])
    return markdown(["accuracy in %, minus InfoNCE", *study.SMALL], lines)


def pages() -> dict[Path, dict[str, str]]:
    """The tables by page and marker."""
    runs = list(read(study.RECORD).values())
    best = AtItsBest(runs)
    return {
        REPRODUCE: {
            "table 1": sourced(table_1(best), runs),
            "temperatures": temperatures(best),
            "table 3": sourced(table_3(runs), runs),
        },
        RESULTS: {
            "graphs": sourced(differences(best), runs),
        },
    }


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
