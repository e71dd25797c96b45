"""A pre-trained encoder and its file; the encoder itself is in examples/molecules.py."""

import pickle
from pathlib import Path
from typing import Any

import torch

from examples.molecules import MoleculeGIN

WIDTH = 300
NONE = "no pre-training"
INFO_NCE, PGCL = ROWS = "InfoNCE", "PGCL"


def encoder_of(file: Path | None, dropout: float = 0.0) -> MoleculeGIN:
    """A new encoder, or a pre-trained one."""
    encoder = MoleculeGIN(WIDTH, dropout=dropout)
    if file is not None:
        encoder.load_state_dict(checkpoint(file)["encoder"])
    return encoder


def checkpoint(path: Path) -> dict[str, Any]:
    """A file of pretrain.py. Nothing in it is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state.keys() >= {"config", "encoder"}:
            return state
        error = "it has other keys"
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError) as raised:
        error = str(raised).partition("\n")[0]
    raise ValueError(f"{path} is not a file of experiments.molecules.pretrain: {error}")
