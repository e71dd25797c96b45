"""Arguments of the commands that compare encoders: tables of molecules, and files of encoders."""

import argparse
import csv
import hashlib
from concurrent.futures import Executor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.common.arguments import count, device, file

from .model import checkpoint
from .molecules import store, write_once
from .ranking import has_both
from .rows import NONE
from .scaffold import TEST, TRAIN, VALID, split
from .smiles import labels, lines, synthetic

NO_FILE = "none"


class LabelledSet(NamedTuple):
    """A table of molecules, split and featurised."""

    tasks: list[str]
    folder: Path  # of the featurised molecules
    labels: Tensor  # [N, tasks]
    digest: str  # of tasks, SMILES and labels
    parts: np.ndarray  # [N]
    device: str


def options_of(parser: argparse.ArgumentParser) -> None:
    """The options that all these commands have."""
    add = parser.add_argument
    add("--csv", type=file, nargs="+", help="tables of molecules and labels; default: synthetic")
    add("--smiles-column", help="default: smiles or mol")
    add(
        "--label-columns",
        type=lambda text: next(csv.reader([text])),
        help="A,B, with quotes around a name that has a comma; default: all others",
    )
    add("--encoders", nargs="+", default=[NO_FILE], help=f"files of pretrain.py, or {NO_FILE!r}")
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=count, default=2, help="runs at a time")
    add("--cache", type=Path, default=Path("runs/molecules"))


def synthetic_table(folder: Path) -> Path:
    """The synthetic molecules, as a table."""
    path = folder / "synthetic.csv"
    smiles, answers = synthetic()
    rows = [
        f"{text},{acid},{halogen}"
        for text, (acid, halogen) in zip(smiles, answers.int().tolist(), strict=True)
    ]
    write_once(path, "\n".join(["smiles,acid,halogen", *rows]) + "\n")
    return path


def tables_of(args: argparse.Namespace) -> list[Path]:
    return args.csv or [synthetic_table(args.cache)]


def prepared(path: Path, args: argparse.Namespace, pool: Executor) -> LabelledSet:
    tasks, answers = labels(path, args.label_columns, args.smiles_column)
    molecules = store(path, args.smiles_column, args.cache, pool)
    texts = list(lines(path, args.smiles_column))
    readable = [texts[line] for line in molecules.lines]
    answers = answers[torch.from_numpy(molecules.lines.copy())]
    parts = split(readable)
    for name, part in (("train", TRAIN), ("validate", VALID), ("test", TEST)):
        here = answers[torch.from_numpy(parts == part)].numpy()
        if not any(has_both(column) for column in here.T):
            raise ValueError(
                f"{path}: the scaffold split leaves {len(here)} molecules to {name}, without a "
                "task that has both classes among them: nothing can be ranked"
            )
    content = repr((tasks, readable)).encode() + answers.numpy().tobytes()
    digest = hashlib.sha256(content).hexdigest()[:12]
    return LabelledSet(tasks, molecules.folder, answers, digest, parts, args.device)


def origin(file: Path | None) -> dict[str, Any] | None:
    """The configuration of an encoder's pre-training, from its file."""
    if file is None:
        return None
    if not file.is_file():
        raise ValueError(f"--encoders: {file} is not a file")
    state = checkpoint(file)
    return state["config"] | {"epochs": len(state["history"])}


def label(pretraining: dict[str, Any] | None) -> str:
    if pretraining is None:
        return NONE
    return f"{pretraining['row']}, {pretraining['molecules']} molecules x {pretraining['epochs']}"
