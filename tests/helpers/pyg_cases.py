"""PyG: the same names as in helpers.dgl_cases."""

import torch
from torch import nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_add_pool

from helpers.batches import Contents, features_of, layers_of, numbered, ring
from pgcl_losses.adapters import pyg as adapter  # noqa: F401


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


class NodeEncoder(nn.Module):
    """A view -> embeddings of nodes."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(map(GINConv, layers_of()))

    def forward(self, view):
        x = view.x
        for conv in self.convs:
            x = conv(x, view.edge_index).relu()
        return x


class Encoder(NodeEncoder):
    """A view -> embeddings of graphs."""

    def forward(self, view):
        return global_add_pool(super().forward(view), view.batch, view.num_graphs)
