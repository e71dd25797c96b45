"""The model of PyG's adapter: its loss, encoders of all kinds, and training."""

import copy

import pytest
import torch
from helpers.cases import LOSSES_OF_THREE_VIEWS, assert_model_is_its_loss
from helpers.pyg_cases import Encoder, Forgetful, NodeEncoder, model_of, molecules
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, Sequential, global_add_pool
from torch_geometric.nn.models import GIN

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import (
    AttributeMask,
    ContrastiveModel,
    EdgePerturb,
    NodeDrop,
    RandomChoice,
    Subgraph,
)


class BatchEncoder(Encoder):
    def forward(self, data):
        return super().forward(data.x, data.edge_index, data.batch, data.num_graphs)


class TestContrastiveModel:
    @pytest.mark.parametrize("kind", [Encoder, BatchEncoder, Forgetful])
    def test_the_loss_is_that_of_the_embeddings_of_the_views(self, kind):
        batch = molecules(6)
        model = model_of(kind(), Subgraph(0.3), EdgePerturb(0.2))
        torch.manual_seed(1)
        loss = model(batch)
        torch.manual_seed(1)
        view1, view2 = model.augment1(batch), model.augment2(batch)
        z1, z2 = (
            Encoder.forward(model.encoder, view.x, view.edge_index, view.batch, 6)
            for view in (view1, view2)
        )
        torch.testing.assert_close(loss, copy.deepcopy(model.loss)(z1, z2))
        torch.manual_seed(1)
        torch.testing.assert_close(model.embeddings(batch), (z1, z2))

    def test_three_views(self):
        batch, loss = molecules(6), PGCLLoss(8, 4)
        model = ContrastiveModel(Encoder(), NodeDrop(0.2), EdgePerturb(0.2), loss, Subgraph(0.3))
        torch.manual_seed(1)
        value = model(batch)
        torch.manual_seed(1)
        embeddings = model.embeddings(batch)
        assert len(embeddings) == 3
        torch.testing.assert_close(value, copy.deepcopy(loss)(*embeddings))
        model.augment3 = lambda view: None
        with pytest.raises(TypeError, match="what augment3 returns must be"):
            model(batch)

    @pytest.mark.parametrize("name", LOSSES_OF_THREE_VIEWS)
    def test_any_loss_of_three_views(self, name):
        loss = LOSSES_OF_THREE_VIEWS[name](8)
        model = ContrastiveModel(Encoder(), NodeDrop(0.2), EdgePerturb(0.2), loss, Subgraph(0.3))
        assert_model_is_its_loss(model, molecules(6))

    def test_a_convolution_encodes_nodes(self):
        graph = molecules(6)
        for conv in (GINConv(torch.nn.Linear(4, 8)), GCNConv(4, 8), SAGEConv(4, 8)):
            model = model_of(conv, EdgePerturb(0.2), AttributeMask(0.2))
            assert [z.shape for z in model.embeddings(graph)] == [(60, 8)] * 2

    def test_an_encoder_of_a_batch_may_have_other_arguments(self):
        class OfBatch(Encoder):
            def forward(self, data, edge_index=None):
                return super().forward(data.x, data.edge_index, data.batch, data.num_graphs)

        assert model_of(OfBatch(), NodeDrop(0.2), NodeDrop(0.2))(molecules(6)).isfinite()

    def test_every_parameter_learns(self):
        model = model_of(Encoder(), NodeDrop(0.2), AttributeMask(0.2))
        model(molecules(6)).backward()
        assert any(name.startswith("loss.prototypes") for name, _ in model.named_parameters())
        assert all(parameter.grad is not None for parameter in model.parameters())

    def test_embeddings_of_nodes(self):
        model = model_of(NodeEncoder(), EdgePerturb(0.2), AttributeMask(0.2))
        batch = molecules(4)
        assert [z.shape for z in model.embeddings(batch)] == [(40, 8)] * 2
        one = batch[0]
        assert [z.shape for z in model.embeddings(one)] == [(10, 8)] * 2
        model(one).backward()

    def test_models_of_pyg(self):
        batch = molecules(3)
        batch.edge_weight = torch.ones(batch.num_edges)
        gin = GIN(4, 8, 2, norm="InstanceNorm")  # takes batch and batch_size
        assert model_of(gin, EdgePerturb(), AttributeMask()).embeddings(batch)[0].shape == (30, 8)
        layers = [
            (GINConv(torch.nn.Linear(4, 8)), "x, edge_index -> x"),
            (global_add_pool, "x, batch, size -> x"),
        ]
        sequential = Sequential("x, edge_index, batch, size", layers)
        assert model_of(sequential, NodeDrop(1.0), NodeDrop()).embeddings(batch)[0].shape == (3, 8)

    def test_an_augmenter_that_is_a_module_is_a_part(self):
        class Scale(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = torch.nn.Parameter(torch.ones(()))

            def forward(self, batch):
                batch = copy.copy(batch)
                batch.x = self.scale * batch.x
                return batch

        model = model_of(Encoder(), Scale(), NodeDrop())
        model(molecules(4)).backward()
        assert model.augment1.scale.grad is not None


def train(model, loader, epochs, lr=0.01):
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    means = []
    for _ in range(epochs):
        losses = []
        for batch in loader:
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        means.append(sum(losses) / len(losses))
    return means


def test_training_on_synthetic_graphs():
    loader = DataLoader(molecules(64).to_data_list(), batch_size=32, shuffle=True)
    augment = RandomChoice([NodeDrop(), Subgraph(), EdgePerturb(), AttributeMask()])
    means = train(model_of(Encoder(norm="batch_norm"), augment, augment), loader, epochs=15)
    assert sum(means[-3:]) < 0.9 * sum(means[:3])
