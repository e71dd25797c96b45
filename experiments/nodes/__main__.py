"""Compare InfoNCE and the reweighted contrast of PGCL on the nodes of one graph; print a table.

python -m experiments.nodes --dataset Photo --batch 512 2048 --seeds 10 --root data

A GCN is trained by InfoNCE, or by InfoNCE for the first half of the steps and then by PGCL; both
losses see the same batches and views. In GRACE, a batch is all nodes. Finished runs are appended to
--output, one JSON line each, and are not run again.
"""

import argparse
import itertools
from pathlib import Path

from experiments.common import results
from experiments.common.arguments import at_least, count, parser_of, positive, program

from .data import SETS, load, raw_folder
from .report import table
from .train import LOSSES, SETTING, UNTRAINED, run


def parse() -> argparse.Namespace:
    parser = parser_of("nodes", __doc__)
    add = parser.add_argument
    add("--dataset", required=True, nargs="+", choices=SETS, help="sets of PyG")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--batch", type=count, nargs="+", default=[512], help="nodes in the loss of each step")
    add("--losses", nargs="+", choices=LOSSES, default=[*LOSSES], help="rows of the table")
    add("--lr", type=positive, default=SETTING["lr"])
    add("--temperature", type=positive, help="in place of the temperature of each loss")
    add("--steps", type=at_least(2), default=400, help="each encodes the whole graph twice")
    add("--seeds", type=count, default=3)
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--device", default="cpu", help="of the training, such as cuda")
    add("--output", type=Path, default=Path("runs/nodes.jsonl"))
    add("--cache", type=Path, default=Path("runs/data"), help="folder for downloads")
    return parser.parse_args()


def main() -> None:
    args = parse()
    jobs = []
    for dataset in args.dataset:
        folder = raw_folder(dataset, args.root, args.cache)
        load(dataset, folder)  # an error before any run
        for seed, batch, loss in itertools.product(range(args.seeds), args.batch, args.losses):
            config = {"dataset": dataset, "loss": loss, "seed": seed}
            if loss != UNTRAINED:  # to which batches make no difference
                config |= {"batch": batch, "steps": args.steps, **SETTING, **LOSSES[loss]}
                config["lr"] = args.lr
                config["temperature"] = args.temperature or config["temperature"]
                config |= {} if args.device == "cpu" else {"device": args.device}
            jobs.append((config, folder))
    print(table(results.complete(args.output, jobs, run, args.workers)))


if __name__ == "__main__":
    program("nodes", main)
