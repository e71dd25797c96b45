"""The model of DGL's adapter: its loss, encoders of all kinds, and training."""

import functools

import dgl
import dgl.transforms as T
import pytest
import torch
from dgl.nn import AvgPooling, GINConv, GraphConv, Sequential, SumPooling
from helpers.cases import LOSSES_OF_THREE_VIEWS, assert_model_is_its_loss
from helpers.dgl_cases import GIN, KINDS, batch_of, graph_lists, model_of, ring
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.dgl import (
    AttributeMask,
    ContrastiveModel,
    EdgePerturb,
    NodeDrop,
    RandomChoice,
)


@settings(max_examples=30)
@given(graphs=graph_lists(), seed=st.integers(0, 1000))
@pytest.mark.filterwarnings("ignore:the batch is one graph alone")
def test_model_is_the_loss_of_the_views_embeddings(graphs, seed):
    graph = batch_of(graphs)
    model = model_of(augment2=RandomChoice([kind(0.5) for kind in KINDS]))
    torch.manual_seed(seed)
    loss = model(graph)
    torch.manual_seed(seed)
    views = model.augment1(graph), model.augment2(graph)
    embeddings = [model.encoder(view, view.ndata["feat"]) for view in views]
    torch.testing.assert_close(loss, model.loss(*embeddings))
    torch.manual_seed(seed)
    torch.testing.assert_close(list(model.embeddings(graph)), embeddings)
    assert loss.isfinite()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_three_views():
    graph, loss = batch_of([ring(8), ring(5), ring(9)]), PGCLLoss(16, 2)
    augments = NodeDrop(0.3), EdgePerturb(0.3), loss, AttributeMask(0.3)
    model = ContrastiveModel(GIN(), *augments, feat_name="feat")
    torch.manual_seed(1)
    value = model(graph)
    torch.manual_seed(1)
    embeddings = model.embeddings(graph)
    assert len(embeddings) == 3
    torch.testing.assert_close(value, loss(*embeddings))


@pytest.mark.parametrize("name", LOSSES_OF_THREE_VIEWS)
def test_any_loss_of_three_views(name):
    augments = NodeDrop(0.3), EdgePerturb(0.3), LOSSES_OF_THREE_VIEWS[name](16), AttributeMask(0.3)
    model = ContrastiveModel(GIN(), *augments, feat_name="feat")
    assert_model_is_its_loss(model, batch_of([ring(size) for size in (8, 5, 9, 4, 7, 6)]))


def test_embeddings_of_each_view_are_graph_i():
    graph = batch_of([(0, []), ring(8), (1, []), ring(9), (0, [])])
    for augment in (kind(0.4) for kind in KINDS[:3]):
        model = model_of(AvgPooling(), augment, NodeDrop(0.2))
        for embeddings in model.embeddings(graph):
            assert embeddings[:, 0].tolist() == [0, 2, 3, 4, 0]


def test_an_encoder_of_the_graph_alone():
    graph = batch_of([ring(4), ring(5)])
    model = model_of(lambda view: dgl.sum_nodes(view, "feat"), feat_name=None)
    assert [z.shape for z in model.embeddings(graph)] == [(2, 3)] * 2


def add_the_dropped_nodes(view):
    return dgl.add_nodes(view, 30 - view.num_nodes())


def test_embeddings_of_nodes():
    graph = batch_of([ring(30)])
    model = model_of(GINConv(nn.Linear(3, 16)), EdgePerturb(0.2), AttributeMask(0.2))
    assert [z.shape for z in model.embeddings(graph)] == [(30, 16)] * 2
    model(graph).backward()
    for augment in (NodeDrop(0.5), T.Compose([NodeDrop(0.5), add_the_dropped_nodes])):
        model.augment1 = augment
        with pytest.raises(ValueError, match="nodes as samples need views that keep all nodes in"):
            model(graph)


def test_training_on_synthetic_graphs():
    generator = torch.Generator().manual_seed(0)
    shapes = [ring(8), (8, [(0, leaf) for leaf in range(1, 8)])] * 16  # rings and stars
    graph = batch_of(shapes)
    graph.ndata["feat"] = torch.randn(graph.num_nodes(), 3, generator=generator)
    model = model_of(augment1=NodeDrop(0.1), augment2=EdgePerturb(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    assert any(parameter is model.loss.prototypes.weight for parameter in model.parameters())
    losses = []
    for _ in range(60):
        loss = model(graph)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_zero_in_degree_is_for_the_encoder_to_allow():
    graph = batch_of([ring(3)] * 4)
    cut = functools.partial(dgl.remove_edges, eids=torch.arange(6))
    for allow in (True, False):
        conv = GraphConv(3, 16, allow_zero_in_degree=allow)
        model = model_of(Sequential(conv, SumPooling()), cut)
        if allow:
            model(graph).backward()
        else:
            with pytest.raises(dgl.DGLError, match="allow_zero_in_degree"):
                model(graph)
