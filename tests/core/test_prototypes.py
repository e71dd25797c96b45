"""Prototypes: prediction, balanced targets, queue and freezing."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import oracle
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import SinkhornPrototypes


@given(
    num_views=st.integers(1, 3),
    n=st.integers(1, 9),
    d=st.integers(1, 5),
    k=st.integers(1, 12),
    temperature=st.floats(0.05, 2),
    epsilon=st.floats(0.01, 1),
    iterations=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
)
def test_agrees_with_the_oracle(num_views, n, d, k, temperature, epsilon, iterations, seed):
    torch.manual_seed(seed)
    prototypes = SinkhornPrototypes(
        d, k, temperature=temperature, epsilon=epsilon, iterations=iterations
    ).double()
    views = torch.randn(num_views, n, d, dtype=torch.float64)
    weight = prototypes.weight.detach().numpy()
    for view, assignment in zip(views, prototypes(*views), strict=True):
        targets = oracle.targets(view.numpy(), weight, epsilon, iterations)
        log_probs = oracle.log_predictions(view.numpy(), weight, temperature)
        np.testing.assert_allclose(assignment.targets, targets, rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(assignment.log_probs.detach(), log_probs, atol=1e-9)
        keys = oracle.ranking(targets, view.numpy(), weight, epsilon)
        of_clusters = np.take_along_axis(keys, assignment.clusters[:, None].numpy(), 1)
        assert (of_clusters[:, 0] >= keys.max(1) - 1e-9).all()  # equal prototypes tie
        assert assignment.log_probs.requires_grad
        assert not assignment.targets.requires_grad


def test_gradcheck():
    prototypes = SinkhornPrototypes(3, 4).double()
    z = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z, _: prototypes(z)[0].log_probs, (z, prototypes.weight))
    assert torch.autograd.gradgradcheck(
        lambda z, _: prototypes(z)[0].log_probs, (z, prototypes.weight)
    )


def test_assign_returns_the_nearest_prototype():
    prototypes = SinkhornPrototypes(4, 6)
    z = torch.randn(20, 4)
    nearest = [
        max(range(6), key=lambda k: oracle.cosine(row, unit[k]))
        for unit in [oracle.unit(prototypes.weight.detach().numpy())]
        for row in oracle.unit(z.numpy())
    ]
    assert prototypes.assign(z).tolist() == nearest
    assert prototypes.assign(z.bfloat16()).shape == (20,)


def test_autocast_changes_nothing():
    prototypes = SinkhornPrototypes(4, 6)
    z = torch.randn(20, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, nearest = prototypes(z), prototypes.assign(z)
    torch.testing.assert_close(inside, prototypes(z), rtol=0, atol=0)
    assert torch.equal(nearest, prototypes.assign(z))


def test_the_initialisation_is_that_of_he():
    weight = SinkhornPrototypes(400, 300).weight
    assert weight.std().item() == pytest.approx(math.sqrt(2 / 400), rel=0.02)
    assert weight.mean().item() == pytest.approx(0, abs=1e-3)


class TestFreezing:
    def test_the_gradient_is_zero_in_the_first_steps(self):
        prototypes = SinkhornPrototypes(4, 3, freeze_steps=2)
        for step in range(4):
            prototypes.weight.grad = None
            z = torch.randn(6, 4, requires_grad=True)
            prototypes(z)[0].log_probs[:, 0].sum().backward()
            assert z.grad.any()
            assert prototypes.weight.grad.any() == (step >= 2)

    def test_only_training_forwards_count(self):
        prototypes = SinkhornPrototypes(4, 3, freeze_steps=1)
        z = torch.randn(6, 4)
        prototypes.eval()(z)
        with torch.no_grad():
            prototypes.train()(z)
        assert prototypes.step == 0
        prototypes(z)
        assert prototypes.step == 1
        prototypes.freeze_steps = 0
        prototypes(z)
        assert prototypes.step == 1


class TestQueue:
    def test_holds_the_last_embeddings_of_each_view_newest_first(self):
        prototypes = SinkhornPrototypes(4, 3, queue_size=7)
        batches = [torch.randn(2, n, 4) for n in (3, 3, 3)]
        for batch in batches:
            prototypes(*batch)
        expected = torch.nn.functional.normalize(torch.cat(batches[::-1], dim=1)[:, :7], dim=-1)
        torch.testing.assert_close(prototypes.queue, expected)
        assert prototypes.queue_filled == 7

    def test_past_embeddings_are_balanced_and_empty_slots_are_not(self):
        prototypes = SinkhornPrototypes(4, 5, queue_size=50).double()
        first, second, third = torch.randn(3, 2, 6, 4, dtype=torch.float64)
        prototypes(*first)
        prototypes(*second)
        for view, assignment in enumerate(prototypes(*third)):
            together = torch.cat([third[view], second[view], first[view]]).numpy()
            expected = oracle.targets(together, prototypes.weight.detach().numpy(), 0.05, 3)[:6]
            np.testing.assert_allclose(assignment.targets, expected, rtol=1e-9, atol=1e-12)
            assert assignment.log_probs.shape == (6, 5)

    def test_a_batch_larger_than_the_queue(self):
        prototypes = SinkhornPrototypes(4, 3, queue_size=2)
        views = torch.randn(2, 5, 4)
        prototypes(*views)
        torch.testing.assert_close(
            prototypes.queue, torch.nn.functional.normalize(views[:, :2], dim=-1)
        )

    def test_changes_in_training_forwards_alone_and_has_no_gradient(self):
        prototypes = SinkhornPrototypes(4, 3, queue_size=8)
        views = torch.randn(2, 5, 4, requires_grad=True)
        with torch.no_grad():
            prototypes(*views)
        prototypes.eval()(*views)
        assert prototypes.queue_filled == 0
        prototypes.train()(*views)
        assert prototypes.queue_filled == 5
        assert not prototypes.queue.requires_grad

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @pytest.mark.parametrize("view", [0, 1])
    def test_a_batch_that_is_not_finite_is_not_stored(self, bad, view):
        prototypes = SinkhornPrototypes(4, 3, queue_size=8)
        prototypes(*torch.randn(2, 5, 4))
        before = copy.deepcopy(prototypes.state_dict())
        views = torch.randn(2, 5, 4)
        views[view, 2, 1] = bad
        assert prototypes(*views)[view].targets.isnan().any()
        for name, tensor in prototypes.state_dict().items():
            assert torch.equal(tensor, before[name]), name

    def test_is_part_of_the_state_and_moves_with_the_module(self):
        prototypes = SinkhornPrototypes(4, 3, queue_size=8)
        names = {"weight", "step"}
        assert set(prototypes.state_dict()) == names | {"queue", "queue_filled"}
        assert prototypes.double().queue.dtype == torch.float64
        assert prototypes.to("meta").queue.is_meta
        assert set(SinkhornPrototypes(4, 3).state_dict()) == names


def test_smaller_batches_are_balanced_through_the_queue():
    # Three graphs cannot be balanced over four prototypes. With those of earlier batches they can.
    data = torch.randn(400, 8)
    with_queue = SinkhornPrototypes(8, 4, queue_size=300)
    totals = torch.zeros(4)
    for batch in data.split(3):
        totals += with_queue(batch, batch)[0].targets.sum(0).detach()
    assert (totals / totals.sum()).min() > 0.15


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dim": 0}, ValueError, "dim must be at least 1, but got 0"),
        ({"dim": 3.0}, TypeError, "dim must be a whole number, but got 3.0"),
        ({"num_prototypes": 0}, ValueError, "num_prototypes must be at least 1"),
        ({"num_prototypes": True}, TypeError, "num_prototypes.*True"),
        ({"temperature": math.nan}, ValueError, "temperature.*nan"),
        ({"temperature": 0.0}, ValueError, "temperature.*0.0"),
        ({"epsilon": -1.0}, ValueError, "epsilon.*-1.0"),
        ({"epsilon": math.inf}, ValueError, "epsilon.*inf"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1"),
        ({"queue_size": -1}, ValueError, "queue_size must be at least 0"),
        ({"queue_size": None}, TypeError, "queue_size must be a whole number, but got None"),
        ({"freeze_steps": -5}, ValueError, "freeze_steps must be at least 0, but got -5"),
    ],
)
def test_wrong_options_are_errors(options, error, message):
    with pytest.raises(error, match=message):
        SinkhornPrototypes(**{"dim": 4, **options})


@pytest.mark.parametrize(
    ("views", "error", "message"),
    [
        ((), TypeError, "views must be one or more Tensors"),
        ((torch.randn(5),), ValueError, r"views\[0\] must have shape \[N, D\], but got \(5,\)"),
        ((torch.randn(5, 3),), ValueError, r"views\[0\] has dimension 3 but weight"),
        ((torch.randn(5, 4), torch.randn(4, 4)), ValueError, r"views\[1\] has shape \(4, 4\) but"),
        ((torch.randn(5, 4, device="meta"),), ValueError, r"views\[0\] is on meta but weight is"),
        ((torch.randn(5, 4),) * 3, ValueError, "views must be 2 when queue_size > 0.*but got 3"),
    ],
)
def test_wrong_views_are_errors(views, error, message):
    with pytest.raises(error, match=message):
        SinkhornPrototypes(4, 3, queue_size=5)(*views)
