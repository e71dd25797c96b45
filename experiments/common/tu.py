"""Sets of graphs of the TU collection, from disk or the network."""

import tempfile
import zipfile
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.datasets import TUDataset

from .results import digest, write
from .sets import downloaded

FOLDS = 10
REQUIRED = ("A", "graph_indicator", "graph_labels")  # raw files of a set: NAME_A.txt, ...
PARTS = (*REQUIRED, "node_labels", "node_attributes")  # those that are read


def fetch(name: str, root: Path | None, cache: Path) -> tuple[Path, str]:
    """The file in ``cache`` with the graphs of a set, written if it does not exist, and a digest.

    The set comes from ``root`` or, without one, from the network. Its content identifies it: if
    its files change, so do the file in ``cache`` and the digest.
    """
    files = raw_files(name, downloaded(TUDataset, name, cache) if root is None else root)
    named = [part for file, raw in sorted(files.items()) for part in (file.encode(), raw)]
    path = cache / f"{name}-{digest(named)}.pt"
    graphs = load(path) if path.exists() else parsed(name, files)
    counts = torch.cat([graph.y for graph in graphs]).bincount().tolist()
    if len(counts) < 2 or min(counts) < FOLDS:
        raise ValueError(
            f"{name} has classes of {counts} graphs: the evaluation needs at least two classes, "
            f"and {FOLDS} graphs of each"
        )
    if not path.exists():
        tensors = [(graph.x, graph.edge_index, graph.y) for graph in graphs]
        write(path, lambda part: torch.save(tensors, part))
    return path, digest_of(graphs)


def load(path: Path) -> list[Data]:
    """The graphs of a file that `fetch` has written, with ``x`` and ``y``."""
    tensors = torch.load(path, weights_only=True)
    return [Data(x=x, edge_index=edge_index, y=y) for x, edge_index, y in tensors]


def digest_of(graphs: list[Data]) -> str:
    tensors = [tensor for graph in graphs for tensor in (graph.x, graph.edge_index, graph.y)]
    shapes = repr([(tensor.dtype, tuple(tensor.shape)) for tensor in tensors])
    return digest([shapes.encode(), *(tensor.numpy().tobytes() for tensor in tensors)])


def raw_files(name: str, root: Path) -> dict[str, bytes]:
    """The raw files of a set by their names, from a folder or a zip that is only read."""
    sources = [root / name / "raw", root / name]
    packed = root / f"{name}.zip"
    if packed.exists():
        try:
            sources += [zipfile.Path(packed) / name, zipfile.Path(packed)]
        except zipfile.BadZipFile as error:
            raise ValueError(f"{packed} is damaged: {error}") from error
    for source in sources:
        files = {file: source / file for file in (f"{name}_{part}.txt" for part in PARTS)}
        there = {file: path.read_bytes() for file, path in files.items() if path.exists()}
        missing = [
            file for file in (f"{name}_{part}.txt" for part in REQUIRED) if file not in there
        ]
        if not missing:
            return there
        if there:
            raise ValueError(f"{source} has no {' and no '.join(missing)}")
    raise ValueError(
        f"--root {root} has no {name}: neither {name}.zip nor {name}/{name}_A.txt nor "
        f"{name}/raw/{name}_A.txt is there; without --root it is downloaded"
    )


def parsed(name: str, files: dict[str, bytes]) -> list[Data]:
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / name / "raw"
        raw.mkdir(parents=True)
        for file, content in files.items():
            (raw / file).write_bytes(content)
        try:
            graphs = list(TUDataset(folder, name))
        except Exception as error:
            raise ValueError(
                f"{name} cannot be read ({type(error).__name__}: {error}): it should be a set in "
                "the raw layout of TU"
            ) from error
    for graph in graphs:
        if graph.x is None:
            graph.x = torch.ones(graph.num_nodes, 1)
    return graphs
