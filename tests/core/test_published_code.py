"""Differences between the paper and the code published with it. Ours follows the paper."""

import math

import numpy as np
import torch
from helpers import oracle

from pgcl_losses import Assignment, ConsistencyLoss, PrototypeReweightedNCE, SinkhornPrototypes
from pgcl_losses._normalize import unit_vectors
from pgcl_losses.weights import prototype_log_weights


def a_table():
    prototypes = unit_vectors(torch.randn(6, 4), torch.float32)
    fractions = torch.tensor([0.3, 0.1, 0.2, 0.05, 0.25, 0.1])
    return prototypes, fractions, prototype_log_weights(prototypes, fractions).exp()


def test_the_gaussian_has_a_negative_exponent():
    # Published: exp(+(d - mu)^2 / (2 sigma^2)), which favours the nearest and the farthest.
    prototypes, fractions, weights = a_table()
    distances = 1 - prototypes @ prototypes.T
    off_mean = (distances - (distances @ fractions)[:, None]).abs()
    for cluster in range(6):
        by_closeness_to_the_mean = weights[cluster][off_mean[cluster].argsort()]
        assert (by_closeness_to_the_mean.diff() <= 0).all()


def test_mu_and_sigma_belong_to_the_query():
    # Published: broadcast along the wrong axis, so that they belong to the negative.
    prototypes, fractions, weights = a_table()
    torch.testing.assert_close(weights @ fractions, torch.ones(6))
    assert not torch.allclose(fractions @ weights, torch.ones(6), atol=1e-2)
    distances = 1 - prototypes @ prototypes.T
    mu = distances @ fractions
    variance = ((distances - mu[:, None]) ** 2) @ fractions
    w = torch.exp(-((distances - mu[:, None]) ** 2) / (2 * variance[:, None]))
    torch.testing.assert_close(weights, w / (w @ fractions)[:, None])


def test_each_query_has_a_denominator_of_its_own():
    # Published: the masked similarities are flattened, so that all queries share one sum over the
    # batch. A rotation of the other graphs about query 0 changes the loss of these graphs alone.
    loss = PrototypeReweightedNCE(reduction="none")
    z1, z2 = torch.randn(2, 5, 3, dtype=torch.float64)
    z1[0] = z2[0] = torch.tensor([1.0, 0.0, 0.0])
    angle = torch.rand(2, 5, dtype=torch.float64) * 2 * math.pi
    rotated = torch.stack([z1, z2])
    y, z = rotated[..., 1].clone(), rotated[..., 2].clone()
    rotated[..., 1] = angle.cos() * y - angle.sin() * z
    rotated[..., 2] = angle.sin() * y + angle.cos() * z
    given = {"clusters": (torch.tensor([0, 1, 1, 2, 2]),) * 2, "prototypes": torch.randn(3, 3)}
    before, after = loss(z1, z2, **given), loss(*rotated, **given)
    torch.testing.assert_close(before[[0, 5]], after[[0, 5]])
    assert not torch.isclose(before[1:5], after[1:5]).any()


def test_both_directions_of_the_swapped_prediction_count():
    # Published: a loop overwrites the first direction by the second.
    log_p, log_p_other = torch.randn(2, 4, 3, dtype=torch.float64).log_softmax(-1).unbind()
    q, q_other = torch.randn(2, 4, 3, dtype=torch.float64).softmax(-1).unbind()
    first = Assignment(log_p.requires_grad_(), q, q.argmax(1))
    second = Assignment(log_p_other.requires_grad_(), q_other, q_other.argmax(1))
    loss = ConsistencyLoss()(first, second)
    torch.testing.assert_close(loss, ConsistencyLoss()(second, first))
    one_way = [-(q_other * log_p).sum(1).mean(), -(q * log_p_other).sum(1).mean()]
    torch.testing.assert_close(loss, sum(one_way) / 2)
    loss.backward()
    assert log_p.grad.any()
    assert log_p_other.grad.any()


def test_the_queue_never_balances_empty_slots_nor_forgets():
    # Published: reset to zeros each epoch, and its zeros take part in Sinkhorn.
    prototypes = SinkhornPrototypes(4, 5, queue_size=100).double()
    past, now = torch.randn(2, 2, 6, 4, dtype=torch.float64)
    prototypes(*past)
    prototypes.eval()
    prototypes.train()  # an epoch later
    (first, _) = prototypes(*now)
    weight = prototypes.weight.detach().numpy()
    embeddings = torch.cat([now[0], past[0]]).numpy()
    expected = oracle.targets(embeddings, weight, 0.05, 3)[:6]
    np.testing.assert_allclose(first.targets, expected, rtol=1e-9)
    padded = np.concatenate([embeddings, np.zeros((88, 4))])
    assert not np.allclose(first.targets, oracle.targets(padded, weight, 0.05, 3)[:6], atol=1e-3)
