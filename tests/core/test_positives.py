"""Positives by index: what they mean, in which transforms and with how much memory."""

import functools

import pytest
import torch
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.item_cases import BLOCKS, DIM, arrays, gradients, listed, numbers, random_sets
from helpers.marks import engines, few_graphs
from helpers.memory import kept_for_backward
from helpers.rank_models import random_pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.engine import blocks


@few_graphs
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    mode=st.fixed_dictionaries(
        {
            "negatives": st.sampled_from(["all", "cross", "memory"]),
            "queries": st.sampled_from(["all", "first"]),
            "decoupled": st.booleans(),
            "over_positives": st.sampled_from(["mean", "supcon", "sum"]),
            "weighting": st.sampled_from(["prototype", "sample", "uniform"]),
            "soft_clusters": st.booleans(),
            "temperature": st.sampled_from([0.01, 0.2]),
        }
    ),
    block=BLOCKS,
    kept_up_to=st.sampled_from([0, 1 << 20]),
)
def test_pgcl_agrees_with_the_oracle(seed, mode, block, kept_up_to):
    """With items, positives by index and a memory, in its value and in both engines' gradient."""
    mode["decoupled"] &= mode["over_positives"] != "supcon"
    views, (items, _) = random_sets((5, 5), seed)
    (z, *_), (items_of_z, *_) = random_sets((6,), seed + 1)
    pairs, weights = random_pairs(10, 5, 12, seed)
    pgcl = PGCLLoss(DIM, 3, memory_size=6, **mode, reduction="sum").double().eval()
    pgcl.remember(z, items_of_z)
    given, results = {"items": items, "positives": pairs, "positive_weights": weights}, []
    for pgcl.contrast.engine in ("dense", "blocks"):
        with in_blocks(block), pytest.MonkeyPatch.context() as patch:
            patch.setattr(blocks, "_KEPT_UP_TO", kept_up_to)
            contrast = pgcl.terms(*views, **given).contrast
            results.append([contrast, *gradients(contrast, views)])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)
    at, prototypes, past = arrays(views), arrays([pgcl.prototypes.weight]), arrays([z])[0]
    memory, mode["listed"] = (past, items_of_z.tolist()), listed(pairs, weights)
    losses = oracle.pgcl_contrast(at, prototypes, numbers([items] * 2), *memory, **mode)
    assert contrast.item() == pytest.approx(sum(losses), rel=1e-8, abs=1e-9)


@engines
@pytest.mark.parametrize("weight", [1e-3, 1e-8, 1e3])
def test_a_weight_that_all_positives_share_changes_nothing(engine, weight):
    """In float32: the 1 of an item's positive leaves no rounding behind a smaller weight."""
    (z1, z2), _ = random_sets((6, 6))
    views = [z.detach().float().requires_grad_() for z in (z1, z2)]
    i = torch.arange(6)
    pairs = torch.stack([torch.cat([i, i + 6, i]), torch.cat([i + 6, i, (i + 1) % 6])])
    loss = InfoNCE(engine=engine)
    losses = [
        loss(*views, positives=pairs, positive_weights=torch.full((18,), each))
        for each in (1.0, weight)
    ]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(gradients(of, views) for of in losses))


def test_transforms_of_any_number_of_pairs():
    (z1, z2), _ = random_sets((6, 6))
    pairs, weights = random_pairs(12, 12, 40)
    loss = InfoNCE(engine="dense")
    of_first = functools.partial(loss, positives=pairs)
    expected = gradients(of_first(z1, z2), [z1])[0]
    torch.testing.assert_close(torch.func.grad(of_first)(z1, z2), expected)
    lists = torch.stack([pairs, pairs.flip(1), random_pairs(12, 12, 40, 1)[0]])
    of_lists = torch.vmap(lambda of_list: loss(z1, z2, positives=of_list))(lists)
    each = [loss(z1, z2, positives=of_list) for of_list in lists]
    torch.testing.assert_close(of_lists, torch.stack(each))
    of_weights = functools.partial(loss, z1.detach(), z2.detach(), positives=pairs)
    (expected,) = gradients(of_weights(positive_weights=weights.requires_grad_()), [weights])
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(weights.detach(), torch.randn_like(weights))
        ours = forward_ad.unpack_dual(of_weights(positive_weights=dual)).tangent
        tangent = forward_ad.unpack_dual(dual).tangent
    torch.testing.assert_close(ours, expected @ tangent)


