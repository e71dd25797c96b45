"""The balanced assignment."""

import math

import numpy as np
import ot
import pytest
import torch
from helpers import oracle
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pgcl_losses import sinkhorn
from pgcl_losses.sinkhorn import balance

shapes = st.tuples(st.integers(1, 9), st.integers(1, 6))


def matrices(dtype, **limits):
    # No subnormal numbers: in torch 2.4, compiling anything makes the process round them to 0.
    elements = st.floats(
        **limits,
        width=8 * dtype().nbytes,
        allow_nan=False,
        allow_infinity=False,
        allow_subnormal=False,
    )
    return shapes.flatmap(lambda shape: arrays(dtype, shape, elements=elements))


cosines = matrices(np.float64, min_value=-1, max_value=1)
finite_floats = matrices(np.float32)
epsilons = st.floats(1e-4, 2.0)


@given(scores=cosines, epsilon=epsilons, iterations=st.integers(1, 8))
def test_agrees_with_the_oracle(scores, epsilon, iterations):
    ours = sinkhorn(torch.tensor(scores), epsilon=epsilon, iterations=iterations)
    # An exponent of s / epsilon carries a rounding error of s / epsilon * 2e-16.
    np.testing.assert_allclose(
        ours, oracle.sinkhorn(scores, epsilon, iterations), rtol=1e-13 / epsilon, atol=1e-9
    )


@given(scores=cosines, epsilon=st.floats(0.02, 2.0), iterations=st.integers(1, 30))
def test_float32_agrees_with_the_oracle(scores, epsilon, iterations):
    scores = scores.astype(np.float32)
    ours = sinkhorn(torch.tensor(scores), epsilon=epsilon, iterations=iterations)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(
        ours, oracle.sinkhorn(scores, epsilon, iterations), rtol=1e-3, atol=1e-4
    )


@given(scores=cosines, epsilon=epsilons, iterations=st.integers(1, 8))
def test_the_ranking_is_log_q(scores, epsilon, iterations):
    """But for a ten thousandth of the scores, which decides between equal q."""
    q, ranking = balance(torch.tensor(scores), epsilon, iterations)
    log_q = ((ranking - 1e-4 * torch.tensor(scores)) / epsilon).log_softmax(1)
    # As above; tiny numbers of q are 0.
    torch.testing.assert_close(q, log_q.exp(), rtol=1e-13 / epsilon, atol=1e-9)


