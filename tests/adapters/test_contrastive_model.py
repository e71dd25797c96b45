"""From a batch to the loss of the embeddings of its views."""

import copy
import importlib
import sys

import pytest
import torch
from helpers.batches import graph_lists, ring, star
from helpers.losses import DIM
from helpers.marks import examples
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss


def model_of(framework, augment1, augment2, encoder=None):
    encoder = framework.Encoder() if encoder is None else encoder
    parts = encoder, augment1, augment2, PGCLLoss(DIM, 4, temperature=0.2, consistency_weight=6)
    return framework.adapter.ContrastiveModel(*parts).double()


@examples(30)
@given(graphs=graph_lists(), seed=st.integers(0, 99))
def test_the_loss_is_that_of_the_embeddings_of_the_views(framework, graphs, seed):
    batch, adapter = framework.batch_of(graphs), framework.adapter
    kinds = adapter.NodeDrop, adapter.Subgraph, adapter.EdgePerturb, adapter.AttributeMask
    choice = adapter.RandomChoice([kind(0.5) for kind in kinds])
    model = model_of(framework, adapter.NodeDrop(0.3), choice)
    torch.manual_seed(seed)
    embeddings = [model.encoder(augment(batch)) for augment in (model.augment1, model.augment2)]
    expected = copy.deepcopy(model.loss)(*embeddings)
    torch.manual_seed(seed)
    loss = model(batch)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_the_loss_gets_what_it_is_called_with(framework):
    adapter, labels = framework.adapter, torch.arange(4) // 2
    batch, augments = framework.batch_of([ring(8), star(8)] * 2), [torch.nn.Identity()] * 2
    model = adapter.ContrastiveModel(framework.Encoder(), *augments, InfoNCE()).double()
    z = model.encoder(batch)
    torch.testing.assert_close(model(batch, labels=labels), InfoNCE()(z, z, labels=labels))
    assert model(batch, labels=labels) != model(batch)


def test_embeddings_of_nodes_need_all_nodes(framework):
    adapter, batch = framework.adapter, framework.batch_of([ring(30)])
    augments = adapter.EdgePerturb(0.2), adapter.AttributeMask(0.2)
    model = model_of(framework, *augments, framework.NodeEncoder())
    for graph in (batch, framework.apart(batch)[0]):
        assert model(graph).isfinite()
    model.augment2 = adapter.NodeDrop(0.5)
    with pytest.raises(
        ValueError, match=r"z2 has shape .* but z1 has \(30, .* row i of every view"
    ):
        model(batch)


def test_training_lowers_the_loss_and_moves_the_prototypes(framework):
    adapter, batch = framework.adapter, framework.batch_of([ring(8), star(8)] * 16)
    model = model_of(framework, adapter.NodeDrop(0.1), adapter.EdgePerturb(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.loss.prototypes.start_from_(model.encoder(batch))
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
    assert model_of(framework, one_by_one, torch.nn.Identity())(batch).isfinite()


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
    message = rf"{adapter} needs {imports}.*pip install -e '.\[{extra}\]'"
    with pytest.raises(ImportError, match=message):
        importlib.import_module(adapter)
