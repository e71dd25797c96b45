"""What PyG alone has: attributes of every kind, and batches that can be cut apart again."""

import pytest
import torch
from helpers.batches import graph_lists, ring
from helpers.pyg_cases import apart, batch_of
from hypothesis import example, given
from hypothesis import strategies as st
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.transforms import RandomLinkSplit
from torch_geometric.utils import dropout_edge, mask_feature

from pgcl_losses.adapters.pyg import (
    AttributeMask,
    EdgeDrop,
    EdgePerturb,
    FeatureMask,
    NodeDrop,
    Subgraph,
)

pytestmark = pytest.mark.pyg
DROPPING = [NodeDrop, Subgraph]
CHANGING = [*DROPPING, EdgeDrop, EdgePerturb]  # nodes or edges


def rings(**values):
    batch = batch_of([ring(10)] * 2)
    for key, value in values.items():
        batch[key] = value
    return batch


@pytest.mark.parametrize("kind", CHANGING)
@given(graphs=graph_lists(), features=st.booleans(), p=st.sampled_from([0.4, 1.0]))
@example(graphs=[(1, []), (3, [(0, 1)] * 2), (1, [(0, 0)])], features=True, p=0.4)
def test_attributes_stay_with_their_nodes_edges_and_graphs(kind, graphs, features, p):
    """Also where there are as many edges as graphs, or as nodes; and to_data_list() cuts right."""
    graphs = apart(batch_of([graph for graph in graphs if graph[0]] or [ring(3)]))
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
        assert torch.equal(data.edge_attr, view.edge_attr[owner == i])
        assert torch.equal(data.edge_index, view.edge_index[:, owner == i] - view.ptr[i])
        assert not features or torch.equal(data.x, view[i].x)


def test_a_batch_that_was_changed_or_made_by_hand():
    batch = rings(noise=torch.randn(20), edge_noise=torch.randn(40), y=torch.arange(2))
    batch.index_of = "rings"  # PyG adds numbers of nodes to tensors whose name has "index" in it
    without_ptr = Batch(**batch.to_dict())
    del without_ptr.ptr
    for given_batch in (batch, without_ptr):
        view = NodeDrop(0.5)(given_batch)
        assert (len(view.noise), len(view.edge_noise)) == (view.num_nodes, view.num_edges)
        assert (view.num_graphs, len(view.y), len(view.ptr)) == (2, 2, 3)


def test_what_follows_an_attribute_goes_with_it():
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
def test_edges_alone_and_edges_with_promises(kind):
    pair = Data(edge_index=torch.tensor([[0, 1], [1, 0]]))
    with pytest.warns(UserWarning, match="infer 'num_nodes'"):
        view = kind(1.0)(pair)
    assert view.num_nodes == (1 if kind in DROPPING else 2)
    batch = rings()
    views = []
    for edges in (
        batch.edge_index,
        EdgeIndex(batch.edge_index, sort_order="row", is_undirected=True),
    ):
        batch.edge_index = edges
        torch.manual_seed(0)
        views.append(kind(0.5)(batch).edge_index)
    assert type(views[1]) is torch.Tensor or not views[1].is_undirected
    assert torch.equal(views[0], views[1].as_subclass(torch.Tensor))


def test_a_short_type_of_numbers_does_not_overflow():
    ends = torch.tensor([[60_000, 69_999], [69_999, 60_000]], dtype=torch.int32)
    view = EdgePerturb(0.0)(Data(x=torch.ones(70_000, 1), edge_index=ends))
    assert torch.equal(view.edge_index, ends.long())


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_the_same_as_the_functions_of_pyg(p):
    batch = rings(x=torch.randn(20, 50), edge_attr=torch.randn(40, 2))
    torch.manual_seed(0)
    view = EdgeDrop(p)(batch)
    torch.manual_seed(0)
    edge_index, kept = dropout_edge(batch.edge_index, p)
    assert torch.equal(view.edge_index, edge_index)
    assert torch.equal(view.edge_attr, batch.edge_attr[kept])
    torch.manual_seed(0)
    view = FeatureMask(p)(batch)
    torch.manual_seed(0)
    assert torch.equal(view.x, mask_feature(batch.x, p)[0])


