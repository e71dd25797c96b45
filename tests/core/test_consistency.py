"""The swapped prediction."""

import torch
from helpers import oracle
from helpers.losses import of_seed
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import Assignment, ConsistencyLoss


def assignments_of(num_views, n, k, seed=0):
    generator = of_seed(seed)
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
    log_p, q, _ = zip(*(a[:3] for a in assignments), strict=True)
    expected = oracle.consistency(log_p, q)
    each, total, mean = (
        ConsistencyLoss(reduction=reduction)(*assignments) for reduction in ("none", "sum", "mean")
    )
    torch.testing.assert_close([each, total, mean], [expected, expected.sum(), expected.mean()])


def test_half_precision_is_computed_in_float32():
    views = assignments_of(2, 20000, 10)
    halves = [Assignment(a.log_probs.half(), a.targets.half(), a.clusters) for a in views]
    total, exact = (ConsistencyLoss(reduction="sum")(*given) for given in (halves, views))
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), exact, rtol=1e-3, atol=0)
