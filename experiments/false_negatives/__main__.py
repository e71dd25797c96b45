"""Compare masks of false negatives with the losses of this package, as in plan.md.

python -m experiments.false_negatives masks trainings --datasets digits MSRC_9 --root data

`masks` answers questions 1 to 4, `trainings` question 5. Each first runs the choosing seeds, and
then what they choose. Finished runs are in --output, one JSON line each.
"""

import itertools
from collections.abc import Iterable
from pathlib import Path

from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.tu import fetch

from . import study


def main() -> None:
    parser = parser_of("false_negatives", __doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=("masks", "trainings"))
    add("--datasets", nargs="+", default=[*study.SETS], choices=study.SETS, metavar="SET")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/false_negatives"), help="folder of the records")
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed data sets")
    args = parser.parse_args()
    for name, part in itertools.product(args.datasets, args.parts):
        file, digest = (None, None) if name == "digits" else fetch(name, args.root, args.cache)

        def complete(
            configs: Iterable[results.Config],
            seeds: range,
            part: str = part,
            name: str = name,
            file: Path | None = file,
            data: dict[str, str] = {"data": digest} if digest else {},
        ) -> list[results.Run]:
            distinct = {str(config): config for config in configs}.values()
            jobs = [(c | {"seed": seed} | data, file) for seed in seeds for c in distinct]
            output = args.output / f"{name}-{part}.jsonl"
            return results.complete(output, jobs, study.run, args.workers)

        seeds = study.SETS[name].seeds
        if part == "masks":
            chosen = complete(study.choosing_masks(name), study.CHOOSING_SEEDS)
            complete(study.reported_masks(name, chosen), seeds)
        else:
            chosen = complete(study.choosing_trainings(name), study.CHOOSING_SEEDS)
            rows = study.tuned(name, chosen)
            complete([rows[study.THREE]], study.CHOOSING_SEEDS)  # which variant decides
            complete(rows.values(), seeds)


if __name__ == "__main__":
    program("false_negatives", main)
