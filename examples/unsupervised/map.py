"""Maps where PGCL helps and where it hurts, on planted classes; draws docs/where_it_helps.md anew.

python examples/unsupervised/map.py    # runs what examples/unsupervised/map.jsonl lacks, then draws
"""

import argparse
import sys
from pathlib import Path

import numpy as np
import results
from cells import fill, spread
from map_pictures import draw_grid, draw_knobs, draw_rule
from places import AGREEMENT, CLASSES, COMPARED, TRAINED, Map, advised, knob_places, wanted
from planted import run
from results import Config
from train import INFO_NCE

HERE = Path(__file__).parent
DOCS = HERE.parents[1] / "docs"
PICTURES = {"grid": draw_grid, "knobs": draw_knobs, "rule": draw_rule}


def table(told: Map, lines: dict[str, Config]) -> str:
    """Markdown: a line each, a column for each number of classes."""
    made = [f"| | {' | '.join(f'{classes} classes' for classes in CLASSES)} |"]
    made.append("| --- |" + " --- |" * len(CLASSES))
    for label, config in lines.items():
        cells = []
        for classes in CLASSES:
            values = [run["accuracy"] for run in told.at(classes=classes, **config)]
            gain = told.gain(classes=classes, **config)
            cell = spread(values)
            cells.append(cell if config.get("row") == INFO_NCE else f"{cell} ({gain:+.1f})")
        made.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(made)


def summary(told: Map) -> str:
    """Markdown: all places of the knobs together, in three settings."""
    made = [
        "| | mean gain | worst | best | places worse by more than 0.5 "
        f"| of these, agreement above {AGREEMENT} |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for label, setting in COMPARED.items():
        places = [setting(place) for place in knob_places()]
        gains = [told.gain(**place) for place in places]
        worse = [place for place, gain in zip(places, gains, strict=True) if gain < -0.5]
        seen = sum(told.mean("agreement", **place) > AGREEMENT for place in worse)
        cells = [*(f"{value:+.1f}" for value in (np.mean(gains), min(gains), max(gains)))]
        cells += [f"{len(worse)} of {len(places)}", str(seen)]
        made.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(made)


def tables(told: Map) -> dict[str, str]:
    """What docs/where_it_helps.md shows."""
    schedules = {
        INFO_NCE: {"row": INFO_NCE},
        "PGCL": {},
        "prototypes frozen for 5 epochs": {"freeze_epochs": 5},
        "lambda rises over 5 epochs": {"warm_up_epochs": 5},
        "lambda rises over all 15": {"warm_up_epochs": 15},
    }
    return {
        "paper": table(told, {row: {"row": row} for row in TRAINED}),
        "recipe": table(told, {row: advised({"row": row}) for row in TRAINED}),
        "summary": summary(told),
        "schedule": table(told, schedules),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--output", type=Path, default=HERE / "map.jsonl", help="finished runs")
    parser.add_argument("--docs", type=Path, default=DOCS, help="where page and pictures go")
    args = parser.parse_args()

    jobs = [(config,) for config in wanted(args.seeds)]
    try:
        done = results.complete(args.output, jobs, run, args.workers)
    except results.Stopped as stopped:
        sys.exit(f"map.py: {stopped}")

    told = Map(done.values())
    (args.docs / "images").mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        draw(told).savefig(args.docs / "images" / f"map-{name}.png", dpi=110)
    page = args.docs / "where_it_helps.md"
    if page.exists():
        page.write_text(fill(page.read_text(), tables(told)))
    print(f"pictures and tables written to {args.docs}")


if __name__ == "__main__":
    main()
