"""Small sets in the raw layouts that programs read."""

import pickle
from pathlib import Path

import numpy as np
from scipy import sparse

RING, TESTED = 560, 40  # PyG takes 500 nodes for validation


def ring_of_planetoid(folder: Path) -> Path:
    """A folder with a small set in Planetoid's raw layout: a ring, classes along it."""
    random = np.random.default_rng(0)
    features = sparse.csr_matrix((random.random((RING, 12)) < 0.3).astype(np.float32))
    answers = np.eye(2, dtype=int)[np.arange(RING) % 2]
    known = RING - TESTED
    graph = {node: [(node + 1) % RING, (node - 1) % RING] for node in range(RING)}
    parts = {"x": features[:10], "tx": features[known:], "allx": features[:known]}
    parts |= {"y": answers[:10], "ty": answers[known:], "ally": answers[:known], "graph": graph}
    of_set = folder / "sets" / "ring"
    of_set.mkdir(parents=True)
    for name, part in parts.items():
        (of_set / f"ind.ring.{name}").write_bytes(pickle.dumps(part))
    (of_set / "ind.ring.test.index").write_text("\n".join(map(str, range(known, RING))))
    return of_set
