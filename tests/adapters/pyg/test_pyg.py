"""What PyG alone has: attributes of every kind, one plain Data, encoders of every signature."""

import pytest
import torch
import torch_geometric.transforms as T
from helpers.batches import graph_lists, ring
from helpers.losses import DIM
from helpers.pyg_cases import Encoder, NodeEncoder, apart, batch_of, model_of
from hypothesis import example, given
from hypothesis import strategies as st
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, Sequential
from torch_geometric.nn.models import GIN

from pgcl_losses.adapters.pyg import AttributeMask, EdgePerturb, NodeDrop, Subgraph

pytestmark = pytest.mark.pyg
CHANGING = [NodeDrop, Subgraph, EdgePerturb]  # nodes or edges
DROPPING = CHANGING[:2]
ALL = [*CHANGING, AttributeMask]
KEEP = torch.nn.Identity()


def rings(count=2, **values):
    batch = batch_of([ring(10)] * count)
    for key, value in values.items():
        batch[key] = value
    return batch


def without(*keys):
    batch = rings()
    for key in keys:
        del batch[key]
    return batch


class TestAttributes:
    @pytest.mark.parametrize("kind", CHANGING)
    @given(graphs=graph_lists(), features=st.booleans(), p=st.sampled_from([0.4, 0.999]))
    @example(graphs=[(1, []), (0, []), (3, [(0, 0)] * 3), (0, [])], features=True, p=0.4)
    def test_they_stay_with_their_nodes_edges_and_graphs(self, kind, graphs, features, p):
        """Also where there are as many graphs as nodes, or nodes as edges."""
        graphs = apart(batch_of(graphs))
        for i, data in enumerate(graphs):
            data.y, data.target = torch.tensor([i]), torch.tensor([[i, -i]])
            data.name = f"graph {i}"
            data.edge_attr = torch.stack([data.edge_id, torch.full_like(data.edge_id, i)], 1)
            if not features:
                data.num_nodes = data.num_nodes
                del data.x, data.node_id
        view = kind(p)(Batch.from_data_list(graphs))
        assert torch.equal(view.y, torch.arange(len(graphs)))
        assert torch.equal(view.target, torch.stack([view.y, -view.y], 1))
        assert view.name == [data.name for data in graphs]
        owner = view.batch[view.edge_index[0]]
        assert torch.equal(view.edge_attr, torch.stack([view.edge_id, owner], 1))
        assert view.ptr[-1] == view.num_nodes == len(view.batch)
        for i, data in enumerate(view.to_data_list()):
            assert (data.y, data.name, data.num_nodes) == (i, f"graph {i}", view.ptr.diff()[i])
            assert torch.equal(data.edge_attr[:, 1], torch.full((data.num_edges,), i))

    def test_of_a_batch_that_was_changed_or_made_by_hand(self):
        batch = rings(noise=torch.randn(20), edge_noise=torch.randn(40), y=torch.arange(2))
        for given_batch in (batch, Batch(**batch.to_dict())):
            view = NodeDrop(0.5)(given_batch)
            assert (len(view.noise), len(view.edge_noise)) == (view.num_nodes, view.num_edges)
            assert (view.num_graphs, len(view.y)) == (2, 2)

    def test_what_follows_an_attribute_goes_with_it(self):
        one_way = [(0, 1), (1, 2), (2, 3), (3, 0)]  # as many as nodes
        graphs = apart(batch_of([(4, one_way), (1, []), (4, one_way)]))
        batch = Batch.from_data_list(graphs, follow_batch=["x", "edge_index", "edge_id"])
        view = NodeDrop(0.4)(batch)
        assert torch.equal(view.x_batch, view.batch)
        assert torch.equal(view.x_ptr, view.ptr)
        owner = view.batch[view.edge_index[0]]
        for key in ("edge_index", "edge_id"):
            assert torch.equal(view[f"{key}_batch"], owner)
            assert torch.equal(view[f"{key}_ptr"].diff(), owner.bincount(minlength=3))

    @pytest.mark.parametrize("kind", CHANGING)
    def test_edges_alone_and_edges_with_promises(self, kind):
        pair = Data(edge_index=torch.tensor([[0, 1], [1, 0]]))
        with pytest.warns(UserWarning, match="infer 'num_nodes'"):
            batch = Batch.from_data_list([pair, pair])
        view = kind(1 - 1e-9)(batch)
        counts = [1, 1] if kind in DROPPING else [2, 2]
        assert [data.num_nodes for data in view.to_data_list()] == counts
        assert view.ptr.diff().tolist() == counts
        batch = rings()
        batch.edge_index = EdgeIndex(batch.edge_index, sort_order="row", is_undirected=True)
        assert type(kind(0.5)(batch).edge_index) is torch.Tensor

    def test_masked_features_of_other_shapes_and_types(self):
        for x in (torch.ones(20, dtype=torch.long), torch.ones(20, 2, 3), torch.ones(20, 0)):
            view = AttributeMask(1.0, fill_value=7)(rings(x=x))
            assert torch.equal(view.x, torch.full_like(x, 7))
        with pytest.raises(ValueError, match=r"whole number where x is torch.int64, but got 0\.5"):
            AttributeMask(fill_value=0.5)(rings(x=torch.ones(20, 1).long()))

    def test_separating_fails_loudly_where_it_cannot_be_right(self):
        # AddSelfLoops puts edges of all graphs at the end.
        view = NodeDrop(0.2)(T.AddSelfLoops()(without("edge_id")))
        assert torch.equal(view.batch[view.edge_index[0]], view.batch[view.edge_index[1]])
        with pytest.raises(RuntimeError, match="Cannot reconstruct"):
            view.to_data_list()


