"""Train a GIN on digits as graphs, without labels, by InfoNCE and by PGCL.

python -m experiments.digits

Prints two tables, and draws runs/digits.png. The settings were selected on the other half of the
labels.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from .common import results
from .common.arguments import count, parser_of, program
from .common.digits import graphs_of_digits
from .common.graphs import INFO_NCE, PGCL, UNTRAINED
from .common.pictures import flat
from .common.tables import aligned, difference, made_by, spread
from .few_labels.report import BOTH, MINUS, Results, moved, rounded
from .few_labels.study import MEASURES, SETS, run

PICTURE = Path("runs/digits.png")
COLOURS = plt.get_cmap("tab10")
ROWS = UNTRAINED, INFO_NCE, PGCL


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


def tables(ours: Results, record: Results) -> str:
    """Means of this run, and its differences beside those of the record."""
    means, deltas = [], []
    for name, label in MEASURES.items():
        means.append([label, *(spread(ours.of(row, name).values()) for row in ROWS)])
        pairs = [[of.of(PGCL, name), of.of(INFO_NCE, name)] for of in (ours, record)]
        deltas.append([label, *(difference(*pair) for pair in pairs)])
    seeds, most = len(ours.of(PGCL)), len(record.of(PGCL))
    moves = np.mean([moved(again, record, row) for again in rounded().values() for row in BOTH])
    return f"""
Held-out half of the labels, in %: accuracy of the nearest class mean with 1
or 5 labels per class, NMI of k-means, accuracy of logistic regression with
all labels. Mean ± standard deviation, {seeds} seeds.

{aligned(["", *ROWS], means)}

InfoNCE() and PGCLLoss(96), with their defaults.

Points, with 95 % intervals over seeds:

{aligned([MINUS, f"this run, {seeds} seeds", f"reported, {most} seeds"], deltas)}

The reported runs are of {made_by(record.runs)}, on another machine.
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

    record, seeds = Results("digits"), SETS["digits"].seeds
    rows = {row: record.config(row) for row in ROWS}
    jobs = [
        (row | {"seed": seed}, None, flat if seed == seeds[0] else None)  # the first are drawn
        for seed in seeds[: args.seeds]
        for row in rows.values()
    ]
    runs = results.complete(args.output, jobs, run, args.workers, args.threads)
    print(tables(Results("digits", runs), record))

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
