"""What DGL alone has: names of types, names of features, functions that forget the batch."""

import dgl
import pytest
import torch
from dgl.nn import GraphConv, Sequential, SumPooling
from helpers.batches import ring
from helpers.dgl_cases import Encoder, batch_of, model_of
from helpers.losses import DIM

from pgcl_losses.adapters.dgl import AttributeMask, EdgePerturb, NodeDrop, Subgraph

pytestmark = pytest.mark.dgl
ALL = [NodeDrop, Subgraph, EdgePerturb, AttributeMask]
KEEP = torch.nn.Identity()
kinds = pytest.mark.parametrize("kind", ALL)


def rings(count=3):
    return batch_of([ring(5)] * count)


@kinds
def test_names_of_types_and_the_type_of_numbers_stay(kind):
    ends = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    graph = dgl.heterograph({("atom", "bond", "atom"): (*ends,)})
    graph.ndata["feat"] = torch.ones(2, 3)
    view = kind(0.5)(graph)
    assert view.canonical_etypes == [("atom", "bond", "atom")]
    assert view.idtype == torch.int32


def test_masked_features_have_a_name():
    graph = rings()
    graph.ndata["atom"] = torch.ones(15, dtype=torch.long)
    masked = AttributeMask(1.0, fill_value=118, feat_name="atom")(graph)
    assert masked.ndata["atom"].tolist() == [118] * 15
    assert torch.equal(masked.ndata["feat"], graph.ndata["feat"])
    masked.set_batch_num_nodes(torch.tensor([15]))
    assert graph.batch_size == 3
    with pytest.raises(ValueError, match=r"must have the feature 'h', but have \['_ID', 'atom', "):
        AttributeMask(feat_name="h")(graph)
    with pytest.raises(ValueError, match=r"whole number where atom is torch.int64, but got 0\.5"):
        AttributeMask(fill_value=0.5, feat_name="atom")(graph)


def test_encoders_get_features_by_name_or_the_graph_alone():
    graph = rings()
    model = model_of(KEEP, KEEP, encoder=lambda view: dgl.sum_nodes(view, "feat"), feat_name=None)
    torch.testing.assert_close(model.embeddings(graph)[0], dgl.sum_nodes(graph, "feat"))
    with pytest.raises(ValueError, match=r"'attr', but have \['_ID', 'feat'\]$"):
        model_of(KEEP, KEEP, feat_name="attr")(graph)
    message = r"missing .*: 'feat': .* feat_name=\.\.\.\), one of \['_ID', 'feat'\]"
    for encoder in (Encoder(), Sequential(GraphConv(3, DIM), SumPooling())):
        with pytest.raises(TypeError, match=message):
            model_of(KEEP, KEEP, encoder=encoder, feat_name=None)(graph)
    with pytest.raises(TypeError, match=r"^object of type .int. has no len\(\)$"):
        model_of(KEEP, KEEP, encoder=lambda view: len(3), feat_name=None)(graph)


def test_functions_that_forget_the_batch():
    graph = rings()
    with pytest.raises(ValueError, match=r"augment2 made 1 graphs of 3.*AddEdge .*forget the b"):
        model_of(KEEP, dgl.AddEdge())(graph)
    with pytest.warns(UserWarning, match="the batch is one graph alone; dgl.add_self_loop"):
        model_of(KEEP, KEEP)(dgl.add_self_loop(graph))
    model = model_of(
        KEEP, KEEP, encoder=lambda view, feat: SumPooling()(dgl.add_self_loop(view), feat)
    )
    with pytest.raises(ValueError, match=r"returned 1 embeddings .* 3 graphs .*dgl.add_self_loop"):
        model(graph)


@kinds
def test_graphs_that_are_no_batch(kind):
    for takes_graph in (kind(), model_of(KEEP, KEEP)):
        with pytest.raises(TypeError, match=r"must be homogeneous, but has node types \['a', 'b'"):
            takes_graph(dgl.heterograph({("a", "to", "b"): ([0], [1])}))
    graph = rings()
    graph.set_batch_num_nodes(torch.tensor([5, 5, 4]))
    if kind is not AttributeMask:
        with pytest.raises(ValueError, match=r"15 nodes but batch_num_nodes\(\) adds up to 14"):
            kind()(graph)
