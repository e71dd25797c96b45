"""PGCLLoss: its value and gradients are those of the oracle."""

import copy
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
from helpers.marks import NEGATIVES, few_graphs, negatives_of
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcl_losses import (
    Assignment,
    ConsistencyLoss,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
    diagnostics,
)
from pgcl_losses.contrast import WEIGHTINGS

LAMBDA = 6.0
HEADS = [4, (3, 5), (2, 4, 3), (5, 1, 2, 6), (1,)]


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
    options, at, ends = dict(problem.options), arrays(inputs), np.cumsum(pgcl.prototypes.heads)[:-1]
    targets = torch.cat([view.targets for view in terms.assignments]).numpy()
    q_of_heads = np.split(targets, ends, axis=1)
    targets_of_heads = [np.split(q, len(views)) for q in q_of_heads]
    temperature, negatives, _ = map(options.pop, ("temperature", "negatives", "num_prototypes"))
    samples, prototypes = np.concatenate(at[:-1]), np.split(at[-1], ends)
    weights = oracle.family_weights(samples, q_of_heads, prototypes, **options)

    for position, ours in enumerate(results[0]):

        def value(moved, position=position):
            *z, prototypes = [*at[:position], moved, *at[position + 1 :]]
            contrast = 0.0
            if position < len(views):  # prototypes learn from the consistency alone
                # exclusion is in the weights
                contrast = oracle.contrast(z, weights, None, temperature, False, negatives)
            of_heads = np.split(prototypes, ends), targets_of_heads
            consistency = exact_consistency(z, *of_heads, temperature)
            return float(np.dot(slopes, contrast + LAMBDA * consistency))

        expected = oracle.gradient(value, at[position])
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


every_member = pytest.mark.parametrize("options", [{"num_prototypes": 3}, *FAMILY], ids=str)


@every_member
@negatives_of
def test_second_derivatives_of_the_contrast(options, negatives):
    """By views and temperature, with targets and clusters held fixed."""
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, **options, negatives=negatives, engine="dense").double().eval()
    inputs = [view.requires_grad_() for view in torch.randn(3, 4, DIM, dtype=torch.float64)]
    # Without a ranking the constant targets alone order the clusters.
    constants = [assignment._replace(ranking=None) for assignment in pgcl.prototypes(*inputs)]

    def contrast(temperature, *views):
        pgcl.temperature = 1 * temperature
        return pgcl.contrast(*views, assignments=constants, prototypes=pgcl.prototypes.weight)

    temperature = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(contrast, (temperature, *inputs))


@every_member
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_modules_called_by_themselves_give_the_terms(options, weighting):
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, **options, weighting=weighting).double()
    views = torch.randn(3, 5, DIM, dtype=torch.float64)
    terms, assignments = pgcl.terms(*views), pgcl.prototypes(*views)
    given = {"prototypes": pgcl.prototypes.weight}
    contrast = pgcl.contrast(*views, assignments=assignments, **given)
    torch.testing.assert_close(contrast, terms.contrast)
    torch.testing.assert_close(pgcl.consistency(*assignments), terms.consistency)
    if options == {"num_prototypes": 3}:
        clusters = [assignment.clusters for assignment in assignments]
        by_clusters = pgcl.contrast(*views, clusters=clusters, **given)
        torch.testing.assert_close(by_clusters, terms.contrast)


def test_each_head_is_assigned_and_queued_by_itself():
    both = SinkhornPrototypes(DIM, (4, 6), queue_size=5)
    single = [SinkhornPrototypes(DIM, size, queue_size=5) for size in (4, 6)]
    with torch.no_grad():
        for one, weight in zip(single, both.weight.split((4, 6)), strict=True):
            one.weight.copy_(weight)
    for _ in range(3):
        views = torch.randn(2, 3, DIM)
        for ours, *of_heads in zip(both(*views), *(one(*views) for one in single), strict=True):
            for field in ("targets", "log_probs"):
                side_by_side = torch.cat([getattr(head, field) for head in of_heads], dim=1)
                torch.testing.assert_close(getattr(ours, field), side_by_side)
            assert torch.equal(ours.clusters, torch.stack([h.clusters for h in of_heads], dim=1))
        nearest = torch.stack([one.assign(views[0]) for one in single], dim=1)
        assert torch.equal(both.assign(views[0]), nearest)


