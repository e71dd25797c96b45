"""The whole loss: its value and gradients are those of the oracle, finite, or a clear error."""

import math

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.cases import MODES
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcl_losses import (
    ConsistencyLoss,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
)

LAMBDA = 6.0


@st.composite
def problems(draw):
    """Views and prototypes of moderate size, so that differences of the loss are accurate."""
    n, d, k = draw(st.integers(1, 4)), draw(st.integers(2, 3)), draw(st.integers(1, 4))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random.normal(size=(n, d)), random.normal(size=(n, d)), random.normal(size=(k, d))


def pgcl_of(prototypes, **options):
    pgcl = PGCLLoss(prototypes.shape[1], len(prototypes), **options).double()
    with torch.no_grad():
        pgcl.prototypes.weight.copy_(torch.tensor(prototypes))
    return pgcl


def oracle_total(z1, z2, prototypes, mode, at):
    """The whole loss; targets, clusters and weights are those of the rows and prototypes `at`."""
    at1, at2, at_prototypes = at
    q = [oracle.targets(z, at_prototypes, epsilon=0.05, iterations=3) for z in (at1, at2)]
    clusters = np.concatenate(q).argmax(1)
    weights = oracle.pair_weights(
        np.concatenate([at1, at2]), clusters, at_prototypes, mode["weighting"]
    )
    contrast = oracle.contrast(
        (z1, z2),
        weights,
        clusters,
        mode["temperature"],
        mode["exclude_same_cluster"],
        mode["negatives"],
    )
    log_p = [oracle.log_predictions(z, prototypes, mode["temperature"]) for z in (z1, z2)]
    consistency = oracle.consistency(log_p, q)
    return oracle.mean(contrast) + LAMBDA * oracle.mean(consistency)


@settings(max_examples=50)
@given(problem=problems(), mode=st.fixed_dictionaries(MODES))
def test_value_and_gradients_agree_with_the_oracle(problem, mode):
    z1, z2, prototypes = problem
    pgcl = pgcl_of(prototypes, **mode)
    views = [torch.tensor(z, requires_grad=True) for z in (z1, z2)]
    loss = pgcl(*views)
    loss.backward()
    np.testing.assert_allclose(
        loss.item(), oracle_total(z1, z2, prototypes, mode, at=problem), rtol=1e-9
    )
    for mine, ours, place in (
        (z1, views[0].grad, 0),
        (z2, views[1].grad, 1),
        (prototypes, pgcl.prototypes.weight.grad, 2),
    ):

        def total(x, place=place):
            moved = [*problem]
            moved[place] = x
            return oracle_total(*moved, mode, at=problem)

        np.testing.assert_allclose(ours, oracle.gradient(total, mine), rtol=1e-5, atol=1e-6)


def test_gradcheck_without_consistency():
    # Targets move with the rows but are constants for the gradient, so that the whole loss is left
    # to the oracle, which can hold them fixed.
    pgcl = PGCLLoss(3, 2, weighting="uniform", exclude_same_cluster=False, consistency_weight=0)
    z1, z2 = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(pgcl.double(), (z1, z2))
    assert torch.autograd.gradgradcheck(pgcl, (z1, z2))


class TestAblationRows:
    """The rows of the paper's ablation are configurations."""

    z1, z2 = torch.randn(2, 12, 5, generator=torch.Generator().manual_seed(1))

    def parts(self, weighting, exclude):
        prototypes = SinkhornPrototypes(5, 4)
        first, second = prototypes(self.z1, self.z2)
        contrast = PrototypeReweightedNCE(weighting=weighting, exclude_same_cluster=exclude)(
            self.z1, self.z2, first.clusters, second.clusters, prototypes.weight
        )
        return prototypes, contrast, ConsistencyLoss()(first, second)

    @pytest.mark.parametrize(
        ("weighting", "exclude", "contrast_weight", "consistency_weight"),
        [
            pytest.param("uniform", False, 1.0, 0.0, id="InfoNCE"),
            pytest.param("uniform", False, 0.0, 1.0, id="consistency"),
            pytest.param("sample", False, 1.0, 0.0, id="sample-reweighted"),
            pytest.param("prototype", True, 1.0, 0.0, id="prototype-reweighted"),
            pytest.param("uniform", False, 1.0, 6.0, id="InfoNCE + consistency"),
            pytest.param("sample", False, 1.0, 6.0, id="sample-reweighted + consistency"),
            pytest.param("prototype", True, 1.0, 6.0, id="PGCL"),
        ],
    )
    def test_row(self, weighting, exclude, contrast_weight, consistency_weight):
        prototypes, contrast, consistency = self.parts(weighting, exclude)
        pgcl = PGCLLoss(
            5,
            4,
            weighting=weighting,
            exclude_same_cluster=exclude,
            contrast_weight=contrast_weight,
            consistency_weight=consistency_weight,
        )
        pgcl.prototypes.load_state_dict(prototypes.state_dict())
        terms = pgcl.terms(self.z1, self.z2)
        if contrast_weight > 0:
            torch.testing.assert_close(terms.contrast, contrast)
        if consistency_weight > 0:
            torch.testing.assert_close(terms.consistency, consistency)
        torch.testing.assert_close(
            terms.loss, contrast_weight * contrast + consistency_weight * consistency
        )
        assert terms.loss.requires_grad == pgcl.prototypes.weight.requires_grad
        assert terms.loss.requires_grad == (consistency_weight > 0)


