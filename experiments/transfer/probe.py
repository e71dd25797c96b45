"""Measures frozen encoders on tables of molecules: few labels, a linear probe, k-means.

python -m experiments.transfer.probe --encoders none runs/transfer/PGCL.pt        # made here
python -m experiments.transfer.probe --csv bbbp.csv tox21.csv \\
    --encoders none runs/transfer/PGCL.pt runs/transfer/PGCL-1.pt runs/transfer/PGCL-2.pt

Seeds are those of pre-training. --output keeps finished runs, one JSON line each. Runs that it has
already are not run again.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.common import results
from experiments.common.arguments import count
from experiments.common.tables import spread

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
    add("--seeds", type=count, default=3, help=f"how many fresh encoders {NO_FILE!r} stands for")
    add("--output", type=Path, default=Path("runs/transfer/probes.jsonl"))
    return parser.parse_args()


def encoders_of(args: argparse.Namespace) -> Iterator[tuple[Path | None, dict[str, Any]]]:
    """Files, and what the configuration of a run has of them."""
    for name in args.encoders:
        if name == NO_FILE:
            for seed in range(args.seeds):
                yield None, {"pretraining": None, "seed": seed}
        else:
            how = origin(Path(name))
            assert how is not None
            yield Path(name), {"pretraining": how, "seed": how["seed"]}


def value(run: results.Run, labels: str, name: str) -> float | None:
    """A score with so many labels, or of k-means with none; None where the set has it not."""
    return (run["labels"][labels] if labels else run["clusters"] or {}).get(name)


def table(runs: Iterable[results.Run]) -> str:
    """Markdown: a line for each pre-training, of one set."""
    counts = [*map(str, SETTING["few"]), ALL]
    columns = [(count, name) for count in counts for name in SCORES]
    columns += [("", "nmi"), ("", "ari")]
    groups: dict[str, list[results.Run]] = {}
    for run_of in runs:
        groups.setdefault(label(run_of["config"]["pretraining"]), []).append(run_of)
    heads = [f"{NAMES[name]}{', ' * bool(count)}{count}" for count, name in columns]
    lines = [f"| pre-training | seeds | {' | '.join(heads)} |"]
    lines.append("| --- | --- |" + " --- |" * len(columns))
    for how, of_group in groups.items():
        values = [[value(one, *column) for one in of_group] for column in columns]
        cells = ["" if None in some else spread(some) for some in values]
        lines.append(f"| {how} | {len(of_group)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    args = parse()
    encoders = list(encoders_of(args))
    tables = tables_of(args)
    results.read(args.output)  # what is wrong with it is an error now, not after the molecules
    with results.processes(args.workers, args.cache) as pool:
        givens = {path: prepared(path, args, pool) for path in tables}
    jobs = {}
    for path, given in givens.items():
        here = {"dataset": path.name, "data": given.digest, **SETTING}
        for file, how in encoders:
            config = here | how
            jobs[results.key(config)] = config, given, file
    first_seeds_first = sorted(jobs.values(), key=lambda job: job[0]["seed"])
    done = results.complete(args.output, first_seeds_first, run, args.workers)
    for path in tables:
        of_table = [done[key] for key, (_, given, _) in jobs.items() if given is givens[path]]
        print(f"\n{path.name}, in per cent\n\n{table(of_table)}\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.transfer.probe: {error}")
    except KeyboardInterrupt:
        sys.exit("experiments.transfer.probe: stopped; what is finished is kept")
