"""PGCL, its ablation and other losses on the nodes of one graph, in GRACE's setting; prints tables.

python -m experiments.nodes                                              # synthetic, minutes
python -m experiments.nodes --dataset Cora --root data --rows all --seeds 5

Measures: a linear probe (10 per cent of the nodes to train, 10 to validate, 80 to test), k-means
against the classes, and accuracy with 1 and 5 labels per class. Finished runs are appended to
--output, one JSON line each, and are not run again.
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

from .data import SYNTHETIC, Stored, fetch
from .rows import ALL, FEW, RAW, UNTRAINED, with_loss
from .train import SHARED, run, setting


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.nodes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", default=SYNTHETIC, help="Cora, CiteSeer, ..., or the synthetic one (default)")
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
            f"--root holds no {SYNTHETIC!r}, which is synthetic: name the set with --dataset"
        )
    if args.rows == ["all"]:
        args.rows = ALL
    for row in args.rows:
        if row not in ALL:
            parser.error(f"argument --rows: {row!r} is not one of {', '.join(map(repr, ALL))}")
    return args


def configuration(
    dataset: str, graph: Stored, overrides: dict[str, Any], row: str, seed: int
) -> results.Config:
    """The configuration of a run; ``overrides`` replace the options of the set."""
    options = setting(dataset) | overrides
    config: dict[str, Any] = {"dataset": dataset, "data": graph.digest, "seed": seed}
    config |= with_loss(row, graph.nodes, options["temperature"])
    if row == UNTRAINED:
        config |= {name: options[name] for name in ("width", "activation")}
    elif row != RAW:
        config |= options
    return json.loads(json.dumps(config))


def main() -> None:
    args = parse()
    try:
        overrides: dict[str, Any] = {"epochs": args.epochs}
        if args.temperature is not None:
            overrides["temperature"] = args.temperature
        graph = fetch(args.dataset, args.root, args.cache)
        configs = {
            (row, seed): configuration(args.dataset, graph, overrides, row, seed)
            for seed, row in itertools.product(range(args.seeds), args.rows)
        }
        jobs = [(config, graph.file) for config in configs.values()]
        done = results.complete(args.output, jobs, run, args.workers)
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.nodes: {error}")

    rows: dict[str, dict[int, results.Run]] = {row: {} for row in args.rows}
    for (row, seed), config in configs.items():
        rows[row][seed] = done[results.key(config)]
    print(measures(rows, NAMES, INFO_NCE))


if __name__ == "__main__":
    main()
