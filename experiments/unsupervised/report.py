"""Tables I and III, Figures 4 and 5, from the records beside this file."""

import itertools
from collections.abc import Collection, Iterable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from experiments.common.graphs import ABLATION, GRAPH_CL, INFO_NCE, PGCL, SETTING, UNTRAINED
from experiments.common.pictures import curves
from experiments.common.results import Run, matching, read
from experiments.common.tables import REPRODUCE, RESULTS, difference, markdown, spread

from . import study
from .evaluate import MEASURES
from .study import config_of

PAPER_WEIGHT = SETTING["consistency_weight"]
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
# The published code's accuracies, best of 20 epochs and last epoch, from published_code.txt.
PUBLISHED_CODE = {
    "MUTAG": {
        UNTRAINED: ("86.4", "84.5"),
        INFO_NCE: ("91.1 ± 0.5", "85.6 ± 1.5"),
        PGCL: ("91.4 ± 0.4", "87.6 ± 3.2"),
    },
    "PTC_MR": {
        UNTRAINED: ("58.6", "56.9"),
        INFO_NCE: ("65.5 ± 1.3", "59.5 ± 2.0"),
        PGCL: ("65.3 ± 1.1", "59.5 ± 2.2"),
    },
    "PROTEINS": {
        UNTRAINED: ("", "72.2"),
        INFO_NCE: ("73.8", "72.5"),
        PGCL: ("73.6", "70.7"),
    },
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
    head = ["all labels", "GraphCL, paper", "PGCL, paper", "seeds", UNTRAINED, *study.LOSSES]
    return markdown([*head, "PGCL minus InfoNCE"], lines)


def temperatures(best: AtItsBest) -> str:
    lines = [
        [row, *(f"{best.temperatures[name][row]:g}" for name in (*study.SMALL, study.LARGE[0]))]
        for row in study.LOSSES
    ]
    return markdown(["temperature", *study.SMALL, "the three large sets"], lines)


def differences(best: AtItsBest, pairs: Iterable[tuple[str, str]]) -> str:
    """Of pairs of rows, by all measures."""
    lines = []
    for (one, other), (measure, label) in itertools.product(pairs, MEASURES.items()):
        both = ([best.of(name, row, measure) for row in (one, other)] for name in SETS)
        lines.append([f"{one} minus {other}, {label}", *(difference(*pair) for pair in both)])
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
    return markdown(["accuracy, minus InfoNCE", *study.SMALL], lines)


def protocol(runs: Collection[Run]) -> str:
    """The paper, its code and ours, by the protocol of that code."""
    ours: dict[tuple[str, str, float], list[Run]] = {}
    for run in runs:
        config = run["config"]
        key = config["dataset"], config["row"], config.get("consistency_weight", PAPER_WEIGHT)
        ours.setdefault(key, []).append(run)
    fresh = {
        key: {run["config"]["seed"]: float(np.mean(run["fresh"])) for run in of_row}
        for key, of_row in ours.items()
    }
    lines = []
    for name, (row, weight) in itertools.product(PUBLISHED_CODE, study.PROTOCOL_ROWS):
        key = name, row, weight
        if key not in ours:
            continue
        label, paper, its_best, its_last = f"{row}, lambda={weight:g}", "", "", ""
        if weight == PAPER_WEIGHT:
            label, (its_best, its_last) = row, PUBLISHED_CODE[name][row]
            paper = dict(zip((INFO_NCE, PGCL), map(str, PAPER[name]), strict=True)).get(row, "")
        scores = [run["accuracy"] for run in ours[key]]
        best = spread(max(score.values()) for score in scores)
        last = spread(score[max(score, key=int)] for score in scores)
        delta = difference(fresh[key], fresh[name, INFO_NCE, PAPER_WEIGHT])
        cells = [its_best, best, its_last, last, spread(fresh[key].values()), delta]
        lines.append([name, label, len(scores), paper, *cells])
    head = ["set", "loss", "seeds", "paper (GraphCL, PGCL)", "best of 20 epochs, its code", "here"]
    head += ["last epoch, its code", "here", "best epoch on fresh folds", "minus InfoNCE"]
    return markdown(head, lines)


def pages() -> dict[Path, dict[str, str]]:
    """The tables by page and marker."""
    runs, paper = (list(read(path).values()) for path in study.RECORDS.values())
    best = AtItsBest(runs)
    return {
        REPRODUCE: {
            "table 1": table_1(best),
            "temperatures": temperatures(best),
            "graphcl": differences(best, [(GRAPH_CL, INFO_NCE)]),
            "protocol": protocol(paper),
            "table 3": table_3(runs),
        },
        RESULTS: {"graphs": differences(best, [(PGCL, INFO_NCE), (INFO_NCE, UNTRAINED)])},
    }


def draw() -> Figure:
    """Figures 4 and 5: accuracy over K and N; whiskers are standard deviations over seeds."""
    runs = list(read(study.RECORDS["results"]).values())
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
