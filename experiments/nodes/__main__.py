"""PGCL, its parts and its rivals on the nodes of one graph, in GRACE's setting; prints tables.

python -m experiments.nodes                                          # a made graph, some minutes
python -m experiments.nodes --dataset Cora --root data --rows all --seeds 5

It measures a linear probe (10 per cent of the nodes to learn from, 10 to choose by, 80 to test),
k-means against the classes, and one and five labels of each class. --output keeps finished runs,
one JSON line each. Runs that it has already are not run again.
"""

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any

from experiments.common import results
from experiments.common.arguments import count, positive
from experiments.common.probes import NAMES
from experiments.common.rows import INFO_NCE
from experiments.common.tables import measures

from .data import SYNTHETIC, Known, fetch
from .rows import ALL, FEW, RAW, UNTRAINED, with_loss
from .train import SHARED, run, setting


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.nodes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", default=SYNTHETIC, help="Cora, CiteSeer, ..., or the made one (default)")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--rows", nargs="+", default=FEW, metavar="ROW", help=f"all, or some of: {', '.join(ALL)}")
    add("--seeds", type=count, default=3)
    add("--epochs", type=count, default=SHARED["epochs"], help="steps, each with the whole graph")
    add("--temperature", type=positive, help="of the contrast; default: that of GRACE for the set")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/nodes.jsonl"))
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed graphs")
    args = parser.parse_args()
    if args.dataset == SYNTHETIC and args.root is not None:
        parser.error(
            f"--root holds no {SYNTHETIC!r}, which is made here: name the set with --dataset"
        )
    if args.rows == ["all"]:
        args.rows = ALL
    for row in args.rows:
        if row not in ALL:
            parser.error(f"argument --rows: {row!r} is not one of {', '.join(map(repr, ALL))}")
    return args


def configuration(
    dataset: str, known: Known, given: dict[str, Any], row: str, seed: int
) -> results.Config:
    """A run's, as JSON has it; ``given`` goes before what the set has."""
    of_set = setting(dataset) | given
    config: dict[str, Any] = {"dataset": dataset, "data": known.digest, "seed": seed}
    config |= with_loss(row, known.nodes, of_set["temperature"])
    if row == UNTRAINED:
        config |= {name: of_set[name] for name in ("width", "activation")}
    elif row != RAW:
        config |= of_set
    return json.loads(json.dumps(config))


def main() -> None:
    args = parse()
    try:
        given: dict[str, Any] = {"epochs": args.epochs}
        if args.temperature is not None:
            given["temperature"] = args.temperature
        known = fetch(args.dataset, args.root, args.cache)
        configs = {
            (row, seed): configuration(args.dataset, known, given, row, seed)
            for seed, row in itertools.product(range(args.seeds), args.rows)
        }
        jobs = [(config, known.file) for config in configs.values()]
        done = results.complete(args.output, jobs, run, args.workers)
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.nodes: {error}")

    rows: dict[str, dict[int, results.Run]] = {row: {} for row in args.rows}
    for (row, seed), config in configs.items():
        rows[row][seed] = done[results.key(config)]
    print(measures(rows, NAMES, INFO_NCE))


if __name__ == "__main__":
    main()