@pytest.mark.parametrize("kind", CHANGING)
def test_a_batch_that_is_not_sorted(kind):
    order = torch.arange(20).view(2, 10).T.flatten()  # the graphs take turns
    data = rings().subgraph(order)
    with pytest.raises(ValueError, match="batch must be sorted"):
        kind()(data)


@pytest.mark.parametrize("kind", DROPPING)
def test_labels_of_one_graph_stay(kind):
    one_edge = Data(x=torch.eye(2), edge_index=torch.tensor([[0], [1]]), y=torch.tensor([7]))
    assert kind(1.0)(one_edge).y.tolist() == [7]
    _, edges = ring(6)
    as_many_as_edges = Data(
        x=torch.eye(6), edge_index=torch.tensor(edges).T, y=torch.arange(12), bond=torch.arange(12)
    )
    view = kind(0.5)(as_many_as_edges)
    assert view.y.tolist() == [*range(12)]
    assert len(view.bond) == view.num_edges < 12


@pytest.mark.parametrize("kind", [*DROPPING, EdgeDrop])
def test_as_many_labels_as_nodes_or_edges_in_all_graphs(kind):
    """PyG's own subgraph() would drop some of the labels."""
    path, cross = (5, [(0, 1), (1, 2)]), (1, [(0, 0)] * 4)
    graphs = apart(batch_of([path, cross]))  # six nodes and six edges
    for data in graphs:
        data.target, data.y = torch.arange(3), torch.arange(3)
        data.bond = data.edge_id  # of edges, although as many as nodes
    batch = Batch.from_data_list(graphs, follow_batch=["target", "bond"])
    view = kind(0.5)(batch)
    for key in ("target", "y", "target_batch", "target_ptr"):
        assert torch.equal(view[key], batch[key]), key
    assert torch.equal(view.bond, view.edge_id)
    assert torch.equal(view.bond_batch, view.batch[view.edge_index[0]])
    assert [data.y.tolist() for data in view.to_data_list()] == [[0, 1, 2]] * 2
    empty = Batch.from_data_list(
        [
            Data(x=x, edge_index=batch.edge_index[:, :0], y=torch.ones(1))
            for x in torch.ones(2, 1).split([0, 2])
        ]
    )
    assert len(kind(1.0)(empty).y) == 2


@pytest.mark.parametrize("kind", [*DROPPING, EdgeDrop])
@pytest.mark.parametrize("in_batch", [True, False])
def test_as_many_edges_as_graphs(kind, in_batch):
    """Where PyG knows the entries of each graph, they decide; else a word of the name, "edge"."""
    graphs = apart(batch_of([(3, [(0, 1), (1, 2)]), (1, [])] if in_batch else [(2, [(0, 1)])]))
    for data in graphs:
        data.edges = data.my_edge_type = data.weight = data.y = data.edge_id
        data.bond = data.edge_id.view(-1, 1).expand(-1, 3)
        data.knowledge, data.parts = torch.tensor([[0.5, 0.5]]), [torch.ones(3), torch.ones(4)]
    data = Batch.from_data_list(graphs) if in_batch else graphs[0]
    view = kind(1.0)(data)
    names = "edges", "my_edge_type", "weight", "y", "bond"
    lengths = [len(view[name]) for name in names]
    assert lengths == ([0] * 5 if in_batch else [0, 0, 1, 1, 1])
    assert len(view.knowledge) == len(graphs)
    assert not in_batch or [len(part) for part in view.parts] == [6, 8]


