"""Molecules as graphs, from files of SMILES and from tables; their scaffold split and ROC-AUC."""

import csv
import gzip
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TextIO

import numpy as np
import torch
from rdkit.Chem.Scaffolds import MurckoScaffold as murcko
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch_geometric.data import Data
from torch_geometric.utils import from_smiles
from tqdm import tqdm

from experiments.common.results import digest

TRAIN, VALID, TEST = 0, 1, 2
SMILES_COLUMNS = ("smiles", "mol")
LABELS = {"": torch.nan, "0": 0.0, "1": 1.0, "0.0": 0.0, "1.0": 1.0}
MAX_INVALID = 0.1  # of the lines of a file; below 0.01 in the sets used here


class LabelledSet(NamedTuple):
    """Molecules whose labels are 0, 1, or nan where nothing was measured."""

    graphs: list[Data]  # with their labels as y, [1, tasks]
    labels: Tensor  # [N, tasks]
    parts: np.ndarray  # [N], of the scaffold split
    digest: str  # of tasks, SMILES and labels

    def part(self, part: int) -> list[Data]:
        return [self.graphs[index] for index in np.flatnonzero(self.parts == part)]


def opened(path: Path) -> TextIO:
    open_text = gzip.open if path.suffix == ".gz" else open
    return open_text(path, "rt", encoding="utf-8-sig", newline="")


def table_of(path: Path) -> tuple[str, list[str], list[dict[str, str]]]:
    """The column of SMILES, all others, and the rows of a table."""
    with opened(path) as file:
        table = csv.DictReader(file)
        rows, columns = list(table), list(table.fieldnames or [])
    name = next((name for name in SMILES_COLUMNS if name in columns), None)
    if name is None:
        raise ValueError(f"{path} has no column {' or '.join(SMILES_COLUMNS)}, it has {columns}")
    return name, [column for column in columns if column != name], rows


def smiles_of(path: Path) -> list[str]:
    """A column of a table, or the first word of each line of a text."""
    if ".csv" in path.suffixes:
        name, _, rows = table_of(path)
        return [row[name] or "" for row in rows]
    with opened(path) as file:
        return [line.split(maxsplit=1)[0] if line.strip() else "" for line in file]


def graph_of(smiles: str) -> Data | None:
    """A molecule as a graph; None if it has no atoms, or RDKit or PyG cannot read it."""
    try:
        graph = from_smiles(smiles)
    except ValueError:  # a category that PyG does not know
        return None
    x, edge_attr = graph.x.byte(), graph.edge_attr.byte()  # 100,000 molecules fit in memory
    return Data(x=x, edge_index=graph.edge_index, edge_attr=edge_attr) if len(x) else None


def graphs_of(path: Path, smiles: list[str]) -> dict[int, Data]:
    """The graphs by line, from 0, without invalid lines."""
    every = map(graph_of, tqdm(smiles, desc=path.name, unit="molecule", leave=False))
    graphs = {line: graph for line, graph in enumerate(every) if graph is not None}
    invalid = [text for line, text in enumerate(smiles) if line not in graphs]
    if not graphs or len(invalid) > MAX_INVALID * len(smiles):
        first = f", the first is {invalid[0]!r}" if invalid else ""
        raise ValueError(f"{path}: {len(invalid)} of {len(smiles)} lines are not molecules{first}")
    return graphs


def split(smiles: Sequence[str]) -> np.ndarray:
    """The part of each molecule ``[N]``: 80 per cent to train, 10 to validate, 10 to test.

    Molecules of one Bemis-Murcko scaffold stay together. Parts get scaffolds from the most frequent
    to the least, of equally frequent ones the last in the file first. A scaffold that would make a
    part too large goes to the next part.
    """
    members: dict[str, list[int]] = {}
    for index, text in enumerate(tqdm(smiles, desc="scaffolds", unit="molecule", leave=False)):
        scaffold = murcko.MurckoScaffoldSmiles(text, includeChirality=True)
        members.setdefault(scaffold, []).append(index)
    parts = np.full(len(smiles), TEST)
    trained, validated = 0, 0
    for group in sorted(members.values(), key=lambda group: (len(group), group[0]), reverse=True):
        if trained + len(group) <= 0.8 * len(smiles):
            parts[group] = TRAIN
            trained += len(group)
        elif trained + validated + len(group) <= 0.9 * len(smiles):
            parts[group] = VALID
            validated += len(group)
    return parts


def has_both(labels: np.ndarray) -> bool:
    """Whether both classes were measured."""
    return bool((labels == 0).any() and (labels == 1).any())


@lru_cache(1)  # programs run all encoders on one set, then on the next
def labelled(path: Path) -> LabelledSet:
    """The molecules of a table, split."""
    column, tasks, rows = table_of(path)
    graphs = graphs_of(path, [row[column] or "" for row in rows])
    smiles = [rows[line][column] for line in graphs]
    labels = torch.tensor([labels_of(path, line, rows[line], tasks) for line in graphs])
    for graph, of_molecule in zip(graphs.values(), labels, strict=True):
        graph.y = of_molecule[None]
    content = repr((tasks, smiles)).encode() + labels.numpy().tobytes()
    data = LabelledSet([*graphs.values()], labels, split(smiles), digest([content]))
    for part, name in {TRAIN: "training", VALID: "validation", TEST: "test"}.items():
        of_part = labels.numpy()[data.parts == part]
        if not any(map(has_both, of_part.T)):
            raise ValueError(
                f"{path}: no task has both classes among the {len(of_part)} molecules of the "
                f"{name} part"
            )
    return data


def labels_of(path: Path, line: int, row: dict[str, str], tasks: list[str]) -> list[float]:
    for name in tasks:
        if (row[name] or "").strip() not in LABELS:
            raise ValueError(
                f"{path}, line {line + 2}, column {name!r}: a label must be 0, 1 or empty, but it "
                f"is {row[name]!r}"
            )
    return [LABELS[(row[name] or "").strip()] for name in tasks]


def roc_auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """In per cent, the mean over the tasks ``[N, tasks]`` that have both classes.

    Labels are 0, 1, or nan where nothing was measured.
    """
    if np.isnan(logits).any():
        raise ValueError("logits are nan, as training has diverged")
    scores = []
    for values, answers in zip(logits.T, labels.T, strict=True):
        if has_both(answers):
            measured = ~np.isnan(answers)
            scores.append(roc_auc_score(answers[measured], values[measured]))
    return 100 * float(np.mean(scores)) if scores else float("nan")
