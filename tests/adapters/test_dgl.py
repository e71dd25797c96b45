"""Whole batches of DGL: row i stays graph i, edges stay inside their graph, features stay put."""

import copy
import functools
import pickle
import subprocess
import sys

import dgl
import pytest
import torch
from dgl.nn import AvgPooling, GINConv, GraphConv, Sequential, SumPooling
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.dgl import (
    AttributeMask,
    ContrastiveModel,
    EdgePerturb,
    NodeDrop,
    RandomChoice,
    Subgraph,
)

SHARES = st.sampled_from([0.0, 0.3, 0.8, 1.0])
KINDS = [NodeDrop, Subgraph, EdgePerturb, AttributeMask]


def batch_of(graphs, idtype=torch.int64):
    """A batch of (number of nodes, undirected edges); its features say where everything is from."""
    parts = []
    num_nodes = num_edges = 0
    for index, (size, pairs) in enumerate(graphs):
        ends = torch.tensor(pairs, dtype=idtype).reshape(-1, 2).T
        part = dgl.graph((*torch.cat([ends, ends.flip(0)], 1),), num_nodes=size, idtype=idtype)
        part.ndata["graph"] = torch.full((size,), index)
        part.ndata["_ID"] = torch.arange(num_nodes, num_nodes + size)
        part.ndata["feat"] = torch.full((size, 3), index + 1.0)
        part.edata["graph"] = torch.full((2 * len(pairs),), index)
        part.edata["_ID"] = torch.arange(num_edges, num_edges + 2 * len(pairs))
        # Both directions of an edge have the same weight.
        part.edata["weight"] = torch.arange(float(len(pairs))).repeat(2)
        parts.append(part)
        num_nodes, num_edges = num_nodes + size, num_edges + 2 * len(pairs)
    return dgl.batch(parts)


@st.composite
def graph_lists(draw):
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=6))
    return [
        (
            size,
            draw(st.lists(st.tuples(*[st.integers(0, size - 1)] * 2), max_size=9)) if size else [],
        )
        for size in sizes
    ]


def ring(size):
    return size, [(node, (node + 1) % size) for node in range(size)]


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
        left = size - int(p * size)
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
        assert kind(1.0)(graph).batch_num_nodes().tolist() == [0] * 5
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
    bare = dgl.batch([dgl.graph(([0], [1]))] * 2)
    assert AttributeMask(1.0)(bare).batch_size == 2
    with pytest.raises(ValueError, match=r"must have the feature 'h', but have \['graph', "):
        AttributeMask(feat_name="h")(graph)


def test_random_choice():
    graph = batch_of([ring(5)] * 3)
    choice = RandomChoice([NodeDrop(1.0), AttributeMask(1.0)])
    results = [choice(graph) for _ in range(40)]
    sizes = [view.num_nodes() for view in results]
    assert set(sizes) == {0, 15}
    assert 8 < sizes.count(0) < 32
    torch.manual_seed(3)
    first = [choice(graph).num_nodes() for _ in range(10)]
    torch.manual_seed(3)
    assert [choice(graph).num_nodes() for _ in range(10)] == first
    assert repr(choice) == "RandomChoice([NodeDrop(p=1.0), AttributeMask(p=1.0)])"
    assert repr(pickle.loads(pickle.dumps(choice))) == repr(choice)
    with pytest.raises(ValueError, match="transforms must hold at least one"):
        RandomChoice([])


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_arguments_of_augmentations(kind):
    with pytest.raises(ValueError, match=r"p must be a number from 0 to 1, but got 1\.5"):
        kind(1.5)
    with pytest.raises(TypeError, match="p must be a number from 0 to 1, but got 'half'"):
        kind("half")
    with pytest.raises(TypeError, match="graph must be a DGLGraph, but got tuple"):
        kind()((batch_of([ring(3)]), torch.zeros(1)))
    with pytest.raises(TypeError, match=r"must be homogeneous, but has node types \['a', 'b'\]"):
        kind()(dgl.heterograph({("a", "to", "b"): ([0], [1])}))
    graph = batch_of([ring(3), ring(4)])
    if kind is not AttributeMask:
        graph.set_batch_num_nodes(torch.tensor([3, 3]))
        with pytest.raises(ValueError, match=r"7 nodes but batch_num_nodes\(\) adds up to 6"):
            kind()(graph)


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


def test_readouts_of_graphs_without_nodes():
    some = batch_of([ring(3), (0, []), ring(4), (0, [])])
    for readout, values in (
        (dgl.mean_nodes, [1, 0, 3, 0]),
        (dgl.max_nodes, [1, 0, 3, 0]),
        (dgl.sum_nodes, [3, 0, 12, 0]),
    ):
        assert readout(some, "feat")[:, 0].tolist() == values
    none = NodeDrop(1.0)(some)
    assert not dgl.sum_nodes(none, "feat").any()
    assert not dgl.max_nodes(none, "feat").any()
    assert dgl.mean_nodes(none, "feat").isnan().all()


class GIN(nn.Module):
    def __init__(self, width=3, dim=16):
        super().__init__()
        self.conv1 = GINConv(nn.Sequential(nn.Linear(width, dim), nn.ReLU(), nn.Linear(dim, dim)))
        self.conv2 = GINConv(nn.Sequential(nn.Linear(dim, dim), nn.ReLU(), nn.Linear(dim, dim)))
        self.pool = SumPooling()

    def forward(self, graph, feat):
        return self.pool(graph, self.conv2(graph, self.conv1(graph, feat).relu()))


def model_of(encoder=None, augment1=None, augment2=None, feat_name="feat"):
    augments = augment1 or NodeDrop(0.3), augment2 or EdgePerturb(0.3)
    return ContrastiveModel(encoder or GIN(), *augments, PGCLLoss(16, 4), feat_name=feat_name)


