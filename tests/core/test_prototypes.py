"""Prototypes: prediction, balanced targets, queue and freezing."""

import math

import pytest
import torch
from helpers import oracle
from helpers.losses import DIM
from helpers.marks import device_type, few_graphs
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import PGCLLoss, SinkhornPrototypes, sinkhorn


@given(
    num_views=st.integers(1, 3),
    n=st.integers(1, 9),
    d=st.integers(1, 5),
    k=st.integers(1, 12),
    temperature=st.floats(0.05, 2),
    epsilon=st.floats(0.01, 1),
    iterations=st.integers(1, 5),
    balance=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_agrees_with_the_oracle(
    num_views, n, d, k, temperature, epsilon, iterations, balance, seed
):
    torch.manual_seed(seed)
    options = {"temperature": temperature, "epsilon": epsilon, "iterations": iterations}
    prototypes = SinkhornPrototypes(d, k, **options, balance_predictions=balance).double()
    views = torch.randn(num_views, n, d, dtype=torch.float64)
    weight = prototypes.weight.detach()
    for view, assignment in zip(views, prototypes(*views), strict=True):
        targets = oracle.targets(view, weight, epsilon, iterations)
        log_probs = oracle.log_predictions(view, weight, temperature, balance)
        torch.testing.assert_close(assignment.targets, targets, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(assignment.log_probs.detach(), log_probs, rtol=0, atol=1e-9)
        keys = oracle.ranking(targets, view, weight, epsilon)
        of_clusters = keys.gather(1, assignment.clusters[:, None])
        assert (of_clusters >= keys.amax(1, keepdim=True) - 1e-9).all()  # equal prototypes tie
        assert assignment.log_probs.requires_grad
        assert not assignment.targets.requires_grad


@pytest.mark.parametrize("balance", [False, True])
def test_gradcheck(balance):
    prototypes = SinkhornPrototypes(3, 4, balance_predictions=balance).double().eval()
    given = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), prototypes.weight
    assert torch.autograd.gradcheck(lambda z, _: prototypes(z)[0].log_probs, given)
    assert torch.autograd.gradgradcheck(lambda z, _: prototypes(z)[0].log_probs, given)


@pytest.mark.parametrize("temperature", [1e-30, 0.01, 0.2])
def test_balanced_predictions_of_few_graphs_and_low_temperatures_are_finite(temperature):
    """One graph predicts 1 / K for each prototype, and so does one prototype."""
    options = {"temperature": temperature, "balance_predictions": True}
    for num_graphs, heads in ((1, 4), (5, 1), (40, 4), (40, (1, 3))):
        prototypes = SinkhornPrototypes(3, heads, **options)
        z = torch.randn(num_graphs, 3, requires_grad=True)
        (view,) = prototypes(z)
        (grad,) = torch.autograd.grad(view.log_probs.sum(), z)
        assert view.log_probs.isfinite().all()
        assert grad.isfinite().all()
        if num_graphs == 1:
            torch.testing.assert_close(view.log_probs.exp(), torch.full((1, 4), 0.25))


def test_embeddings_in_one_direction_get_no_common_gradient_from_balanced_predictions():
    """Which is what pulls all of them the same way, whatever sets them apart."""
    torch.manual_seed(0)
    z = torch.randn(16) + 1e-3 * torch.randn(2, 200, 16)
    for balance, share in ((False, 0.99), (True, 0.1)):
        views = z.clone().requires_grad_()
        pgcl = PGCLLoss(16, contrast_weight=0, balance_predictions=balance)
        (grad,) = torch.autograd.grad(pgcl(*views), views)
        common = grad.mean((0, 1)).norm() / grad.norm(dim=2).mean()
        assert (common > share) == (not balance), common


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_assign_returns_the_nearest_prototype(dtype):
    prototypes = SinkhornPrototypes(4, 6)
    z = torch.randn(20, 4).to(dtype)
    nearest = oracle.cosines(z, prototypes.weight).argmax(1)
    assert prototypes.assign(z).tolist() == nearest.tolist()
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        assert prototypes.assign(z).tolist() == nearest.tolist()


def test_the_initialisation_is_that_of_he_and_the_state_is_empty():
    used = SinkhornPrototypes(4, 3, queue_size=8, freeze_steps=9)
    used(torch.randn(5, 4, requires_grad=True), torch.randn(5, 4))
    used.reset_parameters()
    fresh = SinkhornPrototypes(4, 3, queue_size=8, freeze_steps=9)
    torch.testing.assert_close(dict(used.named_buffers()), dict(fresh.named_buffers()))
    weight = SinkhornPrototypes(400, 300).weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)


def test_the_gradient_is_zero_in_the_first_steps():
    prototypes = SinkhornPrototypes(4, 3, freeze_steps=2)
    for step in range(4):
        prototypes.weight.grad = None
        z = torch.randn(6, 4, requires_grad=True)
        prototypes(z)[0].log_probs[:, 0].sum().backward()
        assert z.grad.any()
        assert prototypes.weight.grad.any() == (step >= 2)
    prototypes.freeze_steps = 0
    prototypes(z)
    assert prototypes.step == 4  # it counts no longer


def test_targets_are_balanced_over_the_past_without_empty_slots():
    prototypes = SinkhornPrototypes(4, 5, queue_size=50).double()
    weight = prototypes.weight.detach()
    first, second, third = torch.randn(3, 2, 6, 4, dtype=torch.float64)
    prototypes(*first)
    prototypes(*second)
    prototypes.eval()
    for view, assignment in enumerate(prototypes.train()(*third)):  # an epoch later
        together = torch.cat([third[view], second[view], first[view]])
        expected = oracle.targets(together, weight)[:6]
        torch.testing.assert_close(assignment.targets, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("num_views", "length"), [(2, 3), (3, 9), (1, 2)])
def test_the_queue_holds_the_last_embeddings_of_each_view(num_views, length):
    """A full queue drops the last graph of the oldest batch first; empty slots are zero."""
    prototypes = SinkhornPrototypes(4, 3, queue_size=7, queue_views=num_views)
    batches = torch.randn(3, num_views, length, 4)
    for batch in batches:
        prototypes(*batch)
    newest_first = torch.nn.functional.normalize(torch.cat(list(batches.flip(0)), dim=1), dim=-1)
    expected = torch.zeros(num_views, 7, 4)
    expected[:, : 3 * length] = newest_first[:, :7]
    assert prototypes.queue.filled(0).sum() == min(3 * length, 7)
    in_any_order = (x.sort(dim=1).values for x in (prototypes.queue.embeddings, expected))
    torch.testing.assert_close(*in_any_order)


@few_graphs
def test_an_empty_memory_gives_no_nan():
    """Its slots are left out later; a subclass sees their clusters before."""
    seen = []
    pgcl = PGCLLoss(DIM, 3, memory_size=5)
    pgcl.prototypes.register_forward_hook(lambda module, given, batch: seen.append(batch))
    pgcl(*torch.randn(2, 6, DIM))
    (batch,) = seen
    assert len(batch.targets) == 12
    assert len(batch.clusters) == 12 + 5


def test_what_users_get_is_contiguous():
    """So they may view it as they like, although we compute with samples side by side."""
    views = torch.randn(2, 5, 4)
    for heads in (3, (2, 3)):
        prototypes = SinkhornPrototypes(dim=4, num_prototypes=heads)
        for part in (*prototypes(*views)[0][:3], prototypes.assign(views[0])):
            assert part.is_contiguous()
    assert sinkhorn(torch.rand(6, 3)).is_contiguous()
