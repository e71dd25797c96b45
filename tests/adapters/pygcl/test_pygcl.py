"""DualBranchContrast has the values and gradients of PyGCL's own."""

import GCL.losses as L
import pytest
import torch
from GCL.models import DualBranchContrast as PyGCLsContrast
from GCL.models import SingleBranchContrast
from helpers.contrast_models import called, embeddings
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE
from pgcl_losses.adapters.pygcl import DualBranchContrast

pytestmark = pytest.mark.pygcl


@pytest.mark.parametrize("mode", ["G2G", "L2L", "G2L"])
@pytest.mark.parametrize(
    ("theirs", "over_positives"), [(L.InfoNCE, "supcon"), (L.InfoNCESP, "sum")]
)
@given(
    sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5) | st.just([1, 1, 1, 1]),
    intraview=st.booleans(),
    more_positives=st.booleans(),
    fewer_negatives=st.booleans(),
    temperature=st.sampled_from([0.02, 0.1, 0.2, 1.0]),
    seed=st.integers(0, 1000),
)
def test_info_nce_is_pygcls(
    theirs,
    over_positives,
    mode,
    sizes,
    intraview,
    more_positives,
    fewer_negatives,
    temperature,
    seed,
):
    torch.manual_seed(seed)
    num_graphs = len(sizes)
    batch = torch.arange(num_graphs).repeat_interleave(torch.tensor(sizes))
    batch = batch[torch.randperm(len(batch))]
    # In G2L, PyGCL's masks for intraview_negs fit only if each graph is one node.
    intraview = intraview and (mode != "G2L" or (num_graphs > 1 and set(sizes) == {1}))
    num_anchors = len(batch) if mode == "L2L" else num_graphs
    num_samples = num_graphs if mode == "G2G" else len(batch)
    if mode == "G2L" and num_graphs == 1:  # h3 and h4 are further samples
        num_samples *= 2
    shape = num_anchors, num_samples + intraview * num_anchors
    positive, masks = torch.rand(shape) < 0.2, {}
    if more_positives:
        masks["extra_pos_mask"] = positive
    if fewer_negatives and theirs is L.InfoNCE:  # the other one ignores this mask
        masks["extra_neg_mask"] = ((torch.rand(shape) < 0.6) & ~positive).float()
    g, h = embeddings(num_graphs, len(batch))

    loss = InfoNCE(temperature=temperature, over_positives=over_positives)
    pygcls = PyGCLsContrast(theirs(tau=temperature), mode, intraview)
    ours = DualBranchContrast(loss, mode, intraview)
    torch.testing.assert_close(*(called(model, g, h, batch, **masks) for model in (ours, pygcls)))


def test_a_single_graph_needs_no_batch():
    g, h = embeddings(1, 6)
    values = [
        called(DualBranchContrast(InfoNCE(temperature=0.2, over_positives="supcon"), "G2L"), g, h),
        called(PyGCLsContrast(L.InfoNCE(tau=0.2), "G2L"), g, h),
    ]
    torch.testing.assert_close(*values)


def test_a_graph_without_nodes_is_left_out():
    """PyGCL's value is NaN there: it is called without this graph."""
    g, h = embeddings(4, 6)
    ours = DualBranchContrast(InfoNCE(temperature=0.2, over_positives="supcon"), "G2L")
    theirs = PyGCLsContrast(L.InfoNCE(tau=0.2), "G2L")
    value, by_g, by_h = called(ours, g, h, torch.tensor([0, 2, 2, 0, 3, 3]))
    has_nodes = [0, 2, 3]
    expected = called(theirs, g[:, has_nodes], h, torch.tensor([0, 1, 1, 0, 2, 2]))
    torch.testing.assert_close((value, by_g[:, has_nodes], by_h), expected)


def test_the_single_branch_on_the_page():
    g, h, batch = torch.randn(3, 4), torch.randn(6, 4), torch.tensor([0, 2, 1, 0, 2, 2])
    expected = SingleBranchContrast(L.InfoNCE(tau=0.2), "G2L")(h, g, batch)
    options = {"negatives": "cross", "queries": "first", "over_positives": "supcon"}
    positives = torch.stack([batch, len(g) + torch.arange(len(h))])
    value = InfoNCE(temperature=0.2, **options)(g, h, positives=positives)
    torch.testing.assert_close(value, expected)
