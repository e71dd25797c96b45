"""Molecules as graphs, featurised once and read from disk on access."""

import hashlib
import itertools
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from rdkit import Chem, RDLogger
from torch_geometric.data import Data
from torch_geometric.utils.smiles import e_map, from_rdmol, x_map
from tqdm import tqdm

from experiments.common.results import write

from .smiles import is_table, lines

MAX_INVALID = 0.1  # fraction of the lines of a file; below 0.01 in the sets used here
ATOM, BOND = len(x_map), len(e_map)  # features of an atom and of a bond
CHUNK = 1000  # molecules that are written at once
AHEAD = 2 * (os.cpu_count() or 1)  # chunks that are featurised ahead of writing
FILES = {
    "molecules": (np.int64, 3),  # line in the source, atoms, bonds
    "atoms": (np.uint8, ATOM),
    "bonds": (np.uint8, BOND),
    "ends": (np.uint16, 2),  # the atoms of a bond
}
PROGRESS = "progress.json"
Chunk = dict[str, np.ndarray]


def featurised(smiles: list[str], first: int) -> Chunk:
    """The arrays of these lines, without those that RDKit or PyG cannot read."""
    RDLogger.DisableLog("rdApp.*")
    rows: dict[str, list[np.ndarray]] = {
        name: [np.empty((0, w), t)] for name, (t, w) in FILES.items()
    }
    for line, text in enumerate(smiles, first):
        graph = graph_of(text)
        if graph is None:
            continue
        once = graph.edge_index[0] < graph.edge_index[1]  # each bond is there in both directions
        rows["molecules"].append(np.array([[line, graph.num_nodes, int(once.sum())]]))
        rows["atoms"].append(graph.x.numpy().astype(np.uint8))
        rows["bonds"].append(graph.edge_attr[once].numpy().astype(np.uint8))
        rows["ends"].append(graph.edge_index[:, once].T.numpy().astype(np.uint16))
    return {name: np.concatenate(parts) for name, parts in rows.items()}


def graph_of(smiles: str) -> Data | None:
    """A molecule as a graph; None if it has no atoms, or RDKit or PyG cannot read it."""
    molecule = Chem.MolFromSmiles(smiles)
    if molecule is None or not 0 < molecule.GetNumAtoms() < 2**16:
        return None
    try:
        return from_rdmol(molecule)
    except ValueError:  # a category that PyG does not know
        return None


