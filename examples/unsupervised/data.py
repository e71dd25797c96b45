"""Graphs to learn from: a TU set from disk or the network, or trees with planted motifs."""

import itertools
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch_geometric.data import Data
from torch_geometric.datasets import TUDataset
from torch_geometric.utils import to_undirected

SYNTHETIC = "motifs"
FOLDS = 10
Edges = list[tuple[int, int]]
MOTIFS: dict[str, Edges] = {
    "ring of 6": [(i, (i + 1) % 6) for i in range(6)],
    "ring of 5": [(i, (i + 1) % 5) for i in range(5)],
    "clique of 4": [(i, j) for i in range(4) for j in range(i)],
    "star of 6": [(0, i) for i in range(1, 6)],
}


def load(name: str, root: Path | None, cache: Path) -> list[Data]:
    """The graphs of a set, with ``x`` and ``y``, fit for a ten-fold comparison of classes."""
    graphs = planted_motifs() if name == SYNTHETIC else tu_graphs(name, root, cache)
    counts = torch.cat([graph.y for graph in graphs]).bincount().tolist()
    if len(counts) < 2 or min(counts) < FOLDS:
        raise ValueError(
            f"{name} has classes of {counts} graphs: the evaluation needs at least two classes, "
            f"and {FOLDS} graphs of each"
        )
    return graphs


def tu_graphs(name: str, root: Path | None, cache: Path) -> list[Data]:
    """A set in the raw layout of TU, from ``root`` or, if it is not there, downloaded."""
    raw = cache / name / "raw"
    if root is not None and not (raw / f"{name}_A.txt").exists():
        copy_raw(name, root, raw)
    try:
        graphs = list(TUDataset(cache, name))
    except Exception as error:
        shutil.rmtree(cache / name, ignore_errors=True)  # for a mended set to be read anew
        raise ValueError(
            f"{name} cannot be read ({type(error).__name__}: {error}). It should be a TU set: "
            f"{name}.zip or {name}/{name}_A.txt, _graph_indicator.txt and _graph_labels.txt in "
            f"--root, or else one that PyG can download"
        ) from error
    if not graphs or graphs[0].y is None:
        raise ValueError(f"{name} has no labels of graphs: {name}_graph_labels.txt is missing")
    for graph in graphs:
        if graph.x is None:
            graph.x = torch.ones(graph.num_nodes, 1)
    return graphs


def copy_raw(name: str, root: Path, raw: Path) -> None:
    """Copies the raw files out of a folder or zip, which may be read-only, if there is one."""
    if not root.is_dir():
        raise ValueError(f"--root {root} is not a folder")
    with tempfile.TemporaryDirectory() as unpacked:
        sources = [root / name / "raw", root / name]
        if (root / f"{name}.zip").exists():
            try:
                zipfile.ZipFile(root / f"{name}.zip").extractall(unpacked)
            except zipfile.BadZipFile as error:
                raise ValueError(f"{root / name}.zip is damaged: {error}") from error
            sources = [Path(unpacked) / name, Path(unpacked)]
        for source in sources:
            if (source / f"{name}_A.txt").exists():
                part = raw.with_name("raw.part")  # not to be taken for whole if this is interrupted
                shutil.rmtree(part, ignore_errors=True)
                shutil.copytree(source, part, ignore=shutil.ignore_patterns("raw", "processed"))
                part.rename(raw)
                return


def planted_motifs(num_graphs: int = 480, templates: int = 10, seed: int = 0) -> list[Data]:
    """Random trees that carry motifs of two kinds, one each; which two is the class.

    Classes share motifs, and the graphs of a class are few templates with some leaves added: a
    batch is full of near-duplicates, which InfoNCE takes for negatives of each other.
    """
    random = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    def template(*kinds: str) -> Edges:
        edges = add_leaves([], 5 + below(15), below)
        for motif in (MOTIFS[kind] for kind in kinds):
            size = num_nodes(edges)
            edges += [(size + a, size + b) for a, b in motif] + [(size, below(size))]
        return edges

    classes = list(itertools.combinations(MOTIFS, 2))
    made = [[template(*kinds) for _ in range(templates)] for kinds in classes]
    graphs = []
    for index in range(num_graphs):
        label = index % len(classes)
        edges = add_leaves(made[label][below(templates)], below(4), below)
        x, y = torch.ones(num_nodes(edges), 1), torch.tensor([label])
        graphs.append(Data(x=x, y=y, edge_index=to_undirected(torch.tensor(edges).T)))
    return graphs


def num_nodes(edges: Edges) -> int:
    return 1 + max((max(edge) for edge in edges), default=0)


def add_leaves(edges: Edges, count: int, below: Callable[[int], int]) -> Edges:
    """The same tree with new nodes, each joined to a random one."""
    size = num_nodes(edges)
    return edges + [(node, below(node)) for node in range(size, size + count)]
