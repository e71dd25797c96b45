"""Swap the loss in the published scripts of GraphCL and SimGRACE, as in plan.md; print a table.

python -m experiments.graphcl --graphcl ../GraphCL --simgrace ../SimGRACE --root data

The scripts are those of your checkouts of github.com/Shen-Lab/GraphCL and
github.com/junxia97/SimGRACE, of which each run trains a copy. Finished runs are in --output, one
JSON line each, and are not run again.
"""

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path

from experiments.common import results
from experiments.common.arguments import at_least, count, parser_of, program
from experiments.common.tu import fetch

from . import report, study


def parse() -> argparse.Namespace:
    parser = parser_of("graphcl", __doc__)
    add = parser.add_argument
    for name, script in study.SCRIPTS.items():
        about = f"a checkout of {name}, with {study.FOLDER}/{script.file}"
        add(f"--{name.lower()}", type=Path, dest=name, metavar="FOLDER", help=about)
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--sets", nargs="+", default=["MUTAG", "PROTEINS"], metavar="SET", help="TU sets")
    add("--seeds", type=count, default=3)
    add("--epochs", type=at_least(2), default=10)
    add("--output", type=Path, default=Path("runs/graphcl.jsonl"))
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed data sets")
    return parser.parse_args()


def options() -> Iterator[results.Config]:
    """Losses and number formats of a script, set and seed."""
    yield from ({"row": row, "dtype": "float32"} for row in report.ROWS)
    yield from (
        {"row": row, "dtype": "float64", "eps": eps}
        for eps, row in itertools.product((1e-8, 1e-3), (study.BEFORE, study.AFTER))
    )
    yield {"row": study.ROUNDED, "dtype": "float64", "eps": 1e-8}


def main() -> None:
    args = parse()
    checkouts = {name: getattr(args, name) for name in study.SCRIPTS if getattr(args, name)}
    if not checkouts:
        raise ValueError("give --graphcl, --simgrace, or both")
    for name, checkout in checkouts.items():
        file = checkout / study.FOLDER / study.SCRIPTS[name].file
        if not file.is_file():
            raise ValueError(f"--{name.lower()} {checkout} has no {file.relative_to(checkout)}")
    jobs = []
    seeds = range(args.seeds)
    for seed, dataset, (name, checkout) in itertools.product(seeds, args.sets, checkouts.items()):
        folder, data = fetch(dataset, args.root, args.cache)
        source = results.digest_of_source([checkout / study.FOLDER])
        given = {"script": name, "dataset": dataset, "seed": seed, "epochs": args.epochs}
        for option in options():
            config = {**given, **option, "data": data, "source": source}
            jobs.append((config, checkout.resolve(), folder.resolve()))
    print(report.table(results.complete(args.output, jobs, study.run, workers=1)))


if __name__ == "__main__":
    program("graphcl", main)
