"""The reweighted contrast of given views, clusters and prototypes."""

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.cases import MODES, cases
from helpers.marks import engines, negatives_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcl_losses import PrototypeReweightedNCE
from pgcl_losses.contrast import WEIGHTINGS


@settings(max_examples=150)
@given(case=cases(), mode=st.fixed_dictionaries(MODES))
def test_values_agree_with_the_oracle(case, mode):
    """In float32 as well. Prototypes are constants."""
    views, given = [view.requires_grad_() for view in case.views()], case.given()
    given["prototypes"].requires_grad_()
    loss, clusters = PrototypeReweightedNCE(**mode), case.clusters
    samples, others = np.concatenate(case.arrays()), dict(mode)
    weights = oracle.pair_weights(samples, clusters, case.prototypes, others.pop("weighting"))
    expected = oracle.contrast(case.arrays(), weights, clusters, **others)
    loss(*views, **given).backward()
    assert given["prototypes"].grad is None
    for loss.reduction, value in (
        ("none", expected),
        ("sum", sum(expected)),
        ("mean", oracle.mean(expected)),
    ):
        np.testing.assert_allclose(loss(*views, **given).detach(), value, rtol=1e-9, atol=1e-11)
        # No case has a spread of distances that float32 takes for rounding and float64 does not.
        ours = loss(*case.views(torch.float32), **case.given(torch.float32))
        assert ours.dtype == torch.float32
        np.testing.assert_allclose(ours, value, rtol=1e-3, atol=1e-3)


@engines
@pytest.mark.parametrize("num_graphs", [1, 6])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@negatives_of
def test_one_graph_or_one_cluster_has_no_negatives(engine, num_graphs, weighting, negatives):
    """The loss is exactly 0, with a gradient of 0."""
    options = {"weighting": weighting, "negatives": negatives, "engine": engine}
    views = torch.randn(2, num_graphs, 4, requires_grad=True)
    given = {"clusters": torch.ones(2, num_graphs).long(), "prototypes": torch.randn(3, 4)}
    loss = PrototypeReweightedNCE(**options)(*views, **given)
    assert loss == 0
    assert not torch.autograd.grad(loss, views)[0].any()


def test_a_spread_at_rounding_level_gives_equal_weights():
    z1, z2 = torch.randn(2, 8, 5)
    clusters = (torch.arange(8) % 3,) * 2
    prototypes = torch.randn(1, 5) * torch.tensor([[0.3], [1.0], [7.0]])  # one direction
    plain = PrototypeReweightedNCE(weighting="uniform")(z1, z2, clusters=clusters)
    ours = PrototypeReweightedNCE()(z1, z2, clusters=clusters, prototypes=prototypes)
    torch.testing.assert_close(ours, plain)

    same = torch.randn(1, 5) * torch.rand(8, 1)  # embeddings of one direction
    plain = PrototypeReweightedNCE(weighting="uniform")(same, same, clusters=clusters)
    ours = PrototypeReweightedNCE(weighting="sample")(same, same, clusters=clusters)
    torch.testing.assert_close(ours, plain)


z, clusters = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"clusters": (clusters,)}, ValueError, "clusters must be a sequence of 2, one for each"),
        ({"clusters": 3}, ValueError, r"clusters must be a sequence of 2.* but got 3 \(int\)"),
        ({"clusters": (clusters, None)}, TypeError, r"clusters\[1\] must be a Tensor.*NoneType"),
        ({"clusters": (clusters[:2],) * 2}, ValueError, r"clusters\[0\] has length 2 but z1 has 4"),
        ({"clusters": (clusters[None],) * 2}, ValueError, r"clusters\[0\] must have.*got \(1, 4\)"),
        ({"clusters": (clusters.int(),) * 2}, TypeError, r"clusters\[0\] must be an int64.*int32"),
        ({"clusters": (clusters.to("meta"),) * 2}, ValueError, "is on meta but z1 is on cpu"),
        ({"clusters": (clusters, clusters + 1)}, ValueError, r"\[1\] must lie in 0..2.*span 1..3"),
        ({"clusters": (clusters, clusters - 1)}, ValueError, r"\[1\] must lie in 0..2.*span -1..1"),
        ({"clusters": None}, ValueError, "assignments is None: give those of .*, or clusters if"),
        ({"prototypes": None}, ValueError, "prototypes is None, but weighting='prototype' needs"),
        ({"prototypes": z[0]}, ValueError, r"prototypes must have shape \[K, D\], but got \(3,\)"),
        ({"prototypes": torch.randn(3, 5)}, ValueError, "dimension 3 but prototypes has .* 5"),
        ({"prototypes": z[:3].to("meta")}, ValueError, "z1 is on cpu but prototypes is on meta"),
    ],
)
def test_errors(given, error, message):
    given = {"clusters": (clusters, clusters), "prototypes": z[:3], **given}
    with pytest.raises(error, match=message):
        PrototypeReweightedNCE()(z, z, **given)


def test_inputs_that_the_weighting_does_not_need_are_optional():
    for weighting in ("uniform", "sample"):
        PrototypeReweightedNCE(weighting=weighting, exclude_same_cluster=False)(z, z)
        PrototypeReweightedNCE(weighting=weighting)(z, z, clusters=(clusters, clusters))
    with pytest.raises(ValueError, match=r"assignments is None: .* or set weighting='uniform'"):
        PrototypeReweightedNCE(weighting="uniform")(z, z)
