"""DGL: the same names as in helpers.pyg_cases."""

import dgl
import torch
from dgl.nn import GINConv, SumPooling
from torch import nn

from helpers.batches import Contents, features_of, layers_of, numbered, ring
from pgcl_losses.adapters import dgl as adapter  # noqa: F401


def batch_of(graphs, idtype=torch.int64):
    """A batch of (number of nodes, edges)."""
    parts = []
    for nodes, edges, ends in numbered(graphs):
        part = dgl.graph((*ends.to(idtype),), num_nodes=len(nodes), idtype=idtype)
        part.ndata["feat"] = features_of(nodes)
        part.ndata["_ID"] = nodes  # a name that DGL uses itself
        part.edata["_ID"] = edges
        parts.append(part)
    return dgl.batch(parts)


def contents(graph):
    edges = torch.stack(graph.formats("coo").edges(order="eid")).long()
    sizes = graph.batch_num_nodes().long()
    assert graph.num_nodes() == sizes.sum()
    edge_id, order = graph.edata["_ID"].sort()  # dgl.node_subgraph changes the order
    return Contents(sizes, edges[:, order], graph.ndata["_ID"], edge_id, graph.ndata["feat"])


apart, together = dgl.unbatch, dgl.batch


def one_graph_in_other_ways():
    batch, alone, counted = (batch_of([ring(6)]) for _ in range(3))
    for graph in (alone, counted):
        graph._batch_num_nodes = graph._batch_num_edges = None
    assert counted.batch_size == 1  # after which dgl's own DropNode fails
    short = batch_of([ring(6)], torch.int32)
    short.set_batch_num_nodes(short.batch_num_nodes().int())
    return [batch, alone, counted, short, batch.formats("csr"), batch.formats("csc")]


class NodeEncoder(nn.Module):
    """A view -> embeddings of nodes."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(GINConv(layer, "sum") for layer in layers_of())

    def forward(self, view):
        feat = view.ndata["feat"]
        for conv in self.convs:
            feat = conv(view, feat).relu()
        return feat


class Encoder(NodeEncoder):
    """A view -> embeddings of graphs."""

    def forward(self, view):
        return SumPooling()(view, super().forward(view))
