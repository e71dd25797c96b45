"""A small graph with classes of nodes, in the raw layout of Photo."""

from pathlib import Path

import numpy as np
from scipy import sparse


def write_photo(folder: Path, num_nodes: int, num_classes: int) -> None:
    """Nodes of one class have more edges with each other than with other nodes."""
    random = np.random.default_rng(0)
    labels = np.arange(num_nodes) % num_classes
    same = labels[:, None] == labels
    parts = {"labels": labels}
    chances = {"adj": 0.01 + 0.1 * same, "attr": np.full((num_nodes, 40), 0.05)}
    for name, chance in chances.items():
        matrix = sparse.csr_matrix(random.random(chance.shape) < chance, dtype=float)
        for field in ("data", "indices", "indptr", "shape"):
            parts[f"{name}_{field}"] = getattr(matrix, field)
    folder.mkdir(parents=True)
    np.savez(folder / "amazon_electronics_photo.npz", **parts)
