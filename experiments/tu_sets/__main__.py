"""Run the paper's Tables I and III and Figures 4 and 5: graph classification on TU sets.

python -m experiments.tu_sets table1 --root data --datasets MUTAG PTC_MR PROTEINS
python -m experiments.tu_sets table1 table3 figures --root data

Finished runs are in --output, one JSON line each, and are not run again. `python -m
experiments.report` fills the pages from the committed runs.
"""

import argparse
import functools
from collections.abc import Iterable
from pathlib import Path

from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.tu import fetch

from . import evaluate, study

PARTS = ("table1", "table3", "figures")


def parse() -> argparse.Namespace:
    parser = parser_of("tu_sets", __doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    sets = (*study.SMALL, *study.LARGE)
    about = f"{', '.join(sets)}; the last three need the first three"
    add("--datasets", nargs="+", default=sets, choices=sets, metavar="SET", help=about)
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/tu_sets"), help="folder of the records")
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed data sets")
    return parser.parse_args()


def main() -> None:
    args = parse()
    fetched = functools.cache(lambda name: fetch(name, args.root, args.cache))

    def complete(configs: Iterable[results.Config]) -> list[results.Run]:
        jobs = []
        for config in configs:
            file, digest = fetched(config["dataset"])
            jobs.append((config | {"data": digest}, file))
        output = args.output / study.RECORD.name
        return results.complete(output, jobs, evaluate.run, args.workers)

    if "table1" in args.parts:
        runs = complete(study.choosing(args.datasets))
        chosen = study.temperatures(runs, args.datasets)
        for name, of_set in chosen.items():
            print(name, *(f"{row}: tau={tau:g}" for row, tau in of_set.items()), sep="  ")
        complete(study.table_1(args.datasets, chosen))
    if "table3" in args.parts:
        complete(study.table_3(args.datasets))
    if "figures" in args.parts:
        complete(study.figures(args.datasets))


if __name__ == "__main__":
    program("tu_sets", main)
