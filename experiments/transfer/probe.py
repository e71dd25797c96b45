"""Measures frozen encoders on tables of molecules: few labels, a linear probe, k-means.

python -m experiments.transfer.probe --encoders none runs/transfer/PGCL.pt        # synthetic
python -m experiments.transfer.probe --csv bbbp.csv tox21.csv \\
    --encoders none runs/transfer/PGCL.pt runs/transfer/PGCL-1.pt runs/transfer/PGCL-2.pt

Seeds are those of pre-training. Finished runs are appended to --output, one JSON line each, and are
not run again.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.common import results
from experiments.common.arguments import count
from experiments.common.tables import markdown, spread

from .inputs import NO_FILE, label, options_of, origin, prepared, tables_of
from .probe_run import ALL, SETTING, run
from .ranking import SCORES

NAMES = {"auc": "ROC-AUC", "ap": "average precision", "nmi": "NMI", "ari": "ARI"}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.transfer.probe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options_of(parser)
    add = parser.add_argument
    add("--seeds", type=count, default=3, help=f"new encoders for {NO_FILE!r}")
    add("--output", type=Path, default=Path("runs/transfer/probes.jsonl"))
    return parser.parse_args()


def encoders_of(args: argparse.Namespace) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Files, and their part of the configuration of a run."""
    for name in args.encoders:
        if name == NO_FILE:
            for seed in range(args.seeds):
                yield None, {"pretraining": None, "seed": seed}
        else:
            pretraining = origin(Path(name))
            assert pretraining is not None
            yield Path(name), {"pretraining": pretraining, "seed": pretraining["seed"]}


def value(run: results.Run, labels: str, name: str) -> float | None:
    """A score with so many labels, or of k-means if none; None if the set does not have it."""
    return (run["labels"][labels] if labels else run["clusters"] or {}).get(name)


def table(runs: Iterable[results.Run]) -> str:
    """A line for each pre-training, of one set."""
    counts = [*map(str, SETTING["few"]), ALL]
    columns = [(count, name) for count in counts for name in SCORES]
    columns += [("", "nmi"), ("", "ari")]
    groups: dict[str, list[results.Run]] = {}
    for run_of in runs:
        groups.setdefault(label(run_of["config"]["pretraining"]), []).append(run_of)
    heads = [f"{NAMES[name]}{', ' * bool(count)}{count}" for count, name in columns]
    lines = []
    for pretraining, of_group in groups.items():
        values = [[value(run_of, *column) for run_of in of_group] for column in columns]
        cells = ("" if None in of_column else spread(of_column) for of_column in values)
        lines.append([pretraining, len(of_group), *cells])
    return markdown(["pre-training", "seeds", *heads], lines)


def main() -> None:
    args = parse()
    encoders = list(encoders_of(args))
    paths = tables_of(args)
    results.read(args.output)  # an invalid file is an error now, not after featurising
    with results.processes(args.workers, args.cache) as pool:
        sets = {path: prepared(path, args, pool) for path in paths}
    jobs = {}
    for path, data in sets.items():
        here = {"dataset": path.name, "data": data.digest, **SETTING}
        for file, of_encoder in encoders:
            config = here | of_encoder
            jobs[results.key(config)] = config, data, file
    first_seeds_first = sorted(jobs.values(), key=lambda job: job[0]["seed"])
    done = results.complete(args.output, first_seeds_first, run, args.workers)
    for path in paths:
        of_table = [done[key] for key, (_, data, _) in jobs.items() if data is sets[path]]
        print(f"\n{path.name}, in per cent\n\n{table(of_table)}\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.transfer.probe: {error}")
    except KeyboardInterrupt:
        sys.exit("experiments.transfer.probe: stopped; finished runs are kept")
