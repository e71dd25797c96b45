"""InfoNCE of views, and of sets with items and positives by index, with and without a memory.

Robinson et al., Contrastive learning with hard negative samples, 2021; Chuang et al., Debiased
contrastive learning, 2020.
"""

import math

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.item_cases import (
    BLOCKS,
    DIM,
    arrays,
    exact_losses,
    gradients,
    listed,
    numbers,
    random_sets,
    weighted,
)
from helpers.marks import engines
from helpers.rank_models import random_pairs
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcl_losses import Batch, InfoNCE, PGCLLoss

MODES = {
    "temperature": st.sampled_from([0.01, 0.05, 0.2, 1.0]),
    "negatives": st.sampled_from(["all", "cross", "memory", "given"]),
    "queries": st.sampled_from(["all", "first"]),
    "over_positives": st.sampled_from(["mean", "mean", "supcon", "sum"]),
    "decoupled": st.booleans(),
    "similarity": st.sampled_from(["cosine", "cosine", "dot"]),
    "hardness": st.sampled_from([0.0, 0.0, 1e-9, 0.5, 2.0]),
    "debias": st.sampled_from([0.0, 0.0, 1e-9, 0.1, 0.9]),
}


@st.composite
def problems(draw):
    """Sets, items, positives, their weights, options, a memory and pairs of negatives."""
    mode = draw(st.fixed_dictionaries(MODES))
    mode["decoupled"] &= mode["over_positives"] != "supcon"
    mode["debias"] *= mode["similarity"] == "cosine"
    with_items, with_pairs = draw(st.booleans()), draw(st.booleans())
    may_be_one = mode["negatives"] in ("all", "given") and (with_items or with_pairs)
    lengths = draw(st.lists(st.integers(1, 6), min_size=1 if may_be_one else 2, max_size=4))
    seed = draw(st.integers(0, 10**6))
    if not (with_items or with_pairs) or sum(lengths) == 1:
        lengths = lengths[:1] * len(lengths)
    sets, items = random_sets(lengths, seed, draw(st.integers(1, 9)))
    count, pairs, weights, negatives = sum(lengths), None, None, None
    of_queries = lengths[0] if mode["queries"] == "first" else count
    if mode["negatives"] == "given":
        negatives, _ = random_pairs(count, of_queries, draw(st.integers(0, 20)), seed + 2)
    if with_pairs and count > 1:
        pairs, weights = random_pairs(count, of_queries, draw(st.integers(0, 12)), seed)
        weights = draw(st.sampled_from([None, weights]))
    elif len(lengths) == 1 and not with_items:
        with_items = True
    has_memory = mode["negatives"] == "memory" or (negatives is None and draw(st.booleans()))
    past = random_sets((4,), seed + 1) if has_memory else None
    return sets, items if with_items else None, pairs, weights, mode, past, negatives


@settings(max_examples=250)
@given(problem=problems(), block=BLOCKS)
def test_losses_agree_with_the_oracle_and_engines_in_their_gradient(problem, block):
    sets, items, pairs, weights, mode, past, negatives = problem
    given = {"items": items, "positives": pairs, "positive_weights": weights}
    given["negative_pairs"] = negatives
    mode["negative_pairs"] = [] if negatives is None else negatives.T.tolist()
    memory, results, options = oracle.Memory(4), [], {}
    if past is not None:
        memory.store(arrays(past[0]), numbers(past[1]) if items else None)
        options = {"memory_size": 4, "dim": DIM}
    losses, exist = exact_losses(sets, items, memory, listed=listed(pairs, weights), **mode)
    mean = oracle.mean_of_queries(losses, exist)
    del mode["negative_pairs"]
    for engine in ("dense", "blocks"):
        loss = InfoNCE(**mode, **options, engine=engine).double()
        if past is not None:
            loss.remember(past[0][0], past[1][0] if items else None)
        for loss.reduction, expected in (("mean", mean), ("none", losses)):
            with in_blocks(block):
                ours = loss(*sets, **given)
            np.testing.assert_allclose(ours.detach(), expected, rtol=1e-8, atol=1e-9)
        with in_blocks(block):
            results.append(gradients(weighted(ours) + 0 * sets[0].sum(), sets))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


