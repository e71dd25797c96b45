"""PGCLLoss: its value and gradients are those of the oracle, finite, or a clear error."""

import math
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.cases import EVERY_MODE, FAMILY
from helpers.item_cases import BLOCKS, DIM, ENGINES, arrays, gradients, numbers, random_sets
from helpers.marks import NEGATIVES, engines, few_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.contrast import WEIGHTINGS

LAMBDA = 6.0
HEADS = [4, (3, 5), (2, 4, 3), (5, 1, 2, 6), 1]


@dataclass
class Problem:
    options: dict[str, Any]
    num_views: int
    num_graphs: int
    seed: int

    def pgcl(self, **options: Any) -> PGCLLoss:
        torch.manual_seed(self.seed)
        return PGCLLoss(DIM, **(self.options | options)).double()

    def views(self, step: int = 0) -> tuple[list[torch.Tensor], torch.Tensor]:
        """The views of a step, with gradient, and the items of their graphs."""
        views, (items, *_) = random_sets((self.num_graphs,) * self.num_views, self.seed + step)
        return views, items


@st.composite
def problems(draw, min_graphs=1):
    """Any options of the contrast, heads and numbers of views."""
    heads = draw(st.sampled_from(HEADS))
    end = draw(st.integers(1, heads if isinstance(heads, int) else min(heads)))
    window = draw(st.sampled_from([None, (draw(st.integers(0, end - 1)), end)]))
    soft = draw(st.booleans())
    nothing_left = window == (0, 1) and not soft  # but the query's own cluster
    options = {
        "num_prototypes": heads,
        "temperature": draw(st.sampled_from([0.05, 0.1, 0.2, 0.5, 1.0])),
        "weighting": draw(st.sampled_from(WEIGHTINGS)),
        "exclude_same_cluster": draw(st.booleans()) and not nothing_left,
        "negative_ranks": window,
        "soft_clusters": soft,
        "negatives": draw(st.sampled_from(NEGATIVES)),
    }
    num_views, num_graphs = draw(st.integers(2, 4)), draw(st.integers(min_graphs, 5))
    return Problem(options, num_views, num_graphs, draw(st.integers(0, 10**6)))


def exact_consistency(views, prototypes_of_heads, targets_of_heads, temperature):
    """Of each embedding, averaged over the heads."""
    of_heads = [
        oracle.consistency([oracle.log_predictions(z, c, temperature) for z in views], q)
        for c, q in zip(prototypes_of_heads, targets_of_heads, strict=True)
    ]
    return np.mean(of_heads, axis=0)


@few_graphs
@settings(max_examples=200)
@given(
    problem=problems(min_graphs=2),  # one graph alone belongs to all clusters alike
    memory_size=st.sampled_from([0, 0, 2, 5, 13, 40]),
    with_items=st.booleans(),
    engine=ENGINES,
    block=BLOCKS,
)
def test_terms_agree_with_the_oracle(problem, memory_size, with_items, engine, block):
    """In every step, of which later ones have a memory."""
    pgcl = problem.pgcl(engine=engine, reduction="none", memory_size=memory_size)
    heads, memory = pgcl.prototypes.heads, oracle.Memory(memory_size)
    prototypes = arrays(pgcl.prototypes.weight.split(heads))
    mode = {name: value for name, value in problem.options.items() if name != "num_prototypes"}
    for step in range(3 if memory_size else 1):
        views, items = problem.views(step)
        items = items if with_items else None
        with in_blocks(block):
            terms = pgcl.terms(*views, items=items)
        z, of_views = arrays(views), numbers([items] * len(views)) if with_items else None
        q_of_heads = [[oracle.targets(view, c, 0.05, 3) for view in z] for c in prototypes]
        for view, at, q in zip(terms.assignments, z, zip(*q_of_heads, strict=True), strict=True):
            np.testing.assert_allclose(view.targets, np.hstack(q), rtol=1e-9, atol=1e-12)
            keys = [
                oracle.ranking(of_head, at, c) for of_head, c in zip(q, prototypes, strict=True)
            ]
            clusters = np.stack([of_head.argmax(1) for of_head in keys], axis=1)
            assert (view.clusters.reshape(clusters.shape).numpy() == clusters).all()
        contrast = oracle.pgcl_contrast(
            z, prototypes, of_views, memory.embeddings, memory.items, **mode
        )
        consistency = exact_consistency(z, prototypes, q_of_heads, mode["temperature"])
        for ours, expected in (
            (terms.contrast, contrast),
            (terms.consistency, consistency),
            (terms.loss, contrast + LAMBDA * consistency),
        ):
            np.testing.assert_allclose(ours.detach(), expected, rtol=1e-9, atol=1e-11)
        memory.store(z, of_views)


