"""Fine-tunes pre-trained encoders on properties of molecules, and compares their ROC-AUC.

python -m experiments.transfer.finetune --encoders none runs/transfer/PGCL.pt        # made here
python -m experiments.transfer.finetune --csv bbbp.csv tox21.csv \\
    --encoders none runs/transfer/PGCL.pt
python -m experiments.transfer.finetune --csv mine.csv --smiles-column smi --label-columns A,B \\
    --encoders runs/transfer/PGCL.pt --predictions runs/predictions

--output keeps finished runs, one JSON line each. Runs that it has already are not run again.
"""

import argparse
import sys
from pathlib import Path

from experiments.common import results
from experiments.common.arguments import count, fraction, positive
from experiments.common.tables import difference, spread

from .finetune_run import best_epoch, run
from .inputs import NO_FILE, label, options_of, origin, prepared, tables_of


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.transfer.finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options_of(parser)
    add = parser.add_argument
    add("--seeds", type=count, default=3)
    add("--epochs", type=count, default=20)
    add("--batch-size", type=count, default=32)
    add("--lr", type=positive, default=1e-3)
    add("--dropout", type=fraction, default=0.5)
    add("--output", type=Path, default=Path("runs/transfer/finetuning.jsonl"))
    add(
        "--predictions",
        type=Path,
        metavar="FOLDER",
        help="train once more with the first seed; write predictions for all molecules here",
    )
    return parser.parse_args()


def predictions_of(
    folder: Path | None, tables: list[Path], encoders: list[str]
) -> dict[tuple[Path, str], Path]:
    """Where the predictions for a table by an encoder go: nowhere, or to files not yet there."""
    if folder is None:
        return {}
    files = {
        (table, encoder): folder / f"{table.name.partition('.')[0]}-{encoder}.csv"
        for table in tables
        for encoder in encoders
    }
    if len({*files.values()}) < len(tables) * len(encoders):
        raise ValueError(f"--predictions: two of {', '.join(map(str, tables))} have the same name")
    for file in files.values():
        if file.exists():
            raise ValueError(f"--predictions: {file} is there already: choose another folder")
    return files


def score(run: results.Run, name: str = "auc") -> float | None:
    """On the test part, at the epoch that ranks the validation part best by ROC-AUC.

    None where it was not recorded: of old runs average precision was not.
    """
    return run[name]["test"][best_epoch(run["auc"])] if name in run else None


def table(runs: dict[str, dict[int, results.Run]]) -> str:
    """Markdown: a line for each encoder, of one set."""
    scores = {
        name: {seed: score(run) for seed, run in seeds.items()} for name, seeds in runs.items()
    }
    made = [
        "| pre-training | encoder | seeds | ROC-AUC, % | minus none | average precision, % |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, seeds in scores.items():
        how = label(next(iter(runs[name].values()))["config"]["pretraining"])
        cells = [how, name, len(seeds), spread(list(seeds.values()))]
        cells.append(difference(seeds, scores.get(NO_FILE, {})))
        precisions = [score(run, "ap") for run in runs[name].values()]
        cells.append("" if None in precisions else spread(precisions))
        made.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(made)


def main() -> None:
    args = parse()
    encoders = {
        name if name == NO_FILE else Path(name).stem: None if name == NO_FILE else Path(name)
        for name in args.encoders
    }
    if len(encoders) < len(args.encoders):
        raise ValueError(f"--encoders: two of {', '.join(args.encoders)} have the same name")
    origins = {name: origin(file) for name, file in encoders.items()}
    tables = tables_of(args)
    predictions = predictions_of(args.predictions, tables, list(encoders))
    shared = {name: getattr(args, name) for name in ("epochs", "batch_size", "lr", "dropout")}
    with results.processes(args.workers, args.cache) as pool:
        givens = {path: prepared(path, args, pool) for path in tables}
    jobs = {}
    for path, given in givens.items():
        here = {"dataset": path.name, "data": given.digest, **shared}
        for name, file in encoders.items():
            for seed in range(args.seeds):
                config = here | {"pretraining": origins[name], "seed": seed}
                jobs[path, name, seed] = config, given, file
    first_seeds_first = sorted(jobs.items(), key=lambda job: job[0][2])
    done = results.complete(args.output, [job for _, job in first_seeds_first], run, args.workers)
    for path in tables:
        runs = {}
        for name in encoders:
            if predictions:
                run(*jobs[path, name, 0], predictions[path, name])
                print(f"predictions written to {predictions[path, name]}")
            seeds = {seed: jobs[path, name, seed][0] for seed in range(args.seeds)}
            runs[name] = {seed: done[results.key(config)] for seed, config in seeds.items()}
        print(f"\n{path.name}\n\n{table(runs)}\n")


if __name__ == "__main__":
    try:
        main()
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.transfer.finetune: {error}")
    except KeyboardInterrupt:
        sys.exit("experiments.transfer.finetune: stopped; what is finished is kept")
