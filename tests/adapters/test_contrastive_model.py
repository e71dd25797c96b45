"""From a batch to the loss of the embeddings of its views."""

import copy
import importlib
import sys

import pytest
import torch
from helpers.batches import graph_lists, ring, star
from helpers.losses import DIM, LOSSES
from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=30)
@given(graphs=graph_lists(), seed=st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:the batch is one graph alone")
def test_the_loss_is_that_of_the_embeddings_of_the_views(framework, graphs, seed):
    batch, adapter = framework.batch_of(graphs), framework.adapter
    kinds = adapter.NodeDrop, adapter.Subgraph, adapter.EdgePerturb, adapter.AttributeMask
    model = framework.model_of(
        adapter.NodeDrop(0.3), adapter.RandomChoice([kind(0.5) for kind in kinds])
    )
    torch.manual_seed(seed)
    views = model.augment1(batch), model.augment2(batch)
    embeddings = [model.encoder(*framework.arguments_of(view)) for view in views]
    expected = copy.deepcopy(model.loss)(*embeddings)
    torch.manual_seed(seed)
    loss = model(batch)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("InfoNCE", {"negatives": "cross"}),
        ("PGCL", {"queue_size": 5, "queue_views": 3}),
        ("heads", {"negative_ranks": (0, 2), "queue_size": 0}),
        ("PGCL", {"soft_clusters": True}),
    ],
)
def test_three_views(framework, name, options):
    """In two steps of training, of which the second one has a queue."""
    adapter, (make, _) = framework.adapter, LOSSES[name]
    augments = adapter.NodeDrop(0.3), adapter.EdgePerturb(0.3), adapter.Subgraph(0.3)
    model = framework.model_of(*augments, loss=make(**options))
    batch = framework.batch_of([ring(size) for size in (8, 5, 9, 4, 7, 6)])
    assert [z.shape for z in model.embeddings(batch)] == [(6, DIM)] * 3
    alone, weights = copy.deepcopy(model.loss), [*model.encoder.parameters()]
    for step in range(2):
        results = []
        for loss_of in (model, lambda batch: alone(*model.embeddings(batch))):
            torch.manual_seed(step)
            value = loss_of(batch)
            results.append([value, *torch.autograd.grad(value, weights)])
        torch.testing.assert_close(*results)
        torch.testing.assert_close(model.loss.state_dict(), alone.state_dict())


def test_embeddings_of_nodes_need_all_nodes(framework):
    adapter, batch = framework.adapter, framework.batch_of([ring(30)])
    model = framework.model_of(
        adapter.EdgePerturb(0.2), adapter.AttributeMask(0.2), encoder=framework.NodeEncoder()
    )
    assert [z.shape for z in model.embeddings(batch)] == [(30, DIM)] * 2
    model(adapter.NodeDrop(0.3)(batch)).backward()
    for then in (lambda view: view, lambda view: framework.with_nodes(view, 30)):
        model.augment2 = lambda batch, then=then: then(adapter.NodeDrop(0.5)(batch))
        message = "augment2.*ends with .*ool.*nodes as samples need views that keep all nodes in"
        with pytest.raises(ValueError, match=message):
            model(batch)


def test_training_lowers_the_loss_and_moves_the_prototypes(framework):
    adapter, batch = framework.adapter, framework.batch_of([ring(8), star(8)] * 16)
    model = framework.model_of(adapter.NodeDrop(0.1), adapter.EdgePerturb(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.loss.prototypes.start_from_(torch.cat(model.embeddings(batch)))
    prototypes = model.loss.prototypes.weight.detach().clone()
    losses = []
    for _ in range(60):
        loss = model(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.9 * sum(losses[:10])
    assert not torch.equal(model.loss.prototypes.weight, prototypes)


def test_an_augmentation_of_one_graph_at_a_time(framework):
    def one_by_one(batch):
        return framework.together([framework.adapter.NodeDrop()(g) for g in framework.apart(batch)])

    batch = framework.batch_of([(0, []), ring(5), (0, []), star(4)])
    assert framework.model_of(one_by_one, one_by_one)(batch).isfinite()


@pytest.mark.parametrize(
    ("extra", "imports", "failure"),
    [
        pytest.param("pyg", "torch_geometric", ModuleNotFoundError, marks=pytest.mark.pyg),
        pytest.param("dgl", "dgl", ModuleNotFoundError, marks=pytest.mark.dgl),
        pytest.param("dgl", "dgl", FileNotFoundError, marks=pytest.mark.dgl),
        pytest.param("dgl", "dgl", OSError, marks=pytest.mark.dgl),
    ],
)
def test_without_the_framework_the_error_names_the_extra(extra, imports, failure, monkeypatch):
    class Finder:
        def find_spec(self, name, *_):
            if name == imports:
                raise failure

    adapter = f"pgcl_losses.adapters.{extra}"
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
    for name in [*sys.modules]:
        if name == adapter or name.split(".")[0] == imports:
            monkeypatch.delitem(sys.modules, name)
    message = rf"{adapter} needs {imports}.*pip install '.\[{extra}\]'"
    with pytest.raises(ImportError, match=message):
        importlib.import_module(adapter)