def test_as_the_contrast_of_pgcl():
    pgcl = PGCLLoss(DIM, 4).double()
    pgcl.contrast = InfoNCE()
    views, _ = random_sets((6, 6))
    torch.testing.assert_close(pgcl.terms(*views).contrast, InfoNCE()(*views))
    pgcl.prototypes.requires_grad_(False)  # otherwise it warns that no optimizer moves them
    for _ in range(25):  # warnings read the batch in some of these steps
        pgcl(*views)


@engines
@pytest.mark.parametrize("options", [{}, {"debias": 0.1}, {"hardness": 1.0, "debias": 0.1}])
def test_a_nan_among_the_negatives_is_a_nan_of_the_loss(engine, options):
    """Here in the embedding of an item that no other one has."""
    z = torch.randn(5, DIM)
    z[4, 0] = torch.nan
    assert InfoNCE(engine=engine, **options)(z, items=torch.tensor([0, 0, 1, 1, 2])).isnan()


z, items, of_memory = torch.randn(5, DIM), torch.arange(5), {"memory_size": 4, "dim": DIM}
pair, dot = torch.tensor([[0], [7]]), InfoNCE(similarity="dot")


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: InfoNCE(hardness=-1.0), ValueError, "hardness must be a number from 0 to 1e6, "),
        (lambda: InfoNCE(hardness=10**400), ValueError, "hardness must be .* but got 1000"),
        (lambda: InfoNCE(hardness=True), TypeError, r"hardness must be .* but got True \(bool\)"),
        (lambda: InfoNCE(debias=math.nan), ValueError, "debias must be a number from 0 to 0.999, "),
        (lambda: setattr(InfoNCE(), "debias", 1), ValueError, "debias must be .* but got 1"),
        (lambda: InfoNCE()(z, z, z[:4]), ValueError, r"z3 has shape \(4, 3\) but z1 has \(5, 3\)"),
        (lambda: InfoNCE()(z, z[:4], items=items), ValueError, "items has length 5 but z2 has 4"),
        (
            lambda: PGCLLoss(DIM, negatives="given"),
            ValueError,
            "'cross', 'memory', but got 'given'",
        ),
        (lambda: PGCLLoss(DIM, similarity="dot"), TypeError, "similarity: clusters are cosines"),
        (lambda: InfoNCE(negatives="given", **of_memory), ValueError, "memory_size must be 0, but"),
        (lambda: InfoNCE(negatives="given")(z, z), TypeError, "'given' needs negative_pairs"),
        (lambda: InfoNCE()(z, z, negative_pairs=pair), TypeError, "and only that does"),
        (
            lambda: InfoNCE(negatives="given")(z, z, negative_pairs=pair.T),
            ValueError,
            r"negative_pairs must have shape \[2, P\], but got .*\(1, 2\)",
        ),
        (
            lambda: InfoNCE(negatives="given")(z, z, negative_pairs=pair + 3),
            ValueError,
            r"negative_pairs must be pairs .* a key from 0 to 9, but got \[3, 10\]",
        ),
        (
            lambda: InfoNCE(over_positives="supcon", decoupled=True)(z, z),
            ValueError,
            "over_positives='supcon' has positives in each denominator: .* or decoupled=False",
        ),
        (lambda: InfoNCE(similarity="dot", debias=0.1)(z, z), ValueError, "debias=0.1 needs c"),
        (lambda: dot(Batch.of((z, z))), TypeError, "a batch has a memory and a similarity"),
        (lambda: InfoNCE()(items=()), TypeError, "views must be one or more Tensors .* but got 0"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()
