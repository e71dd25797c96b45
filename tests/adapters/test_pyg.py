import copy
import subprocess
import sys
from collections import Counter
from itertools import product

import pytest
import torch
import torch_geometric.transforms as T
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric import EdgeIndex
from torch_geometric.data import Batch, Data, HeteroData
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GCNConv, GINConv, SAGEConv, Sequential, global_add_pool
from torch_geometric.nn.models import GIN
from torch_geometric.utils import degree, is_undirected, to_undirected

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pyg import (
    AttributeMask,
    ContrastiveModel,
    EdgePerturb,
    NodeDrop,
    RandomChoice,
    Subgraph,
)

DROPPING = [NodeDrop, Subgraph]
ALL = [*DROPPING, EdgePerturb, AttributeMask]


@st.composite
def graph_lists(draw, undirected=False):
    """Graphs whose rows carry the number of their graph, and their own."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=6))
    with_x = draw(st.booleans())
    graphs = []
    for i, size in enumerate(sizes):
        pair = st.tuples(*[st.integers(0, size - 1)] * 2)
        pairs = draw(st.lists(pair, max_size=8)) if size else []
        edge_index = torch.tensor(pairs, dtype=torch.long).view(-1, 2).T
        if undirected:
            edge_index = to_undirected(edge_index, num_nodes=size)
        num_edges = edge_index.shape[1]
        data = Data(
            edge_index=edge_index,
            edge_attr=torch.stack([torch.full((num_edges,), i), torch.arange(num_edges)], 1),
            y=torch.tensor([i]),
            node_mark=torch.stack([torch.full((size,), i), torch.arange(size)], 1),
            weight_of_edge=torch.arange(num_edges) + 100 * i,
            target=torch.tensor([[i, -i]]),
            name=f"graph {i}",
        )
        if with_x:
            data.x = data.node_mark + 1.0
        else:
            data.num_nodes = size
        graphs.append(data)
    return graphs


def assert_consistent(view, graphs):
    """Whatever happened, row i is graph i, and everything is where it belongs."""
    num_graphs = len(graphs)
    assert view.num_graphs == num_graphs
    assert view.ptr.tolist() == [0, *degree(view.batch, num_graphs, torch.long).cumsum(0).tolist()]
    assert torch.equal(view.batch, view.batch.sort().values)
    assert view.num_nodes == len(view.batch) == len(view.node_mark)
    assert torch.equal(view.node_mark[:, 0], view.batch)
    assert torch.equal(view.y, torch.arange(num_graphs))
    assert torch.equal(view.target[:, 0], torch.arange(num_graphs))
    assert view.name == [data.name for data in graphs]
    source, target = view.edge_index
    assert len(view.edge_attr) == len(view.weight_of_edge) == len(source)
    assert torch.equal(view.batch[source], view.batch[target])
    assert torch.equal(view.edge_attr[:, 0], view.batch[source])
    assert torch.equal(view.weight_of_edge, view.edge_attr @ torch.tensor([100, 1]))


def assert_separable(view):
    apart = view.to_data_list()
    assert len(apart) == view.num_graphs
    for i, data in enumerate(apart):
        nodes = view.batch == i
        edges = view.edge_attr[:, 0] == i
        assert data.num_nodes == int(nodes.sum())
        assert torch.equal(data.node_mark, view.node_mark[nodes])
        assert torch.equal(data.edge_attr, view.edge_attr[edges])
        assert torch.equal(data.edge_index, view.edge_index[:, edges] - view.ptr[i])
        assert (int(data.y), data.name) == (i, f"graph {i}")
    again = Batch.from_data_list(apart)
    assert torch.equal(again.edge_index, view.edge_index)
    assert torch.equal(again.ptr, view.ptr)


@pytest.mark.parametrize("augmentation", ALL)
@given(graphs=graph_lists(), p=st.sampled_from([0.0, 0.3, 0.7, 1.0]), seed=st.integers(0, 99))
def test_row_i_stays_graph_i(augmentation, graphs, p, seed):
    torch.manual_seed(seed)
    batch = Batch.from_data_list(graphs)
    before = copy.deepcopy(batch)
    view = augmentation(p)(batch)
    assert_consistent(view, graphs)
    assert_separable(view)
    assert_separable(NodeDrop(0.5)(view))
    for key, value in before:
        assert torch.equal(batch[key], value) if torch.is_tensor(value) else batch[key] == value
        if p == 0 and augmentation is not Subgraph:  # which keeps one component of a graph
            assert torch.equal(view[key], value) if torch.is_tensor(value) else view[key] == value
    assert_separable(batch)


@pytest.mark.parametrize("augmentation", DROPPING)
@given(graphs=graph_lists(), seed=st.integers(0, 99))
def test_what_is_left_is_as_it_was(augmentation, graphs, seed):
    torch.manual_seed(seed)
    view = augmentation(0.4)(Batch.from_data_list(graphs))
    if "x" in view:
        assert torch.equal(view.x, view.node_mark + 1.0)
    kept = {tuple(mark) for mark in view.node_mark.tolist()}
    edges = {}
    for i, data in enumerate(graphs):
        for k, (source, target) in enumerate(data.edge_index.T.tolist()):
            if (i, source) in kept and (i, target) in kept:
                edges[i, k] = [source, target]
    ends = view.node_mark[view.edge_index, 1].T.tolist()
    assert dict(zip(map(tuple, view.edge_attr.tolist()), ends, strict=True)) == edges


@pytest.mark.parametrize("augmentation", ALL)
@given(graphs=graph_lists(), p=st.sampled_from([0.0, 0.5, 1.0]))
def test_one_data_is_one_graph(augmentation, graphs, p):
    data = graphs[0]
    view = augmentation(p)(data)
    assert type(view) is Data
    assert "ptr" not in view
    assert "batch" not in view
    assert_consistent(Batch.from_data_list([view]), graphs[:1])


@pytest.mark.parametrize("augmentation", ALL)
def test_determinism_under_a_seed(augmentation):
    batch = molecules(20)
    views = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        views.append(augmentation(0.5)(batch))
    same, other = ([view.x.tolist(), view.edge_index.tolist()] for view in views[1:])
    assert [views[0].x.tolist(), views[0].edge_index.tolist()] == same != other


def molecules(count, **changes):
    """Rings of six with a tail of four; the first feature is the graph's class."""
    ring = torch.arange(6)
    tail = torch.arange(5, 9)
    one_way = torch.stack([torch.cat([ring, tail]), torch.cat([ring.roll(-1), tail + 1])])
    edge_index = to_undirected(one_way)
    graphs = []
    for i in range(count):
        x = torch.cat([torch.full((10, 1), i % 2 - 0.5), torch.randn(10, 3)], dim=1)
        graphs.append(Data(x=x, edge_index=edge_index, y=torch.tensor([i % 2]), **changes))
    return Batch.from_data_list(graphs)


