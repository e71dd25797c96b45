"""The swapped prediction."""

import numpy as np
import pytest
import torch
from helpers import oracle
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import Assignment, ConsistencyLoss


def assignments_of(num_views, n, k, seed=0):
    generator = torch.Generator().manual_seed(seed)
    assignments = []
    for _ in range(num_views):
        log_probs, scores = torch.randn(2, n, k, generator=generator, dtype=torch.float64).mul(3)
        targets = scores.softmax(1)
        assignments.append(Assignment(log_probs.log_softmax(1), targets, targets.argmax(1)))
    return assignments


@given(
    num_views=st.integers(2, 4),
    n=st.integers(1, 8),
    k=st.integers(1, 6),
    seed=st.integers(0, 2**32 - 1),
)
def test_agrees_with_the_oracle(num_views, n, k, seed):
    assignments = assignments_of(num_views, n, k, seed)
    expected = oracle.consistency(
        [a.log_probs.tolist() for a in assignments], [a.targets.numpy() for a in assignments]
    )
    each, total, mean = (
        ConsistencyLoss(reduction=reduction)(*assignments) for reduction in ("none", "sum", "mean")
    )
    np.testing.assert_allclose(each, expected, rtol=1e-12)
    np.testing.assert_allclose(total, sum(expected), rtol=1e-12)
    np.testing.assert_allclose(mean, oracle.mean(expected), rtol=1e-12)


@pytest.mark.parametrize("num_views", [2, 3])
def test_gradcheck(num_views):
    assignments = assignments_of(num_views, 3, 4)

    def function(*log_probs):
        return ConsistencyLoss()(
            *(a._replace(log_probs=p) for a, p in zip(assignments, log_probs, strict=True))
        )

    inputs = [a.log_probs.requires_grad_() for a in assignments]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_half_precision_is_computed_in_float32():
    views = assignments_of(2, 20000, 10)
    halves = [Assignment(a.log_probs.half(), a.targets.half(), a.clusters) for a in views]
    total, exact = (ConsistencyLoss(reduction="sum")(*given) for given in (halves, views))
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=1e-3, atol=0)
