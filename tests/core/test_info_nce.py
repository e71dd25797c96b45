"""InfoNCE of views, and of sets with labels and positives by index, with and without a memory.

Robinson et al., Contrastive learning with hard negative samples, 2021; Chuang et al., Debiased
contrastive learning, 2020.
"""

import pytest
import torch
from helpers import oracle
from helpers.cases import WAYS, are_apart, as_lists, in_chunks, listed, random_sets, upstream
from helpers.losses import DIM, gradients, random_pairs
from helpers.marks import examples
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss

MODES = {
    "temperature": st.sampled_from([0.01, 0.05, 0.2, 1.0]),
    "negatives": st.sampled_from(["all", "cross", "memory"]),
    "queries": st.sampled_from(["all", "first"]),
    "over_positives": st.sampled_from(["mean", "mean", "supcon", "sum"]),
    "decoupled": st.booleans(),
    "similarity": st.sampled_from(["cosine", "cosine", "dot"]),
    "hardness": st.sampled_from([0.0, 0.0, 1e-9, 0.5, 2.0]),
    "debias": st.sampled_from([0.0, 0.0, 1e-9, 0.1, 0.9]),
}


@st.composite
def problems(draw):
    """Sets, options, past embeddings, and what else a loss is called with."""
    mode = draw(st.fixed_dictionaries(MODES))
    mode["decoupled"] &= mode["over_positives"] != "supcon"
    mode["debias"] *= mode["similarity"] == "cosine"
    with_labels, with_pairs = draw(st.booleans()), draw(st.booleans())
    with_negatives = mode["negatives"] != "memory" and draw(st.booleans())
    may_be_one = mode["negatives"] == "all" and (with_labels or with_pairs)
    lengths = draw(st.lists(st.integers(1, 6), min_size=1 if may_be_one else 2, max_size=4))
    seed = draw(st.integers(0, 10**6))
    if not (with_labels or with_pairs) or sum(lengths) == 1:
        lengths = lengths[:1] * len(lengths)
    sets, labels = random_sets(lengths, seed, draw(st.integers(1, 9)))
    count, given = sum(lengths), {}
    of_queries = lengths[0] if mode["queries"] == "first" else count
    if with_negatives:
        num = draw(st.integers(0, 20))
        given["negative_pairs"], _ = random_pairs(count, of_queries, num, seed + 2)
    if with_pairs and count > 1:
        pairs, weights = random_pairs(count, of_queries, draw(st.integers(0, 12)), seed)
        if mode["negatives"] == "cross":  # a positive in the set of the query is an error
            is_apart = are_apart(lengths, *pairs)
            pairs, weights = pairs[:, is_apart], weights[is_apart]
        given["positives"] = pairs
        given["positive_weights"] = draw(st.sampled_from([None, weights]))
    elif len(lengths) == 1:
        with_labels = True
    if with_labels:
        given["labels"] = labels
    may_have_memory = not with_negatives and draw(st.booleans())
    past = random_sets((4,), seed + 1) if may_have_memory or mode["negatives"] == "memory" else None
    return sets, mode, past, given


@examples(500)
@given(problem=problems(), way=WAYS)
def test_losses_and_gradients_agree_with_the_oracle(problem, way):
    sets, mode, past, given = problem
    memory, options = (), {}
    if past is not None:
        (z,), (labels,) = past
        labels = labels if "labels" in given else None
        memory = z, labels if labels is None else labels.tolist()
        options = {"memory_size": 4, "dim": DIM}
    losses, exist = oracle.info_nce(
        sets,
        as_lists(given.get("labels")),
        *memory,
        **mode,
        listed=listed(given.get("positives"), given.get("positive_weights")),
        negative_pairs=given["negative_pairs"].T.tolist() if "negative_pairs" in given else None,
    )
    expected = gradients(upstream(losses), sets)
    loss = InfoNCE(**mode, **options, reduction="none", engine=way.engine).double()
    if past is not None:
        loss.remember(z, labels=labels)
    with in_chunks(way.chunk):
        ours = loss(*sets, **given)
        d_sets = gradients(upstream(ours) + 0 * sets[0].sum(), sets)
        loss.reduction = "mean"
        mean = loss.eval()(*sets, **given)
    torch.testing.assert_close(ours, losses, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(mean, oracle.mean_of_queries(losses, exist))
    torch.testing.assert_close(d_sets, expected, rtol=1e-6, atol=1e-7)


def test_as_the_contrast_of_pgcl():
    pgcl = PGCLLoss(DIM, 4).double()
    pgcl.contrast = InfoNCE()
    views, _ = random_sets((6, 6))
    torch.testing.assert_close(pgcl.terms(*views).contrast, InfoNCE()(*views))
    pgcl.prototypes.requires_grad_(False)  # otherwise it warns that no optimizer moves them
    for _ in range(25):  # warnings read the batch in some of these steps
        pgcl(*views)


@pytest.mark.parametrize("options", [{}, {"debias": 0.1}, {"hardness": 1.0, "debias": 0.1}])
def test_a_nan_among_the_negatives_is_a_nan_of_the_loss(engine, options):
    """Here in an embedding whose label no other one has."""
    z = torch.randn(5, DIM)
    z[4, 0] = torch.nan
    assert InfoNCE(engine=engine, **options)(z, labels=torch.tensor([0, 0, 1, 1, 2])).isnan()


def test_listed_negatives_may_change_before_the_backward(engine):
    """A sampler writes its next pairs into the same tensor."""
    z = random_sets((8,))[0][0].requires_grad_()
    positives, negatives = torch.tensor([[[0, 1], [1, 2]], [[0, 1], [4, 5]]])
    loss_of = InfoNCE(reduction="none", engine=engine)
    losses = [loss_of(z, positives=positives, negative_pairs=negatives).sum() for _ in range(2)]
    expected = gradients(losses[0], [z])
    negatives += 2
    torch.testing.assert_close(gradients(losses[1], [z]), expected)