@few_graphs
@settings(max_examples=100)
@given(problem=problems(), block=BLOCKS)
def test_gradients_agree_with_the_oracle(problem, block):
    """To embeddings and prototypes, with targets, clusters and weights held fixed."""
    views, _ = problem.views()
    results = []
    for engine in ("dense", "blocks"):
        pgcl = problem.pgcl(engine=engine, reduction="none")
        inputs = [*views, pgcl.prototypes.weight]
        with in_blocks(block):
            terms = pgcl.terms(*views)
            slopes = np.linspace(-1, 2, len(terms.loss))
            total = terms.loss @ torch.from_numpy(slopes)
            results.append(torch.autograd.grad(total, inputs))
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-10)
    heads, options = pgcl.prototypes.heads, problem.options
    ends = np.cumsum(heads)[:-1]
    at = arrays(inputs)
    targets = torch.cat([view.targets for view in terms.assignments]).numpy()
    q_of_heads = np.split(targets, ends, axis=1)
    weights = oracle.family_weights(
        np.concatenate(at[:-1]),
        q_of_heads,
        np.split(at[-1], ends),
        options["weighting"],
        options["exclude_same_cluster"],
        options["negative_ranks"],
        options["soft_clusters"],
    )
    targets_of_heads = [np.split(q, len(views)) for q in q_of_heads]
    mode = options["temperature"], False, options["negatives"]  # exclusion is in the weights

    for position, ours in enumerate(results[0]):

        def value(moved, position=position):
            *z, prototypes = [*at[:position], moved, *at[position + 1 :]]
            contrast = 0.0
            if position < len(views):  # prototypes learn from the consistency alone
                contrast = oracle.contrast(z, weights, None, *mode)
            consistency = exact_consistency(
                z, np.split(prototypes, ends), targets_of_heads, options["temperature"]
            )
            return float(np.dot(slopes, contrast + LAMBDA * consistency))

        expected = oracle.gradient(value, at[position])
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@few_graphs
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("member", [{}, *FAMILY], ids=str)
@pytest.mark.parametrize("with_items", [False, True])
def test_engines_have_the_same_gradient_with_a_memory(weighting, member, with_items):
    results = []
    for engine in ("dense", "blocks"):
        torch.manual_seed(0)
        options = {"weighting": weighting, "engine": engine, "memory_size": 9, **member}
        pgcl, of_engine = PGCLLoss(DIM, **options).double(), []
        for seed in range(3):
            views, (items, *_) = random_sets((4, 4, 4), seed)
            with in_blocks(3):
                loss = pgcl(*views, items=items if with_items else None)
                of_engine += gradients(loss, [*views, pgcl.prototypes.weight])
        results.append(of_engine)
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


@few_graphs
@engines
@pytest.mark.parametrize("memory_size", [0, 5])
@pytest.mark.parametrize("with_items", [False, True])
def test_uniform_weights_without_consistency_are_info_nce(engine, memory_size, with_items):
    options = {"memory_size": memory_size, "engine": engine}
    pgcl = PGCLLoss(
        DIM, weighting="uniform", exclude_same_cluster=False, consistency_weight=0, **options
    ).double()
    info_nce = InfoNCE(**options, dim=DIM).double()
    for seed in range(3):
        views, (items, *_) = random_sets((6, 6, 6), seed, num_items=3)
        items = items if with_items else None
        form = [items] * 3 if with_items and seed else items  # one tensor, or one for each view
        ours, expected = pgcl(*views, items=form), info_nce(*views, items=items)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(gradients(ours, views), gradients(expected, views))


def test_gradcheck_without_consistency():
    # Targets depend on the embeddings but are constants for the gradient. The oracle holds them
    # fixed; differences of the loss do not.
    options = {"weighting": "uniform", "exclude_same_cluster": False, "engine": "dense"}
    pgcl = PGCLLoss(3, 2, **options, consistency_weight=0)
    z1, z2 = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True).unbind()
    assert torch.autograd.gradcheck(pgcl.double(), (z1, z2))
    assert torch.autograd.gradgradcheck(pgcl, (z1, z2))


def test_the_loss_is_the_sum_of_its_weighted_terms():
    views = torch.randn(2, 12, DIM)
    terms = PGCLLoss(DIM, 4, contrast_weight=2.0, consistency_weight=3.0).terms(*views)
    torch.testing.assert_close(terms.loss, 2 * terms.contrast + 3 * terms.consistency)
    for weight in (0.0, 3.0):
        loss = PGCLLoss(DIM, 4, consistency_weight=weight)(*views)
        assert loss.requires_grad == (weight > 0)


