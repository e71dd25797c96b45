"""One run: train a GCN on a graph without labels, and measure its embeddings."""

import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch_geometric.nn import GCNConv
from torch_geometric.utils import dropout_edge

from experiments.common import probes
from experiments.common.losses import Objective

from .data import load
from .probe import linear
from .rows import RAW, UNTRAINED

# GRACE's, published with its code.
SETTINGS: dict[str, dict[str, Any]] = {
    "Cora": {
        "width": 128,
        "activation": "relu",
        "lr": 5e-4,
        "temperature": 0.4,
        "edges_dropped": (0.2, 0.4),
        "features_masked": (0.3, 0.4),
    },
    "CiteSeer": {
        "width": 256,
        "activation": "prelu",
        "lr": 1e-3,
        "temperature": 0.9,
        "edges_dropped": (0.2, 0.0),
        "features_masked": (0.3, 0.2),
    },
}
SHARED = {"epochs": 200, "weight_decay": 1e-5}


def setting(dataset: str) -> dict[str, Any]:
    """GRACE's options for a set; those of Cora for sets that GRACE does not have."""
    return SHARED | SETTINGS.get(dataset, SETTINGS["Cora"])


class GCN(nn.Module):
    """Two layers; features may be sparse."""

    def __init__(self, features: int, width: int, activation: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList([GCNConv(features, 2 * width), GCNConv(2 * width, width)])
        self.activation = {"relu": nn.ReLU, "prelu": nn.PReLU}[activation]()

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        for conv in self.convs:
            x = self.activation(conv(x, edge_index))
        return x


def run(config: dict[str, Any], file: Path) -> dict[str, Any]:
    """The results of a run with this configuration, ready for JSON."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    graph = load(file)
    history: list[dict[str, Any]] = []
    if config["row"] == RAW:
        embeddings = graph.x
    else:
        features = sparse(graph.x)
        encoder = GCN(features.shape[1], config["width"], config["activation"])
        if config["row"] != UNTRAINED:
            history = train(config, encoder, features, graph.edge_index)
        with torch.no_grad():
            embeddings = encoder(features, graph.edge_index)
    values = measured(embeddings.numpy(), graph.y.numpy(), config["seed"])
    seconds = round(time.perf_counter() - started, 1)
    return {"config": config, **values, "history": history, "seconds": seconds}


def sparse(x: Tensor) -> Tensor:
    """Few entries are not 0: sparse products take a tenth of the time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return x.to_sparse_csr()


def measured(embeddings: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    values = {"probe": linear(embeddings, labels, seed)}
    values |= probes.without_training(embeddings, labels, seed)
    return {name: round(value, 3) for name, value in values.items()}


def train(
    config: dict[str, Any], encoder: GCN, x: Tensor, edge_index: Tensor
) -> list[dict[str, Any]]:
    width = config["width"]
    head = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, width))
    objective = Objective(config["loss"], width, config["temperature"], config["epochs"])
    optimizer = torch.optim.Adam(
        [*encoder.parameters(), *head.parameters(), *objective.parameters()],
        lr=config["lr"],
        weight_decay=config["weight_decay"],
    )
    history = []
    for step in range(config["epochs"]):
        objective.begin(step, lambda: head(encoder(x, edge_index)))
        views = [
            head(encoder(masked(x, fraction), dropout_edge(edge_index, dropped)[0]))
            for dropped, fraction in zip(
                config["edges_dropped"], config["features_masked"], strict=True
            )
        ]
        loss, diagnostics = objective(*views)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if (step + 1) % 20 == 0:
            history.append(diagnostics())
    return history


def masked(x: Tensor, fraction: float) -> Tensor:
    """``x``, sparse (CSR), with a random fraction of the features masked in all nodes."""
    kept = (torch.rand(x.shape[1]) >= fraction).to(x.dtype)
    values = x.values() * kept[x.col_indices()]
    return torch.sparse_csr_tensor(
        x.crow_indices(), x.col_indices(), values, x.shape, check_invariants=False
    )
