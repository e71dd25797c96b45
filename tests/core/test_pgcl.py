"""PGCLLoss: its value and gradients are those of the oracle.

For more cases: FUZZ_CASES=2000 python -m pytest tests/core/test_pgcl.py
"""

import copy
import os
from unittest import mock

import pytest
import torch
from helpers import oracle
from helpers.cases import CHUNKS, ENGINES, FAMILY, in_chunks, listed, random_sets
from helpers.losses import DIM, gradients, random_pairs
from helpers.marks import few_graphs, negatives_of
from hypothesis import assume, given, settings
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

HEADS = [4, (3, 5), (2, 4, 3), (5, 1, 2, 6), (1,)]
HALF = [torch.float16, torch.bfloat16]
DTYPES = [torch.float64, torch.float64, torch.float32, *HALF]
LAYOUTS = [
    lambda z: z,
    lambda z: z,
    lambda z: z.mT.contiguous().mT,
    lambda z: z.repeat_interleave(2, 1)[:, ::2],
    lambda z: z[:1].expand_as(z),
]


@st.composite
def modes(draw):
    """Any options of the contrast, heads and numbers of prototypes."""
    heads = draw(st.sampled_from(HEADS))
    end = draw(st.integers(1, heads if isinstance(heads, int) else min(heads)))
    window = draw(st.sampled_from([None, (draw(st.integers(0, end - 1)), end)]))
    soft, over_positives = draw(st.booleans()), draw(st.sampled_from(["mean", "supcon", "sum"]))
    memory_size = draw(st.sampled_from([0, 0, 2, 5, 13, 40]))
    nothing_left = window == (0, 1) and not soft  # but the query's own cluster
    contrast_weight, consistency_weight = draw(st.sampled_from([(1.0, 6.0), (2.0, 3.0)]))
    queries = draw(st.sampled_from(["all", "first"]))
    made_with = {
        "num_prototypes": heads,
        "memory_size": memory_size,
        "contrast_weight": contrast_weight,
        "consistency_weight": consistency_weight,
        "reduction": draw(st.sampled_from(["mean", *["sum", "none"] * (queries == "all")])),
    }
    return made_with, {
        "temperature": draw(st.sampled_from([0.05, 0.1, 0.2, 0.5, 1.0])),
        "weighting": draw(st.sampled_from(WEIGHTINGS)),
        "exclude_same_cluster": draw(st.booleans()) and not nothing_left,
        "negative_ranks": window,
        "soft_clusters": soft,
        "negatives": draw(st.sampled_from(["all", "cross", *["memory"] * (memory_size > 0)])),
        "queries": queries,
        "over_positives": over_positives,
        "decoupled": draw(st.booleans()) and over_positives != "supcon",
    }