def test_weight_decay_does_not_move_prototypes_without_consistency():
    pgcl, views = PGCLLoss(4, 3, consistency_weight=0), torch.randn(2, 7, 4, requires_grad=True)
    optimizer = torch.optim.Adam([views, *pgcl.parameters()], weight_decay=1.0)
    before = pgcl.prototypes.weight.detach().clone()
    for weight in (0, 1):
        pgcl.consistency_weight = weight
        optimizer.zero_grad()
        pgcl(*views).backward()
        optimizer.step()
        assert torch.equal(pgcl.prototypes.weight, before) == (weight == 0)
    pgcl.prototypes.weight.requires_grad_(False)
    pgcl.consistency_weight = 2
    assert not pgcl.prototypes.weight.requires_grad  # the user's own choice


def test_reductions_of_the_terms():
    pgcl, views, terms = PGCLLoss(4, 3), torch.randn(2, 7, 4), {}
    for pgcl.reduction in ("none", "sum", "mean"):
        terms[pgcl.reduction] = pgcl.terms(*views)[:3]
    for each, total, mean in zip(terms["none"], terms["sum"], terms["mean"], strict=True):
        assert each.shape == (14,)
        torch.testing.assert_close([each.sum(), each.mean()], [total, mean])


def test_paper_defaults():
    pgcl = PGCLLoss(96)
    assert pgcl.prototypes.weight.shape == (10, 96)
    options = ("consistency_weight", "contrast_weight", "temperature", "epsilon", "weighting")
    assert [getattr(pgcl, name) for name in options] == [6.0, 1.0, 0.2, 0.05, "prototype"]
    assert "consistency_weight=6.0" in repr(pgcl)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32_and_autocast_changes_nothing(dtype):
    pgcl = PGCLLoss(4, 3)
    z1, z2 = (v.to(dtype).requires_grad_() for v in torch.randn(2, 6, 4).unbind())
    loss = pgcl(z1, z2)
    loss.backward()
    torch.testing.assert_close(loss, pgcl(z1.float(), z2.float()))
    assert loss.dtype == torch.float32
    assert z1.grad.dtype == z2.grad.dtype == dtype
    assert pgcl.prototypes.weight.grad.dtype == torch.float32
    with torch.autocast("cpu", dtype=dtype):
        inside = pgcl(z1.float(), z2.float())
    assert torch.equal(inside, pgcl(z1.float(), z2.float()))


@pytest.mark.parametrize(
    ("n", "d", "k"), [(1, 1, 1), (1, 4, 3), (2, 4, 30), (5, 1, 2), (5, 3, 1), (64, 8, 10)]
)
@pytest.mark.parametrize("length", [0.0, 1e-18, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("alike", ["independent", "identical embeddings", "opposed"])
def test_finite_input_gives_finite_losses_and_gradients(n, d, k, length, alike):
    z1, z2 = torch.randn(2, n, d)
    if alike == "identical embeddings":
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


@given(options=st.sampled_from([*EVERY_MODE, {"soft_clusters": True}, {"queue_size": 5}]))
def test_without_consistency_its_module_is_not_called(options):
    pgcl, plain = PGCLLoss(DIM, 3, consistency_weight=0.0, **options), PGCLLoss(DIM, 3, **options)
    plain.load_state_dict(pgcl.state_dict())
    with mock.patch.object(pgcl.consistency, "forward", side_effect=AssertionError):
        views = torch.randn(2, 9, DIM, requires_grad=True)
        terms, expected = pgcl.terms(*views), plain.terms(*views)
    assert torch.equal(terms.loss, expected.contrast)
    assert torch.equal(terms.consistency, torch.zeros_like(terms.loss))
    torch.testing.assert_close(terms.assignments[0][1:], expected.assignments[0][1:])
    (ours,) = torch.autograd.grad(terms.loss, views)
    assert torch.equal(ours, torch.autograd.grad(expected.contrast, views)[0])
    torch.testing.assert_close(pgcl.state_dict(), plain.state_dict())


def test_shapes_can_be_traced_without_data():
    z = torch.empty(6, 4, device="meta")
    assert PGCLLoss(4, 3, queue_size=5).to("meta")(z, z).shape == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"consistency_weight": -1.0}, ValueError, "consistency_weight must be a finite.*-1.0"),
        ({"consistency_weight": math.nan}, ValueError, "consistency_weight.*nan"),
        ({"contrast_weight": "1"}, TypeError, "contrast_weight must be a finite number.*'1'"),
        ({"temperature": 10**400}, ValueError, "temperature must be a finite number"),
        ({"gather": None}, TypeError, "gather must be True or False, but got None"),
        ({"process_group": "all"}, TypeError, "process_group must be a ProcessGroup or None"),
    ],
)
def test_wrong_options_are_errors(options, error, message):
    with pytest.raises(error, match=message):
        PGCLLoss(**{"dim": 4, **options})
