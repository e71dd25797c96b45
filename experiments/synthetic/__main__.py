"""PGCL beside InfoNCE on the synthetic grid; writes to docs/where_it_helps.md.

python -m experiments.synthetic   # runs what experiments/synthetic/results.jsonl lacks, then draws
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import numpy as np

from experiments.common import results
from experiments.common.arguments import count
from experiments.common.results import Config
from experiments.common.rows import INFO_NCE, ROWS
from experiments.common.tables import markdown, refill, spread

from .clusters import run
from .pictures import draw_diagnostics, draw_grid, draw_options
from .settings import (
    AGREEMENT,
    CLASSES,
    COMPARED,
    FAMILY,
    Grid,
    one_at_a_time,
    third_of_batch,
    wanted,
)

RUNS = Path(__file__).parent / "results.jsonl"
DOCS = Path(__file__).parents[2] / "docs"
PICTURES = {
    "grid": draw_grid,
    "data": partial(draw_options, names=("spread", "duplicates", "imbalance")),
    "training": partial(draw_options, names=("batch_size", "epochs")),
    "loss": partial(draw_options, names=("temperature", "epsilon")),
    "diagnostics": draw_diagnostics,
}


def table(runs: Grid, first: str, lines: dict[str, Config]) -> str:
    """A line for each loss, a column for each number of classes."""

    def cell(config: Config) -> str:
        accuracy = spread([run["accuracy"] for run in runs.at(**config)])
        return (
            accuracy
            if config.get("row") == INFO_NCE
            else f"{accuracy} ({runs.gain(**config):+.1f})"
        )

    return markdown(
        [first, *(f"{classes} classes" for classes in CLASSES)],
        [
            [label, *(cell({"classes": classes, **config}) for classes in CLASSES)]
            for label, config in lines.items()
        ],
    )


def summary(runs: Grid) -> str:
    """Three losses over all settings of data and training."""
    lines = []
    for label, options_of in COMPARED.items():
        settings = [options_of(setting) for setting in one_at_a_time()]
        gains = [runs.gain(**setting) for setting in settings]
        worse = [setting for setting, gain in zip(settings, gains, strict=True) if gain < -0.5]
        high = sum(runs.mean("agreement", **setting) > AGREEMENT for setting in worse)
        numbers = [f"{value:+.1f}" for value in (np.mean(gains), min(gains), max(gains))]
        lines.append([label, *numbers, f"{len(worse)} of {len(settings)}", high])
    head = ["loss", "mean gain", "worst", "best", "settings below by more than 0.5"]
    return markdown([*head, f"of these, agreement above {AGREEMENT}"], lines)


def tables(runs: Grid) -> dict[str, str]:
    """Those of docs/where_it_helps.md."""
    return {
        "paper": table(runs, "loss", {row: {"row": row} for row in ROWS}),
        "recipe": table(runs, "loss", {row: third_of_batch({"row": row}) for row in ROWS}),
        "summary": summary(runs),
        "family": table(runs, "options", FAMILY),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.synthetic",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=count, default=3)
    parser.add_argument("--workers", type=count, default=2, help="runs at a time, one thread each")
    args = parser.parse_args()

    jobs = [(config,) for config in wanted(args.seeds)]
    try:
        done = results.complete(RUNS, jobs, run, args.workers)
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.synthetic: {error}")

    runs = Grid(done.values())
    for name, draw in PICTURES.items():
        draw(runs).savefig(DOCS / "images" / f"synthetic-{name}.png", dpi=160)
    refill({DOCS / "where_it_helps.md": tables(runs)})
    print(f"pictures and tables written to {DOCS}")


if __name__ == "__main__":
    main()