class Molecules(torch.utils.data.Dataset):
    """The molecules of a folder written by :func:`store`; 16 bytes of each are held in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.arrays = {
            name: np.memmap(folder / name, dtype, mode="r").reshape(-1, width)
            for name, (dtype, width) in FILES.items()
            if (folder / name).stat().st_size
        }
        self.ends = np.cumsum(self.arrays["molecules"][:, 1:], axis=0)  # of atoms and of bonds

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def digest(self) -> str:
        """Of the molecules in the folder."""
        return json.loads((self.folder / PROGRESS).read_text())["digest"]

    @property
    def lines(self) -> np.ndarray:
        """The line of each molecule in its source, from 0."""
        return self.arrays["molecules"][:, 0]

    def __getitem__(self, index: int) -> Data:
        _, atoms, bonds = self.arrays["molecules"][index]
        last_atom, last_bond = self.ends[index]
        x = torch.from_numpy(self.arrays["atoms"][last_atom - atoms : last_atom].astype(np.int64))
        if not bonds:
            none = torch.empty(0, BOND, dtype=torch.long)
            return Data(x=x, edge_index=torch.empty(2, 0, dtype=torch.long), edge_attr=none)
        of_molecule = slice(last_bond - bonds, last_bond)
        ends = torch.from_numpy(self.arrays["ends"][of_molecule].astype(np.int64)).T
        features = torch.from_numpy(self.arrays["bonds"][of_molecule].astype(np.int64))
        edge_index = torch.cat([ends, ends.flip(0)], dim=1)
        return Data(x=x, edge_index=edge_index, edge_attr=features.repeat(2, 1))


def store(source: Path, column: str | None, cache: Path, pool: Executor) -> Molecules:
    """The molecules of a file, featurised into a folder of ``cache``; resumes if interrupted.

    The content and the column identify a file. One process featurises it, others wait.
    """
    folder = cache / f"{source.name}-{content_digest(source, column)[:12]}"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        progress = folder / PROGRESS
        done: dict[str, Any] = {"lines": 0, "molecules": 0, "digest": "", "whole": False}
        done["bytes"] = dict.fromkeys(FILES, 0)
        if progress.exists():
            done = json.loads(progress.read_text())
        if not done["whole"]:
            for name, size in done["bytes"].items():  # the rest is a partial chunk
                (folder / name).touch()
                os.truncate(folder / name, size)
            append_chunks(folder, progress, done, lines(source, column), pool)
    if not done["molecules"]:
        raise ValueError(f"{source}: none of its {done['lines']} lines is a molecule")
    molecules = Molecules(folder)
    check_readable(source, column, molecules.lines, done["lines"])
    return molecules


def check_readable(source: Path, column: str | None, readable: np.ndarray, total: int) -> None:
    """Raise an error if more than `MAX_INVALID` of the lines are not molecules."""
    bad = total - len(readable)
    if bad <= MAX_INVALID * total:
        return
    counted = np.arange(len(readable) + 1)
    first = int(np.argmin(np.append(readable, -1) == counted))  # line that is not readable
    text = next(itertools.islice(lines(source, column), first, None))
    line = first + 1 + is_table(source, column)  # a table has a header
    raise ValueError(
        f"{source}: {bad} of its {total} lines ({bad / total:.0%}) are not molecules, the first on "
        f"line {line}: {text!r}. Up to {MAX_INVALID:.0%} are left out; correct or remove some"
    )


def content_digest(source: Path, column: str | None) -> str:
    if not source.is_file():
        raise ValueError(f"{source} is not a file")
    digest = hashlib.sha256(repr(column).encode())
    with source.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def append_chunks(
    folder: Path, progress: Path, done: dict[str, Any], smiles: Iterable[str], pool: Executor
) -> None:
    rest = itertools.islice(smiles, done["lines"], None)
    with tqdm(desc=folder.name, initial=done["lines"], unit="molecule") as bar:
        for count, chunk in in_order(pool, rest, done["lines"]):
            digest = hashlib.sha256(done["digest"].encode())
            for name, rows in chunk.items():
                data = rows.tobytes()
                digest.update(data)
                with (folder / name).open("ab") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                done["bytes"][name] += len(data)
            done["digest"] = digest.hexdigest()
            done["lines"] += count
            done["molecules"] += len(chunk["molecules"])
            write(progress, lambda part: part.write_text(json.dumps(done)))
            bar.update(count)
    done["whole"] = True
    write(progress, lambda part: part.write_text(json.dumps(done)))
    skipped = done["lines"] - done["molecules"]
    print(f"{folder.name}: {done['molecules']} molecules, {skipped} invalid lines left out")


def in_order(pool: Executor, smiles: Iterator[str], first: int) -> Iterator[tuple[int, Chunk]]:
    """Featurised chunks of lines; at most `AHEAD` are read ahead."""
    waiting: deque[tuple[int, Future[Chunk]]] = deque()
    while chunk := list(itertools.islice(smiles, CHUNK)):
        waiting.append((len(chunk), pool.submit(featurised, chunk, first)))
        first += len(chunk)
        if len(waiting) > AHEAD:
            count, future = waiting.popleft()
            yield count, future.result()
    for count, future in waiting:
        yield count, future.result()


def write_once(path: Path, text: str) -> None:
    """Write the file; an existing one with other text is an error."""
    if not path.exists():
        write(path, lambda part: part.write_text(text))
    elif path.read_text() != text:
        raise ValueError(f"{path} exists and has other content: move it away")
