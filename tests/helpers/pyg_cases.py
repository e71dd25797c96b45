"""PyG: the same names as in helpers.dgl_cases."""

import copy

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_add_pool

from helpers.batches import Contents, features_of, layers_of, numbered, ring
from helpers.losses import DIM
from pgcl_losses import PGCLLoss
from pgcl_losses.adapters import pyg as adapter


def batch_of(graphs):
    """A batch of (number of nodes, edges)."""
    return Batch.from_data_list(
        [
            Data(x=features_of(nodes), edge_index=ends, node_id=nodes, edge_id=edges)
            for nodes, edges, ends in numbered(graphs)
        ]
    )


def contents(data):
    if "ptr" not in data:
        sizes = torch.tensor([data.num_nodes])
    else:
        sizes = data.ptr.diff()
        assert torch.equal(data.batch, torch.repeat_interleave(sizes)), "batch and ptr differ"
    assert data.num_nodes == sizes.sum()
    return Contents(sizes, data.edge_index.long(), data.node_id, data.edge_id, data.x)


def apart(batch):
    return batch.to_data_list()


together = Batch.from_data_list


def one_graph_in_other_ways():
    batch, short = batch_of([ring(6)]), batch_of([ring(6)])
    short.edge_index = short.edge_index.int()
    return [batch, batch[0], short]


def with_nodes(view, count):
    """As many nodes again: without edges, at the end."""
    view = copy.copy(view)
    for key in ("x", "batch", "pgcl_node_position"):
        value = view[key]
        view[key] = torch.cat([value, value.new_zeros(count - len(value), *value.shape[1:])])
    return view


class NodeEncoder(nn.Module):
    """Embeddings of nodes."""

    def __init__(self, layers=None):
        super().__init__()
        self.convs = nn.ModuleList(GINConv(layer) for layer in layers or layers_of())

    def forward(self, x, edge_index):
        for conv in self.convs:
            x = conv(x, edge_index).relu()
        return x


class Encoder(NodeEncoder):
    """Embeddings of graphs."""

    def forward(self, x, edge_index, batch, num_graphs):
        return global_add_pool(super().forward(x, edge_index), batch, num_graphs)


def arguments_of(view):
    """What the encoder of graphs is called with."""
    return view.x, view.edge_index, view.batch, view.num_graphs


def model_of(augment1, augment2, *further, encoder=None, loss=None):
    encoder = Encoder() if encoder is None else encoder
    loss = PGCLLoss(DIM, 4) if loss is None else loss
    model = adapter.ContrastiveModel(encoder, augment1, augment2, loss, *further)
    return model.double()
