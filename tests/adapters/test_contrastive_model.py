"""From a batch to the loss of the embeddings of its views, and what cannot be such a batch."""

import copy
import importlib
import sys

import pytest
import torch
from helpers.batches import DIM, graph_lists, ring, star
from helpers.cases import LOSSES_OF_THREE_VIEWS, assert_model_is_its_loss
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


@pytest.mark.parametrize("name", LOSSES_OF_THREE_VIEWS)
def test_three_views(framework, name):
    adapter = framework.adapter
    augments = adapter.NodeDrop(0.3), adapter.EdgePerturb(0.3), adapter.Subgraph(0.3)
    model = framework.model_of(*augments, loss=LOSSES_OF_THREE_VIEWS[name](DIM))
    batch = framework.batch_of([ring(size) for size in (8, 5, 9, 4, 7, 6)])
    assert [z.shape for z in model.embeddings(batch)] == [(6, DIM)] * 3
    assert_model_is_its_loss(model, batch)


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


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (
            torch.ones(7, DIM),
            "encoder returned 7 embeddings for the view of augment1, which has 3 graphs and 15 "
            "nodes, while the batch has 15 nodes$",
        ),
        (torch.ones(5), r"must return a Tensor of shape \[graphs, D\] or .*, but got \(5,\)"),
        ((torch.ones(3, DIM),), "must return a Tensor of shape .*, but got tuple"),
    ],
)
def test_results_of_an_encoder(framework, result, message):
    model = framework.model_of(torch.nn.Identity(), torch.nn.Identity())
    model.encoder.register_forward_hook(lambda *_: result)
    with pytest.raises(ValueError, match=message):
        model(framework.batch_of([ring(5)] * 3))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_what_is_no_view(framework, number):
    def model_with(augment):
        augments = [torch.nn.Identity()] * 3
        augments[number - 1] = augment
        return framework.model_of(*augments)

    batch, name = framework.batch_of([ring(5)] * 3), f"augment{number}"
    with pytest.raises(TypeError, match=f"what {name} returns must be a .* got NoneType"):
        model_with(lambda batch: None)(batch)
    with pytest.raises(ValueError, match=f"{name} made 1 graphs of 3: row i of every view must"):
        model_with(lambda batch: framework.apart(batch)[0])(batch)
    with pytest.raises(ValueError, match=f"graph 0 of the view of {name} has only nodes of other"):
        model_with(lambda batch: framework.together(framework.apart(batch)[::-1]))(batch)


def test_an_augmentation_of_one_graph_at_a_time(framework):
    def one_by_one(batch):
        return framework.together([framework.adapter.NodeDrop()(g) for g in framework.apart(batch)])

    batch = framework.batch_of([(0, []), ring(5), (0, []), star(4)])
    assert framework.model_of(one_by_one, one_by_one)(batch).isfinite()


@pytest.mark.parametrize("kind", ["NodeDrop", "Subgraph", "EdgePerturb", "AttributeMask", "model"])
def test_what_is_no_batch(framework, kind):
    adapter = framework.adapter
    takes_batch = framework.model_of(adapter.NodeDrop(), adapter.NodeDrop())
    if kind != "model":
        takes_batch = getattr(adapter, kind)()
    for value in (torch.ones(2), framework.apart(framework.batch_of([ring(3)] * 2))):
        message = f"(batch|data|graph) must be a .*, but got {type(value).__name__}"
        with pytest.raises(TypeError, match=message):
            takes_batch(value)


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
