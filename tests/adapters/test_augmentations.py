"""Augmentations of whole batches: row i stays graph i, and what is drawn has its probability."""

import copy
import itertools
from collections import Counter

import pytest
import torch
from helpers.batches import both_ways, graph_lists, ring
from helpers.marks import examples
from hypothesis import given
from hypothesis import strategies as st

DROPPING = ["NodeDrop", "Subgraph"]
KINDS = [*DROPPING, "EdgeDrop", "EdgePerturb", "AttributeMask", "FeatureMask"]
kinds = pytest.mark.parametrize("kind", KINDS)
FRACTIONS = st.sampled_from([0.0, 0.3, 0.7, 1.0])  # of all nodes, one stays in each graph
SEEDS = st.integers(0, 99)


def augmentation(framework, kind, *options):
    return getattr(framework.adapter, kind)(*options)


def equal(one, other):
    return all(map(torch.equal, vars(one).values(), vars(other).values()))


def assert_rows(framework, view, batch):
    """Graph i of the view has nodes and edges of graph i of the batch, and of no other graph."""
    now, was = framework.contents(view), framework.contents(batch)
    assert torch.equal(now.sizes > 0, was.sizes > 0)
    assert torch.equal(now.graph, was.graph[now.node_id])
    for end in now.edges:
        assert torch.equal(now.graph[end], was.graph[was.edges[0][now.edge_id]])
    parts = [framework.contents(graph) for graph in framework.apart(view)]
    starts = now.sizes.cumsum(0) - now.sizes
    for part, start in zip(parts, starts, strict=True):
        part.edges = part.edges + start
    for name, value in vars(now).items():
        joined = torch.cat([getattr(part, name) for part in parts], -1 if name == "edges" else 0)
        assert torch.equal(joined, value), name


@kinds
@given(graphs=graph_lists(), p=FRACTIONS, seed=SEEDS)
def test_row_i_stays_graph_i(framework, kind, graphs, p, seed):
    batch = framework.batch_of(graphs)
    before = copy.deepcopy(framework.contents(batch))
    views = []
    for _ in range(2):
        torch.manual_seed(seed)
        views.append(augmentation(framework, kind, p)(batch))
    view, again = map(framework.contents, views)
    assert equal(view, again)
    assert equal(framework.contents(batch), before)
    assert_rows(framework, views[0], batch)
    assert_rows(framework, framework.adapter.NodeDrop(0.5)(views[0]), batch)
    if p == 0 and kind != "Subgraph":  # which keeps one component of a graph
        assert equal(view, before)
    if p == 1 and kind in DROPPING:
        assert torch.equal(view.sizes, before.sizes.clamp(max=1))
    if kind in DROPPING:
        assert torch.equal(view.features, before.features[view.node_id])
        between = torch.isin(before.edges, view.node_id).all(0)
        assert torch.equal(view.edge_id, before.edge_id[between])
        assert torch.equal(view.node_id[view.edges], before.edges[:, view.edge_id])
    if kind == "EdgeDrop":
        assert torch.equal(view.edges, before.edges[:, view.edge_id])
        assert torch.equal(view.features, before.features)


@kinds
def test_one_graph_given_in_other_ways(framework, kind):
    views = []
    for graph in framework.one_graph_in_other_ways():
        torch.manual_seed(0)
        view = augmentation(framework, kind, 0.5)(graph)
        assert type(view) is type(graph)
        views.append(vars(framework.contents(view)))
    for other in views[1:]:
        torch.testing.assert_close(other, views[0])


@given(graphs=graph_lists(undirected=True), p=FRACTIONS, seed=SEEDS)
def test_a_subgraph_is_connected(framework, graphs, p, seed):
    torch.manual_seed(seed)
    view = framework.adapter.Subgraph(p)(framework.batch_of(graphs))
    for part, (size, _) in zip(framework.apart(view), graphs, strict=True):
        part = framework.contents(part)
        assert part.sizes <= min(size, max(size - int(p * size), 1))
        reached = torch.arange(int(part.sizes)) == 0
        for _ in range(size):
            reached[part.edges[1][reached[part.edges[0]]]] = True
        assert reached.all()


@examples(50)
@given(graphs=graph_lists(undirected=True), seed=SEEDS)
def test_perturbed_edges_stay_undirected(framework, graphs, seed):
    torch.manual_seed(seed)
    batch = framework.batch_of(graphs)
    was, view = (framework.contents(g) for g in (batch, framework.adapter.EdgePerturb(0.6)(batch)))
    assert sorted(view.edges.T.tolist()) == sorted(view.edges.flip(0).T.tolist())
    loops = was.edges[0] == was.edges[1]
    assert torch.equal(loops, view.edges[0] == view.edges[1])
    assert torch.equal(was.edges[:, loops], view.edges[:, loops])
    for name in ("sizes", "node_id", "edge_id", "features"):
        assert torch.equal(getattr(was, name), getattr(view, name))


