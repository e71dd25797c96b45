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
from pgcl_losses.adapters.pyg import AttributeMask, ContrastiveModel, EdgePerturb, NodeDrop

LAYERS, WIDTH = 5, 300
NONE = "no pre-training"
MASKING, INFO_NCE, PGCL = ROWS = "attribute masking", "InfoNCE", "PGCL"
MASK = max(len(values) for values in x_map.values())  # no atom has this category


class Categories(nn.Module):
    """The sum of the embeddings of all categories of an atom or bond."""

    def __init__(self, features: int, values: int) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(features * values, WIDTH, mode="sum")
        nn.init.xavier_uniform_(self.embedding.weight)
        self.register_buffer("first", torch.arange(features) * values, persistent=False)

    def forward(self, categories: Tensor) -> Tensor:
        return self.embedding(categories + self.first)


class MoleculeGIN(nn.Module):
    """Atoms ``x [V, 9]`` and bonds ``edge_attr [E, 3]`` of a batch -> embeddings ``[G, 300]``."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.atoms = Categories(len(x_map), MASK + 1)
        values = max(len(values) for values in e_map.values())
        self.bonds = nn.ModuleList(Categories(len(e_map), values) for _ in range(LAYERS))
        self.convs = nn.ModuleList(
            GINEConv(
                nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
            )
            for _ in range(LAYERS)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in range(LAYERS))

    def nodes(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = self.atoms(x)
        for layer, (conv, bonds, norm) in enumerate(
            zip(self.convs, self.bonds, self.norms, strict=True), 1
        ):
            x = norm(conv(x, edge_index, bonds(edge_attr)))
            x = F.dropout(x if layer == LAYERS else x.relu(), self.dropout, self.training)
        return x

    def forward(self, batch: Batch) -> Tensor:
        nodes = self.nodes(batch.x, batch.edge_index, batch.edge_attr)
        return global_mean_pool(nodes, batch.batch, batch.num_graphs)


class MaskedAtoms(nn.Module):
    """Predicts the elements of masked atoms: pre-training without contrast, ``Batch -> loss``."""

    def __init__(self, encoder: MoleculeGIN, fraction: float = 0.15) -> None:
        super().__init__()
        self.encoder = encoder
        self.mask = AttributeMask(fraction, fill_value=MASK)
        self.head = nn.Linear(WIDTH, len(x_map["atomic_num"]))

    def forward(self, batch: Batch) -> Tensor:
        view = self.mask(batch)
        nodes = self.encoder.nodes(view.x, batch.edge_index, batch.edge_attr)
        masked = view.x[:, 0] == MASK
        logits = self.head(nodes[masked])
        # The sum over no masked atoms is 0; the mean would be nan.
        loss = F.cross_entropy(logits, batch.x[masked, 0].long(), reduction="sum")
        return loss / masked.sum().clamp(min=1)


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
    if config["row"] == MASKING:
        return MaskedAtoms(encoder)
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
        if state.keys() >= {"config", "history", "encoder", "model", "optimizer"}:
            return state
        error = "it has other keys"
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError) as raised:
        error = str(raised).partition("\n")[0]
    raise ValueError(f"{path} is not a file of experiments.molecules.pretrain: {error}")
