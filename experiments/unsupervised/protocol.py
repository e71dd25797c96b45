"""The protocol of the code published with the paper, around the losses of this library.

docs/results_graphs.md lists what is as in that code, and what is not. That code looks at the test
folds after every epoch, draws them anew each time, and keeps the best. Here that number stands
beside the last epoch's, and beside the chosen epoch's on folds that had no part in the choice.
"""

from typing import Any

import numpy as np
import torch
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.preprocessing import normalize
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.utils import cumsum, remove_self_loops, subgraph

from .evaluate import of_kernel
from .model import GIN
from .train import LOSSES, UNTRAINED, build, embed, train_epoch

PAPER = "paper"
PAPER_ROWS = (UNTRAINED, *LOSSES)
# What the protocol fixes, as options of the usual one.
FIXED = {"look_every": 1, "freeze_epochs": 0, "drop": 0.1}
INNER = 5  # folds that choose C, however many graphs there are
FRESH = 5  # draws of folds on which the chosen epoch is looked at again


def looks(config: dict[str, Any], graphs: list[Data]) -> dict[str, Any]:
    """Accuracies by epochs, each on folds of its own, and the chosen epoch's on fresh folds.

    The untrained encoder is looked at as often: its best look is what the choice alone gains.
    """
    seed, epochs = config["seed"], config["epochs"]
    # Shuffled once: a batch has the same graphs in every epoch.
    graphs = [with_self_loops(graphs[index]) for index in torch.randperm(len(graphs))]
    labels = torch.cat([graph.y for graph in graphs]).numpy()
    encoder = GIN(graphs[0].num_node_features)
    start(encoder)
    if config["row"] == UNTRAINED:
        history: list[dict[str, Any]] = []
        rows = [embed(encoder, graphs)] * epochs
    else:
        history, rows = trained(config, encoder, graphs)
    scores = {epoch: look(rows[epoch - 1], labels, seed, epoch) for epoch in range(1, epochs + 1)}
    chosen = rows[max(scores, key=scores.__getitem__) - 1]
    fresh = [look(chosen, labels, seed, epochs + draw) for draw in range(1, FRESH + 1)]
    return {"accuracy": scores, "fresh": fresh, "history": history}


def trained(
    config: dict[str, Any], encoder: GIN, graphs: list[Data]
) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
    """What was seen in each epoch, and the rows of all graphs after it."""
    loader = DataLoader(graphs, config["batch_size"])
    model = build(config, encoder, len(loader), (lambda batch: batch, dropped))
    start(model.encoder.head)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    history, rows = [], []
    for _ in range(config["epochs"]):
        history.append(train_epoch(model, loader, optimizer))
        rows.append(embed(encoder, graphs))
    return history, rows


def start(module: nn.Module) -> None:
    """Xavier weights and no biases in all linear maps."""
    for linear in module.modules():
        if isinstance(linear, nn.Linear):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)


def with_self_loops(graph: Data) -> Data:
    """On every node but the last one that has an edge."""
    nodes = torch.arange(int(graph.edge_index.max()))
    edge_index = torch.cat([graph.edge_index, torch.stack([nodes, nodes])], dim=1)
    return Data(x=graph.x, y=graph.y, edge_index=edge_index)


def dropped(batch: Data) -> Data:
    """Without a tenth of each graph's nodes, rounded down, and without self-loops.

    The last node goes, too, where it has no edge left; others are kept by their self-loops.
    """
    num, sizes = batch.num_nodes, batch.ptr.diff()
    order = (batch.batch + torch.rand(num, dtype=torch.float64)).argsort()
    keep = torch.empty(num, dtype=torch.bool)
    keep[order] = torch.arange(num) - batch.ptr[batch.batch] >= (sizes // 10)[batch.batch]
    edge_index, _ = subgraph(keep, batch.edge_index, num_nodes=num)
    keep = torch.zeros(num, dtype=torch.bool).index_fill(0, edge_index.flatten(), True)
    edge_index, _ = subgraph(keep, edge_index, relabel_nodes=True, num_nodes=num)
    edge_index, _ = remove_self_loops(edge_index)
    ptr = cumsum(keep.long())[batch.ptr]
    return Data(x=batch.x[keep], edge_index=edge_index, batch=batch.batch[keep], ptr=ptr)


def look(rows: np.ndarray, labels: np.ndarray, seed: int, draw: int) -> float:
    """Accuracy in per cent of scikit-learn's default machine on unit rows, on folds of its own."""
    rows = normalize(rows.astype(np.float64))
    kernel = rbf_kernel(rows, gamma=1 / (rows.shape[1] * rows.var()))
    return of_kernel(kernel, labels, 1000 * seed + draw, INNER)
