"""Scaffold split: no scaffold of the test part is in the training part."""

from collections.abc import Sequence

import numpy as np
from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles
from tqdm import tqdm

TRAIN, VALID, TEST = 0, 1, 2
PARTS = ("training", "validation", "test")


def split(smiles: Sequence[str]) -> np.ndarray:
    """The part of each molecule ``[N]``: 80 per cent to train, 10 to validate, 10 to test.

    Molecules of one Bemis-Murcko scaffold stay together. Parts get scaffolds from the most frequent
    to the least, of equally frequent ones the last in the file first. A scaffold that would make a
    part too large goes to the next part.
    """
    members: dict[str, list[int]] = {}
    for index, text in enumerate(tqdm(smiles, desc="scaffolds", unit="molecule", leave=False)):
        members.setdefault(MurckoScaffoldSmiles(text, includeChirality=True), []).append(index)
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
