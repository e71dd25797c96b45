"""Compare losses where labels are few, and choose their defaults, as in plan.md.

python -m experiments.few_labels choose report lengths --datasets digits MSRC_9 --root data

`choose` runs the candidates of all losses, by which the development half of the labels selects.
`prototypes` does the same for K. `report` runs what they select, `temperatures` the curves, and
`lengths` longer trainings. The committed runs choose as well. Finished runs are in --output, one
JSON line each.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.graphs import INFO_NCE, PGCL
from experiments.common.tu import fetch

from . import study

PARTS = "choose", "prototypes", "report", "temperatures", "lengths"


def main() -> None:
    parser = parser_of("few_labels", __doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=PARTS)
    add("--datasets", nargs="+", default=[*study.SETS], choices=study.SETS, metavar="SET")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/few_labels"), help="folder of the records")
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed data sets")
    args = parser.parse_args()
    for name, part in itertools.product(args.datasets, args.parts):
        file, digest = (None, None) if name == "digits" else fetch(name, args.root, args.cache)
        output = args.output / f"{name}.jsonl"

        def complete(
            configs: Iterable[results.Config],
            seeds: Iterable[int],
            file: Path | None = file,
            data: dict[str, str] = {"data": digest} if digest else {},
            output: Path = output,
        ) -> None:
            distinct = {str(config): config for config in configs}.values()
            jobs = [(c | {"seed": seed} | data, file) for seed in seeds for c in distinct]
            results.complete(output, jobs, study.run, args.workers)

        def finished(name: str = name, output: Path = output) -> list[results.Run]:
            files = study.RECORDS / f"{name}.jsonl", output
            return [run for file in files for run in results.read(file).values()]

        seeds = study.SETS[name].seeds
        few = seeds[: study.FEW]
        if part == "choose":
            complete(study.choosing(name), study.CHOOSING_SEEDS)
        elif part == "prototypes":
            complete(study.choosing_prototypes(name), study.CHOOSING_SEEDS)
        elif part == "report":
            complete(study.rows(name, finished()).values(), seeds)
            complete(study.rows(name, finished(), "all").values(), few)
        elif study.SETS[name].in_depth:
            for row in (INFO_NCE, PGCL):
                if part == "temperatures":
                    at_temperatures = study.at_temperatures(name, row, study.CURVE, times=1)
                    complete(at_temperatures, few[: study.OF_CURVE])
                    continue
                for times in study.LONGER:
                    candidates = study.of_length(name, row, times)
                    complete(candidates, study.CHOOSING_SEEDS)
                    complete([study.best(finished(), candidates)], few)


if __name__ == "__main__":
    program("few_labels", main)