class TestRates:
    """Shares, to five standard deviations."""

    batch = molecules(1000)

    def assert_share(self, share, p, count):
        assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5

    def test_node_drop(self):
        self.assert_share(1 - NodeDrop(0.3)(self.batch).num_nodes / 10_000, 0.3, 10_000)

    def test_attribute_mask(self):
        view = AttributeMask(0.3, fill_value=9)(self.batch)
        masked = view.x == 9
        assert torch.equal(masked.all(1), masked.any(1))
        assert torch.equal(view.x[~masked], self.batch.x[~masked])
        self.assert_share(masked.float().mean().item(), 0.3, 10_000)

    def test_edge_perturb(self):
        view = EdgePerturb(0.3)(self.batch)
        assert is_undirected(view.edge_index)
        assert not (view.edge_index[0] == view.edge_index[1]).any()
        stays = (view.edge_index == self.batch.edge_index).all(0)
        undirected = self.batch.edge_index[0] < self.batch.edge_index[1]
        # One in 45 pairs of nodes is the old one.
        self.assert_share(1 - stays[undirected].float().mean().item(), 0.3 * 44 / 45, 10_000)

    def test_added_edges_are_uniform(self):
        triangle = Data(x=torch.zeros(4, 1), edge_index=torch.tensor([[0], [1]]))
        view = EdgePerturb(1.0)(Batch.from_data_list([triangle] * 12_000))
        counts = Counter(map(tuple, (view.edge_index - view.ptr[:-1]).T.tolist()))
        assert set(counts) == {(i, j) for i, j in product(range(4), repeat=2) if i != j}
        assert all(abs(count - 1000) < 5 * 31 for count in counts.values())

    def test_subgraph(self):
        view = Subgraph(0.25)(self.batch)
        assert view.ptr.diff().tolist() == [8] * 1000  # 10 less 2.5, rounded down

    def test_subgraph_grows_by_a_random_neighbour_at_a_time(self):
        edges = [(0, 1), (1, 2), (2, 3), (1, 3), (3, 4)]
        neighbours = {i: {j for e in edges for j in e if i in e and j != i} for i in range(5)}
        expected = Counter()

        def grow(part, probability):
            if len(part) == 3:
                expected[part] += probability
                return
            border = set().union(*(neighbours[i] for i in part)) - part
            for node in border:
                grow(part | {node}, probability / len(border))

        for seed in range(5):
            grow(frozenset([seed]), 1 / 5)
        data = Data(x=torch.arange(5.0)[:, None], edge_index=to_undirected(torch.tensor(edges).T))
        view = Subgraph(0.4)(Batch.from_data_list([data] * 10_000))
        parts = Counter(map(frozenset, view.x.view(-1, 3).int().tolist()))
        for part in {*parts, *expected}:
            self.assert_share(parts[part] / 10_000, expected[part], 10_000)


