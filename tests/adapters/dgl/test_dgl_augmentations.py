"""Whole batches of DGL: row i stays graph i, edges stay inside their graph, features stay put."""

import copy
import pickle

import dgl
import pytest
import torch
from helpers.dgl_cases import KINDS, batch_of, graph_lists, ring
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses.adapters.dgl import AttributeMask, EdgePerturb, NodeDrop, RandomChoice, Subgraph

SHARES = st.sampled_from([0.0, 0.3, 0.8, 1.0])


def edge_multiset(graph):
    source, target = graph.edges(order="eid")
    weight = graph.edata["weight"].long()
    return sorted(zip(source.tolist(), target.tolist(), weight.tolist(), strict=True))


def check_view(view, graph):
    """What has to hold whatever an augmentation does."""
    assert view.batch_size == graph.batch_size
    assert view.idtype == graph.idtype
    assert set(view.ndata) == set(graph.ndata)
    assert set(view.edata) == set(graph.edata)
    assert torch.equal(view.batch_num_nodes() > 0, graph.batch_num_nodes() > 0)
    owner = torch.repeat_interleave(view.batch_num_nodes())
    assert torch.equal(view.ndata["graph"], owner)
    assert torch.equal(view.edata["graph"], torch.repeat_interleave(view.batch_num_edges()))
    for end in view.edges(order="eid"):
        assert torch.equal(owner[end.long()], view.edata["graph"])
    # Each node and edge still has its own features.
    assert torch.equal(graph.ndata["graph"][view.ndata["_ID"]], view.ndata["graph"])
    assert torch.equal(graph.edata["weight"][view.edata["_ID"]], view.edata["weight"])
    for part in dgl.unbatch(view):
        assert part.num_edges() == len(part.edata["graph"])


