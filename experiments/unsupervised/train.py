"""One run: pre-train a new encoder on a set without labels, and evaluate its embeddings."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.preprocessing import scale
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from experiments.common.probes import few_labels
from experiments.common.rows import ROWS
from pgcl_losses import PGCLLoss, diagnostics
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

from . import wl
from .data import load
from .evaluate import accuracy, of_kernel
from .model import DIM, GIN, Projected

WL, UNTRAINED = "WL kernel", "untrained GIN"
ALL_ROWS = (WL, UNTRAINED, *ROWS)
ONE_SHOT = "labels_1"
WINDOW = "PGCL, ranks 3 to 8"  # as the published code takes its negatives
LOSSES = ROWS | {WINDOW: {"negative_ranks": (2, 8)}}

# The paper's options, but for the epochs, the learning rate and the fraction dropped.
SETTING = {
    "num_prototypes": 10,
    "batch_size": 128,
    "consistency_weight": 6.0,
    "epochs": 20,
    "look_every": 5,
    "freeze_epochs": 1,
    "drop": 0.2,
    "lr": 0.01,
}

# It has 12 million edges: 20 epochs would take most of an hour.
SHORTER = {"COLLAB": {"epochs": 2}}

Protocol = Callable[[dict[str, Any], list[Data]], dict[str, Any]]
Augment = Callable[[Data], Data]


def usual(config: dict[str, Any], graphs: list[Data]) -> dict[str, Any]:
    """Accuracies by epochs, one-shot accuracy after the last one, and diagnostics of each epoch."""
    seed = config["seed"]
    labels = torch.cat([graph.y for graph in graphs]).numpy()
    encoder = GIN(graphs[0].num_node_features)
    scores, history = {}, []
    if config["row"] == WL:
        scores[0] = of_kernel(wl.kernel(graphs), labels, seed)
    elif config["row"] == UNTRAINED:
        scores[0] = accuracy(embed(encoder, graphs), labels, seed)
    else:
        loader = DataLoader(graphs, config["batch_size"], shuffle=True)
        model = build(config, encoder, len(loader))
        optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
        for epoch in range(1, config["epochs"] + 1):
            history.append(train_epoch(model, loader, optimizer))
            if epoch % config["look_every"] == 0 or epoch == config["epochs"]:
                scores[epoch] = accuracy(embed(encoder, graphs), labels, seed)
    few = {}
    if config["row"] != WL:  # a kernel has no embeddings
        embeddings = scale(embed(encoder, graphs).astype(np.float64))
        few = {ONE_SHOT: round(few_labels(embeddings, labels, 1, seed), 3)}
    return {"accuracy": scores, **few, "history": history}


def run(
    config: dict[str, Any], graphs_file: Path, logs: Path | None, protocol: Protocol = usual
) -> dict[str, Any]:
    """The results of a run with this configuration, ready for JSON."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    values = protocol(config, load(graphs_file))
    seconds = time.perf_counter() - started
    if logs is not None:
        log(logs, config, values["accuracy"], values["history"])
    return {"config": config, **values, "seconds": round(seconds, 1)}


def build(
    config: dict[str, Any],
    encoder: GIN,
    batches: int,
    augments: tuple[Augment, Augment] | None = None,
) -> ContrastiveModel:
    """The encoder with its head, augmentations and loss, for so many batches an epoch."""
    augments = augments or (NodeDrop(config["drop"]), EdgePerturb(config["drop"]))
    options = {"consistency_weight": config["consistency_weight"], **LOSSES[config["row"]]}
    frozen = config["freeze_epochs"] * batches
    with torch.random.fork_rng(devices=[]):  # all losses of one seed get the same batches and views
        loss = PGCLLoss(DIM, config["num_prototypes"], freeze_steps=frozen, **options)
    return ContrastiveModel(Projected(encoder), *augments, loss)


def train_epoch(
    model: ContrastiveModel, loader: DataLoader, optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    """An epoch; returns the means of the terms, and diagnostics of the last full batch."""
    model.train()
    sums = np.zeros(3)
    numbers = None
    for batch in loader:
        terms = model.loss.terms(*model.embeddings(batch))
        optimizer.zero_grad()
        terms.loss.backward()
        optimizer.step()
        sums += [terms.loss.item(), terms.contrast.item(), terms.consistency.item()]
        if numbers is None or batch.num_graphs == loader.batch_size:
            numbers = diagnostics(terms, model.loss.prototypes.weight)
    loss, contrast, consistency = (sums / len(loader)).tolist()
    assert numbers is not None
    numbers |= {"loss": loss, "contrast": contrast, "consistency": consistency}
    return {name: round(value, 4) for name, value in numbers.items()}


def log(
    logs: Path, config: dict[str, Any], scores: dict[int, float], history: list[dict[str, Any]]
) -> None:
    """A run's curves for TensorBoard."""
    from torch.utils.tensorboard import SummaryWriter  # optional: pip install tensorboard

    named = " ".join(str(value) for value in config.values())
    with SummaryWriter(str(logs / named.replace("/", "-"))) as writer:
        for epoch, score in scores.items():
            writer.add_scalar("accuracy", score, epoch)
        for epoch, numbers in enumerate(history, 1):
            for name, value in numbers.items():
                writer.add_scalar(name, value, epoch)


@torch.no_grad()
def embed(encoder: nn.Module, graphs: list[Data]) -> np.ndarray:
    """``[G, 96]``. It draws no random number, so that evaluation does not change the training."""
    encoder.eval()
    embeddings = []
    for start in range(0, len(graphs), 128):
        batch = Batch.from_data_list(graphs[start : start + 128])
        embeddings.append(encoder(batch.x, batch.edge_index, batch.batch, batch.num_graphs))
    return torch.cat(embeddings).numpy()