@settings(max_examples=30)
@given(graphs=graph_lists(), seed=st.integers(0, 1000))
@pytest.mark.filterwarnings("ignore:the batch is one graph alone")
def test_model_is_the_loss_of_the_views_rows(graphs, seed):
    graph = batch_of(graphs)
    model = model_of(augment2=RandomChoice([kind(0.5) for kind in KINDS]))
    torch.manual_seed(seed)
    loss = model(graph)
    torch.manual_seed(seed)
    views = model.augment1(graph), model.augment2(graph)
    rows = [model.encoder(view, view.ndata["feat"]) for view in views]
    torch.testing.assert_close(loss, model.loss(*rows))
    torch.manual_seed(seed)
    torch.testing.assert_close(list(model.rows(graph)), rows)
    assert loss.isfinite()
    loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_rows_of_each_view_are_graph_i():
    graph = batch_of([(0, []), ring(8), (1, []), ring(9), (0, [])])
    for augment in (kind(0.4) for kind in KINDS[:3]):
        model = model_of(AvgPooling(), augment, NodeDrop(0.2))
        for rows in model.rows(graph):
            left = rows[:, 0] != 0  # a graph that lost all its nodes
            assert torch.equal(rows[left, 0], torch.arange(1.0, 6)[left])
            assert left[[1, 3]].all()


def test_an_encoder_of_the_graph_alone():
    graph = batch_of([ring(4), ring(5)])
    model = model_of(lambda view: dgl.sum_nodes(view, "feat"), feat_name=None)
    assert [rows.shape for rows in model.rows(graph)] == [(2, 3)] * 2


def test_rows_of_nodes():
    graph = batch_of([ring(30)])
    model = model_of(GINConv(nn.Linear(3, 16)), EdgePerturb(0.2), AttributeMask(0.2))
    assert [rows.shape for rows in model.rows(graph)] == [(30, 16)] * 2
    model(graph).backward()
    model.augment1 = NodeDrop(0.5)
    with pytest.raises(
        ValueError, match="for rows of nodes the augmentations must leave the nodes"
    ):
        model(graph)


def test_training_on_synthetic_graphs():
    generator = torch.Generator().manual_seed(0)
    shapes = [ring(8), (8, [(0, leaf) for leaf in range(1, 8)])] * 16  # rings and stars
    graph = batch_of(shapes)
    graph.ndata["feat"] = torch.randn(graph.num_nodes(), 3, generator=generator)
    model = model_of(augment1=NodeDrop(0.1), augment2=EdgePerturb(0.1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    assert any(parameter is model.loss.prototypes.weight for parameter in model.parameters())
    losses = []
    for _ in range(60):
        loss = model(graph)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_zero_in_degree_is_for_the_encoder_to_allow():
    graph = batch_of([ring(3)] * 4)
    cut = functools.partial(dgl.remove_edges, eids=torch.arange(6))
    for allow in (True, False):
        conv = GraphConv(3, 16, allow_zero_in_degree=allow)
        model = model_of(Sequential(conv, SumPooling()), cut)
        if allow:
            model(graph).backward()
        else:
            with pytest.raises(dgl.DGLError, match="allow_zero_in_degree"):
                model(graph)


def test_a_batch_that_forgot_its_graphs():
    graph = batch_of([ring(4)] * 3)
    with pytest.raises(
        ValueError, match=r"augment2 made 1 graphs of 3.*AddEdge .*forget the batch"
    ):
        model_of(augment2=dgl.AddEdge())(graph)
    with pytest.warns(UserWarning, match="the batch is one graph alone; dgl.add_self_loop"):
        model_of()(dgl.add_self_loop(graph))
    with pytest.raises(ValueError, match=r"returned 1 rows .* 3 graphs .*dgl.add_self_loop"):
        model_of(lambda view, feat: SumPooling()(dgl.add_self_loop(view), feat))(graph)


def test_errors_of_the_model():
    graph = batch_of([ring(4)] * 3)
    for result, got in ((torch.zeros(3), r"\(3,\)"), (None, "NoneType")):
        with pytest.raises(ValueError, match=rf"\[graphs, D\] or \[nodes, D\], but got {got}"):
            model_of(lambda view, feat, result=result: result)(graph)
    with pytest.raises(
        ValueError, match=r"encoder returned 2 rows for the view of augment1, which"
    ):
        model_of(lambda view, feat: torch.zeros(2, 16))(graph)
    with pytest.raises(
        TypeError, match="what augment1 returns must be a DGLGraph, but got NoneType"
    ):
        model_of(augment1=lambda graph: None)(graph)
    with pytest.raises(TypeError, match="batch must be a DGLGraph, but got list"):
        model_of()([graph])
    for encoder in (GIN(), None):
        with pytest.raises(TypeError, match=r"batch must be homogeneous.*dgl.to_homogeneous"):
            model_of(encoder)(dgl.heterograph({("a", "to", "b"): ([0], [1])}))
    with pytest.raises(ValueError, match=r"must have the feature 'attr', but have \['graph', "):
        model_of(feat_name="attr")(graph)


@pytest.mark.parametrize(
    "failure",
    ["ModuleNotFoundError('No module named dgl')", "FileNotFoundError('x.so')", "OSError()"],
)
def test_import_errors_name_the_extra(failure):
    code = f"""
import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "dgl":
            raise {failure}
sys.meta_path.insert(0, Finder())
import pgcl_losses, pgcl_losses.adapters
try:
    import pgcl_losses.adapters.dgl
except ImportError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert failure.partition("(")[0] in result.stdout
    assert (
        "pip install dgl==1.1.3 packaging, or the extra: pip install 'pgcl-losses[dgl]'"
        in result.stdout
    )
