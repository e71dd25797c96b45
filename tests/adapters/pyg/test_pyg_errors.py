"""Batches, arguments and encoders that PyG's adapter cannot take are errors that say why."""

import copy
import subprocess
import sys

import pytest
import torch
from helpers.pyg_cases import ALL, DROPPING, Encoder, Forgetful, NodeEncoder, model_of, molecules
from torch_geometric.data import Batch, Data, HeteroData

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import (
    AttributeMask,
    ContrastiveModel,
    EdgePerturb,
    NodeDrop,
    RandomChoice,
)


def hetero():
    data = HeteroData()
    data["atom"].x = torch.ones(2, 1)
    data["atom", "bond", "atom"].edge_index = torch.tensor([[0], [1]])
    return data


def without(*keys):
    batch = molecules(2)
    for key in keys:
        del batch[key]
    return batch


def with_(**values):
    batch = molecules(2)
    for key, value in values.items():
        batch[key] = value
    return batch


class TestBadInput:
    @pytest.mark.parametrize(
        ("data", "error", "message"),
        [
            (hetero(), TypeError, "must be a Batch or Data, but got HeteroData; to_homog"),
            (Batch.from_data_list([hetero()]), TypeError, "HeteroDataBatch; to_homog"),
            (torch.ones(2), TypeError, "must be a Batch or Data, but got Tensor"),
            (without("ptr"), ValueError, "(data|batch) has no ptr: make it by a DataLoader"),
            (without("batch"), ValueError, "has no batch: make it"),
            (without("batch", "ptr"), ValueError, "has no batch and no ptr: make it"),
            (Data(x=torch.ones(2, 1), batch=torch.zeros(2).long()), ValueError, "has no ptr"),
        ],
    )
    def test_not_a_batch(self, data, error, message):
        model = model_of(Encoder(), NodeDrop(), NodeDrop())
        for takes_batch in (*(kind(0.2) for kind in ALL), model):
            with pytest.raises(error, match=message):
                takes_batch(data)

    @pytest.mark.parametrize("augmentation", [*DROPPING, EdgePerturb])
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (without("edge_index"), "must have its edges only in edge_index"),
            (with_(adj_t=torch.eye(20)), "must have its edges only in edge_index"),
            (with_(x=torch.ones(19, 4), batch=torch.zeros(19).long()), "19 nodes but ptr ends at"),
        ],
    )
    def test_batches_that_cannot_be_augmented(self, augmentation, data, message):
        with pytest.raises(ValueError, match=message):
            augmentation(0.2)(data)

    @pytest.mark.parametrize("augmentation", [*DROPPING, EdgePerturb])
    def test_nodes_of_two_kinds(self, augmentation):
        class Bipartite(Data):
            def __inc__(self, key, value, *args, **kwargs):
                if key == "edge_index":
                    return torch.tensor([[len(self.x_s)], [len(self.x_t)]])
                return super().__inc__(key, value, *args, **kwargs)

        ends = torch.tensor([[0, 1, 2], [0, 0, 1]])
        pair = Bipartite(x_s=torch.ones(3, 1), x_t=torch.ones(2, 1), edge_index=ends, num_nodes=3)
        for data in (pair, Batch.from_data_list([pair, pair])):
            with pytest.raises(ValueError, match="data must have nodes of one kind"):
                augmentation(0.2)(data)

    def test_no_features_to_mask(self):
        with pytest.raises(ValueError, match=r"features x, but is DataBatch\(edge_index=.*ptr"):
            AttributeMask()(without("x"))

    @pytest.mark.parametrize("augmentation", DROPPING)
    def test_tensors_inside_of_others(self, augmentation):
        graphs = molecules(2).to_data_list()
        for graph in graphs:
            graph.extra = {"charge": torch.ones(10)}
        with pytest.raises(TypeError, match="extra must be one Tensor, but is a dict of them"):
            augmentation(0.2)(Batch.from_data_list(graphs))

    @pytest.mark.parametrize("augmentation", DROPPING)
    def test_other_numbers_of_nodes(self, augmentation):
        batch = with_(face=torch.zeros(3, 5, dtype=torch.long))
        with pytest.raises(ValueError, match="face holds numbers of nodes, which change"):
            augmentation(0.2)(batch)

    @pytest.mark.parametrize("augmentation", ALL)
    @pytest.mark.parametrize(
        ("p", "error", "message"),
        [
            (-0.1, ValueError, "p must be a number from 0 to 1, but got -0.1"),
            (1.1, ValueError, "p must be a number from 0 to 1, but got 1.1"),
            (float("nan"), ValueError, "p must be a number from 0 to 1, but got nan"),
            ("0.1", TypeError, "p must be a number from 0 to 1, but got '0.1'"),
        ],
    )
    def test_share(self, augmentation, p, error, message):
        with pytest.raises(error, match=message):
            augmentation(p)

    def test_no_choice(self):
        with pytest.raises(ValueError, match="transforms must hold at least one transform"):
            RandomChoice([])
        with pytest.raises(TypeError, match=r"transforms\[1\] must be a callable .* got None"):
            RandomChoice([NodeDrop(), None])

    @pytest.mark.parametrize("number", [1, 2, 3])
    def test_no_augmentation(self, number):
        augments = {1: NodeDrop(), 2: NodeDrop(), 3: NodeDrop(), number: None}
        message = (
            rf"augment{number} must be a callable that makes a view of a batch, but got None "
            r"\(NoneType\)"
        )
        with pytest.raises(TypeError, match=rf"{message}; .* give torch.nn.Identity\(\)"):
            ContrastiveModel(Encoder(), augments[1], augments[2], PGCLLoss(8), augments[3])
        augments[number] = torch.nn.Identity()
        model = ContrastiveModel(Encoder(), augments[1], augments[2], PGCLLoss(8), augments[3])
        batch = molecules(3)
        own = model.encoder(batch.x, batch.edge_index, batch.batch, 3)
        torch.testing.assert_close(model.embeddings(batch)[number - 1], own)


