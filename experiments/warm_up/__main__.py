"""Compare PGCL after a warm-up with InfoNCE and with PGCL from the first step on, as in plan.md.

python -m experiments.warm_up choose controls confirm --datasets digits MSRC_9 --root data

`choose` runs the candidates, of which the rule of the plan takes one. The other parts run it, with
what it is compared with: `controls`, `confirm`, `longer`, `parts`, `encoder`, `fractions` and
`track`. Finished runs are in --output, one JSON line each; the committed runs choose as well.
"""

import itertools
from pathlib import Path

from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.tu import FOLDS, fetch

from . import choice, study


def main() -> None:
    parser = parser_of("warm_up", __doc__)
    add = parser.add_argument
    add("parts", nargs="+", choices=choice.PARTS)
    add("--datasets", nargs="+", default=[*study.SETS], choices=study.SETS, metavar="SET")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/warm_up"), help="folder of the records")
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed data sets")
    args = parser.parse_args()
    for part, name in itertools.product(args.parts, args.datasets):
        configs, seeds = choice.jobs(part, name, args.output)
        if not configs:
            continue
        least = study.LEAST.get(name, FOLDS)
        known = (None, None) if name == "digits" else fetch(name, args.root, args.cache, least)
        file, digest = known
        data = {"data": digest} if digest else {}
        jobs = [(c | {"seed": seed} | data, file) for seed in seeds for c in configs]
        results.complete(args.output / f"{name}.jsonl", jobs, study.run, args.workers)


if __name__ == "__main__":
    program("warm_up", main)
