"""The swapped prediction."""

import numpy as np
import pytest
import torch
from helpers import oracle
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import Assignment, ConsistencyLoss


def assignments_of(num_views, n, k, seed):
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
    assignments = assignments_of(num_views, 3, 4, seed=0)

    def function(*log_probs):
        return ConsistencyLoss()(
            *(a._replace(log_probs=p) for a, p in zip(assignments, log_probs, strict=True))
        )

    inputs = [a.log_probs.requires_grad_() for a in assignments]
    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


def test_half_precision_is_computed_in_float32():
    first, second = assignments_of(2, 20000, 10, seed=0)
    halves = [Assignment(a.log_probs.half(), a.targets.half(), a.clusters) for a in (first, second)]
    total = ConsistencyLoss(reduction="sum")(*halves)
    assert total.dtype == torch.float32
    torch.testing.assert_close(
        total.double(), ConsistencyLoss(reduction="sum")(first, second), rtol=1e-3, atol=0
    )


def test_certain_and_equal_assignments_have_loss_0():
    targets = torch.eye(3)
    certain = Assignment(torch.log_softmax(targets * 1e4, 1), targets, targets.argmax(1))
    assert ConsistencyLoss()(certain, certain) == 0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda a, b: (a,), TypeError, "assignments must be two or more, but got 1"),
        (lambda a, b: (a, b.targets), TypeError, r"assignments\[1\] must be an Assignment.*Tensor"),
        (
            lambda a, b: (a, b._replace(targets=b.targets[:2])),
            ValueError,
            r"assignments\[1\].targets has shape \(2, 3\) but assignments\[0\].log_probs has \(5",
        ),
        (
            lambda a, b: (a, b._replace(log_probs=b.log_probs.float())),
            TypeError,
            r"assignments\[1\].log_probs is torch.float32 but assignments\[0\]",
        ),
    ],
)
def test_wrong_inputs_are_errors(change, error, message):
    with pytest.raises(error, match=message):
        ConsistencyLoss()(*change(*assignments_of(2, 5, 3, seed=0)))


def test_a_wrong_reduction_is_an_error():
    with pytest.raises(ValueError, match="reduction must be one of 'mean', 'sum', 'none'"):
        ConsistencyLoss(reduction="batchmean")
