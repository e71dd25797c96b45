"""The balanced assignment."""

import math
from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.marks import device_type
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pgcl_losses import sinkhorn
from pgcl_losses.clusters.sinkhorn import balance, largest


def matrices(dtype, **limits):
    # No subnormal numbers: what a compiler links may make the process round them to 0.
    elements = st.floats(**limits, width=8 * dtype().nbytes, allow_subnormal=False)
    shapes = st.tuples(st.integers(1, 9), st.integers(1, 6))
    return shapes.flatmap(lambda shape: arrays(dtype, shape, elements=elements))


COSINES = matrices(np.float64, min_value=-1, max_value=1)
FINITE = matrices(np.float32, allow_nan=False, allow_infinity=False)
EPSILONS = st.floats(1e-4, 2.0)


@given(scores=COSINES, epsilon=EPSILONS, iterations=st.integers(1, 8))
def test_targets_agree_with_the_oracle(scores, epsilon, iterations):
    scores = torch.tensor(scores)
    exact = oracle.sinkhorn(scores, epsilon, iterations)
    of_any_scores = sinkhorn(scores, epsilon=epsilon, iterations=iterations)
    of_cosines = balance(scores / epsilon, epsilon=epsilon, iterations=iterations)
    for q in (of_any_scores, of_cosines):
        # An exponent of s / epsilon carries a rounding error of s / epsilon * 2e-16.
        torch.testing.assert_close(q, exact, rtol=1e-13 / epsilon, atol=1e-9)


@given(scores=COSINES, epsilon=EPSILONS)
def test_the_largest_target_and_among_equal_ones_the_nearest(scores, epsilon):
    exponents = torch.tensor(scores) / epsilon
    q = balance(exponents, epsilon=epsilon, iterations=3)
    found = q.gather(1, largest(q, exponents.clone(), epsilon)).squeeze(1)
    assert (found >= 0.8 * q.amax(1)).all()  # which is another cluster only if a cosine is larger
    if epsilon > 0.05:
        assert (found >= 0.99 * q.amax(1)).all()
    nearest = largest(torch.full_like(q, 0.25), exponents.clone(), epsilon)
    cosines = torch.tensor(scores)
    assert (cosines.gather(1, nearest).squeeze(1) >= cosines.amax(1) - 1e-9).all()


@pytest.mark.parametrize("iterations", [3, 10])
@pytest.mark.parametrize("epsilon", [0.05, 0.01, 0.005, 0.001, 1e-4])
def test_large_matrices_in_float32_without_denormal_numbers(epsilon, iterations):
    """A CPU computes with them a hundred times more slowly."""
    scores = F.normalize(torch.randn(500, 16)) @ F.normalize(torch.randn(50, 16)).T
    q = sinkhorn(scores, epsilon=epsilon, iterations=iterations)
    assert not ((q > 0) & (q < torch.finfo(q.dtype).tiny)).any()
    wide = sinkhorn(scores.double(), epsilon=epsilon, iterations=iterations)
    torch.testing.assert_close(q.double(), wide, rtol=0, atol=2e-6 / epsilon)


@example(scores=[[0.0], [1.7e38]], epsilon=0.5, iterations=3)  # of which 1 / epsilon overflows
@given(scores=FINITE, epsilon=EPSILONS, iterations=st.integers(1, 40))
def test_any_finite_scores_give_rows_that_sum_to_one(scores, epsilon, iterations):
    q = sinkhorn(torch.tensor(scores), epsilon=epsilon, iterations=iterations)
    assert q.isfinite().all()
    assert (q >= 0).all()
    torch.testing.assert_close(q.sum(1), torch.ones(len(q)), rtol=0, atol=1e-5)


def with_200_digits(scores, epsilon, iterations):
    """Sinkhorn in logarithms, as float64 cannot hold 1e30 + log 4."""

    def log_sum(x):
        return max(x) + sum((value - max(x)).exp() for value in x).ln()

    with localcontext(prec=200):
        rows = [[Decimal(value) / Decimal(epsilon) for value in row] for row in scores.tolist()]
        for _ in range(iterations):
            totals = [log_sum(column) for column in zip(*rows, strict=True)]
            rows = [[x - total for x, total in zip(row, totals, strict=True)] for row in rows]
            rows = [[x - log_sum(row) for x in row] for row in rows]
        return torch.tensor([[float(x.exp()) for x in row] for row in rows])


