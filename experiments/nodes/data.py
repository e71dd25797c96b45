"""Graphs with classes of nodes, from the raw files of PyG's sets."""

from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch_geometric.datasets import Amazon, CitationFull, Coauthor, Planetoid
from torch_geometric.io import read_npz, read_planetoid_data

from experiments.common.sets import downloaded

# PyG's class, the folder that it makes, and a raw file.
SETS: dict[str, tuple[Any, str, str]] = {
    "Photo": (Amazon, "Photo", "amazon_electronics_photo.npz"),
    "CS": (Coauthor, "CS", "ms_academic_cs.npz"),
    "DBLP": (CitationFull, "dblp", "dblp.npz"),
    "Cora": (Planetoid, "Cora", "ind.cora.graph"),
    "CiteSeer": (Planetoid, "CiteSeer", "ind.citeseer.graph"),
}


def raw_folder(name: str, root: Path | None, cache: Path) -> Path:
    """The folder with the raw files of a set, below ``root``, or downloaded into ``cache``."""
    collection, folder, file = SETS[name]
    root = downloaded(collection, folder, cache) if root is None else root
    folders = [root / of_set / raw for of_set in (name, name.lower()) for raw in ("raw", "")]
    found = next((folder for folder in folders if (folder / file).is_file()), None)
    if found is None:
        raise ValueError(
            f"--root {root} has no {name}: {file} is in none of {', '.join(map(str, folders))}; "
            "without --root it is downloaded"
        )
    return found


def load(name: str, folder: Path) -> tuple[Tensor, Tensor, Tensor]:
    """Features of unit length ``[N, F]``, edges ``[2, E]`` and labels ``[N]``."""
    collection, _, file = SETS[name]
    try:
        if collection is Planetoid:
            graph = read_planetoid_data(str(folder), name.lower())
        else:
            graph = read_npz(str(folder / file))
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} in {folder} cannot be read ({what})") from error
    return nn.functional.normalize(graph.x), graph.edge_index, graph.y
