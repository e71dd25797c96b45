"""The encoder of molecules, and its heads: contrastive, masked atoms, tasks."""

import pickle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch
from torch_geometric.nn import GINEConv, global_mean_pool
from torch_geometric.utils.smiles import e_map, x_map

from experiments.common.losses import FirstInfoNCE
from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import AttributeMask, ContrastiveModel, EdgePerturb, NodeDrop

from .molecules import ATOM, BOND
from .rows import MASKING, options

LAYERS, WIDTH = 5, 300
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
    """Atoms ``[V, 9]`` and bonds ``[E, 3]`` -> embeddings of molecules ``[G, 300]``."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.atoms = Categories(ATOM, MASK + 1)
        values = max(len(values) for values in e_map.values())
        self.bonds = nn.ModuleList(Categories(BOND, values) for _ in range(LAYERS))
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

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, num_graphs: int
    ) -> Tensor:
        return global_mean_pool(self.nodes(x, edge_index, edge_attr), batch, num_graphs)


class Projected(nn.Module):
    """The encoder with its projection head."""

    def __init__(self, encoder: MoleculeGIN) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, batch: Tensor, num_graphs: int
    ) -> Tensor:
        return self.head(self.encoder(x, edge_index, edge_attr, batch, num_graphs))


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
        loss = F.cross_entropy(logits, batch.x[masked, 0], reduction="sum")
        return loss / masked.sum().clamp(min=1)


class Tasks(nn.Module):
    """The encoder with a linear layer for properties, ``Batch -> [G, tasks]`` logits."""

    def __init__(self, encoder: MoleculeGIN, tasks: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(WIDTH, tasks)

    def forward(self, b: Batch) -> Tensor:
        return self.head(self.encoder(b.x, b.edge_index, b.edge_attr, b.batch, b.num_graphs))


def pretraining(config: dict[str, Any], encoder: MoleculeGIN, batches: int) -> nn.Module:
    """``Batch -> loss`` of a run of pretrain.py with so many batches an epoch."""
    if config["row"] == MASKING:
        return MaskedAtoms(encoder)
    drop = config["drop"]
    loss = FirstInfoNCE(
        PGCLLoss(WIDTH, **options(config, batches)), config.get("lead_steps", 0), kept=0
    )
    return ContrastiveModel(Projected(encoder), NodeDrop(drop), EdgePerturb(drop), loss)


def encoder_of(file: Path | None, dropout: float = 0.0) -> MoleculeGIN:
    """A new encoder, or a pre-trained one."""
    encoder = MoleculeGIN(dropout)
    if file is not None:
        state = checkpoint(file)
        pretraining(state["config"], encoder, 0).load_state_dict(state["model"])
    return encoder


def checkpoint(path: Path) -> dict[str, Any]:
    """A file of pretrain.py. Nothing in it is executed."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state.keys() >= {"config", "history", "model", "optimizer"}:
            return state
        error = "it has other keys"
    except (pickle.UnpicklingError, RuntimeError, EOFError, AttributeError) as raised:
        error = str(raised).partition("\n")[0]
    raise ValueError(f"{path} is not a file of pretrain.py: {error}")
