"""DGL: the same names as in helpers.pyg_cases."""

import dgl
import torch
from dgl.nn import GINConv, SumPooling
from torch import nn

from helpers.batches import Contents, features_of, layers_of, numbered, ring
from helpers.losses import DIM
from pgcl_losses import PGCLLoss
from pgcl_losses.adapters import dgl as adapter


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


def with_nodes(view, count):
    """As many nodes again: without edges, at the end."""
    return dgl.add_nodes(view, count - view.num_nodes())


class NodeEncoder(nn.Module):
    """Embeddings of nodes."""

    def __init__(self, layers=None):
        super().__init__()
        self.convs = nn.ModuleList(GINConv(layer, "sum") for layer in layers or layers_of())

    def forward(self, graph, feat):
        for conv in self.convs:
            feat = conv(graph, feat).relu()
        return feat


class Encoder(NodeEncoder):
    """Embeddings of graphs."""

    def forward(self, graph, feat):
        return SumPooling()(graph, super().forward(graph, feat))


def arguments_of(view):
    """What the encoder of graphs is called with."""
    return view, view.ndata["feat"]


def model_of(augment1, augment2, *further, encoder=None, loss=None, feat_name="feat"):
    encoder = Encoder() if encoder is None else encoder
    loss = PGCLLoss(DIM, 4) if loss is None else loss
    model = adapter.ContrastiveModel(
        encoder, augment1, augment2, loss, *further, feat_name=feat_name
    )
    return model.double()
