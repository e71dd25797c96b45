"""Fine-tunes pre-trained encoders on properties of molecules, and compares their ROC-AUC.

python -m experiments.transfer.finetune --encoders none runs/transfer/PGCL.pt        # synthetic
python -m experiments.transfer.finetune --csv bbbp.csv tox21.csv \\
    --encoders none runs/transfer/PGCL.pt
python -m experiments.transfer.finetune --csv mine.csv --smiles-column smi --label-columns A,B \\
    --encoders runs/transfer/PGCL.pt --predictions runs/predictions

Finished runs are appended to --output, one JSON line each, and are not run again.
"""

import argparse
import sys
from pathlib import Path

from experiments.common import results
from experiments.common.arguments import count, fraction, positive
from experiments.common.tables import difference, markdown, spread

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
    """The files for the predictions of each table and encoder, which must not exist yet."""
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
            raise ValueError(f"--predictions: {file} exists: choose another folder")
    return files


def score(run: results.Run, name: str = "auc") -> float | None:
    """Test score at the epoch with the best validation ROC-AUC.

    None if it was not recorded: the oldest records have no average precision.
    """
    return run[name]["test"][best_epoch(run["auc"])] if name in run else None


def table(runs: dict[str, dict[int, results.Run]]) -> str:
    """A line for each encoder, of one set."""
    scores = {
        name: {seed: score(run) for seed, run in seeds.items()} for name, seeds in runs.items()
    }
    lines = []
    for name, seeds in scores.items():
        pretraining = label(next(iter(runs[name].values()))["config"]["pretraining"])
        delta = difference(seeds, scores.get(NO_FILE, {}))
        precisions = [score(run, "ap") for run in runs[name].values()]
        precision = "" if None in precisions else spread(precisions)
        lines.append([pretraining, name, len(seeds), spread([*seeds.values()]), delta, precision])
    head = ["pre-training", "encoder", "seeds", "ROC-AUC, %", "minus none", "average precision, %"]
    return markdown(head, lines)


def main() -> None:
    args = parse()
    encoders = {
        name if name == NO_FILE else Path(name).stem: None if name == NO_FILE else Path(name)
        for name in args.encoders
    }
    if len(encoders) < len(args.encoders):
        raise ValueError(f"--encoders: two of {', '.join(args.encoders)} have the same name")
    origins = {name: origin(file) for name, file in encoders.items()}
    paths = tables_of(args)
    predictions = predictions_of(args.predictions, paths, list(encoders))
    shared = {name: getattr(args, name) for name in ("epochs", "batch_size", "lr", "dropout")}
    with results.processes(args.workers, args.cache) as pool:
        sets = {path: prepared(path, args, pool) for path in paths}
    jobs = {}
    for path, data in sets.items():
        here = {"dataset": path.name, "data": data.digest, **shared}
        for name, file in encoders.items():
            for seed in range(args.seeds):
                config = here | {"pretraining": origins[name], "seed": seed}
                jobs[path, name, seed] = config, data, file
    first_seeds_first = sorted(jobs.items(), key=lambda job: job[0][2])
    done = results.complete(args.output, [job for _, job in first_seeds_first], run, args.workers)
    for path in paths:
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
        sys.exit("experiments.transfer.finetune: stopped; finished runs are kept")
