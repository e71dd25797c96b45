"""Trains a GIN on digits as graphs, without labels, by InfoNCE and by PGCL.

python -m experiments.digits

A minute and a half on two cores: a table, and a picture in runs/digits.png. Losses have the
settings that plan.md chooses, by labels that are not used here.
"""

from pathlib import Path

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from sklearn.manifold import TSNE
from threadpoolctl import threadpool_limits
from torch_geometric.data import Data

from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.graphs import INFO_NCE, PGCL, UNTRAINED, embed, trained
from experiments.common.tables import comparison
from pgcl_losses.adapters.pyg import ContrastiveModel

from . import study
from .data import graphs_of_digits

PICTURE = Path("runs/digits.png")
COLOURS = plt.get_cmap("tab10")


def draw(axes: Axes, model: ContrastiveModel, graphs: list[Data]) -> None:
    """t-SNE of all projections, coloured by digit, with the prototypes, if any, as stars."""
    points = F.normalize(torch.from_numpy(embed(model.encoder, graphs)))
    prototypes = getattr(model.loss, "prototypes", None)
    stars = points[:0] if prototypes is None else F.normalize(prototypes.weight.detach())
    flat = TSNE(metric="cosine", init="pca", random_state=0).fit_transform(
        torch.cat([points, stars]).numpy()
    )
    digits = [int(graph.y) for graph in graphs]
    axes.scatter(*flat[: len(points)].T, c=COLOURS(digits), s=4, linewidths=0)
    axes.scatter(
        *flat[len(points) :].T, marker="*", s=140, c="black", edgecolors="white", linewidths=0.8
    )
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)


def main() -> None:
    parser = parser_of("digits", __doc__)
    add = parser.add_argument
    add("--seeds", type=count, default=10)
    add("--workers", type=count, default=2, help="runs at a time, one thread each")
    add("--output", type=Path, default=Path("runs/digits.jsonl"), help="finished runs")
    add("--picture", type=Path, help=f"a new file; default: {PICTURE}")
    args = parser.parse_args()
    if args.picture is not None and args.picture.exists():
        parser.error(f"--picture {args.picture} is there already: choose another")

    settings = study.chosen(results.read(study.RECORD).values())
    rows = {UNTRAINED: {"row": UNTRAINED}, INFO_NCE: settings[INFO_NCE], PGCL: settings[PGCL]}
    jobs = study.jobs(rows.values(), range(args.seeds))
    runs = results.complete(args.output, jobs, study.run, args.workers)
    print(f"\nPer cent, mean ± standard deviation over {args.seeds} seeds\n")
    values = {
        row: {
            name: study.means(runs.values(), options, "held_out", name) for name in study.MEASURES
        }
        for row, options in rows.items()
    }
    print(comparison("", study.MEASURES, values, [(PGCL, INFO_NCE)], {}))

    graphs = graphs_of_digits()
    figure, panels = plt.subplots(1, len(rows), figsize=(12, 4), layout="constrained")
    with threadpool_limits(1):  # as in the runs
        for axes, (row, options) in zip(panels, rows.items(), strict=True):
            draw(axes, trained(options | {"seed": 0}, graphs), graphs)
            axes.set_title(row)
    picture = args.picture or PICTURE
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=130)
    print(f"\nwritten to {picture}")


if __name__ == "__main__":
    program("digits", main)