@settings(max_examples=50)
@given(graphs=graph_lists(undirected=True), seed=st.integers(0, 99))
def test_perturbed_edges_stay_undirected(graphs, seed):
    torch.manual_seed(seed)
    batch = Batch.from_data_list(graphs)
    view = EdgePerturb(0.6)(batch)
    assert Counter(map(tuple, view.edge_index.T.tolist())) == Counter(
        map(tuple, view.edge_index.flip(0).T.tolist())
    )
    was_loop, is_loop = (ends[0] == ends[1] for ends in (batch.edge_index, view.edge_index))
    assert torch.equal(was_loop, is_loop)
    assert torch.equal(batch.edge_index[:, was_loop], view.edge_index[:, was_loop])


@given(graphs=graph_lists(undirected=True), seed=st.integers(0, 99))
def test_a_subgraph_is_connected(graphs, seed):
    torch.manual_seed(seed)
    for data in Subgraph(0.3)(Batch.from_data_list(graphs)).to_data_list():
        reached = torch.arange(data.num_nodes) == 0
        for _ in range(data.num_nodes):
            reached[data.edge_index[1][reached[data.edge_index[0]]]] = True
        assert reached.all()


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
        assert view.ptr.tolist() == [0] * 5
        assert view.edge_score.shape == (0,)
        assert view.num_nodes == 0

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
        assert (view.num_graphs, view.num_nodes, len(view.y)) == (3, 0, 3)

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
        assert len(NodeDrop(1.0)(batch).x_batch) == 0

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

    @pytest.mark.parametrize("augmentation", ALL)
    def test_edges_alone(self, augmentation):
        pair = Data(edge_index=torch.tensor([[0, 1], [1, 0]]))
        with pytest.warns(UserWarning, match="infer 'num_nodes'"):
            batch = Batch.from_data_list([pair, pair])
        view = augmentation(1.0)(batch)
        assert view.x is None
        counts = [0, 0] if augmentation in DROPPING else [2, 2]
        if augmentation is not AttributeMask:
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


def test_random_choice_draws_one_for_each_call():
    batch = molecules(2)
    choice = RandomChoice([NodeDrop(1.0), AttributeMask(1.0), T.Compose([EdgePerturb(0.0)])])
    drawn = Counter()
    for _ in range(300):
        view = choice(batch)
        drawn["drop"] += view.num_nodes == 0
        drawn["mask"] += view.num_nodes == 20 and not view.x.any()
    assert all(70 < count < 130 for count in drawn.values())
    assert repr(RandomChoice([NodeDrop(0.1)])) == "RandomChoice([NodeDrop(p=0.1)])"


class Encoder(torch.nn.Module):
    """GIN on tensors, told the number of graphs."""

    def __init__(self, width=4, dim=8, **options):
        super().__init__()
        self.gin = GIN(width, dim, num_layers=3, **options)
        self.head = torch.nn.Linear(dim, dim)

    def forward(self, x, edge_index, batch, num_graphs):
        return self.head(global_add_pool(self.gin(x, edge_index), batch, num_graphs))


class BatchEncoder(Encoder):
    def forward(self, data):
        return super().forward(data.x, data.edge_index, data.batch, data.num_graphs)


class Forgetful(Encoder):
    """Pools without the number of graphs."""

    def forward(self, x, edge_index, batch):
        return super().forward(x, edge_index, batch, None)


class NodeEncoder(Encoder):
    def forward(self, x, edge_index):
        return self.gin(x, edge_index)


def model_of(encoder, *augmentations, **options):
    return ContrastiveModel(encoder, *augmentations, PGCLLoss(8, 4, **options))


