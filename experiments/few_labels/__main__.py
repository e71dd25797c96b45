"""Compare PGCL and InfoNCE over temperatures on digits and MSRC_9, with few labels, as in plan.md.

python -m experiments.few_labels choose report --datasets digits MSRC_9 --root data

`choose` selects settings on the development half of the labels. `report` without `choose` uses the
settings selected by the committed runs. Finished runs are in --output, one JSON line each.
"""

from pathlib import Path

from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.tu import fetch

from .study import CHOOSING_SEEDS, DIGITS, STUDIES, jobs, run


def main() -> None:
    parser = parser_of("few_labels", __doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=("choose", "report"))
    add("--datasets", nargs="+", default=[*STUDIES], choices=STUDIES, metavar="SET")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/few_labels"), help="folder of the records")
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed data sets")
    args = parser.parse_args()
    for name in args.datasets:
        study = STUDIES[name]
        output = args.output / study.record.name
        source = (None, None) if study is DIGITS else fetch(name, args.root, args.cache)
        runs = list(results.read(study.record).values())
        if "choose" in args.parts:
            choosing = jobs(study, study.choosing(), CHOOSING_SEEDS, source)
            runs = results.complete(output, choosing, run, args.workers)
        rows = study.rows(runs)
        print(*rows.items(), sep="\n")
        if "report" in args.parts:
            reported = jobs(study, study.reported(rows), study.seeds, source)
            results.complete(output, reported, run, args.workers)


if __name__ == "__main__":
    program("few_labels", main)