def test_weight_decay_moves_no_prototypes_that_nothing_teaches():
    pgcl, views = PGCLLoss(4, 3, consistency_weight=0), torch.randn(2, 7, 4, requires_grad=True)
    optimizer = torch.optim.Adam([views, *pgcl.parameters()], weight_decay=1.0)
    before = pgcl.prototypes.weight.detach().clone()
    moved = []
    for weight in (0, 1, 0):
        pgcl.consistency_weight = weight
        optimizer.zero_grad()
        pgcl(*views).backward()
        optimizer.step()
        moved.append(not torch.equal(pgcl.prototypes.weight, before))
        before = pgcl.prototypes.weight.detach().clone()
    assert moved == [False, True, False]


def test_terms_and_reductions():
    torch.manual_seed(3)
    z1, z2 = torch.randn(2, 7, 4)
    terms = {}
    for reduction in ("none", "sum", "mean"):
        torch.manual_seed(0)
        terms[reduction] = PGCLLoss(4, 3, reduction=reduction).terms(z1, z2)
    each = terms["none"]
    assert each.loss.shape == each.contrast.shape == each.consistency.shape == (14,)
    for name in ("loss", "contrast", "consistency"):
        torch.testing.assert_close(getattr(each, name).sum(), getattr(terms["sum"], name))
        torch.testing.assert_close(getattr(each, name).mean(), getattr(terms["mean"], name))
    assert len(each.assignments) == 2
    assert each.assignments[0].targets.shape == (7, 3)


def test_paper_defaults():
    pgcl = PGCLLoss(96)
    assert (pgcl.consistency_weight, pgcl.contrast_weight) == (6.0, 1.0)
    assert pgcl.prototypes.weight.shape == (10, 96)
    assert (pgcl.prototypes.temperature, pgcl.contrast.temperature) == (0.2, 0.2)
    assert pgcl.prototypes.epsilon == 0.05
    assert "weighting='prototype'" in repr(pgcl)
    assert "consistency_weight=6.0" in repr(pgcl)


class TestHalfPrecision:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_computes_in_float32_and_returns_gradients_in_kind(self, dtype):
        pgcl = PGCLLoss(4, 3)
        z1, z2 = (v.to(dtype).requires_grad_() for v in torch.randn(2, 6, 4).unbind())
        loss = pgcl(z1, z2)
        loss.backward()
        torch.testing.assert_close(loss, pgcl(z1.float(), z2.float()))
        assert loss.dtype == torch.float32
        assert z1.grad.dtype == z2.grad.dtype == dtype
        assert pgcl.prototypes.weight.grad.dtype == torch.float32

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_autocast_changes_nothing(self, dtype):
        pgcl = PGCLLoss(4, 3)
        z1, z2 = torch.randn(2, 6, 4)
        with torch.autocast("cpu", dtype=dtype):
            inside = pgcl(z1, z2)
        assert torch.equal(inside, pgcl(z1, z2))