class TestContrastiveModel:
    @pytest.mark.parametrize("kind", [Encoder, BatchEncoder, Forgetful])
    def test_the_loss_is_that_of_the_rows_of_the_views(self, kind):
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
        torch.testing.assert_close(model.rows(batch), (z1, z2))

    def test_a_convolution_encodes_nodes(self):
        graph = molecules(6)
        for conv in (GINConv(torch.nn.Linear(4, 8)), GCNConv(4, 8), SAGEConv(4, 8)):
            model = model_of(conv, EdgePerturb(0.2), AttributeMask(0.2))
            assert [rows.shape for rows in model.rows(graph)] == [(60, 8)] * 2

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

    def test_graphs_may_be_emptied(self):
        model = model_of(Encoder(), NodeDrop(1.0), AttributeMask(1.0))
        loss = model(molecules(6))
        loss.backward()
        assert loss.isfinite()

    def test_rows_of_nodes(self):
        model = model_of(NodeEncoder(), EdgePerturb(0.2), AttributeMask(0.2))
        batch = molecules(4)
        assert [rows.shape for rows in model.rows(batch)] == [(40, 8)] * 2
        one = batch[0]
        assert [rows.shape for rows in model.rows(one)] == [(10, 8)] * 2
        model(one).backward()

    def test_models_of_pyg(self):
        batch = molecules(3)
        batch.edge_weight = torch.ones(batch.num_edges)
        gin = GIN(4, 8, 2, norm="InstanceNorm")  # takes batch and batch_size
        assert model_of(gin, EdgePerturb(), AttributeMask()).rows(batch)[0].shape == (30, 8)
        layers = [
            (GINConv(torch.nn.Linear(4, 8)), "x, edge_index -> x"),
            (global_add_pool, "x, batch, size -> x"),
        ]
        sequential = Sequential("x, edge_index, batch, size", layers)
        assert model_of(sequential, NodeDrop(1.0), NodeDrop()).rows(batch)[0].shape == (3, 8)

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
            (without("edge_index"), "must have its edges in edge_index, and there alone"),
            (with_(adj_t=torch.eye(20)), "must have its edges in edge_index, and there alone"),
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


def first_only(batch):
    return Batch.from_data_list(batch.to_data_list()[:1])


class Returns(torch.nn.Module):
    def __init__(self, rows):
        super().__init__()
        self.rows = rows

    def forward(self, batch):
        return self.rows


class TestBadModels:
    @pytest.mark.parametrize(
        ("encoder", "message"),
        [
            (
                Forgetful(),
                "encoder returned 0 rows for the view of augment1, which has 5 graphs and 0 nodes, "
                "of the batch's 50; pool with size=batch.num_graphs",
            ),
            (NodeEncoder(), "encoder returned 0 rows.*size=batch.num_graphs"),
            (Returns(torch.ones(7, 8)), r"encoder returned 7 rows.*of the batch's 50$"),
            (Returns(torch.ones(5)), r"must return a Tensor of shape.*but got \(5,\)"),
            (Returns((torch.ones(5, 8),)), "must return a Tensor of shape.*but got tuple"),
        ],
    )
    def test_rows_of_the_encoder(self, encoder, message):
        with pytest.raises(ValueError, match=message):
            model_of(encoder, NodeDrop(1.0), NodeDrop())(molecules(5))

    def test_the_last_graph_is_empty(self):
        def empty_last(batch):
            mask = batch.batch < batch.num_graphs - 1
            view = batch.subgraph(mask)
            view.ptr = torch.cat([batch.ptr[:-1], batch.ptr[-2:-1]])
            return view

        with pytest.raises(ValueError, match=r"returned 4 rows .* 5 graphs and 40 nodes.*size="):
            model_of(Forgetful(), AttributeMask(), empty_last)(molecules(5))
        assert model_of(Encoder(), AttributeMask(), empty_last)(molecules(5)).isfinite()

    def test_rows_of_nodes_need_all_nodes(self):
        model = model_of(NodeEncoder(), EdgePerturb(), NodeDrop(0.5))
        for batch in (molecules(2), molecules(2)[0]):
            with pytest.raises(ValueError, match=r"augment2.*must leave the nodes alone"):
                model(batch)

    def test_rows_of_graphs_need_a_batch(self):
        class Pooled(Encoder):
            def forward(self, data):
                return self.gin(data.x, data.edge_index).sum(0, keepdim=True)

        with pytest.raises(ValueError, match=r"1 row for one plain Data.*batch graphs by"):
            model_of(Pooled(), EdgePerturb(), EdgePerturb())(molecules(2)[0])

    def test_views_of_other_graphs(self):
        model = model_of(Encoder(), NodeDrop(), first_only)
        with pytest.raises(ValueError, match="augment2 made 1 graphs of 3: row i of both"):
            model(molecules(3))

    def test_signatures_of_encoders(self):
        class OtherNames(torch.nn.Module):
            def forward(self, features, adjacency, batch): ...

        class OneMore(torch.nn.Module):
            def forward(self, x, edge_index, temperature): ...

        for encoder, message in [
            (OtherNames(), "encoder.forward takes features, adjacency, batch: it must take one"),
            (OneMore(), "encoder.forward takes x, edge_index, temperature: it must take one"),
            (torch.compile(Encoder()), "give torch.compile, DistributedDataParallel and others"),
        ]:
            with pytest.raises(TypeError, match=message):
                model_of(encoder, NodeDrop(), NodeDrop())


def test_without_the_framework_the_error_names_the_extra():
    code = "import sys; sys.modules['torch_geometric'] = None; import pgcl_losses.adapters.pyg"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ImportError: pgcl_losses.adapters.pyg needs torch_geometric" in result.stderr
    assert (
        "pip install torch-geometric, or the extra: pip install 'pgcl-losses[pyg]'" in result.stderr
    )