class OfTensors(Encoder):
    """Pools without the number of graphs."""

    def forward(self, x, edge_index, batch):
        return super().forward(x, edge_index, batch, None)


class TestEncoders:
    def test_tensors_by_name_or_the_view(self):
        class OfView(Encoder):
            def forward(self, data, edge_index=None):
                return super().forward(data.x, data.edge_index, data.batch, data.num_graphs)

        encoders, batch = [Encoder(), OfTensors(), OfView()], rings(3)
        for encoder in encoders:
            encoder.load_state_dict(encoders[0].state_dict())
        embeddings = [model_of(KEEP, KEEP, encoder=each).embeddings(batch)[0] for each in encoders]
        for others in embeddings[1:]:
            torch.testing.assert_close(others, embeddings[0])

    @pytest.mark.parametrize(
        "encoder",
        [
            GINConv(torch.nn.Linear(3, DIM)),
            GCNConv(3, DIM),
            SAGEConv(3, DIM),
            GIN(3, DIM, 2, norm="InstanceNorm"),  # takes batch and batch_size
            Sequential("x, edge_index, batch", [(GCNConv(3, DIM), "x, edge_index -> x")]),
        ],
    )
    def test_layers_and_models_of_pyg_encode_nodes(self, encoder):
        batch = rings(edge_weight=torch.ones(40).double())
        model = model_of(EdgePerturb(), AttributeMask(), encoder=encoder)
        for graph in (batch, batch[0]):
            assert [z.shape for z in model.embeddings(graph)] == [(graph.num_nodes, DIM)] * 2

    @pytest.mark.parametrize(
        ("forward", "message"),
        [
            (lambda features, adjacency, batch: ..., "takes features, adjacency, batch"),
            (lambda x, edge_index, temperature: ..., "takes x, edge_index, temperature"),
            (lambda x, e, b: ..., "rename e to edge_index, b to batch"),
            (None, "put it around the ContrastiveModel instead"),
        ],
    )
    def test_signatures_that_cannot_be_called(self, forward, message):
        encoder = torch.compile(Encoder()) if forward is None else Encoder()
        if forward is not None:
            encoder.forward = forward
        with pytest.raises(TypeError, match=message):
            model_of(KEEP, KEEP, encoder=encoder)

    def test_pooling_without_size_where_the_last_graph_is_empty(self):
        batch = batch_of([ring(10), ring(10), (0, [])])
        assert model_of(KEEP, KEEP)(batch).isfinite()
        with pytest.raises(ValueError, match=r"returned 2 embeddings .* 3 graphs and 20 .*size="):
            model_of(KEEP, KEEP, encoder=OfTensors())(batch)

    def test_an_embedding_of_a_graph_needs_a_batch(self):
        class Pooled(NodeEncoder):
            def forward(self, x, edge_index):
                return super().forward(x, edge_index).sum(0, keepdim=True)

        with pytest.raises(ValueError, match=r"1 embedding for one plain Data.*batch graphs by"):
            model_of(KEEP, KEEP, encoder=Pooled())(rings()[0])