@pytest.mark.parametrize("epsilon", [1e-30, 1e-10, 1e-4, 0.5])
@pytest.mark.parametrize("size", [1.0, 1e10, 2.0**126])
@pytest.mark.parametrize("iterations", [1, 3])
def test_scores_whose_quotients_are_huge(size, epsilon, iterations):
    """Samples that are far from all prototypes have their share, also if many scores are equal."""
    scores = torch.randint(4, (12, 4)) / 4 * size
    scores[3] -= size
    q = sinkhorn(scores, epsilon=epsilon, iterations=iterations)
    expected = with_200_digits(scores, epsilon, iterations)
    torch.testing.assert_close(q, expected, rtol=0, atol=1e-5)


def extreme_scores(kind):
    """Cosines of 1 and -1; prototypes and samples far from all others; scalings that grow."""
    scores = {
        "limits": torch.rand(4000, 100).round() * 2 - 1,
        "far": torch.rand(50, 6) * 0.1,
        "growing": torch.full((300, 20), -1.0),
    }[kind]
    if kind == "growing":
        scores[:, 0], scores[0] = torch.linspace(-1, 1, 300), 1.0
    else:
        scores[:, 2] = scores[7] = -1.0
    if kind == "limits":
        scores[7, 2] = 1.0
    return scores


@pytest.mark.parametrize("iterations", [1, 3, 12, 100])
@pytest.mark.parametrize(
    ("kind", "epsilon", "atol"),
    [("limits", 0.04, 1e-6), ("far", 1e-4, 2e-2), ("growing", 1e-3, 1e-4)],
)
def test_extreme_scores_in_float32(kind, epsilon, atol, iterations):
    scores = extreme_scores(kind)
    q = sinkhorn(scores, epsilon=epsilon, iterations=iterations)
    expected = oracle.sinkhorn(scores, epsilon, iterations)
    torch.testing.assert_close(q.double(), expected, rtol=1e-3, atol=atol)


@pytest.mark.parametrize("iterations", [1, 3, 100])
@pytest.mark.parametrize("kind", ["limits", "far", "growing"])
def test_the_sharpest_powers_that_need_no_logarithms(kind, iterations):
    """In float32, at the default epsilon, with and without slots that are not filled."""
    scores, epsilon = extreme_scores(kind), 0.05
    expected = oracle.sinkhorn(scores, epsilon, iterations)
    filled = torch.arange(len(scores) + 9) < len(scores)
    padded = torch.cat([scores, torch.zeros(9, scores.shape[1])])
    for some, mask in ((scores, None), (padded, filled)):
        q = balance(some / epsilon, epsilon=epsilon, iterations=iterations, filled=mask)
        torch.testing.assert_close(q[: len(scores)].double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("epsilon", [0.04, 0.05])
@pytest.mark.parametrize("factor", [1e-30, 1.0, 1e30])
def test_sizes_count_relative_to_each_other(epsilon, factor):
    scores, sizes = torch.rand(30, 4), torch.tensor([1.0, 0.0, 3.0, 1e-6])
    options = {"epsilon": epsilon, "iterations": 3}
    q = balance(scores / epsilon, factor * sizes, **options)
    expected = sinkhorn(scores.double(), sizes=sizes, **options)
    torch.testing.assert_close(q.double(), expected, rtol=1e-4, atol=1e-6)
    assert (q[:, 1] == 0).all()


@given(scores=COSINES, extra=st.integers(0, 5), epsilon=EPSILONS)
def test_absent_samples_change_nothing(scores, extra, epsilon):
    n, k = scores.shape
    absent = torch.full((extra, k), 3.0, dtype=torch.float64)  # above every score
    present = torch.arange(n + extra) < n
    both = torch.cat([torch.tensor(scores), absent]).unsqueeze(0) / epsilon
    (balanced,) = balance(both, epsilon=epsilon, iterations=5, filled=present)
    expected = sinkhorn(torch.tensor(scores), epsilon=epsilon, iterations=5)
    torch.testing.assert_close(balanced[:n], expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_are_computed_in_float32_without_gradient(dtype):
    scores = torch.rand(20, 4, dtype=dtype, requires_grad=True)
    before, expected = scores.clone(), sinkhorn(scores.float())
    with torch.autocast(device_type(), dtype=torch.bfloat16):
        inside = sinkhorn(scores)
    for q in (inside, sinkhorn(scores)):
        torch.testing.assert_close(q, expected)
        assert not q.requires_grad
    assert torch.equal(scores, before)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_give_nan(bad):
    scores = torch.rand(6, 3)
    scores[2, 1] = bad
    assert sinkhorn(scores).isnan().any()


def test_minus_infinity_excludes_a_pair():
    scores = torch.rand(6, 3, dtype=torch.float64)
    scores[2, 1] = -math.inf
    q = sinkhorn(scores)
    assert q[2, 1] == 0
    scores[2, 1] = -1e3
    torch.testing.assert_close(q, sinkhorn(scores))
