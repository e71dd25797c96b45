"""The reweighted contrast of given views, clusters and prototypes."""

import math

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.cases import EVERY_MODE, MODES, cases, oracle_losses
from helpers.marks import engines, negatives_of
from hypothesis import given
from hypothesis import strategies as st
from pytorch_metric_learning.losses import NTXentLoss

from pgcl_losses import PrototypeReweightedNCE
from pgcl_losses.contrast import WEIGHTINGS


@given(case=cases(), mode=st.fixed_dictionaries(MODES))
def test_value_agrees_with_the_oracle(case, mode):
    losses = oracle_losses(case, (case.z1, case.z2), **mode)
    expected = {"none": losses, "sum": sum(losses), "mean": oracle.mean(losses)}
    for reduction, value in expected.items():
        ours = PrototypeReweightedNCE(**mode, reduction=reduction)(*case.views(), **case.given())
        np.testing.assert_allclose(ours, value, rtol=1e-9, atol=1e-11)


@given(case=cases(max_graphs=4, max_width=3), mode=st.fixed_dictionaries(MODES))
def test_gradient_agrees_with_the_oracle(case, mode):
    z1, z2 = [view.requires_grad_() for view in case.views()]
    PrototypeReweightedNCE(**mode)(z1, z2, **case.given()).backward()
    for mine, ours, views in (
        (case.z1, z1.grad, lambda z: (z, case.z2)),
        (case.z2, z2.grad, lambda z: (case.z1, z)),
    ):
        lengths = np.linalg.norm(mine, axis=1, keepdims=True)
        scaled = mine / np.where(lengths > 0, lengths, 1)
        expected = oracle.gradient(
            lambda z, views=views: oracle.mean(oracle_losses(case, views(z), **mode)), scaled
        )
        # The loss does not depend on lengths: its gradient is that of the unit embedding, over the
        # length. Embeddings of zeros have none.
        there = lengths[:, 0] > 0
        np.testing.assert_allclose(
            (ours.numpy() * lengths)[there], expected[there], rtol=1e-5, atol=1e-7
        )
        assert not ours[~there].any()


@given(case=cases(), mode=st.fixed_dictionaries(MODES))
def test_float32_agrees_with_float64(case, mode):
    loss = PrototypeReweightedNCE(**mode, reduction="none")
    # No case has a spread of distances that float32 takes for rounding and float64 does not.
    wide = loss(*case.views(), **case.given())
    narrow = loss(*case.views(torch.float32), **case.given(torch.float32))
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("weighting", ["prototype", "uniform"])
@pytest.mark.parametrize("exclude_same_cluster", [True, False])
@negatives_of
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(weighting, exclude_same_cluster, negatives, reduction):
    # Weights of samples depend on the embeddings but are constants for the gradient. The oracle
    # holds them fixed; differences of the loss do not.
    loss = PrototypeReweightedNCE(
        weighting=weighting,
        exclude_same_cluster=exclude_same_cluster,
        negatives=negatives,
        reduction=reduction,
        engine="dense",
    )
    views = torch.randn(2, 4, 3, dtype=torch.float64)
    clusters = torch.tensor([[0, 1, 1, 2], [0, 1, 0, 2]])
    prototypes = torch.randn(3, 3, dtype=torch.float64)

    def function(z1, z2):
        return loss(z1, z2, clusters=clusters, prototypes=prototypes)

    inputs = [view.requires_grad_() for view in views.unbind()]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


@pytest.mark.parametrize("n", [1, 2, 17, 64])
@pytest.mark.parametrize("temperature", [0.07, 0.5])
def test_uniform_is_nt_xent(n, temperature):
    z1, z2 = torch.randn(2, n, 8, dtype=torch.float64)
    ours = PrototypeReweightedNCE(
        temperature=temperature, weighting="uniform", exclude_same_cluster=False
    )(z1, z2)
    labels = torch.arange(n).repeat(2)
    peer = NTXentLoss(temperature)(torch.cat([z1, z2]), labels)
    torch.testing.assert_close(ours, peer)


def test_weights_and_clusters_are_constants_for_the_gradient():
    prototypes = torch.randn(3, 4, requires_grad=True)
    z1, z2 = torch.randn(2, 5, 4, requires_grad=True).unbind()
    clusters = torch.randint(3, (5,))
    PrototypeReweightedNCE()(z1, z2, clusters=(clusters,) * 2, prototypes=prototypes).backward()
    assert prototypes.grad is None


