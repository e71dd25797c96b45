"""SMILES from text and tables on disk, plain or gzipped; and synthetic ones, for trials."""

import csv
import gzip
import itertools
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch
from torch import Tensor

SMILES_COLUMNS = ("smiles", "mol")  # default columns of a table


@contextmanager
def opened(path: Path) -> Iterator[TextIO]:
    if not path.is_file():
        raise ValueError(f"{path} is not a file")
    opening = gzip.open if path.suffix.lower() == ".gz" else open
    try:
        with opening(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} cannot be read: {error}") from error


def is_table(path: Path, column: str | None) -> bool:
    """Whether the file is a .csv, or a column was named."""
    return column is not None or ".csv" in (suffix.lower() for suffix in path.suffixes)


def lines(path: Path, column: str | None = None) -> Iterator[str]:
    """Iterate over SMILES: a column of a table, or the first word of each line of a text.

    The file is not held in memory.
    """
    with opened(path) as file:
        if is_table(path, column):
            rows = csv.DictReader(file)
            name = smiles_column(path, rows.fieldnames, column)
            yield from (row[name] or "" for row in rows)
        else:
            yield from (line.split()[0] if line.strip() else "" for line in file)


def smiles_column(path: Path, header: Sequence[str] | None, column: str | None) -> str:
    """The column that is named, or one of the default columns."""
    usual = [name for name in SMILES_COLUMNS if name in (header or [])]
    name = column or (usual or SMILES_COLUMNS)[0]
    check_columns(path, header, [name])
    return name


def check_columns(path: Path, header: Sequence[str] | None, wanted: list[str]) -> None:
    for name in wanted:
        if name not in (header or []):
            raise ValueError(f"{path} has no column {name!r}; it has {', '.join(header or [])}")


def labels(
    path: Path, columns: list[str] | None, smiles: str = "smiles"
) -> tuple[list[str], Tensor]:
    """Names of tasks, and their labels ``[N, tasks]``: 0, 1, or nan where nothing was measured.

    If none are named, all columns but that of SMILES are tasks.
    """
    with opened(path) as file:
        table = csv.DictReader(file)
        smiles = smiles_column(path, table.fieldnames, smiles)
        check_columns(path, table.fieldnames, columns or [])
        names = columns or [name for name in table.fieldnames or [] if name != smiles]
        rows = [[row[name] for name in names] for row in table]
    answers = torch.full((len(rows), len(names)), torch.nan)
    for line, row in enumerate(rows, 2):
        for task, text in enumerate(row):
            if text and text.strip():
                answers[line - 2, task] = number(
                    text, f"{path}, line {line}, column {names[task]!r}"
                )
    for name, column in zip(names, answers.T, strict=True):
        values = column[~column.isnan()].unique().tolist()
        if len(values) < 2:
            only = f"only {values[0]:.0f}" if values else "nothing"
            raise ValueError(f"{path}, column {name!r}: labels must be 0 and 1, but it has {only}")
    return names, answers


def number(text: str, where: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if value not in (0, 1):
        raise ValueError(f"{where}: a label must be 0, 1 or empty, but it is {text!r}")
    return value


def synthetic() -> tuple[list[str], Tensor]:
    """1120 small molecules, and two labels: whether it is an acid, whether it has a halogen."""
    ends = ("OC(=O)", "NC(=O)", "O", "N", "Cl", "CC(C)", "C#C", "OS(=O)(=O)")
    rings = (
        *("c1ccc({})cc1", "C1CCC({})CC1", "c1cc({})ncc1", "C1CC({})NCC1"),
        *("c1cc({})sc1", "C1CC({})OC1", "C1CC1{}"),
    )
    sides = ("C", "F", "OC", "c2ccccc2", "C2CC2")
    parts = list(itertools.product(ends, range(4), rings, sides))
    molecules = [f"{end}{'C' * length}{ring.format(side)}" for end, length, ring, side in parts]
    acid = [end in ("OC(=O)", "OS(=O)(=O)") for end, *_ in parts]
    halogen = [end == "Cl" or side == "F" for end, _, _, side in parts]
    return molecules, torch.tensor([acid, halogen]).T.float()