@pytest.mark.parametrize("iterations", [1, 3, 30])
def test_cosines_of_1_and_minus_1_in_float32(iterations):
    scores = torch.rand(4000, 100).round() * 2 - 1
    scores[:, 3] = -1.0
    scores[7], scores[7, 3] = -1.0, 1.0
    q = sinkhorn(scores, epsilon=0.04, iterations=iterations)
    expected = oracle.sinkhorn(scores.double().numpy(), 0.04, iterations)
    np.testing.assert_allclose(q, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("epsilon", [0.05, 0.01, 0.005, 0.001, 1e-4])
def test_targets_have_no_denormal_numbers(epsilon):
    """A CPU computes them a hundred times more slowly."""
    scores = torch.nn.functional.normalize(torch.randn(500, 16)) @ (
        torch.nn.functional.normalize(torch.randn(50, 16)).T
    )
    for iterations in (3, 10):
        q = sinkhorn(scores, epsilon=epsilon, iterations=iterations)
        assert not ((q > 0) & (q < torch.finfo(q.dtype).tiny)).any()
        torch.testing.assert_close(q.sum(1), torch.ones(len(q)), rtol=0, atol=1e-5)


@given(scores=finite_floats, epsilon=epsilons, iterations=st.integers(1, 40))
def test_any_finite_scores_give_rows_that_sum_to_one(scores, epsilon, iterations):
    q = sinkhorn(torch.tensor(scores), epsilon=epsilon, iterations=iterations)
    assert q.isfinite().all()
    assert (q >= 0).all()
    torch.testing.assert_close(q.sum(1), torch.ones(len(q)), rtol=0, atol=1e-5)


def test_far_prototypes_and_samples_do_not_underflow():
    # One prototype far from every sample, one sample far from every prototype, tiny epsilon.
    scores = torch.rand(50, 6) * 0.1
    scores[:, 2] = -1.0
    scores[7] = -1.0
    for iterations in (1, 3, 10, 100):
        q = sinkhorn(scores, epsilon=1e-4, iterations=iterations)
        expected = oracle.sinkhorn(scores.double().numpy(), 1e-4, iterations)
        np.testing.assert_allclose(q, expected, atol=2e-2)
        assert q[:, 2].sum() > 0.5, "the far prototype gets samples"


@pytest.mark.parametrize(("n", "k"), [(128, 10), (64, 100), (4096, 100)])
def test_agrees_with_pot(n, k):
    scores = torch.nn.functional.normalize(torch.randn(n, 16, dtype=torch.float64)) @ (
        torch.nn.functional.normalize(torch.randn(k, 16, dtype=torch.float64)).T
    )
    q = sinkhorn(scores, epsilon=0.05, iterations=3)
    # POT scales columns first as well. stopThr=0 keeps it from stopping at convergence.
    uniform = [np.full(size, 1 / size) for size in (n, k)]
    plan = ot.bregman.sinkhorn_knopp(
        *uniform, -scores.numpy(), reg=0.05, numItermax=3, stopThr=0, warn=False
    )
    np.testing.assert_allclose(q, plan / plan.sum(1, keepdims=True), rtol=1e-9)


def test_converges_to_balanced_columns():
    q = sinkhorn(torch.rand(30, 5), iterations=200)
    torch.testing.assert_close(q.sum(0), torch.full((5,), 6.0), rtol=1e-3, atol=0)


def test_small_epsilon_matches_large_matrices_in_float32():
    scores = torch.rand(2000, 40) * 2 - 1
    for epsilon in (0.05, 0.01, 0.001):
        wide = sinkhorn(scores.double(), epsilon=epsilon)
        torch.testing.assert_close(
            sinkhorn(scores, epsilon=epsilon).double(), wide, rtol=0, atol=2e-6 / epsilon
        )


@given(scores=cosines, extra=st.integers(0, 5), epsilon=epsilons)
def test_absent_samples_change_nothing(scores, extra, epsilon):
    n, k = scores.shape
    absent = torch.full((extra, k), 3.0, dtype=torch.float64)  # above every score
    present = torch.cat([torch.ones(n, 1), torch.zeros(extra, 1)]).bool()
    both = torch.cat([torch.tensor(scores), absent]).unsqueeze(0)
    balanced = balance(both, epsilon, 5, present)[0].squeeze(0)
    assert balanced.isfinite().all()
    torch.testing.assert_close(
        balanced[:n], sinkhorn(torch.tensor(scores), epsilon=epsilon, iterations=5)
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_are_computed_in_float32(dtype):
    scores = torch.rand(20, 4).to(dtype)
    torch.testing.assert_close(sinkhorn(scores), sinkhorn(scores.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(sinkhorn(scores.float()), sinkhorn(scores.float()))
        assert sinkhorn(scores.float()).dtype == torch.float32


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


def test_has_no_gradient_and_leaves_its_input_alone():
    scores = torch.rand(6, 3, requires_grad=True)
    before = scores.detach().clone()
    assert not sinkhorn(scores).requires_grad
    assert torch.equal(scores, before)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"scores": [[1.0]]},
            TypeError,
            r"scores must be a Tensor of shape \[N, K\], but got list",
        ),
        ({"scores": torch.rand(3)}, ValueError, r"scores must have shape \[N, K\], but got \(3,\)"),
        ({"scores": torch.rand(0, 3)}, ValueError, r"scores must not be empty.*\(0, 3\)"),
        ({"scores": torch.ones(2, 2).long()}, TypeError, "scores must be a floating.*int64"),
        ({"epsilon": 0.0}, ValueError, "epsilon must be .* at least 1e-30, at most 1e30"),
        (
            {"epsilon": -1},
            ValueError,
            "epsilon must be .* at least 1e-30, at most 1e30, but got -1",
        ),
        (
            {"epsilon": math.nan},
            ValueError,
            "epsilon must be a finite number.*nan",
        ),
        ({"epsilon": math.inf}, ValueError, "epsilon must be a finite number.*inf"),
        ({"epsilon": "0.1"}, TypeError, "epsilon must be a finite number.*'0.1'"),
        ({"epsilon": True}, TypeError, "epsilon.*True"),
        ({"iterations": 0}, ValueError, "iterations must be at least 1, but got 0"),
        (
            {"iterations": 2.0},
            TypeError,
            r"iterations must be a whole number, but got 2.0 \(float\)",
        ),
    ],
)
def test_wrong_inputs_are_errors(arguments, error, message):
    with pytest.raises(error, match=message):
        sinkhorn(**{"scores": torch.rand(4, 3), **arguments})
