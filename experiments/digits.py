"""Train a GIN on digits as graphs, without labels: by InfoNCE, and by PGCL after a warm-up.

python -m experiments.digits

Prints two tables, and draws runs/digits.png. The recipe was selected on the other half of the
labels, by a plan: experiments/warm_up/plan.md.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from .common import results
from .common.arguments import count, parser_of, program
from .common.digits import graphs_of_digits
from .common.graphs import INFO_NCE, UNTRAINED
from .common.pictures import flat
from .common.probes import NAMES
from .common.results import Config, Run
from .common.tables import aligned, difference, made_by, spread
from .few_labels import report as few_labels
from .warm_up import study
from .warm_up.report import Results

PICTURE = Path("runs/digits.png")
COLOURS = plt.get_cmap("tab10")
PGCL = "InfoNCE, then PGCL"


def draw(axes: Axes, points: np.ndarray, digits: list[int]) -> None:
    """The points ``[N, 2]`` of all graphs, coloured by digit; prototypes behind them are stars."""
    graphs, prototypes = np.split(points, [len(digits)])
    axes.scatter(*graphs.T, c=COLOURS(digits), s=4, linewidths=0)
    star = {"marker": "*", "s": 140, "c": "black", "edgecolors": "white", "linewidths": 0.8}
    axes.scatter(*prototypes.T, **star)
    axes.set(xticks=[], yticks=[])


def legend(axes: Axes) -> None:
    """The colours of the digits, and what a star is."""
    marks = [Line2D([], [], ls="", marker="o", c=COLOURS(d), label=f"digit {d}") for d in range(10)]
    star = Line2D([], [], ls="", marker="*", ms=13, c="black", label="PGCL's prototypes")
    axes.legend(handles=[*marks, star], loc="center", ncols=2, frameon=False, fontsize=13)
    axes.axis("off")


def tables(runs: list[Run], record: Results, rows: dict[str, Config]) -> str:
    """Means of these runs, and their differences beside those of the record."""
    means, deltas = [], []
    for name, label in NAMES.items():
        by_row = {row: study.values(runs, c, "held_out", name) for row, c in rows.items()}
        reported = [record.of(rows[row], name) for row in (PGCL, INFO_NCE)]
        means.append([label, *(spread(seeds.values()) for seeds in by_row.values())])
        pairs = [by_row[PGCL], by_row[INFO_NCE]], reported
        deltas.append([label, *(difference(*pair) for pair in pairs)])
    seeds, most = len(by_row[PGCL]), len(reported[0])
    again, digits = few_labels.rounded().values(), few_labels.Results("digits")
    both = few_labels.BOTH
    moves = np.mean([few_labels.moved(of, digits, row) for of in again for row in both])
    return f"""
Held-out half of the labels, in %: accuracy of the nearest class mean with 1
or 5 labels per class, NMI of k-means, accuracy of logistic regression with
all labels. Mean ± standard deviation, {seeds} seeds.

{aligned(["", *rows], means)}

InfoNCE() for all epochs, or for half of them and then PGCLLoss(96, {rows[PGCL]["num_prototypes"]}).

Points, with 95 % intervals over seeds:

{aligned(["PGCL minus InfoNCE", f"this run, {seeds} seeds", f"reported, {most} seeds"], deltas)}

The reported runs are of {made_by(record.runs)},
on another machine.
Another CPU rounds differently and changes one-shot accuracy of a seed by {moves:.1f}
points on average. The difference of few seeds may be outside the interval of
{most} seeds."""


def main() -> None:
    parser = parser_of("digits", __doc__)
    add = parser.add_argument
    add("--seeds", type=count, default=5, help="the first ones of the record (default: 5)")
    add("--workers", type=count, default=2, help="runs at a time")
    add("--threads", type=count, default=1, help="of each run")
    add("--output", type=Path, default=Path("runs/digits.jsonl"), help="finished runs")
    add("--picture", type=Path, help=f"a new file; default: {PICTURE}")
    args = parser.parse_args()
    if args.picture is not None and args.picture.exists():
        parser.error(f"--picture {args.picture} is there already: choose another")

    record, seeds = Results("digits"), study.SEEDS
    rows = {
        UNTRAINED: study.untrained("digits"),
        INFO_NCE: study.info_nce("digits"),
        PGCL: record.form,
    }
    jobs = [
        (row | {"seed": seed}, None, flat if seed == seeds[0] else None)  # the first are drawn
        for seed in seeds[: args.seeds]
        for row in rows.values()
    ]
    runs = results.complete(args.output, jobs, study.run, args.workers, args.threads)
    print(tables(runs, record, rows))

    digits = [int(graph.y) for graph in graphs_of_digits()]
    figure, panels = plt.subplots(2, 2, figsize=(8, 8), layout="constrained")
    for axes, row, made in zip(panels.flat, rows, runs, strict=False):
        draw(axes, np.array(made["kept"]), digits)
        axes.set_title(row)
    legend(panels[1, 1])
    picture = args.picture or PICTURE
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    print(f"""
What to try next:
- docs/quickstart.md: the same training in sixty lines, to change as you like
- python examples/compare.py: InfoNCE, PGCL and an untrained encoder on a TU set
- docs/swap.md: the loss of your own script, by its name

The picture of the embeddings is {picture}""")


if __name__ == "__main__":
    program("digits", main)