def test_names_of_edges_and_of_other_graphs():
    """`e_id` of a NeighborLoader belongs to edges, also of a ring, which has as many nodes."""
    ring = torch.tensor([[0, 1, 2], [1, 2, 0]])
    data = Data(x=torch.eye(3), edge_index=ring, edge_index_s=ring, e_id=torch.arange(3))
    data.n_id = torch.arange(3)
    view = EdgeDrop(1.0)(data)
    assert (view.num_edges, len(view.e_id), len(view.n_id)) == (0, 0, 3)
    assert torch.equal(view.edge_index_s, ring)


@pytest.mark.parametrize("kind", DROPPING)
def test_lists_by_node(kind):
    names = [["C", "N", "O"], ["C", "H"]]
    graphs = [
        Data(x=torch.ones(len(name), 1), edge_index=torch.tensor([[0, 1], [1, 0]]), names=name)
        for name in names
    ]
    assert len(kind(1.0)(graphs[0]).names) == 1
    with pytest.raises(ValueError, match="names has entries of nodes or edges in a list"):
        kind()(Batch.from_data_list(graphs))
    for data, name in zip(graphs, names, strict=True):
        data.names = {"all": torch.ones(len(name))}
        data.smiles, data.tags = "".join(name), [1, 2, 3]
    with pytest.raises(ValueError, match="names has entries of nodes or edges in a dict"):
        kind()(Batch.from_data_list(graphs))
    batch = Batch.from_data_list(graphs, exclude_keys=["names"])
    view = kind(1.0)(batch)
    assert (view.smiles, view.tags) == (["CNO", "CH"], [[1, 2, 3]] * 2)


def test_masked_features_of_other_shapes_and_types():
    for x in (torch.ones(20, dtype=torch.long), torch.ones(20, 2, 3), torch.ones(20, 0)):
        view = AttributeMask(1.0, fill_value=7)(rings(x=x))
        assert torch.equal(view.x, torch.full_like(x, 7))
        assert torch.equal(FeatureMask(1.0)(rings(x=x)).x, torch.zeros_like(x))


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


@pytest.mark.parametrize("split_labels", [False, True])
def test_links_to_predict_stay_whole(split_labels):
    """RandomLinkSplit may make as many of them as the graph has edges."""
    split = RandomLinkSplit(0.1, 0.1, neg_sampling_ratio=0.0, split_labels=split_labels)
    data, _, _ = split(Data(x=torch.eye(40), edge_index=torch.randint(40, (2, 200))))
    labels = {key: value.clone() for key, value in data if "edge_label" in key}
    assert any(len(label) == data.num_edges for label in labels.values())
    view = EdgeDrop(p=0.5)(data)
    assert view.num_edges < data.num_edges
    assert all(torch.equal(view[key], label) for key, label in labels.items())
    view.validate(raise_on_error=True)
    with pytest.raises(ValueError, match="edge_label_index holds numbers of nodes"):
        NodeDrop()(data)


@pytest.mark.parametrize("kind", [AttributeMask, FeatureMask])
def test_sparse_features_are_an_error(kind):
    data = Data(x=torch.eye(4).to_sparse(), edge_index=torch.zeros(2, 0).long())
    with pytest.raises(TypeError, match=r"x must be a dense Tensor, but got torch.sparse_coo"):
        kind()(data)


@pytest.mark.parametrize("kind", [*CHANGING, AttributeMask, FeatureMask])
def test_data_without_what_is_changed(kind):
    missing = "node features x" if kind in (AttributeMask, FeatureMask) else "an edge_index"
    for data in (Data(y=torch.ones(2)), hetero(), Batch.from_data_list([hetero()])):
        message = f"data must be a Batch or Data with {missing}, but got {type(data).__name__}"
        with pytest.raises(TypeError, match=message):
            kind()(data)


@pytest.mark.parametrize("kind", DROPPING)
@pytest.mark.parametrize(
    ("data", "key"),
    [(rings(face=torch.ones(3, 5).long()), "face"), (bipartite(), "edge_index")],
)
def test_numbers_of_nodes_that_would_be_wrong(kind, data, key):
    with pytest.raises(ValueError, match=f"{key} holds numbers of nodes, which {kind.__name__}"):
        kind()(data)