@given(
    graphs=graph_lists(),
    kind=st.sampled_from(KINDS),
    p=SHARES,
    seed=st.integers(0, 1000),
    idtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_row_i_stays_graph_i(graphs, kind, p, seed, idtype):
    graph = batch_of(graphs, idtype)
    before = copy.deepcopy(graph)
    torch.manual_seed(seed)
    view = kind(p)(graph)
    check_view(view, graph)
    check_view(graph, before)
    assert edge_multiset(graph) == edge_multiset(before)
    assert torch.equal(graph.ndata["feat"], before.ndata["feat"])

    torch.manual_seed(seed)
    again = kind(p)(graph)
    assert edge_multiset(again) == edge_multiset(view)
    assert torch.equal(again.ndata["feat"], view.ndata["feat"])

    edges = edge_multiset(view)
    assert sorted((target, source, weight) for source, target, weight in edges) == edges


@given(graphs=graph_lists(), p=SHARES)
def test_dropped_nodes_take_their_edges_and_nothing_else(graphs, p):
    graph = batch_of(graphs)
    for kind in (NodeDrop, Subgraph):
        view = kind(p)(graph)
        kept = torch.zeros(graph.num_nodes(), dtype=torch.bool)
        kept[view.ndata["_ID"]] = True
        source, target = graph.edges(order="eid")
        inside = (kept[source] & kept[target]).nonzero().view(-1)
        assert torch.equal(view.edata["_ID"].sort().values, inside)
        source, target = view.edges(order="eid")
        ends = graph.find_edges(view.edata["_ID"])
        assert torch.equal(view.ndata["_ID"][source], ends[0])
        assert torch.equal(view.ndata["_ID"][target], ends[1])


@given(graphs=graph_lists(), p=SHARES)
def test_subgraph_is_connected_and_of_the_right_size(graphs, p):
    view = Subgraph(p)(batch_of(graphs))
    for part, (size, _) in zip(dgl.unbatch(view), graphs, strict=True):
        left = min(size, max(size - int(p * size), 1))
        assert part.num_nodes() <= left
        if left:
            reached = torch.zeros(part.num_nodes(), dtype=torch.bool)
            reached[0] = True
            source, target = part.edges()
            for _ in range(size):
                reached[target[reached[source]]] = True
            assert reached.all()


@pytest.mark.parametrize("idtype", [torch.int32, torch.int64])
def test_subgraph_of_rings(idtype):
    rings = batch_of([ring(10)] * 20, idtype)
    rings.set_batch_num_nodes(rings.batch_num_nodes().to(idtype))
    assert Subgraph(0.3)(rings).batch_num_nodes().tolist() == [7] * 20


@given(graphs=graph_lists(), p=SHARES)
def test_perturbed_edges_keep_nodes_and_loops(graphs, p):
    graph = batch_of(graphs)
    view = EdgePerturb(p)(graph)
    assert torch.equal(view.ndata["_ID"], graph.ndata["_ID"])
    assert torch.equal(view.batch_num_edges(), graph.batch_num_edges())
    (source, target), (new_source, new_target) = (g.edges(order="eid") for g in (graph, view))
    assert torch.equal(source == target, new_source == new_target)
    assert torch.equal(source[source == target], new_source[source == target])


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_types_stay(kind):
    graph = dgl.heterograph({("atom", "bond", "atom"): ([0, 1], [1, 0])})
    graph.ndata["feat"] = torch.ones(2, 3)
    assert kind(0.5)(graph).canonical_etypes == [("atom", "bond", "atom")]


def test_nothing_and_everything():
    graph = batch_of([ring(5), (0, []), (1, []), ring(3), (0, [])])
    for kind in KINDS:
        view = kind(0.0)(graph)
        assert edge_multiset(view) == edge_multiset(graph)
        assert torch.equal(view.ndata["feat"], graph.ndata["feat"])
    for kind in (NodeDrop, Subgraph):
        assert kind(1.0)(graph).batch_num_nodes().tolist() == [1, 0, 1, 1, 0]
        assert kind(1.0)(kind(1.0)(graph)).batch_num_edges().tolist() == [0] * 5
    assert not AttributeMask(1.0)(graph).ndata["feat"].any()


def test_expected_rates():
    graph = batch_of([ring(20)] * 200)
    for p in (0.1, 0.5, 0.9):
        nodes = NodeDrop(p)(graph)
        assert nodes.num_nodes() / 4000 == pytest.approx(1 - p, abs=0.03)
        assert nodes.num_edges() / 8000 == pytest.approx((1 - p) ** 2, abs=0.04)
        old, new = (torch.stack(g.edges(order="eid")) for g in (graph, EdgePerturb(p)(graph)))
        # One of 190 pairs of nodes is the edge's old place.
        assert (old != new).any(0).float().mean() == pytest.approx(p, abs=0.03)
        masked = AttributeMask(p)(graph).ndata["feat"]
        assert (masked == 0).all(1).float().mean() == pytest.approx(p, abs=0.03)
        assert torch.equal((masked == 0).any(1), (masked == 0).all(1))
    # Every node of the graph is as good a place as any other.
    ends = torch.cat(EdgePerturb(1.0)(graph).edges()) % 20
    torch.testing.assert_close(
        ends.bincount() / len(ends), torch.full((20,), 0.05), atol=0.01, rtol=0
    )


def test_one_graph_that_is_no_batch():
    for seen in (False, True):
        for kind in KINDS:
            graph = batch_of([ring(6)])
            graph._batch_num_nodes = graph._batch_num_edges = None
            if seen:
                assert graph.batch_size == 1  # after which dgl's own DropNode fails
            check_view(kind(0.5)(graph), graph)
            assert kind(1.0)(graph).batch_size == 1


def test_views_follow_each_other_and_gradients_flow():
    graph = batch_of([ring(4), (0, []), ring(9)])
    graph.ndata["feat"] = graph.ndata["feat"].requires_grad_()
    for first in KINDS:
        for second in KINDS:
            view = second(0.5)(first(0.5)(graph))
            check_view(view, graph)
            assert view.ndata["feat"].requires_grad


def test_masking_features():
    graph = batch_of([ring(5)] * 3)
    graph.ndata["atom"] = torch.ones(15, dtype=torch.long)
    masked = AttributeMask(1.0, fill_value=118, feat_name="atom")(graph)
    assert masked.ndata["atom"].tolist() == [118] * 15
    assert torch.equal(masked.ndata["feat"], graph.ndata["feat"])
    masked.set_batch_num_nodes(torch.tensor([15]))
    assert graph.batch_size == 3
    with pytest.raises(ValueError, match=r"must have the feature 'h', but have \['graph', "):
        AttributeMask(feat_name="h")(graph)
    with pytest.raises(ValueError, match=r"must have the feature 'feat', but have \[\]"):
        AttributeMask()(dgl.graph(([0], [1])))


def test_random_choice():
    graph = batch_of([ring(5)] * 3)
    choice = RandomChoice([NodeDrop(1.0), AttributeMask(1.0)])
    results = [choice(graph) for _ in range(40)]
    sizes = [view.num_nodes() for view in results]
    assert set(sizes) == {3, 15}
    assert 8 < sizes.count(3) < 32
    torch.manual_seed(3)
    first = [choice(graph).num_nodes() for _ in range(10)]
    torch.manual_seed(3)
    assert [choice(graph).num_nodes() for _ in range(10)] == first
    assert repr(choice) == "RandomChoice([NodeDrop(p=1.0), AttributeMask(p=1.0)])"
    assert repr(pickle.loads(pickle.dumps(choice))) == repr(choice)
    with pytest.raises(ValueError, match="transforms must hold at least one"):
        RandomChoice([])


def test_what_dgl_does_to_batches():
    """The reasons for doing otherwise; where one of these changes, the adapter may get simpler."""
    graph = batch_of([ring(5)] * 40)
    view = dgl.AddEdge(ratio=1.0)(graph)
    assert (graph.batch_size, view.batch_size) == (40, 1)
    source, target = view.edges()
    assert (graph.ndata["graph"][source] != graph.ndata["graph"][target]).any()
    assert dgl.add_self_loop(graph).batch_size == 1
    assert dgl.node_subgraph(graph, [0, 1]).batch_size == 1

    view = dgl.DropNode(0.5)(graph)
    assert view.batch_size == 40
    assert "_ID" not in view.ndata
    plain = dgl.graph(([0, 1], [1, 0]))
    assert plain.batch_size == 1
    with pytest.raises(TypeError):
        dgl.remove_nodes(plain, [0])

    dgl.FeatMask(1.0, ["feat"])(graph)
    assert not graph.ndata["feat"].any()  # of the graph that came in


def test_graphs_augmented_one_by_one_make_a_batch():
    graph = batch_of([ring(5), ring(3)] * 10)
    choice = RandomChoice([kind(0.5) for kind in KINDS])
    batch = dgl.batch([choice(part) for part in dgl.unbatch(graph)])
    check_view(batch, graph)
