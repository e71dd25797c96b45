"""Losses that branch off from one InfoNCE run on a real graph, with the same batches and views.

python -m experiments.nodes.branches --dataset Cora --root data --seeds 0 1 2 --lengths 100 200 400

Results are appended to --output, one JSON line each, and are not computed again.
"""

import argparse
import itertools
import sys
from concurrent.futures import as_completed
from pathlib import Path

from tqdm import tqdm

from experiments.common import results
from experiments.common.arguments import at_least, count, positive

from ..data import fetch
from .rows import ROWS, UNTRAINED
from .train import SETTING, configuration, keep


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.nodes.branches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--dataset", required=True, nargs="+", help="Cora, CiteSeer, DBLP, Photo, CS, ...")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    add("--seeds", type=at_least(0), nargs="+", default=[0, 1, 2])
    add("--lengths", type=count, nargs="+", default=[100, 200, 400], help="steps of a run")
    add("--batch", type=count, nargs="+", default=[2048], help="nodes in the loss of each step")
    add("--temperature", type=positive, nargs="+", default=[SETTING["temperature"]])
    add("--workers", type=count, default=2, help="processes, with one thread each")
    add("--output", type=Path, default=Path("runs/branches.jsonl"))
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed graphs")
    return parser.parse_args()


def main() -> None:
    args = parse()
    try:
        done = results.read(args.output)
        graphs = {name: fetch(name, args.root, args.cache) for name in args.dataset}
        jobs = []
        for seed, dataset, batch, temperature in itertools.product(
            args.seeds, args.dataset, args.batch, args.temperature
        ):
            graph = graphs[dataset]
            config = {"dataset": dataset, "data": graph.digest, "batch": batch, "seed": seed}
            config |= SETTING | {"temperature": temperature}
            rows = itertools.product(args.rows, args.lengths)
            pairs = dict.fromkeys((row, length * (row != UNTRAINED)) for row, length in rows)
            wanted = [
                pair for pair in pairs if results.key(configuration(config, *pair)) not in done
            ]
            if wanted:
                jobs.append((config, graph.file, wanted, args.output))
        with results.processes(args.workers, args.output) as pool, tqdm(total=len(jobs)) as bar:
            for future in as_completed([pool.submit(keep, *job) for job in jobs]):
                future.result()
                bar.update()
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.nodes.branches: {error}")


if __name__ == "__main__":
    main()
