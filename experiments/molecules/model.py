"""The encoder of molecules, its pre-training and its file."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, global_mean_pool
from torch_geometric.utils.smiles import e_map, x_map

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

LAYERS, WIDTH = 5, 300
NONE = "no pre-training"
INFO_NCE, PGCL = ROWS = "InfoNCE", "PGCL"


class Categories(nn.Module):
    """The sum of the embeddings of all categories of an atom or bond."""

    def __init__(self, features: dict[str, list[Any]]) -> None:
        super().__init__()
        most = max(map(len, features.values()))
        self.embedding = nn.EmbeddingBag(len(features) * most, WIDTH, mode="sum")
        nn.init.xavier_uniform_(self.embedding.weight)
        self.register_buffer("first", torch.arange(len(features)) * most, persistent=False)

    def forward(self, categories: Tensor) -> Tensor:
        return self.embedding(categories + self.first)


class MoleculeGIN(nn.Module):
    """Atoms ``x [V, 9]`` and bonds ``edge_attr [E, 3]`` of a batch -> embeddings ``[G, 300]``."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.atoms = Categories(x_map)
        self.bonds = nn.ModuleList(Categories(e_map) for _ in range(LAYERS))
        self.convs = nn.ModuleList(
            GINEConv(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            )
            for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(LAYERS))

    def forward(self, batch: Batch) -> Tensor:
        x = self.atoms(batch.x)
        for layer, (conv, bonds, norm) in enumerate(
            zip(self.convs, self.bonds, self.norms, strict=True), 1
        ):
            x = norm(conv(x, batch.edge_index, bonds(batch.edge_attr)))
            x = F.dropout(x if layer == LAYERS else x.relu(), self.dropout, self.training)
        return global_mean_pool(x, batch.batch, batch.num_graphs)


def projected(encoder: MoleculeGIN) -> nn.Sequential:
    """The encoder with its projection head."""
    return nn.Sequential(encoder, nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


@torch.no_grad()
def outputs(model: nn.Module, graphs: list[Data]) -> Tensor:
    """What the model, ``Batch -> [G, D]``, makes of all graphs, without dropout."""
    model.eval()
    device = next(model.parameters()).device
    return torch.cat([model(batch.to(device)).cpu() for batch in DataLoader(graphs, 256)])


def pretraining(config: dict[str, Any], encoder: MoleculeGIN, batches: int) -> nn.Module:
    """``Batch -> loss`` of a row, for so many batches an epoch."""
    # Before the loss, which draws prototypes: all rows of a seed have the same head.
    model = projected(encoder)
    frozen = config["freeze_epochs"] * batches
    loss = InfoNCE() if config["row"] == INFO_NCE else PGCLLoss(WIDTH, freeze_steps=frozen)
    augments = NodeDrop(config["drop"]), EdgePerturb(config["drop"])
    return ContrastiveModel(model, *augments, loss)


def encoder_of(file: Path | None, dropout: float = 0.0) -> MoleculeGIN:
    """A new encoder, or a pre-trained one."""
    encoder = MoleculeGIN(dropout)
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