@few_graphs
@settings(max_examples=int(os.environ.get("FUZZ_CASES", "250")))
@given(
    options=modes(),
    shape=st.tuples(st.integers(2, 4), st.integers(2, 5)),  # one graph alone is in all clusters
    seed=st.integers(0, 10**6),
    given_besides=st.sets(st.sampled_from(["labels", "pairs"])),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    layout=st.sampled_from(LAYOUTS),
    scale=st.sampled_from([1.0, 1.0, 1e-4, 1e4, 1e-15, 0.0]),  # of one view
    engine=ENGINES,
    chunk=CHUNKS,
)
def test_terms_and_gradients_agree_with_the_oracle(
    options, shape, seed, given_besides, dtypes, layout, scale, engine, chunk
):
    """In every step, of which later ones have a memory; targets and weights have no gradient."""
    torch.manual_seed(seed)
    (made_with, mode), (num_views, length) = options, shape
    pgcl = PGCLLoss(DIM, **made_with, **mode, engine=engine).to(dtypes[1])
    weight, heads = pgcl.prototypes.weight, pgcl.prototypes.heads
    of_oracle = weight.detach().double().requires_grad_()
    prototypes, past = of_oracle.split(heads), oracle.Memory(made_with["memory_size"])
    assume(not past.size or dtypes[1] not in HALF)  # embeddings in a memory of float16
    is_exact = torch.float64 in dtypes and (dtypes[1] == torch.float64 or not past.size)
    close = {"rtol": 1e-6, "atol": 1e-7} if is_exact else {"rtol": 2e-3, "atol": 2e-3}
    for step in range(2 if past.size else 1):
        views, (labels, *_) = random_sets([length] * num_views, seed + step)
        views = [layout(z.detach().to(dtypes[0])) for z in views]
        views[0] = scale * views[0]
        at = [z.double().requires_grad_() for z in views]
        views, given, exact = [z.requires_grad_() for z in views], {}, {}
        if "labels" in given_besides:
            given["labels"], exact["labels"] = labels, [labels.tolist()] * num_views
        if "pairs" in given_besides:
            of_queries = length if mode["queries"] == "first" else num_views * length
            pairs, weights = random_pairs(num_views * length, of_queries, 12, seed)
            given |= {"positives": pairs, "positive_weights": weights.to(dtypes[0])}
            exact["listed"] = listed(pairs, given["positive_weights"].double())

        q_of_heads = [[oracle.targets(z, c) for z in at] for c in prototypes]
        for c in prototypes:
            for z in (*at, *[past.embeddings] * step):
                gaps = oracle.ranking(oracle.targets(z, c), z, c).sort().values.diff()
                # Else rounding decides about clusters.
                assume(((gaps == 0) | (gaps > (1e-9 if is_exact else 1e-5))).all())
        log_p = [
            [oracle.log_predictions(z, c, mode["temperature"]) for z in at] for c in prototypes
        ]
        of_heads = map(oracle.consistency, log_p, q_of_heads)
        consistency = torch.stack([*of_heads]).mean(0)
        contrast, exist = oracle.pgcl_contrast(
            at, prototypes, memory=past.embeddings, memory_labels=past.labels, **exact, **mode
        )
        if made_with["reduction"] == "mean":
            consistency, contrast = consistency.mean(), oracle.mean_of_queries(contrast, exist)
        elif made_with["reduction"] == "sum":
            consistency, contrast = consistency.sum(), contrast.sum()
        loss = pgcl.contrast_weight * contrast + pgcl.consistency_weight * consistency

        with in_chunks(chunk):
            terms = pgcl.terms(*views, **given)
            slopes = torch.linspace(-1, 2, terms.loss.numel(), dtype=torch.float64)
            ours = gradients(terms.loss.view(-1).double() @ slopes, [*views, weight])
        for of_terms, expected in zip(terms[:3], (loss, contrast, consistency), strict=True):
            torch.testing.assert_close(of_terms.double(), expected, **close)
        for view, *q in zip(terms.assignments, *q_of_heads, strict=True):
            torch.testing.assert_close(view.targets.double(), torch.cat(q, 1), **close)
        theirs = gradients(loss.view(-1) @ slopes, [*at, of_oracle])
        for z, gradient, expected in zip([*views, weight], ours, theirs, strict=True):
            assert (gradient.shape, gradient.dtype) == (z.shape, z.dtype)
            # Gradients of short embeddings overflow in float16.
            assert gradient.isfinite().all() or z.dtype == torch.float16
            if dtypes == (torch.float64,) * 2:
                size = scale if z is views[0] else 1.0
                torch.testing.assert_close(size * gradient, size * expected, rtol=1e-6, atol=1e-7)
        past.store(at, exact.get("labels"))


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
@pytest.mark.parametrize("options", [{}, {"soft_clusters": True}, {"queue_size": 5}])
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
        assert getattr(terms, name).item() == 0
        torch.testing.assert_close(terms.assignments[0][1:], expected.assignments[0][1:])
        losses = terms.loss.sum(), weight * getattr(expected, other).sum()
        torch.testing.assert_close(*(gradients(loss, views) for loss in losses))
        torch.testing.assert_close(pgcl.state_dict(), twin.state_dict())