@engines
def test_weights_of_a_query_without_positives_have_no_gradient(engine):
    (z,), _ = random_sets((4,))
    weights = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    pairs = torch.tensor([[0, 1], [1, 2]])
    InfoNCE(engine=engine)(z, positives=pairs, positive_weights=weights).backward()
    torch.testing.assert_close(weights.grad, torch.zeros_like(weights))


def test_a_left_out_positive_above_all_others_has_a_precise_gradient():
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    weights = torch.tensor([1.0, 0.0], requires_grad=True)
    options = {"over_positives": "supcon", "queries": "first", "temperature": 0.05}
    pairs = {"positives": torch.tensor([[0, 0], [1, 2]]), "positive_weights": weights}
    InfoNCE(**options)(z[:1], z[1:], **pairs).backward()
    # e^20 / (S + E), with S = e^20 and E = e^-20, minus the distance to the mean of -20.
    torch.testing.assert_close(weights.grad, torch.tensor([0.0, 1.0 - 40.0]))


def test_embeddings_of_pairs_are_not_kept_for_the_backward():
    """They are gathered again, in chunks."""
    z = torch.randn(100, 64, requires_grad=True)
    pairs, _ = random_pairs(100, 100, 40_000)
    (expected,) = gradients(InfoNCE()(z, positives=pairs), [z])
    with in_blocks(64):
        loss, kept = kept_for_backward(lambda: InfoNCE()(z, positives=pairs))
    assert kept < pairs.shape[1] * z.shape[1] / 2
    torch.testing.assert_close(gradients(loss, [z])[0], expected)


pair = torch.tensor([[2], [1]])


@pytest.mark.parametrize(
    ("positives", "weights", "error", "message"),
    [
        ([[0, 1], [1, 2]], None, TypeError, r"positives must be .*\[2, P\], but got .*list"),
        (torch.zeros(3, 2).long(), None, ValueError, r"positives must have .* but got .*\(3, 2\)"),
        (torch.zeros(2, 3), None, TypeError, "positives must be an int64 Tensor"),
        (torch.tensor([[0], [8]]), None, ValueError, r"a key from 0 to 7, but got \[0, 8\]"),
        (torch.tensor([[1, -1], [0, 1]]), None, ValueError, r"but got \[-1, 1\]"),
        (torch.tensor([[4], [1]]), None, ValueError, r"a query from 0 to 3 .* but got \[4, 1\]"),
        (torch.tensor([[2], [2]]), None, ValueError, r"two different .* but got \[2, 2\]"),
        (pair.to("meta"), None, ValueError, "positives is on meta"),
        (pair, torch.ones(2), TypeError, r"positive_weights .* but got .*\(2,\)"),
        (pair, [1.0], TypeError, r"positive_weights .* but got .*list"),
        (pair, -torch.ones(1), ValueError, "positive_weights must be numbers from 0"),
        (pair, torch.ones(1, device="meta"), ValueError, "positive_weights is on meta"),
        (None, torch.ones(1), TypeError, "positive_weights need positives"),
    ],
)
def test_errors(positives, weights, error, message):
    given, sets = {"positives": positives, "positive_weights": weights}, random_sets((4, 4))[0]
    for loss in (InfoNCE(queries="first"), PGCLLoss(DIM, 2, queries="first").double()):
        with pytest.raises(error, match=message):
            loss(*sets, **given)
