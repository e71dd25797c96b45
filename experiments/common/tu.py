"""Sets of graphs of the TU collection, from disk or the network."""

import os
import tempfile
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.datasets import TUDataset

from .results import digest
from .sets import downloaded

FOLDS = 10


def fetch(name: str, root: Path | None, cache: Path, least: int = FOLDS) -> tuple[Path, str]:
    """A folder in ``cache`` with a set as PyG reads it, made if it does not exist, and a digest.

    The set comes from ``root``, which is only read, or, without one, from the network. Its files
    identify it: if they change, so do the folder and the digest. ``least``: how many graphs each of
    its classes must have.
    """
    root = downloaded(TUDataset, name, cache) if root is None else root
    folders = [root / name / "raw", root / name]
    raw = next((folder for folder in folders if (folder / f"{name}_A.txt").is_file()), None)
    if raw is None:
        raise ValueError(
            f"--root {root} has no {name}: {name}_A.txt is in none of "
            f"{', '.join(map(str, folders))}; without --root it is downloaded"
        )
    files = {file.name: file.read_bytes() for file in sorted(raw.glob(f"{name}_*.txt"))}
    of_files = digest(part for name, text in files.items() for part in (name.encode(), text))
    folder = cache / f"{name}-{of_files}"
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as part:
            there = Path(part) / name / name / "raw"
            there.mkdir(parents=True)
            for file, text in files.items():
                (there / file).write_bytes(text)
            check(name, there.parents[1], least)
            os.rename(there.parents[1], folder)
    return folder, of_files


def check(name: str, folder: Path, least: int) -> None:
    """An error before any run, if PyG cannot read a set, or the evaluation cannot split it."""
    try:
        graphs = list(TUDataset(str(folder), name))
    except Exception as error:
        raise ValueError(
            f"{name} cannot be read ({type(error).__name__}: {error}): it should be a set in "
            "the raw layout of TU"
        ) from error
    counts = torch.cat([graph.y for graph in graphs]).bincount().tolist()
    if len(counts) < 2 or min(counts) < least:
        raise ValueError(
            f"{name} has classes of {counts} graphs: the evaluation needs at least two classes, "
            f"and {least} graphs of each"
        )


def load(folder: Path) -> list[Data]:
    """The graphs of a folder that `fetch` has made.

    Features are the labels of nodes, without labels their attributes, and without these a 1.
    """
    name = folder.name.rpartition("-")[0]
    has_labels = TUDataset(str(folder), name).num_node_labels > 0
    graphs = list(TUDataset(str(folder), name, use_node_attr=not has_labels))
    for graph in graphs:
        if graph.x is None:
            graph.x = torch.ones(graph.num_nodes, 1)
    return graphs
