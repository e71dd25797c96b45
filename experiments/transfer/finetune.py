"""Fine-tunes pre-trained encoders on properties of molecules, and compares their ROC-AUC.

python -m experiments.transfer.finetune --encoders none runs/transfer/PGCL.pt        # made here
python -m experiments.transfer.finetune --csv bbbp.csv tox21.csv \\
    --encoders none runs/transfer/PGCL.pt
python -m experiments.transfer.finetune --csv mine.csv --smiles-column smi --label-columns A,B \\
    --encoders runs/transfer/PGCL.pt --predictions runs/predictions

Finished runs are kept, one JSON line each, in --output; what is there already is not run again.
"""

import argparse
import csv
import hashlib
import sys
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import torch

from experiments.shelf import results
from experiments.shelf.tables import difference, spread

from .model import NONE, checkpoint
from .molecules import keep, store
from .scaffold import TEST, TRAIN, VALID, split
from .smiles import labels, lines, made
from .tuning import Given, best_epoch, run

NO_FILE = "none"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m experiments.transfer.finetune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--csv", type=Path, nargs="+", help="tables of molecules and labels; else one is made here")
    add("--smiles-column", help="default: smiles or mol")
    add(
        "--label-columns",
        type=lambda text: next(csv.reader([text])),
        help="A,B, in quotes where a name has a comma; default: all others",
    )
    add("--encoders", nargs="+", default=[NO_FILE], help=f"files of pretrain.py, or {NO_FILE!r}")
    add("--seeds", type=int, default=3)
    add("--epochs", type=int, default=20)
    add("--batch-size", type=int, default=32)
    add("--lr", type=float, default=1e-3)
    add("--dropout", type=float, default=0.5)
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=int, default=2, help="runs at a time")
    add("--cache", type=Path, default=Path("runs/molecules"))
    add("--output", type=Path, default=Path("runs/transfer/finetuning.jsonl"))
    add(
        "--predictions",
        type=Path,
        metavar="FOLDER",
        help="train with the first seed once more, and write predictions for all molecules there",
    )
    return parser.parse_args()


def made_table(folder: Path) -> Path:
    """The molecules made here, as a table."""
    path = folder / "made.csv"
    smiles, answers = made()
    rows = [
        f"{text},{acid},{halogen}"
        for text, (acid, halogen) in zip(smiles, answers.int().tolist(), strict=True)
    ]
    keep(path, "\n".join(["smiles,acid,halogen", *rows]) + "\n")
    return path


def prepared(path: Path, args: argparse.Namespace, pool: Executor) -> Given:
    """What the runs on one table share. All that can be wrong with it is an error here."""
    tasks, answers = labels(path, args.label_columns, args.smiles_column)
    molecules = store(path, args.smiles_column, args.cache, pool)
    texts = list(lines(path, args.smiles_column))
    readable = [texts[line] for line in molecules.lines]
    answers = answers[torch.from_numpy(molecules.lines.copy())]
    parts = split(readable)
    for name, part in (("train", TRAIN), ("validate", VALID), ("test", TEST)):
        there = answers[torch.from_numpy(parts == part)]
        if not any(len(column[~column.isnan()].unique()) == 2 for column in there.T):
            raise ValueError(
                f"{path}: the scaffold split leaves {len(there)} molecules to {name}, without a "
                "task that has both classes among them: nothing can be ranked"
            )
    digest = hashlib.sha256(repr((tasks, readable)).encode() + answers.numpy().tobytes())
    return Given(tasks, molecules.folder, answers, digest.hexdigest()[:12], parts, args.device)


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


def origin(file: Path | None) -> dict[str, Any] | None:
    """How an encoder was pre-trained, as its file says."""
    if file is None:
        return None
    if not file.is_file():
        raise ValueError(f"--encoders: {file} is not a file")
    state = checkpoint(file)
    return state["config"] | {"epochs": len(state["history"])}


def score(run: results.Run) -> float:
    return run["auc"]["test"][best_epoch(run["auc"])]


def label(pretraining: dict[str, Any] | None) -> str:
    if pretraining is None:
        return NONE
    return f"{pretraining['row']}, {pretraining['molecules']} molecules x {pretraining['epochs']}"


def table(runs: dict[str, dict[int, results.Run]]) -> str:
    """Markdown: a line for each encoder, of one set."""
    scores = {
        name: {seed: score(run) for seed, run in seeds.items()} for name, seeds in runs.items()
    }
    made = [
        "| pre-training | encoder | seeds | ROC-AUC, % | minus none |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, seeds in scores.items():
        how = label(next(iter(runs[name].values()))["config"]["pretraining"])
        cells = [how, name, len(seeds), spread(list(seeds.values()))]
        made.append(
            f"| {' | '.join(map(str, cells))} | {difference(seeds, scores.get(NO_FILE, {}))} |"
        )
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
    tables = args.csv or [made_table(args.cache)]
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