@pytest.mark.parametrize(
    ("n", "d", "k"), [(1, 1, 1), (1, 4, 3), (2, 4, 30), (5, 1, 2), (5, 3, 1), (64, 8, 10)]
)
@pytest.mark.parametrize("length", [0.0, 1e-18, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("alike", ["independent", "identical rows", "opposed"])
def test_finite_in_finite_out(n, d, k, length, alike):
    z1, z2 = torch.randn(2, n, d)
    if alike == "identical rows":
        z1 = z2 = z1[:1].expand(n, d)
    elif alike == "opposed":
        z2 = -z1
    z1, z2 = ((length * torch.nn.functional.normalize(z)).requires_grad_() for z in (z1, z2))
    for options in ({}, {"temperature": 0.01, "epsilon": 1e-4}, {"weighting": "sample"}):
        pgcl = PGCLLoss(d, k, **options)
        loss = pgcl(z1, z2)
        assert loss.isfinite()
        gradients = torch.autograd.grad(loss, [z1, z2, pgcl.prototypes.weight])
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_length_does_not_matter():
    pgcl = PGCLLoss(4, 3)
    z1, z2 = torch.randn(2, 6, 4)
    losses = [pgcl(length * z1, z2) for length in (1e-8, 1.0, 1e18)]
    torch.testing.assert_close(losses, [losses[1]] * 3)


@pytest.mark.parametrize("training", [True, False])
def test_functional_gradients(training):
    pgcl = PGCLLoss(4, 3).train(training)
    z1, z2 = torch.randn(2, 6, 4)
    functional = torch.func.grad(lambda z: pgcl(z, z2))(z1)
    weights = dict(pgcl.named_parameters())
    of_weights = torch.func.grad(lambda given: torch.func.functional_call(pgcl, given, (z1, z2)))(
        weights
    )
    pgcl(z1.requires_grad_(), z2).backward()
    torch.testing.assert_close(functional, z1.grad)
    for name, weight in weights.items():
        torch.testing.assert_close(of_weights[name], weight.grad)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_without_the_contrast_no_pair_is_computed(reduction):
    pgcl = PGCLLoss(4, 3, contrast_weight=0, reduction=reduction)
    pgcl.contrast.register_forward_hook(lambda *_: pytest.fail("the contrast was computed"))
    views = torch.randn(2, 6, 4, requires_grad=True)
    terms = pgcl.terms(*views)
    assert terms.contrast.shape == terms.loss.shape
    assert not terms.contrast.any()
    torch.testing.assert_close(terms.loss, 6 * terms.consistency)
    (gradient,) = torch.autograd.grad(terms.loss.sum(), views)
    assert gradient.any()


def test_shapes_can_be_traced_without_data():
    z = torch.empty(6, 4, device="meta")
    assert PGCLLoss(4, 3, queue_size=5).to("meta")(z, z).shape == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"consistency_weight": -1.0}, ValueError, "consistency_weight must be a finite.*-1.0"),
        ({"consistency_weight": math.nan}, ValueError, "consistency_weight.*nan"),
        ({"contrast_weight": "1"}, TypeError, "contrast_weight must be a finite number.*'1'"),
        ({"temperature": 0.0}, ValueError, "temperature"),
        ({"engine": "fast"}, ValueError, "engine must be one of"),
        ({"num_prototypes": 0}, ValueError, "num_prototypes"),
        (
            {"temperature": 10**400},
            ValueError,
            "temperature must be a finite number",
        ),
        ({"gather": None}, TypeError, "gather must be True or False, but got None"),
        ({"process_group": "all"}, TypeError, "process_group must be a ProcessGroup or None"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        PGCLLoss(**{"dim": 4, **options})


@pytest.mark.parametrize(
    ("z1", "z2", "error", "message"),
    [
        (torch.randn(4, 5), torch.randn(4, 5), ValueError, "z1 has dimension 5 but"),
        (torch.randn(4, 3), torch.randn(5, 3), ValueError, r"z2 has shape \(5, 3\) but z1"),
        (torch.randn(4, 3), torch.randn(4, 3).half(), TypeError, "z2 is torch.float16 but z1"),
        (torch.randn(0, 3), torch.randn(0, 3), ValueError, "z1 must not be empty"),
        (torch.eye(3).to_sparse(), torch.eye(3), TypeError, "z1 must be a dense Tensor"),
        (torch.randn(4, 3), "z", TypeError, "z2 must be a Tensor.*but got str"),
        (
            torch.randn(4),
            torch.randn(4),
            ValueError,
            r"z1 must have shape \[N, D\], but got \(4,\)",
        ),
    ],
)
def test_bad_input(z1, z2, error, message):
    with pytest.raises(error, match=message):
        PGCLLoss(3)(z1, z2)
