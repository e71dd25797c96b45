"""One run: train a GCN on a graph without labels, and measure its embeddings."""

import time
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch_geometric.nn.conv.gcn_conv import gcn_norm

from pgcl_losses import InfoNCE, PGCLLoss

from .data import load
from .probe import measured_nodes

UNTRAINED, INFO_NCE, PGCL = "untrained", "InfoNCE", "PGCL, weighted negatives"
# Fixed in plan.md before the runs on Photo and CS.
LOSSES: dict[str, dict[str, Any]] = {
    UNTRAINED: {},
    INFO_NCE: {"temperature": 2.0},
    PGCL: {"temperature": 1.2, "num_prototypes": 50},
}
SETTING: dict[str, Any] = {
    "lr": 1e-3,
    "weight_decay": 1e-5,
    "edges_dropped": [0.2, 0.4],
    "features_masked": [0.3, 0.4],
}
WIDTH = 128  # of embeddings and projections
RECENT = 4096  # projections that initialise the prototypes


class GCN(nn.Module):
    """Two layers with the formula of PyG's GCNConv.

    GCNConv itself would draw other initial weights from a seed than the committed runs have.
    """

    def __init__(self, num_features: int, width: int = WIDTH) -> None:
        super().__init__()
        widths = [num_features, 2 * width, width]
        self.layers = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in pairwise(widths))
        self.biases = nn.ParameterList(torch.zeros(width) for width in widths[1:])
        for layer in self.layers:
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Tensor, edge_index: Tensor, visible: Tensor) -> Tensor:
        """``[N, F], [2, E], [F] -> [N, width]``; features that are not visible are masked."""
        weights = [layer.weight.T for layer in self.layers]
        weights[0] = weights[0] * visible[:, None]
        edges, values = gcn_norm(edge_index, num_nodes=len(x))
        adjacency = torch.sparse_coo_tensor(
            edges.flip(0), values, (len(x), len(x)), check_invariants=False
        )
        for weight, bias in zip(weights, self.biases, strict=True):
            x = torch.relu(adjacency @ (x @ weight) + bias)
        return x


def run(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The results of a run with this configuration, ready for JSON."""
    started = time.perf_counter()
    torch.manual_seed(config["seed"])
    x, edge_index, labels = load(config["dataset"], folder)
    encoder = GCN(x.shape[1])
    features = sparse_if_faster(x)
    if config["loss"] != UNTRAINED:
        train(config, encoder, features, edge_index)
    with torch.no_grad():
        embeddings = encoder(features, edge_index, torch.ones(x.shape[1]))
    values = measured_nodes(embeddings.numpy(), labels.numpy(), config["seed"])
    seconds = round(time.perf_counter() - started, 1)
    device = config.get("device", "cpu")
    versions = {"gpu": torch.cuda.get_device_name(device)} if "cuda" in device else {}
    return {"config": config, **values, "seconds": seconds, "versions": versions}


def sparse_if_faster(x: Tensor) -> Tensor:
    """``x`` in CSR layout if fewer than 10 per cent of its entries are not 0."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        return x.to_sparse_csr() if (x != 0).float().mean() < 0.1 else x


def train(config: dict[str, Any], encoder: GCN, x: Tensor, edge_index: Tensor) -> None:
    """InfoNCE for all steps, or for the first half and PGCL for the second.

    Random numbers are drawn on the CPU, so that a GPU trains from the same weights and views.
    """
    device = config.get("device", "cpu")
    head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ELU(), nn.Linear(WIDTH, WIDTH)).to(device)
    encoder.to(device)
    x = x if device == "cpu" else x.to_dense().to(device)  # CSR is faster on a CPU alone
    optimizer = torch.optim.Adam(
        [*encoder.parameters(), *head.parameters()],
        lr=config["lr"],
        weight_decay=config["weight_decay"],
    )
    criterion: nn.Module = InfoNCE(temperature=config["temperature"])
    recent = torch.empty(0, WIDTH, device=device)
    for step in range(config["steps"]):
        if config["loss"] == PGCL and step == config["steps"] // 2:
            criterion = weighted_negatives(config, recent)
        batch, views = views_of(config, step, *x.shape, edge_index)
        z1, z2 = (
            head(encoder(x, edges.to(device), visible.to(device))[batch.to(device)])
            for edges, visible in views
        )
        loss = criterion(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent = torch.cat([recent, z1.detach(), z2.detach()])[-RECENT:]
    encoder.cpu()


def weighted_negatives(config: dict[str, Any], projections: Tensor) -> PGCLLoss:
    """PGCL without consistency, its prototypes initialised by k-means and then fixed."""
    pgcl = PGCLLoss(
        WIDTH, config["num_prototypes"], consistency_weight=0, temperature=config["temperature"]
    ).to(projections)
    torch.manual_seed(config["seed"])
    pgcl.prototypes.start_from_(projections)
    return pgcl


def views_of(
    config: dict[str, Any], step: int, num_nodes: int, num_features: int, edge_index: Tensor
) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
    """The nodes of a batch; the edges and the visible features of two views.

    They depend on seed and step alone, so that all losses see the same.
    """
    random = torch.Generator().manual_seed(config["seed"] * 1_000_003 + step)
    batch = torch.randperm(num_nodes, generator=random)[: config["batch"]]
    views = []
    for dropped, masked in zip(config["edges_dropped"], config["features_masked"], strict=True):
        kept = torch.rand(edge_index.shape[1], generator=random) >= dropped
        visible = torch.rand(num_features, generator=random) >= masked
        views.append((edge_index[:, kept], visible))
    return batch, views