def hetero():
    data = HeteroData()
    data["atom"].x = torch.ones(2, 1)
    data["atom", "bond", "atom"].edge_index = torch.tensor([[0], [1]])
    return data


class Bipartite(Data):
    def __inc__(self, key, value, *args, **kwargs):
        if key == "edge_index":
            return torch.tensor([[len(self.x_s)], [len(self.x_t)]])
        return super().__inc__(key, value, *args, **kwargs)


def bipartite():
    ends = torch.tensor([[0, 1, 2], [0, 0, 1]])
    return Bipartite(x_s=torch.ones(3, 1), x_t=torch.ones(2, 1), edge_index=ends, num_nodes=3)


class TestBadBatches:
    @pytest.mark.parametrize(
        ("data", "error", "message"),
        [
            (hetero(), TypeError, "must be a Batch or Data, but got HeteroData; to_homogeneous"),
            (Batch.from_data_list([hetero()]), TypeError, "HeteroDataBatch; to_homogeneous"),
            (without("ptr"), ValueError, "(data|batch) has no ptr: make it by a DataLoader"),
            (without("batch"), ValueError, "has no batch: make it"),
            (without("batch", "ptr"), ValueError, "has no batch and no ptr: make it"),
            (Data(x=torch.ones(2, 1), batch=torch.zeros(2).long()), ValueError, "has no ptr"),
        ],
    )
    def test_for_any_augmentation_and_the_model(self, data, error, message):
        for takes_batch in (*(kind(0.2) for kind in ALL), model_of(KEEP, KEEP)):
            with pytest.raises(error, match=message):
                takes_batch(data)

    @pytest.mark.parametrize("kind", CHANGING)
    @pytest.mark.parametrize(
        ("data", "message"),
        [
            (without("edge_index"), "must have its edges only in edge_index"),
            (rings(adj_t=torch.eye(20)), "must have its edges only in edge_index"),
            (rings(x=torch.ones(19, 4), batch=torch.zeros(19).long()), "19 nodes but ptr ends at"),
            (bipartite(), "data must have nodes of one kind"),
            (Batch.from_data_list([bipartite()] * 2), "data must have nodes of one kind"),
        ],
    )
    def test_where_nodes_or_edges_change(self, kind, data, message):
        with pytest.raises(ValueError, match=message):
            kind(0.2)(data)

    @pytest.mark.parametrize("kind", DROPPING)
    def test_attributes_that_may_belong_to_nodes(self, kind):
        with pytest.raises(TypeError, match="extra must be one Tensor, but is a dict of them"):
            kind(0.2)(rings(extra={"charge": torch.ones(20)}))
        with pytest.raises(ValueError, match="face holds numbers of nodes, which change"):
            kind(0.2)(rings(face=torch.zeros(3, 5, dtype=torch.long)))

    def test_no_features_to_mask(self):
        with pytest.raises(ValueError, match=r"must have node features x, but is .*Constant\(\)"):
            AttributeMask()(without("x"))
        batch = without("x")
        for encoder in (Encoder(), GIN(3, DIM, 2), lambda view: GCNConv(3, DIM)(view.x, None)):
            with pytest.raises(TypeError, match=r"the batch has no x: .*Constant\(\)"):
                model_of(KEEP, KEEP, encoder=encoder)(batch)