class TestEdges:
    """Finite input gives finite losses and gradients."""

    every_mode = pytest.mark.parametrize(
        ("weighting", "exclude", "negatives"),
        [tuple(mode.values()) for mode in EVERY_MODE],
    )

    def run(self, mode, z1, z2, clusters=None, temperature=0.2, num_prototypes=3, **options):
        weighting, exclude, negatives = mode
        loss = PrototypeReweightedNCE(
            temperature=temperature,
            weighting=weighting,
            exclude_same_cluster=exclude,
            negatives=negatives,
            reduction="none",
            **options,
        )
        z1, z2 = z1.clone().requires_grad_(), z2.clone().requires_grad_()
        if clusters is None:
            clusters = torch.arange(2 * len(z1)) % num_prototypes
        prototypes = torch.randn(num_prototypes, z1.shape[1])
        losses = loss(z1, z2, clusters=clusters.chunk(2), prototypes=prototypes)
        losses.sum().backward()
        for tensor in (losses, z1.grad, z2.grad):
            assert tensor.isfinite().all()
        assert z1.grad.dtype == z1.dtype
        return losses, z1.grad, z2.grad

    @every_mode
    @engines
    def test_one_graph_has_no_negatives(self, weighting, exclude, negatives, engine):
        z1, z2 = torch.randn(2, 1, 4)
        losses, *gradients = self.run((weighting, exclude, negatives), z1, z2, engine=engine)
        assert not losses.any()
        assert not any(gradient.any() for gradient in gradients)

    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    @negatives_of
    @engines
    def test_one_cluster_has_no_negatives(self, weighting, negatives, engine):
        one_cluster = torch.ones(12, dtype=torch.long)
        z1, z2 = torch.randn(2, 6, 4)
        mode = weighting, True, negatives
        losses, *gradients = self.run(mode, z1, z2, one_cluster, engine=engine)
        assert not losses.any()
        assert not any(gradient.any() for gradient in gradients)

    def test_one_cluster_without_exclusion_is_info_nce(self):
        one_cluster = torch.ones(6, dtype=torch.long)
        z1, z2 = torch.randn(2, 6, 4)
        plain = PrototypeReweightedNCE(weighting="uniform", exclude_same_cluster=False)(z1, z2)
        ours = PrototypeReweightedNCE(exclude_same_cluster=False)(
            z1, z2, clusters=(one_cluster,) * 2, prototypes=torch.randn(3, 4)
        )
        torch.testing.assert_close(ours, plain)

    def test_a_spread_at_rounding_level_gives_equal_weights(self):
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

    @every_mode
    @pytest.mark.parametrize("length", [0.0, 1e-18, 1e18])
    def test_extreme_lengths(self, weighting, exclude, negatives, length):
        mode = (weighting, exclude, negatives)
        directions = torch.nn.functional.normalize(torch.randn(2, 6, 4), dim=-1)
        self.run(mode, directions[0] * length, directions[1])
        self.run(mode, directions[0] * length, directions[1] * length)
        if length == 1e18:
            big, *_ = self.run(mode, directions[0] * length, directions[1] * length)
            torch.manual_seed(0)
            torch.randn(2, 6, 4)
            unit, *_ = self.run(mode, *directions)
            if weighting != "prototype":  # whose prototypes are random in each run
                torch.testing.assert_close(big, unit)

    @every_mode
    @pytest.mark.parametrize("views", ["identical embeddings", "identical views", "opposed views"])
    def test_degenerate_views(self, weighting, exclude, negatives, views):
        z = torch.randn(1, 4).expand(6, 4) if views == "identical embeddings" else torch.randn(6, 4)
        sign = -1 if views == "opposed views" else 1
        for temperature in (0.01, 0.2):
            self.run((weighting, exclude, negatives), z, sign * z, temperature=temperature)

    @every_mode
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision(self, weighting, exclude, negatives, dtype):
        z1, z2 = torch.randn(2, 6, 4).to(dtype)
        z1[2] = 0.0
        losses, *_ = self.run((weighting, exclude, negatives), z1, z2)
        assert losses.dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            inside, *_ = self.run((weighting, exclude, negatives), z1.float(), z2.float())
        assert inside.dtype == torch.float32
        if weighting != "prototype":
            torch.testing.assert_close(inside, losses)

    @every_mode
    @engines
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_nan_and_inf_give_nan(self, weighting, exclude, negatives, engine, bad):
        z1, z2 = torch.randn(2, 6, 4)
        z1[3, 1] = bad
        loss = PrototypeReweightedNCE(
            weighting=weighting, exclude_same_cluster=exclude, negatives=negatives, engine=engine
        )
        clusters = (torch.arange(6) % 3,) * 2
        assert loss(z1, z2, clusters=clusters, prototypes=torch.randn(3, 4)).isnan()


