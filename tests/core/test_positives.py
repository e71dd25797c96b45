"""Positives by index: their weights, transforms and memory. Values are in test_info_nce."""

import functools

import pytest
import torch
from helpers import oracle
from helpers.cases import in_chunks, listed, random_sets
from helpers.losses import gradients, random_pairs
from helpers.memory import kept_for_backward
from torch.autograd import forward_ad

from pgcl_losses import InfoNCE


@pytest.mark.parametrize("weight", [1e-3, 1e-8, 1e3])
def test_a_weight_that_all_positives_share_changes_nothing(engine, weight):
    """In float32: the 1 of a label's positive leaves no rounding behind a smaller weight."""
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


def test_weights_of_a_query_without_positives_have_no_gradient(engine):
    (z,), _ = random_sets((4,))
    weights = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    pairs = torch.tensor([[0, 1], [1, 2]])
    InfoNCE(engine=engine)(z, positives=pairs, positive_weights=weights).backward()
    torch.testing.assert_close(weights.grad, torch.zeros_like(weights))


def test_a_left_out_positive_above_all_others_has_a_precise_gradient(engine):
    z = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    weights = torch.tensor([1.0, 0.0], requires_grad=True)
    options = {"over_positives": "supcon", "queries": "first", "temperature": 0.05}
    options["engine"] = engine
    pairs = {"positives": torch.tensor([[0, 0], [1, 2]]), "positive_weights": weights}
    InfoNCE(**options)(z[:1], z[1:], **pairs).backward()
    # e^20 / (S + E), with S = e^20 and E = e^-20, minus the distance to the mean of -20.
    torch.testing.assert_close(weights.grad, torch.tensor([0.0, 1.0 - 40.0]))


def test_embeddings_of_pairs_are_not_kept_for_the_backward():
    """They are gathered again, in chunks."""
    z = torch.randn(100, 64, requires_grad=True)
    pairs, _ = random_pairs(100, 100, 40_000)
    (expected,) = gradients(InfoNCE()(z, positives=pairs), [z])
    with in_chunks(64):
        loss, kept = kept_for_backward(lambda: InfoNCE()(z, positives=pairs))
    assert kept < pairs.shape[1] * z.shape[1] / 2
    torch.testing.assert_close(gradients(loss, [z])[0], expected)


@pytest.mark.parametrize("temperature", [0.01, 0.02])
def test_one_positive_far_above_all_negatives_is_no_loss_of_0(engine, temperature):
    """In float32: log(1 + S / E) of S far below E."""
    z = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.55, -0.835]])
    for over_positives in ("mean", "supcon", "sum"):
        options = {"over_positives": over_positives, "temperature": temperature, "engine": engine}
        given = {"positives": torch.tensor([[0, 1], [1, 0]])}
        ours = InfoNCE(**options)(z, **given)
        exact = InfoNCE(**options)(z.double(), **given)
        assert 1e-20 < exact < 1e-8
        torch.testing.assert_close(ours.double(), exact, rtol=1e-4, atol=0)


def test_listed_positives_take_the_place_of_row_i_of_every_view(engine):
    """Users and items may happen to be equally many: user i did not buy item i for that."""
    (users, items), _ = random_sets((4, 4))
    bought, loss = torch.tensor([[0, 1, 2], [6, 7, 4]]), InfoNCE(engine=engine)
    losses, exist = oracle.info_nce([users, items], listed=listed(bought))
    ours = loss(users, items, positives=bought)
    torch.testing.assert_close(ours, oracle.mean_of_queries(losses, exist))
    assert exist == [True, True, True, *[False] * 5]
    views = {"labels": torch.arange(4), "positives": bought}
    losses, exist = oracle.info_nce([users, items], [range(4)] * 2, listed=listed(bought))
    torch.testing.assert_close(loss(users, items, **views), oracle.mean_of_queries(losses, exist))


@pytest.mark.parametrize("over_positives", ["mean", "sum"])
def test_pairs_within_one_set_are_left_out_of_a_contrast_with_other_sets(engine, over_positives):
    """With weight 0 they may be listed, as where all known pairs are left out."""
    (z1, z2, z3), _ = random_sets((3, 4, 2))
    positives = torch.tensor([[0, 1, 4, 8, 3], [5, 8, 1, 3, 7]])
    within = torch.tensor([[0, 3, 6, 8], [1, 5, 4, 7]])
    weights = torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0], dtype=torch.float64)
    loss = InfoNCE(negatives="cross", over_positives=over_positives, engine=engine)
    expected = loss(z1, z2, z3, positives=positives, positive_weights=weights)
    both = {"positives": torch.cat([positives, within], 1)}
    ours = loss(z1, z2, z3, **both, positive_weights=torch.cat([weights, 0 * weights[:4]]))
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("over_positives", ["mean", "supcon", "sum"])
def test_the_padding_of_queries_with_few_positives_gives_no_nan(over_positives):
    """In float32: the query itself, which pads, is far more similar than its small positive."""
    z = torch.tensor([[1.0, 0.2], [-1.0, 0.1], [-1.0, 0.3], [0.2, -1.0]])
    given = {"labels": torch.arange(4), "positives": torch.tensor([[0, 1, 1], [1, 2, 3]])}
    weights = torch.tensor([1e-5, 0.5, 1.0], requires_grad=True)
    loss = InfoNCE(temperature=0.02, over_positives=over_positives)
    loss(z, positive_weights=weights, **given).backward()
    assert weights.grad.isfinite().all()