def test_diagnostics_of_each_head():
    pgcl = PGCLLoss(DIM, (4, 6))
    terms = pgcl.terms(*torch.randn(2, 9, DIM))
    numbers = diagnostics(terms, pgcl.prototypes.weight)
    assert "agreement" not in numbers
    for h, columns in enumerate((slice(4), slice(4, 10))):
        alone = [
            Assignment(a.log_probs[:, columns], a.targets[:, columns], a.clusters[:, h])
            for a in terms.assignments
        ]
        expected = diagnostics(alone, pgcl.prototypes.weight[columns])
        prefix = f"head{h}/"
        ours = {k.removeprefix(prefix): v for k, v in numbers.items() if k.startswith(prefix)}
        del expected["consistency_ratio"]
        assert ours == pytest.approx(expected)


def test_terms_are_reduced_weighted_and_added():
    pgcl, views, terms = PGCLLoss(4, 3), torch.randn(2, 7, 4), {}
    pgcl.contrast_weight, pgcl.consistency_weight = 2.0, 3.0
    for reduction in ("none", "sum", "mean"):
        pgcl.contrast.reduction = pgcl.consistency.reduction = reduction
        terms[reduction] = of_reduction = pgcl.terms(*views)
        total = 2 * of_reduction.contrast + 3 * of_reduction.consistency
        torch.testing.assert_close(of_reduction.loss, total)
    for each, total, mean in zip(
        *(of_reduction[:3] for of_reduction in terms.values()), strict=True
    ):
        assert each.shape == (14,)
        torch.testing.assert_close([each.sum(), each.mean()], [total, mean])


def test_paper_defaults():
    pgcl = PGCLLoss(96)
    assert pgcl.prototypes.weight.shape == (10, 96)
    ours = pgcl.all_options()
    names = ("consistency_weight", "contrast_weight", "contrast.temperature", "prototypes.epsilon")
    assert [ours[name] for name in names] == [6.0, 1.0, 0.2, 0.05]
    for name, module in {
        "prototypes": SinkhornPrototypes(96),
        "contrast": PrototypeReweightedNCE(),
        "consistency": ConsistencyLoss(),
    }.items():  # PGCLLoss lists their defaults again
        for option, value in module.all_options().items():
            assert ours[f"{name}.{option}"] == value


@few_graphs
@pytest.mark.parametrize(("dim", "num_graphs", "epsilon"), [(8, 5, 0.01), (3, 64, 0.005)])
def test_positions_of_clusters_are_the_same_in_float32_and_float64(dim, num_graphs, epsilon):
    """Most targets are too small for float32."""
    for seed in range(40):
        torch.manual_seed(seed)
        options = {"epsilon": epsilon, "negative_ranks": (8, 9), "consistency_weight": 0}
        pgcl, views = PGCLLoss(dim, 10, **options), torch.randn(2, num_graphs, dim)
        narrow = pgcl(*views)
        wide = pgcl.double()(*views.double())
        torch.testing.assert_close(narrow.double(), wide, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("options", [*EVERY_MODE, {"soft_clusters": True}, {"queue_size": 5}])
def test_a_term_of_weight_0_is_not_computed(options, reduction):
    plain, views = PGCLLoss(DIM, 3, **options), torch.randn(2, 9, DIM, requires_grad=True)
    for name, other, weight in (("contrast", "consistency", 6), ("consistency", "contrast", 1)):
        pgcl = PGCLLoss(DIM, 3, **options, reduction=reduction, **{f"{name}_weight": 0.0})
        pgcl.load_state_dict(plain.state_dict())
        twin = copy.deepcopy(plain)
        twin.contrast.reduction = twin.consistency.reduction = reduction
        with mock.patch.object(getattr(pgcl, name), "forward", side_effect=AssertionError):
            terms, expected = pgcl.terms(*views), twin.terms(*views)
        torch.testing.assert_close(terms.loss, weight * getattr(expected, other))
        assert torch.equal(getattr(terms, name), torch.zeros_like(terms.loss))
        torch.testing.assert_close(terms.assignments[0][1:], expected.assignments[0][1:])
        losses = terms.loss.sum(), weight * getattr(expected, other).sum()
        torch.testing.assert_close(*(gradients(loss, views) for loss in losses))
        torch.testing.assert_close(pgcl.state_dict(), twin.state_dict())
