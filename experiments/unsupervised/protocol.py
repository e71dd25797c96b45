"""The protocol of the code published with the paper, with the losses of this library.

docs/reproduce.md lists what differs from that code. That code evaluates on test folds after
every epoch, draws them anew each time, and keeps the best. Here that accuracy is beside the last
epoch's, and beside the best epoch's on folds that did not choose it.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.preprocessing import normalize
from torch import nn
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader
from torch_geometric.utils import cumsum, remove_self_loops, subgraph

from experiments.common.graphs import GIN, UNTRAINED, build, embed, train

from .data import load
from .evaluate import of_kernel

INNER = 5  # folds that choose C, however many graphs there are
FRESH = 5  # draws of folds on which the best epoch is evaluated again


def run(config: dict[str, Any], graphs_file: Path) -> dict[str, Any]:
    """Accuracies by epochs, each on its own folds, and the best epoch's on fresh folds.

    The untrained encoder is evaluated as often: its best accuracy shows what the choice gains.
    """
    started = time.perf_counter()
    seed, epochs = config["seed"], config["epochs"]
    torch.manual_seed(seed)
    graphs = load(graphs_file)
    # Shuffled once: a batch has the same graphs in every epoch.
    graphs = [with_self_loops(graphs[index]) for index in torch.randperm(len(graphs))]
    labels = torch.cat([graph.y for graph in graphs]).numpy()
    encoder = GIN(graphs[0].num_node_features)
    initialise(encoder)
    if config["row"] == UNTRAINED:
        embeddings = [embed(encoder, graphs)] * epochs
    else:
        loader = DataLoader(graphs, config["batch_size"])
        model = build(config, encoder, len(loader), (lambda batch: batch, dropped))
        initialise(model.encoder.head)
        embeddings = [embed(encoder, graphs) for _ in train(model, loader, config)]
    scores = {epoch: accuracy(z, labels, seed, draw=epoch) for epoch, z in enumerate(embeddings, 1)}
    best = embeddings[max(scores, key=scores.__getitem__) - 1]
    fresh = [accuracy(best, labels, seed, epochs + draw) for draw in range(1, FRESH + 1)]
    seconds = round(time.perf_counter() - started, 1)
    return {"config": config, "accuracy": scores, "fresh": fresh, "seconds": seconds}


def initialise(module: nn.Module) -> None:
    """Xavier weights and zero biases in all linear layers."""
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

    The last node is also dropped if it has no edge left; others are kept by their self-loops.
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


def accuracy(embeddings: np.ndarray, labels: np.ndarray, seed: int, draw: int) -> float:
    """In per cent, by scikit-learn's default kernel of unit embeddings, on this draw's folds."""
    z = normalize(embeddings.astype(np.float64))
    kernel = rbf_kernel(z, gamma=1 / (z.shape[1] * z.var()))
    return of_kernel(kernel, labels, 1000 * seed + draw, INNER)