class TestErrors:
    z = torch.randn(4, 3)
    clusters = torch.tensor([0, 1, 2, 0])
    prototypes = torch.randn(3, 3)

    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            ("z1", [[1.0]], TypeError, r"z1 must be a Tensor of shape \[N, D\], but got list"),
            ("z1", torch.randn(4), ValueError, r"z1 must have shape \[N, D\], but got \(4,\)"),
            ("z1", torch.ones(4, 3).long(), TypeError, "z1 must be a floating-point.*int64"),
            ("z1", torch.randn(4, 3, dtype=torch.cfloat), TypeError, "z1 must be a fl.*complex"),
            ("z1", torch.randn(0, 3), ValueError, "z1 must not be empty"),
            ("z1", torch.eye(4, 3).to_sparse(), TypeError, "z1 must be a dense Tensor"),
            ("z2", None, TypeError, "z2 must be a Tensor.*NoneType"),
            ("z2", torch.randn(5, 3), ValueError, r"z2 has shape \(5, 3\) but z1 has \(4, 3\)"),
            ("z2", torch.randn(4, 2), ValueError, r"z2 has shape \(4, 2\) but z1 has \(4, 3\)"),
            ("z2", torch.randn(4, 3).double(), TypeError, "z2 is torch.float64 but z1 is torch.f"),
            ("z2", torch.randn(4, 3, device="meta"), ValueError, "z2 is on meta but z1 is on cpu"),
            ("clusters", None, ValueError, "clusters and assignments are None: give one"),
            (
                "clusters",
                (clusters,),
                ValueError,
                "clusters must be a sequence of 2, one for each view, but got",
            ),
            ("c2", None, TypeError, r"clusters\[1\] must be a Tensor of shape \[N\].*NoneType"),
            ("c1", [0, 1], TypeError, r"clusters\[0\] must be a Tensor.* \[N\], but got list"),
            ("c1", clusters[:2], ValueError, r"clusters\[0\] has length 2 but z1 has 4"),
            ("c1", clusters[None], ValueError, r"clusters\[0\] must have shape.*got \(1, 4\)"),
            ("c2", clusters.int(), TypeError, r"clusters\[1\] must be an int64 Tensor.*int32"),
            ("c2", clusters.to("meta"), ValueError, r"clusters\[1\] is on meta but z1 is on cpu"),
            ("c2", clusters + 1, ValueError, r"clusters\[1\] must lie in 0..2.*span 1..3"),
            ("c2", clusters - 1, ValueError, r"clusters\[1\] must lie in 0..2.*span -1..1"),
            ("prototypes", None, ValueError, "prototypes is None, but weighting='prototype' need"),
            ("prototypes", torch.randn(3), ValueError, r"prototypes must have shape \[K, D\]"),
            ("prototypes", torch.randn(3, 5), ValueError, "dimension 3 but prototypes has .* 5"),
            ("prototypes", torch.randn(3, 3, device="meta"), ValueError, "z1 is on cpu but proto"),
        ],
    )
    def test_inputs(self, name, value, error, message):
        given = {"z1": self.z, "z2": self.z, "c1": self.clusters, "c2": self.clusters}
        given |= {"prototypes": self.prototypes, name: value}
        clusters = given.get("clusters", (given["c1"], given["c2"]))
        with pytest.raises(error, match=message):
            PrototypeReweightedNCE()(
                given["z1"], given["z2"], clusters=clusters, prototypes=given["prototypes"]
            )

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            (
                {"temperature": 0},
                ValueError,
                "temperature must be .* at least 1e-30, at most 1e30, but got 0",
            ),
            ({"temperature": -0.1}, ValueError, "temperature.*-0.1"),
            ({"temperature": math.nan}, ValueError, "temperature must be a finite number.*nan"),
            ({"temperature": "hot"}, TypeError, "temperature.*'hot'"),
            (
                {"weighting": "soft"},
                ValueError,
                "weighting must be one of 'prototype', 'sample', 'uniform', but got 'soft'",
            ),
            ({"negatives": "some"}, ValueError, "negatives must be one of 'all', 'cross'"),
            ({"reduction": "max"}, ValueError, "reduction must be one of 'mean', 'sum', 'none'"),
            (
                {"engine": "warp"},
                ValueError,
                "engine must be one of 'auto', 'dense', 'blocks', 'flex', but",
            ),
            ({"engine": None}, ValueError, "engine must be one of.*None"),
            ({"exclude_same_cluster": 1}, TypeError, "exclude_same_cluster must be True or False"),
        ],
    )
    def test_options(self, options, error, message):
        with pytest.raises(error, match=message):
            PrototypeReweightedNCE(**options)

    def test_inputs_that_the_weighting_does_not_need_are_optional(self):
        clusters = (self.clusters,) * 2
        for weighting in ("uniform", "sample"):
            PrototypeReweightedNCE(weighting=weighting, exclude_same_cluster=False)(self.z, self.z)
            PrototypeReweightedNCE(weighting=weighting)(self.z, self.z, clusters=clusters)
        with pytest.raises(ValueError, match=r"clusters and assignments are None.*='uniform'"):
            PrototypeReweightedNCE(weighting="uniform")(self.z, self.z)


def test_repr_shows_the_options():
    assert "weighting='sample', exclude_same_cluster=True" in repr(
        PrototypeReweightedNCE(weighting="sample")
    )
