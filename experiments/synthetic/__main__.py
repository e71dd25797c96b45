"""PGCL beside InfoNCE on the synthetic grid; writes to docs/where_it_helps.md.

python -m experiments.synthetic               # runs what experiments/synthetic/results.jsonl lacks, then draws
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from experiments.common import results
from experiments.common.arguments import count
from experiments.common.results import Config
from experiments.common.rows import INFO_NCE, ROWS
from experiments.common.tables import refill, spread

from .pictures import draw_grid, draw_knobs, draw_rule
from .settings import AGREEMENT, CLASSES, COMPARED, FAMILY, Map, advised, knob_places, wanted
from .clusters import run

RUNS = Path(__file__).parent / "results.jsonl"
DOCS = Path(__file__).parents[2] / "docs"
PICTURES = {"grid": draw_grid, "knobs": draw_knobs, "rule": draw_rule}


def table(runs: Map, lines: dict[str, Config]) -> str:
    """Markdown: a line each, a column for each number of classes."""
    made = [f"| | {' | '.join(f'{classes} classes' for classes in CLASSES)} |"]
    made.append("| --- |" + " --- |" * len(CLASSES))
    for label, config in lines.items():
        cells = []
        for classes in CLASSES:
            values = [run["accuracy"] for run in runs.at(classes=classes, **config)]
            gain = runs.gain(classes=classes, **config)
            cell = spread(values)
            cells.append(cell if config.get("row") == INFO_NCE else f"{cell} ({gain:+.1f})")
        made.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(made)


def summary(runs: Map) -> str:
    """Markdown: three settings of PGCL, over all settings of the data and of training."""
    made = [
        "| | mean gain | worst | best | settings below by more than 0.5 "
        f"| of these, agreement above {AGREEMENT} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for label, setting in COMPARED.items():
        places = [setting(place) for place in knob_places()]
        gains = [runs.gain(**place) for place in places]
        worse = [place for place, gain in zip(places, gains, strict=True) if gain < -0.5]
        seen = sum(runs.mean("agreement", **place) > AGREEMENT for place in worse)
        cells = [*(f"{value:+.1f}" for value in (np.mean(gains), min(gains), max(gains)))]
        cells += [f"{len(worse)} of {len(places)}", str(seen)]
        made.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(made)


def tables(runs: Map) -> dict[str, str]:
    """What docs/where_it_helps.md shows."""
    return {
        "paper": table(runs, {row: {"row": row} for row in ROWS}),
        "recipe": table(runs, {row: advised({"row": row}) for row in ROWS}),
        "summary": summary(runs),
        "family": table(runs, FAMILY),
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

    runs = Map(done.values())
    for name, draw in PICTURES.items():
        draw(runs).savefig(DOCS / "images" / f"synthetic-{name}.png", dpi=110)
    refill({DOCS / "where_it_helps.md": tables(runs)})
    print(f"pictures and tables written to {DOCS}")


if __name__ == "__main__":
    main()
