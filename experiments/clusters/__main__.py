"""Cluster graphs without labels, and compare the clusters with the classes, as in plan.md.

python -m experiments.clusters choose report --root data

`choose` selects settings on the development halves of five sets. Without `choose`, the settings
are those that the committed runs select. Finished runs are in --output, one JSON line each.
"""

import functools
from collections.abc import Collection, Iterable
from pathlib import Path

from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.tu import fetch

from . import study


def main() -> None:
    parser = parser_of("clusters", __doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=("choose", "report"))
    add("--datasets", nargs="+", default=[*study.SETS], choices=study.SETS, metavar="SET")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/clusters.jsonl"), help="finished runs")
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed data sets")
    args = parser.parse_args()
    fetched = functools.cache(lambda name: fetch(name, args.root, args.cache))

    def complete(
        configs: Iterable[results.Config], choose_in: Collection[str] = ()
    ) -> list[results.Run]:
        jobs = []
        for config in configs:
            name = config["dataset"]
            file, digest = (None, None) if name == "digits" else fetched(name)
            jobs.append((config | ({"data": digest} if digest else {}), file, choose_in))
        return results.complete(args.output, jobs, study.run, args.workers)

    if "choose" in args.parts:
        runs = complete(study.choosing())
    else:
        runs = list(results.read(study.RECORD).values())
    common, own = study.settings(runs, study.CHOOSE_ON), study.tuned(runs)
    for name, of in {"all sets": common, **own}.items():
        print(name, *of.items(), sep="\n  ")
    spaces = [*{setting.space for setting in common.values()} & {*study.SPACES}]
    if "report" in args.parts:
        for name in args.datasets:
            both = common, own.get(name, common)
            runs = complete(study.reported(name, study.SEEDS, *both), spaces)
            complete(study.with_chosen(name, common, runs))


if __name__ == "__main__":
    program("clusters", main)
