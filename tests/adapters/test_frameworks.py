"""PyG and DGL give the same loss for the same graphs."""

import copy
import importlib

import pytest
import torch
from helpers.batches import DIM, both_ways, layers_of

from pgcl_losses import PGCLLoss


def random_graphs():
    """Of many sizes: one has no node, some have no edge."""
    graphs = []
    for size in (7, 0, 1, 12, 4, 9, 2, 15):
        pairs = torch.randint(size, (2 * size, 2)) if size > 2 else torch.empty(0, 2)
        pairs = pairs[pairs[:, 0] != pairs[:, 1]].tolist()
        graphs.append((size, both_ways([*map(tuple, pairs)])))
    return graphs


@pytest.mark.parametrize("kind", ["NodeDrop", "Subgraph", "EdgePerturb", "AttributeMask"])
@pytest.mark.parametrize("p", [0.0, 0.3])
def test_same_graphs_same_weights_same_loss(kind, p):
    """Augmentations draw the same in both, from the same seed."""
    graphs, layers, loss = random_graphs(), layers_of(), PGCLLoss(DIM, 3)
    results = []
    for name in ("pyg", "dgl"):
        framework = importlib.import_module(f"helpers.{name}_cases")
        own_layers, own_loss = copy.deepcopy((layers, loss))
        augments = (getattr(framework.adapter, each)(p) for each in (kind, "EdgePerturb"))
        model = framework.model_of(*augments, encoder=framework.Encoder(own_layers), loss=own_loss)
        own_layers.load_state_dict(layers.state_dict())  # PyG's GINConv has drawn new ones
        batch = framework.batch_of(graphs)
        torch.manual_seed(3)
        embeddings = model.embeddings(batch)
        torch.manual_seed(3)
        value = model(batch)
        value.backward()
        parameters = [*own_layers.parameters(), *own_loss.parameters()]
        results.append([value, *embeddings, *(parameter.grad for parameter in parameters)])
    torch.testing.assert_close(*results)
