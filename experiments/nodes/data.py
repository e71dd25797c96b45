"""One graph with classes of nodes: one of PyG's sets, or a stochastic block model."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch_geometric.data import Data
from torch_geometric.datasets import Amazon, CitationFull, Coauthor, Planetoid
from torch_geometric.utils import stochastic_blockmodel_graph

from experiments.common.results import write
from experiments.common.sets import check_name, downloaded

SYNTHETIC = "blocks"
PARTS = ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index")
# By the name of the set: PyG's collection of it, if it is not of Planetoid, and its raw file.
OTHERS: dict[str, tuple[Callable[[str, str], Any], str]] = {
    "Photo": (Amazon, "amazon_electronics_photo.npz"),
    "CS": (Coauthor, "ms_academic_cs.npz"),
    "DBLP": (CitationFull, "dblp.npz"),
}


class Stored(NamedTuple):
    """A graph on disk: its file, a digest of its content, and its number of nodes."""

    file: Path
    digest: str
    nodes: int


def fetch(name: str, root: Path | None, cache: Path) -> Stored:
    """Process the graph of a set into a file in ``cache``, unless the file exists."""
    graph = block_model() if name == SYNTHETIC else published(name, root, cache)
    parts = (graph.x, graph.edge_index, graph.y)
    digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()[:12]
    path = cache / f"{name}-{digest}.pt"
    if not path.exists():
        write(path, lambda part: torch.save(parts, part))
    return Stored(path, digest, graph.num_nodes)


def load(path: Path) -> Data:
    """The graph of a file that `fetch` has written."""
    x, edge_index, y = torch.load(path, weights_only=True)
    return Data(x=x, edge_index=edge_index, y=y)


def published(name: str, root: Path | None, cache: Path) -> Data:
    """One of PyG's sets; features of a node sum to 1, as in GRACE."""
    check_name(name)
    collection = OTHERS[name][0] if name in OTHERS else Planetoid
    root = downloaded(collection, name, cache) if root is None else root
    files = [OTHERS[name][1]] if name in OTHERS else [f"ind.{name.lower()}.{p}" for p in PARTS]
    graph = parsed(collection, name, raw_folder(name, root, files), files)
    sums = graph.x.sum(1, keepdim=True)
    return Data(x=graph.x / sums.clamp(min=1), edge_index=graph.edge_index, y=graph.y)


def raw_folder(name: str, root: Path, files: list[str]) -> Path:
    """The folder with the raw files of a set."""
    folders = [root / name / "raw", root / name, root / name.lower()]
    for folder in folders:
        missing = [file for file in files if not (folder / file).is_file()]
        if not missing:
            return folder
        if len(missing) < len(files):
            raise ValueError(f"{folder} has no {' and no '.join(missing)}")
    raise ValueError(
        f"--root {root} has no {name}: {files[0]} is in none of {', '.join(map(str, folders))}; "
        "without --root it is downloaded"
    )


def parsed(
    collection: Callable[[str, str], Any], name: str, folder: Path, files: list[str]
) -> Data:
    """Read by PyG from a copy, as it writes processed files beside the raw ones."""
    with tempfile.TemporaryDirectory() as root:
        for of_set in {name, name.lower()}:  # CitationFull uses the second
            copy = Path(root) / of_set / "raw"
            copy.mkdir(parents=True)
            for file in files:
                shutil.copy(folder / file, copy)
        try:
            return collection(root, name)[0]
        except Exception as error:
            raise ValueError(
                f"{name} in {folder} cannot be read ({type(error).__name__}: {error}): it should "
                "be a set in its raw layout"
            ) from error


def block_model(nodes: int = 2000, blocks: int = 7, seed: int = 0) -> Data:
    """A sparse stochastic block model; nodes have ten words, some of their block's topic."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        sizes = torch.tensor([nodes // blocks + (b < nodes % blocks) for b in range(blocks)])
        inside, across = (
            3.0 * blocks / nodes,
            2.0 / nodes,
        )  # mean degree: 3 inside, 2 anywhere
        probabilities = torch.full((blocks, blocks), across) + inside * torch.eye(blocks)
        edge_index = stochastic_blockmodel_graph(sizes, probabilities)
        labels = torch.repeat_interleave(torch.arange(blocks), sizes)
        words, vocabulary, topical = 10, 80 * blocks, 0.2
        topic = torch.randint(80, (nodes, words)) * blocks + labels[:, None]
        chosen = torch.randint(vocabulary, (nodes, words))
        chosen = torch.where(torch.rand(nodes, words) < topical, topic, chosen)
        x = torch.zeros(nodes, vocabulary).scatter_(1, chosen, 1)
        return Data(x=x / x.sum(1, keepdim=True), edge_index=edge_index, y=labels)