def first_only(batch):
    return Batch.from_data_list(batch.to_data_list()[:1])


def add_the_dropped_nodes(view):
    """Nodes without edges, at the end, in place of those that were dropped."""
    view = copy.copy(view)
    view.x, view.pgcl_node_position = (
        torch.cat([value, value.new_zeros(10 - len(value) % 10, *value.shape[1:])])
        for value in (view.x, view.pgcl_node_position)
    )
    return view


class Returns(torch.nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings

    def forward(self, batch):
        return self.embeddings


class TestBadModels:
    @pytest.mark.parametrize(
        ("encoder", "message"),
        [
            (
                Returns(torch.ones(7, 8)),
                "encoder returned 7 embeddings for the view of augment1, which has 5 graphs and 5 "
                "nodes, while the batch has 50 nodes$",
            ),
            (Returns(torch.ones(5)), r"must return a Tensor of shape.*but got \(5,\)"),
            (Returns((torch.ones(5, 8),)), "must return a Tensor of shape.*but got tuple"),
        ],
    )
    def test_embeddings_of_the_encoder(self, encoder, message):
        with pytest.raises(ValueError, match=message):
            model_of(encoder, NodeDrop(1.0), NodeDrop())(molecules(5))

    def test_the_last_graph_is_empty(self):
        def empty_last(batch):
            mask = batch.batch < batch.num_graphs - 1
            view = batch.subgraph(mask)
            view.ptr = torch.cat([batch.ptr[:-1], batch.ptr[-2:-1]])
            return view

        with pytest.raises(ValueError, match=r"returned 4 embeddings .* 5 graphs and 40 .*size="):
            model_of(Forgetful(), AttributeMask(), empty_last)(molecules(5))
        assert model_of(Encoder(), AttributeMask(), empty_last)(molecules(5)).isfinite()

    @pytest.mark.parametrize("then", [lambda data: data, add_the_dropped_nodes])
    def test_embeddings_of_nodes_need_all_nodes(self, then):
        torch.manual_seed(0)
        model = model_of(NodeEncoder(), EdgePerturb(), lambda data: then(NodeDrop(0.5)(data)))
        message = "augment2.*nodes as samples need views that keep all nodes in their order"
        for batch in (molecules(2), molecules(2)[0]):
            with pytest.raises(ValueError, match=message):
                model(batch)
        model.augment2 = AttributeMask()
        assert model(EdgePerturb()(NodeDrop(0.5)(molecules(2)))).isfinite()

    def test_embeddings_of_graphs_need_a_batch(self):
        class Pooled(Encoder):
            def forward(self, data):
                return self.gin(data.x, data.edge_index).sum(0, keepdim=True)

        with pytest.raises(ValueError, match=r"1 embedding for one plain Data.*batch graphs by"):
            model_of(Pooled(), EdgePerturb(), EdgePerturb())(molecules(2)[0])

    def test_views_of_other_graphs(self):
        model = model_of(Encoder(), NodeDrop(), first_only)
        with pytest.raises(ValueError, match="augment2 made 1 graphs of 3: row i of every"):
            model(molecules(3))

    def test_signatures_of_encoders(self):
        class OtherNames(torch.nn.Module):
            def forward(self, features, adjacency, batch): ...

        class Short(torch.nn.Module):
            def forward(self, x, e, b): ...

        class OneMore(torch.nn.Module):
            def forward(self, x, edge_index, temperature): ...

        for encoder, message in [
            (OtherNames(), "encoder.forward takes features, adjacency, batch: it must take one"),
            (OneMore(), "takes x, edge_index, temperature: it must take one .*by these names$"),
            (Short(), "takes x, e, b: .*by these names: rename e to edge_index, b to batch$"),
            (torch.compile(Encoder()), "put it around the ContrastiveModel instead"),
        ]:
            with pytest.raises(TypeError, match=message):
                model_of(encoder, NodeDrop(), NodeDrop())


def test_without_the_framework_the_error_names_the_extra():
    code = "import sys; sys.modules['torch_geometric'] = None; import pgcl_losses.adapters.pyg"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: pgcl_losses.adapters.pyg needs torch_geometric" in result.stderr
    assert "or in a checkout of pgcl-losses: pip install '.[pyg]'" in result.stderr
