"""One run: train a new encoder on a set without labels, and measure its embeddings."""

import time
from pathlib import Path
from typing import Any

import torch
from torch_geometric.loader import DataLoader

from experiments.common.graphs import GIN, UNTRAINED, build, embed, train

from .data import load
from .evaluate import measured

# The paper's options but for the learning rate, the fraction dropped and the frozen first epoch.
SETTING: dict[str, Any] = {
    "temperature": 0.2,
    "num_prototypes": 10,
    "consistency_weight": 6.0,
    "freeze_epochs": 1,
    "batch_size": 128,
    "epochs": 20,
    "drop": 0.2,
    "perturb": 0.2,
    "lr": 0.01,
}
# It has 12 million edges: 20 epochs would take most of an hour.
SHORTER = {"COLLAB": {"epochs": 2}}


def run(config: dict[str, Any], graphs_file: Path) -> dict[str, Any]:
    """The results of a run with this configuration, ready for JSON."""
    started = time.perf_counter()
    torch.manual_seed(config["seed"])
    graphs = load(graphs_file)
    encoder = GIN(graphs[0].num_node_features)
    if config["row"] != UNTRAINED:
        loader = DataLoader(graphs, config["batch_size"], shuffle=True)
        for _ in train(build(config, encoder, len(loader)), loader, config):
            pass
    labels = torch.cat([graph.y for graph in graphs]).numpy()
    values = measured(embed(encoder, graphs), labels, config["seed"])
    return {"config": config, **values, "seconds": round(time.perf_counter() - started, 1)}