@given(graphs=graph_lists(), p=FRACTIONS, seed=SEEDS)
def test_edges_and_columns_are_drawn_as_by_pyg(framework, graphs, p, seed):
    """The draws of dropout_edge and mask_feature: a number for each edge, and for each column."""
    batch = framework.batch_of(graphs)
    was = framework.contents(batch)
    torch.manual_seed(seed)
    dropped = framework.contents(framework.adapter.EdgeDrop(p)(batch))
    torch.manual_seed(seed)
    assert torch.equal(dropped.edge_id, (torch.rand(was.edges.shape[1]) >= p).nonzero()[:, 0])
    torch.manual_seed(seed)
    masked = framework.contents(framework.adapter.FeatureMask(p)(batch))
    torch.manual_seed(seed)
    assert torch.equal(masked.features, was.features * (torch.rand(3) >= p))


def assert_share(share, p, count):
    """To five standard deviations."""
    assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5


def test_fractions_are_as_asked(framework):
    batch = framework.batch_of([ring(10)] * 500)
    was = framework.contents(batch)
    for p in (0.1, 0.55, 0.9):  # 5.5 nodes of 10: rounded down
        dropped, masked, moved, smaller = (
            framework.contents(augmentation(framework, kind, p)(batch))
            for kind in ("NodeDrop", "AttributeMask", "EdgePerturb", "Subgraph")
        )
        if p < 0.9:  # few graphs would lose all their nodes
            assert_share(1 - len(dropped.node_id) / 5000, p, 5000)
        is_masked = (masked.features == 0).all(1)
        assert torch.equal(masked.features, was.features * ~is_masked[:, None])
        assert_share(is_masked.double().mean(), p, 5000)
        stays = (moved.edges == was.edges).all(0)[was.edges[0] < was.edges[1]]
        # One in 45 pairs of nodes is the old one.
        assert_share(1 - stays.double().mean(), p * 44 / 45, 5000)
        assert (moved.edges[0] != moved.edges[1]).all()
        assert smaller.sizes.tolist() == [10 - int(10 * p)] * 500


def test_a_graph_that_would_lose_all_nodes_keeps_a_random_one(framework):
    batch = framework.batch_of([(2, [])] * 2000)
    view = framework.contents(framework.adapter.NodeDrop(0.6)(batch))
    alone = view.sizes == 1
    assert_share(1 - alone.double().mean(), 0.4 * 0.4, 2000)
    second = view.node_id[alone[view.graph]] % 2
    assert_share(second.double().mean(), 0.5, len(second))


def test_added_edges_are_uniform(framework):
    batch = framework.batch_of([(4, [(0, 1)])] * 2400)
    view = framework.contents(framework.adapter.EdgePerturb(1.0)(batch))
    counts = Counter(map(tuple, (view.edges % 4).T.tolist()))
    assert set(counts) == set(itertools.permutations(range(4), 2))
    for count in counts.values():
        assert_share(count / 2400, 1 / 12, 2400)


def test_edges_of_a_ring_move_independently(framework):
    """Also the last edge of a ring of four, whose random keys are those of the other edges."""
    batch = framework.batch_of([ring(4)] * 4000)
    was, view = (framework.contents(g) for g in (batch, framework.adapter.EdgePerturb(0.6)(batch)))
    pairs = (
        edges.sort(0).values[:, was.edges[0] < was.edges[1]] for edges in (was.edges, view.edges)
    )
    stay = torch.eq(*pairs).all(0).view(-1, 4)  # [4000, 4]
    p = 1 - 0.6 * 5 / 6  # one in six pairs of nodes is the old one
    counts = Counter(map(tuple, stay.tolist()))
    for pattern in itertools.product([False, True], repeat=4):
        expected = p ** sum(pattern) * (1 - p) ** (4 - sum(pattern))
        assert_share(counts[pattern] / 4000, expected, 4000)


def test_a_subgraph_grows_by_a_random_neighbour_at_a_time(framework):
    edges = both_ways([(0, 1), (1, 2), (2, 3), (1, 3), (3, 4)])
    expected = Counter()

    def grow(part, probability):
        if len(part) == 3:
            expected[part] += probability
            return
        border = {target for source, target in edges if source in part} - part
        for node in border:
            grow(part | {node}, probability / len(border))

    for seed in range(5):
        grow(frozenset([seed]), 1 / 5)
    view = framework.adapter.Subgraph(0.4)(framework.batch_of([(5, edges)] * 2000))
    nodes = framework.contents(view).node_id % 5
    drawn = Counter(map(frozenset, nodes.view(-1, 3).tolist()))
    for part in {*drawn, *expected}:
        assert_share(drawn[part] / 2000, expected[part], 2000)


def test_random_choice_draws_one_for_each_call(framework):
    batch = framework.batch_of([ring(5)] * 2)
    drop, mask = framework.adapter.NodeDrop(1.0), framework.adapter.AttributeMask(1.0)
    choice = framework.adapter.RandomChoice([drop, mask, lambda batch: batch])
    drawn = Counter()
    for _ in range(300):
        view = framework.contents(choice(batch))
        drawn[len(view.node_id), bool(view.features.any())] += 1
    assert set(drawn) == {(2, True), (10, False), (10, True)}
    assert all(70 < count < 130 for count in drawn.values())
    shown = "RandomChoice(transforms=[NodeDrop(p=1.0)])"
    assert repr(framework.adapter.RandomChoice([drop])) == shown
