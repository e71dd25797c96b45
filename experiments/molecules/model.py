"""The encoder, its training, and the file of a pre-trained one."""

import pickle
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, global_mean_pool
from torch_geometric.utils.smiles import e_map, x_map

WIDTH = 300
NONE = "no pre-training"
INFO_NCE, PGCL = ROWS = "InfoNCE", "PGCL"


class Categories(nn.Module):
    """The sum of the embeddings of all categories of an atom or bond."""

    def __init__(self, features: dict[str, list[Any]], width: int) -> None:
        super().__init__()
        most = max(map(len, features.values()))
        self.embedding = nn.EmbeddingBag(len(features) * most, width, mode="sum")
        nn.init.xavier_uniform_(self.embedding.weight)
        self.register_buffer("first", torch.arange(len(features)) * most, persistent=False)

    def forward(self, categories: Tensor) -> Tensor:
        return self.embedding(categories + self.first)


class MoleculeGIN(nn.Module):
    """Atoms ``x [V, 9]`` and bonds ``edge_attr [E, 3]`` of a batch -> embeddings ``[G, width]``."""

    def __init__(self, width: int = 300, layers: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.width, self.dropout = width, dropout
        self.atoms = Categories(x_map, width)
        self.bonds = nn.ModuleList(Categories(e_map, width) for _ in range(layers))
        self.convs = nn.ModuleList(
            GINEConv(
                nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            )
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))

    def forward(self, batch: Batch) -> Tensor:
        x = self.atoms(batch.x)
        for conv, bonds, norm in zip(self.convs, self.bonds, self.norms, strict=True):
            x = norm(conv(x, batch.edge_index, bonds(batch.edge_attr)))
            x = x if norm is self.norms[-1] else x.relu()
            x = F.dropout(x, self.dropout, self.training)
        return global_mean_pool(x, batch.batch, batch.num_graphs)


def projected(encoder: MoleculeGIN) -> nn.Sequential:
    """The encoder with its projection head."""
    width = encoder.width
    return nn.Sequential(encoder, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


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


def train_epoch(
    loss_of: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
) -> float:
    """The loss of the last batch of an epoch."""
    for batch in batches:
        loss = loss_of(batch.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def outputs(model: nn.Module, graphs: Sequence[Data]) -> Tensor:
    """What the model, ``Batch -> [G, D]``, makes of all graphs, without dropout."""
    model.eval()
    device = next(model.parameters()).device
    return torch.cat([model(batch.to(device)).cpu() for batch in DataLoader(graphs, 256)])
