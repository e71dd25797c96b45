"""One run: train a new encoder on a set without labels, and measure its embeddings."""

import time
from pathlib import Path
from typing import Any

import torch

from experiments.common.graphs import embed, trained
from experiments.common.tu import load

from .evaluate import measured

# It has 12 million edges: 20 epochs would take most of an hour.
SHORTER = {"COLLAB": {"epochs": 2}}


def run(config: dict[str, Any], graphs_file: Path) -> dict[str, Any]:
    """The results of a run with this configuration, ready for JSON."""
    started = time.perf_counter()
    graphs = load(graphs_file)
    z = embed(trained(config, graphs).encoder.encoder, graphs)
    labels = torch.cat([graph.y for graph in graphs]).numpy()
    values = measured(z, labels, config["seed"])
    return {"config": config, **values, "seconds": round(time.perf_counter() - started, 1)}
