"""What DGL alone has: names of types, names of features, graphs of several types."""

import dgl
import pytest
import torch
from helpers.batches import ring
from helpers.dgl_cases import batch_of

from pgcl_losses.adapters.dgl import (
    AttributeMask,
    EdgeDrop,
    EdgePerturb,
    FeatureMask,
    NodeDrop,
    Subgraph,
)

pytestmark = pytest.mark.dgl
kinds = pytest.mark.parametrize(
    "kind", [NodeDrop, Subgraph, EdgeDrop, EdgePerturb, AttributeMask, FeatureMask]
)


@kinds
def test_names_of_types_and_the_type_of_numbers_stay(kind):
    ends = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32)
    graph = dgl.heterograph({("atom", "bond", "atom"): (*ends,)})
    graph.ndata["feat"] = torch.ones(2, 3)
    view = kind(0.5)(graph)
    assert view.canonical_etypes == [("atom", "bond", "atom")]
    assert view.idtype == torch.int32


def test_masked_features_have_a_name():
    graph = batch_of([ring(5)] * 3)
    graph.ndata["atom"] = torch.ones(15, dtype=torch.long)
    masked = AttributeMask(1.0, fill_value=118, feat_name="atom")(graph)
    assert masked.ndata["atom"].tolist() == [118] * 15
    assert torch.equal(masked.ndata["feat"], graph.ndata["feat"])
    columns = FeatureMask(1.0, feat_name="atom")(graph)
    assert columns.ndata["atom"].tolist() == [0] * 15
    assert graph.ndata["atom"].tolist() == [1] * 15
    with pytest.raises(ValueError, match=r"the node feature 'h', but has \['_ID', 'atom', 'feat'"):
        AttributeMask(feat_name="h")(graph)


@kinds
def test_graphs_of_several_types(kind):
    with pytest.raises(
        TypeError, match=r"must be a homogeneous DGLGraph, but got .*'a', 'to', 'b'"
    ):
        kind()(dgl.heterograph({("a", "to", "b"): ([0], [1])}))
