"""Whole batches of PyG: row i stays graph i, edges stay inside their graph, shares are as asked."""

import copy
from collections import Counter
from itertools import product

import pytest
import torch
import torch_geometric.transforms as T
from helpers.pyg_cases import ALL, DROPPING, molecules
from hypothesis import given, settings
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import global_add_pool
from torch_geometric.utils import degree, is_undirected, to_undirected

from pgcl_losses.adapters.pyg import AttributeMask, EdgePerturb, NodeDrop, RandomChoice, Subgraph


@st.composite
def graph_lists(draw, undirected=False, min_nodes=0, with_x=None):
    """Graphs whose nodes carry the number of their graph, and their own."""
    sizes = draw(st.lists(st.integers(min_nodes, 5), min_size=1, max_size=6))
    with_x = draw(st.booleans()) if with_x is None else with_x
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
    assert torch.equal(view.ptr.diff() > 0, torch.tensor([data.num_nodes > 0 for data in graphs]))
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
@given(data=st.data(), p=st.sampled_from([0.0, 0.3, 0.7, 1.0]), seed=st.integers(0, 99))
def test_row_i_stays_graph_i(augmentation, data, p, seed):
    graphs = data.draw(graph_lists(with_x=True if augmentation is AttributeMask else None))
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


@given(
    graphs=graph_lists(min_nodes=1, with_x=True),
    kinds=st.lists(st.sampled_from(ALL), min_size=1, max_size=3),
    p=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_views_carry_the_ids_of_the_nodes_they_kept(graphs, kinds, p):
    batch = Batch.from_data_list(graphs)
    for given_nodes in (batch, graphs[0]):
        given_nodes.node_id = torch.arange(given_nodes.num_nodes)
        view = T.Compose([kind(p) for kind in kinds])(given_nodes)
        assert torch.equal(view.node_mark, given_nodes.node_mark[view.node_id])
    view = T.Compose([kind(p) for kind in kinds])(batch)
    assert len(global_add_pool(view.x, view.batch)) == len(graphs)


def test_graphs_augmented_one_by_one_make_a_batch():
    choice = RandomChoice([torch.nn.Identity(), *(kind(0.5) for kind in ALL)])
    for batch in DataLoader([choice(data) for data in molecules(20).to_data_list()], batch_size=10):
        assert len(NodeDrop(0.5)(batch).to_data_list()) == 10


@pytest.mark.parametrize("augmentation", ALL)
@given(graphs=graph_lists(with_x=True), p=st.sampled_from([0.0, 0.5, 1.0]))
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


class TestRates:
    """Shares, to five standard deviations."""

    batch = molecules(1000)

    def assert_share(self, share, p, count):
        assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5

    def test_node_drop(self):
        self.assert_share(1 - NodeDrop(0.3)(self.batch).num_nodes / 10_000, 0.3, 10_000)
        pair = Data(x=torch.arange(2), edge_index=torch.empty(2, 0).long())
        view = NodeDrop(0.6)(Batch.from_data_list([pair] * 10_000))
        alone = view.ptr.diff() == 1
        self.assert_share(1 - alone.float().mean().item(), 0.4 * 0.4, 10_000)
        kept = view.x[view.ptr[:-1][alone]].float().mean().item()
        self.assert_share(kept, 0.5, int(alone.sum()))

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


def test_random_choice_draws_one_for_each_call():
    batch = molecules(2)
    choice = RandomChoice([NodeDrop(1.0), AttributeMask(1.0), T.Compose([EdgePerturb(0.0)])])
    drawn = Counter()
    for _ in range(300):
        view = choice(batch)
        drawn["drop"] += view.num_nodes == 2
        drawn["mask"] += view.num_nodes == 20 and not view.x.any()
    assert all(70 < count < 130 for count in drawn.values())
    assert repr(RandomChoice([NodeDrop(0.1)])) == "RandomChoice([NodeDrop(p=0.1)])"
