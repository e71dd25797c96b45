"""Whatever a batch of PyG carries goes along with its nodes, edges and graphs."""

import pytest
import torch
import torch_geometric.transforms as T
from helpers.pyg_cases import ALL, DROPPING, molecules
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data
from torch_geometric.utils import degree

from pgcl_losses.adapters.pyg import AttributeMask, EdgePerturb, NodeDrop, Subgraph


class TestAttributes:
    def test_labels_of_as_many_graphs_as_nodes(self):
        # By their numbers of rows alone, y and ptr could belong to nodes or edges.
        sizes = [1, 0, 3, 0]
        graphs = [
            Data(x=torch.zeros(n, 1), edge_index=torch.zeros(2, n, dtype=torch.long)) for n in sizes
        ]
        for i, data in enumerate(graphs):
            data.y = torch.tensor([i])
            data.edge_score = torch.ones(data.num_edges)
        view = NodeDrop(1.0)(Batch.from_data_list(graphs))
        assert view.y.tolist() == [0, 1, 2, 3]
        assert view.ptr.tolist() == [0, 1, 1, 2, 2]
        assert len(view.edge_score) == view.num_edges
        assert view.num_nodes == 2

    def test_labels_where_each_graph_is_a_node(self):
        data = Data(x=torch.zeros(1, 1), edge_index=torch.empty(2, 0, dtype=torch.long), y=1)
        assert NodeDrop(1.0)(Batch.from_data_list([data] * 3)).y.shape == (3,)
        assert NodeDrop(1.0)(data).y == 1

    def test_set_after_batching(self):
        batch = molecules(3)
        batch.noise = torch.randn(30)
        batch.edge_noise = torch.randn(60)
        view = NodeDrop(0.5)(batch)
        assert (len(view.noise), len(view.edge_noise)) == (view.num_nodes, view.num_edges)

    def test_a_batch_made_by_hand(self):
        batch = molecules(3)
        by_hand = Batch(
            x=batch.x, edge_index=batch.edge_index, batch=batch.batch, ptr=batch.ptr, y=batch.y
        )
        view = NodeDrop(1.0)(by_hand)
        assert (view.num_graphs, view.num_nodes, len(view.y)) == (3, 3, 3)

    def test_follow_batch(self):
        graphs = molecules(3).to_data_list()
        batch = Batch.from_data_list(graphs, follow_batch=["x", "edge_index"])
        view = NodeDrop(0.5)(batch)
        assert torch.equal(view.x_batch, view.batch)
        assert torch.equal(view.x_ptr, view.ptr)
        assert torch.equal(view.edge_index_batch, view.batch[view.edge_index[0]])
        counts = degree(view.edge_index_batch, 3, torch.long)
        assert torch.equal(view.edge_index_ptr.diff(), counts)

    def test_what_follows_an_attribute_goes_with_it(self):
        ring = Data(x=torch.ones(4, 1), edge_index=torch.tensor([[0, 1, 2, 3], [1, 2, 3, 0]]))
        ring.edge_bond = torch.arange(4)  # as many as nodes
        lone = Data(
            x=torch.ones(1, 1), edge_index=torch.empty(2, 0).long(), edge_bond=torch.empty(0)
        )
        batch = Batch.from_data_list([ring, lone, ring], follow_batch=["x", "edge_bond"])
        view = NodeDrop(0.4)(batch)
        assert torch.equal(view.x_batch, view.batch)
        assert torch.equal(view.edge_bond_batch, view.batch[view.edge_index[0]])
        assert len(view.edge_bond) == view.num_edges
        assert NodeDrop(1.0)(batch).x_batch.tolist() == [0, 1, 2]

    @pytest.mark.parametrize("augmentation", ALL)
    def test_edges_of_int32(self, augmentation):
        graphs = molecules(4).to_data_list()
        for graph in graphs:
            graph.edge_index = graph.edge_index.int()
        views = []
        for batch in (Batch.from_data_list(graphs), molecules(4)):
            torch.manual_seed(0)
            views.append(augmentation(0.4)(batch).edge_index)
        torch.testing.assert_close(*views, check_dtype=False)

    @pytest.mark.parametrize("augmentation", [*DROPPING, EdgePerturb])
    def test_edges_alone(self, augmentation):
        pair = Data(edge_index=torch.tensor([[0, 1], [1, 0]]))
        with pytest.warns(UserWarning, match="infer 'num_nodes'"):
            batch = Batch.from_data_list([pair, pair])
        view = augmentation(1.0)(batch)
        assert view.x is None
        counts = [1, 1] if augmentation in DROPPING else [2, 2]
        assert [data.num_nodes for data in view.to_data_list()] == counts
        assert view.ptr.diff().tolist() == counts

    def test_edge_index_with_promises(self):
        batch = molecules(2)
        batch.edge_index = EdgeIndex(batch.edge_index, sort_order="row", is_undirected=True)
        for augmentation in (NodeDrop(0.5), Subgraph(0.5), EdgePerturb(0.5)):
            assert type(augmentation(batch).edge_index) is torch.Tensor

    def test_features_of_other_shapes_and_types(self):
        batch = molecules(2)
        for x in (torch.ones(20, dtype=torch.long), torch.ones(20, 2, 3), torch.ones(20, 0)):
            batch.x = x
            view = AttributeMask(1.0, fill_value=7)(batch)
            assert torch.equal(view.x, torch.full_like(x, 7))

    def test_separating_fails_loudly_where_it_cannot_be_right(self):
        # AddSelfLoops puts edges of all graphs at the end.
        view = NodeDrop(0.2)(T.AddSelfLoops()(molecules(3)))
        assert torch.equal(view.batch[view.edge_index[0]], view.batch[view.edge_index[1]])
        with pytest.raises(RuntimeError, match="Cannot reconstruct"):
            view.to_data_list()
