"""PGCL and its baselines on graph classification without labels; prints a table.

python -m experiments.unsupervised                                      # synthetic, a minute
python -m experiments.unsupervised --dataset MUTAG --root data --rows all --seeds 5
python -m experiments.unsupervised --protocol paper --dataset MUTAG --root data --seeds 5

Finished runs are appended to --output, one JSON line each, and are not run again.
"""

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from experiments.common import results
from experiments.common.arguments import at_least, count, fraction, positive, weight
from experiments.common.rows import INFO_NCE, PGCL

from . import protocol, table
from .data import SYNTHETIC, fetch
from .protocol import PAPER
from .train import ALL_ROWS, SETTING, UNTRAINED, WL, run, usual

MEASURED = (
    "Accuracy in per cent of a support vector machine, ten folds: mean and standard deviation over "
    "seeds.\n1 label per class: nearest class mean, mean of 50 draws of the labels.\n"
    "Differences in points, paired by seed, with 95 per cent intervals."
)

# Options that take several values; every combination of them is run.
LISTS = {
    "num_prototypes": (count, "K"),
    "batch_size": (count, "N"),
    "consistency_weight": (weight, "lambda"),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.unsupervised",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", default=SYNTHETIC, help="a TU set, or the synthetic one (default)")
    add(
        "--protocol",
        choices=["usual", PAPER],
        default="usual",
        help="paper: evaluate after every epoch, on new folds each time, as its code does",
    )
    add("--root", type=Path, help="folder of NAME.zip or NAME/; without it, NAME is downloaded")
    add(
        "--rows",
        nargs="+",
        default=[UNTRAINED, INFO_NCE, PGCL],
        metavar="ROW",
        help=f"all, or some of: {', '.join(ALL_ROWS)}",
    )
    add("--seeds", type=count, default=3)
    for name, (kind, about) in {
        "epochs": (count, "of training"),
        "look_every": (count, "epochs between evaluations"),
        "freeze_epochs": (at_least(0), "epochs with frozen prototypes"),
        "drop": (fraction, "fraction of nodes dropped, and of edges perturbed"),
        "lr": (positive, "learning rate"),
    }.items():
        option, value = f"--{name.replace('_', '-')}", SETTING[name]
        add(option, type=kind, default=value, help=f"{about} (default {value})")
    for name, (kind, about) in LISTS.items():
        option, value = f"--{name.replace('_', '-')}", SETTING[name]
        add(option, type=kind, nargs="+", default=[value], help=f"{about} (default {value})")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/unsupervised.jsonl"))
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed data sets")
    add("--tensorboard", type=Path, metavar="FOLDER", help="log losses and diagnostics there")
    args = parser.parse_args()
    if args.dataset == SYNTHETIC and args.root is not None:
        parser.error(
            f"--root holds no {SYNTHETIC!r}, which is synthetic: name the set with --dataset"
        )
    rows = protocol.PAPER_ROWS if args.protocol == PAPER else ALL_ROWS
    if args.rows == ["all"]:
        args.rows = list(rows)
    for row in args.rows:
        if row not in rows:
            parser.error(f"argument --rows: {row!r} is not one of {', '.join(map(repr, rows))}")
    if args.protocol == PAPER:
        for name in protocol.FIXED:
            if getattr(args, name) != SETTING[name]:
                parser.error(f"--{name.replace('_', '-')} is the usual protocol's: paper fixes it")
        vars(args).update(protocol.FIXED)
    return args


def grid_of(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The settings to compare losses in, one for each combination of the lists."""
    combinations = itertools.product(*(getattr(args, name) for name in LISTS))
    shared = {name: getattr(args, name) for name in SETTING}
    return [shared | dict(zip(LISTS, values, strict=True)) for values in combinations]


def configurations(
    args: argparse.Namespace, digest: str, setting: dict[str, Any]
) -> list[dict[str, Any]]:
    """The configurations of one setting on the set with this digest."""
    bare: dict[str, Any] = {}  # the options of rows that train nothing
    if args.protocol == PAPER:
        bare = {"protocol": PAPER, "epochs": setting["epochs"]}
    configs = []
    for seed, row in itertools.product(range(args.seeds), args.rows):
        config = {"dataset": args.dataset, "data": digest, "row": row, "seed": seed} | bare
        configs.append(config if row in (WL, UNTRAINED) else config | setting)
    return configs


def main() -> None:
    args = parse()
    grid = grid_of(args)
    evaluate, compare = usual, table.comparison
    if args.protocol == PAPER:
        evaluate, compare = protocol.every_epoch, table.every_epoch
    try:
        graphs, digest = fetch(args.dataset, args.root, args.cache)
        configs = [configurations(args, digest, setting) for setting in grid]
        jobs = [
            (config, graphs, args.tensorboard, evaluate) for config in itertools.chain(*configs)
        ]
        done = results.complete(args.output, jobs, run, args.workers)
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.unsupervised: {error}")

    for setting, of_setting in zip(grid, configs, strict=True):
        if len(grid) > 1:
            print(f"\n{setting}\n")
        runs = [done[results.key(config)] for config in of_setting]
        print(f"\n{MEASURED}\n\n{compare(runs)}")
        if args.protocol == "usual":
            print(f"\n{table.verdict(runs)}")


if __name__ == "__main__":
    main()
