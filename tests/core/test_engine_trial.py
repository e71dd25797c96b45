"""Right kernels pass their trial; wrong ones are named once, and "auto" does without them."""

import os
import sys
import warnings
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode

from pgcl_losses import arrival
from pgcl_losses._normalize import unit_vectors
from pgcl_losses.engine import mean_of, trial
from pgcl_losses.engine.contract import Factors, Gaussian, Pairs
from pgcl_losses.engine.dispatch import log_weighted_sums
from pgcl_losses.ranks import Ranks

if not torch.cuda.is_available() and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read while triton is imported

pytest.importorskip("triton", minversion="3.6")

from helpers.interpreter import bfloat16_products
from triton.runtime.errors import OutOfResources

from pgcl_losses.engine import triton  # only after the interpreter was asked for

pytestmark = pytest.mark.slow

DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
KINDS = ["uniform", "table", "heads", "lines of rows", "soft", "gaussian", "gaussian, table"]


@pytest.fixture(autouse=True)
def _untried():
    with mock.patch.dict(trial.OUTCOMES, clear=True), bfloat16_products():
        yield


def problem(kind="table", width=3, *, num_rows=12, across_views=False, dtype=torch.float32):
    rows = unit_vectors(torch.randn(num_rows, width, device=DEVICE), dtype)

    def table(size, of_rows=False):
        clusters = torch.randint(size, (num_rows,), device=DEVICE)
        log_left = torch.randn(num_rows if of_rows else size, size, device=DEVICE, dtype=dtype)
        return Factors(log_left, clusters, None if of_rows else clusters)

    weights = []
    if "table" in kind:
        weights.append(table(4))
    elif kind == "heads":
        weights.append(mean_of([table(3), table(4)]))
    elif kind == "lines of rows":
        weights.append(table(4, of_rows=True))
    elif kind == "soft":
        weights.append(Factors(*torch.rand(2, num_rows, 4, device=DEVICE, dtype=dtype)))
    if "gaussian" in kind:
        weights.append(Gaussian(*torch.rand(2, num_rows, device=DEVICE, dtype=dtype)))
    return Pairs(rows, 2, across_views, tuple(weights))


def is_trusted(pairs, temperature=0.2):
    """Once the trial has come to its end."""
    trial.is_trusted(pairs, temperature)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return trial.is_trusted(pairs, temperature)


def scaled_sums(by):
    """Kernels whose sums are wrong by a factor."""
    right = triton.sums_by_kernels

    def wrong(*args, **split):
        sums = right(*args, **split)
        return sums._replace(log_sums=sums.log_sums + torch.tensor(by).log().item())

    return mock.patch.object(triton, "sums_by_kernels", wrong)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.2, 0.01])
def test_right_kernels_pass(kind, temperature):
    pairs = problem(kind)
    state = torch.get_rng_state()
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda _: None):
        assert is_trusted(pairs, temperature)
    assert torch.equal(torch.get_rng_state(), state)
    assert not packed
    assert list(trial.OUTCOMES.values()) == [True]


def test_a_trial_is_made_once():
    with mock.patch.object(triton, "sums_by_kernels", wraps=triton.sums_by_kernels) as log_sums:
        for _ in range(3):
            is_trusted(problem())
        assert log_sums.call_count == 1
        is_trusted(problem(), 0.01)
        is_trusted(problem(width=5))
        is_trusted(problem("soft"))
        is_trusted(problem(across_views=True))
        assert log_sums.call_count == 5


@settings(max_examples=30)
@given(
    kind=st.sampled_from(KINDS),
    width=st.integers(1, 40),
    across_views=st.booleans(),
    temperature=st.sampled_from([0.2, 0.001]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_what_is_tried_is_of_the_same_kind(kind, width, across_views, temperature, dtype):
    pairs = problem(kind, width, across_views=across_views, dtype=dtype)
    case = case_of(pairs, temperature)
    example = trial._example(case)
    assert case_of(example, trial._temperature(case)) == case
    assert len(example.rows) == 600
    torch.testing.assert_close(example.rows.norm(dim=1), torch.ones_like(example.rows[:, 0]))
    for ours, theirs in zip(example.weights, pairs.weights, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert (mine is None) == (other is None)
            assert mine is None or mine.dtype == other.dtype


def case_of(pairs, temperature):
    seen = []
    with mock.patch.object(trial, "_go_on", seen.append):
        trial.is_trusted(pairs, temperature)
    return seen[0]


def test_kernels_are_not_trusted_before_the_answer_has_arrived():
    pairs = problem()
    with mock.patch.object(arrival.Arrival, "read", return_value=None):
        assert not is_trusted(pairs)
    (errors,) = trial.OUTCOMES.values()
    assert set(errors) == {"sums", "the gradient"}
    with mock.patch.object(triton, "sums_by_kernels", side_effect=AssertionError("it was tried")):
        assert trial.is_trusted(pairs, 0.2)
    assert list(trial.OUTCOMES.values()) == [True]


def test_sums_off_by_a_hundredth_are_named_once():
    with (
        scaled_sums(1.01),
        pytest.warns(UserWarning, match="engine='auto': on c.* kernels for torch.float32 rows of "
                     "width 3 differ from plain operations by 1.0e-02 in sums, where") as caught,
    ):  # fmt: skip
        assert not is_trusted(problem())
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert list(trial.OUTCOMES.values()) == [False]
    # For whatever comes next, and if it were right: nothing is tried, said or trusted.
    for pairs in (problem(), problem("soft"), problem(width=5)):
        assert not is_trusted(pairs)
    assert len(trial.OUTCOMES) == 1


def test_a_failure_counts_for_what_has_passed_before():
    assert is_trusted(problem())
    with scaled_sums(1.01), pytest.warns(UserWarning, match="differ"):
        assert not is_trusted(problem("soft"))
    assert not is_trusted(problem())


@pytest.mark.parametrize(
    ("function", "wrong", "message"),
    [
        (
            "sums_by_kernels",
            lambda sums: sums._replace(log_masses=sums.log_masses + 0.01),
            "in masses",
        ),
        (
            "sums_by_kernels",
            lambda sums: sums._replace(log_sums=sums.log_sums * torch.nan),
            "by nan in",
        ),
        ("gradient_by_kernels", lambda d_rows: d_rows * 1.01, "1.0e-02 in the gradient"),
        ("gradient_by_kernels", lambda d_rows: d_rows.roll(1, 0), "in the gradient"),
        ("gradient_by_kernels", torch.zeros_like, "by 1.0e[+]00 in the gradient"),
    ],
)
def test_wrong_kernels(function, wrong, message):
    right = getattr(triton, function)
    with (
        mock.patch.object(triton, function, lambda *args, **split: wrong(right(*args, **split))),
        pytest.warns(UserWarning, match=message),
    ):
        assert not is_trusted(problem("gaussian, table"))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OutOfResources(300_000, 232_448, "shared memory"), "fail with OutOfResources: out of res"),
        (RuntimeError("no C compiler"), "fail with RuntimeError: no C compiler. It takes"),
    ],
)
@pytest.mark.parametrize("function", ["sums_by_kernels", "gradient_by_kernels"])
def test_kernels_that_cannot_be_started(function, error, message):
    with (
        mock.patch.object(triton, function, side_effect=error),
        pytest.warns(UserWarning, match=message) as caught,
    ):
        assert not is_trusted(problem())
    assert len(caught) == 1
    assert list(trial.OUTCOMES.values()) == [False]
    assert not is_trusted(problem("soft"))


def test_a_warning_that_is_an_error_is_one_once():
    with scaled_sums(1.01), warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="differ"):
            is_trusted(problem())
        assert not is_trusted(problem())


@pytest.fixture
def _matmul_precision():
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("_matmul_precision")
def test_rounding_is_allowed_for():
    with scaled_sums(1.005):
        for precision in ("medium", "high"):
            torch.set_float32_matmul_precision(precision)
            assert is_trusted(problem())
        assert len(trial.OUTCOMES) == 2
        torch.set_float32_matmul_precision("highest")
        with pytest.warns(UserWarning, match="by 5.0e-03 in sums, where rounding explains 1e-04"):
            assert not is_trusted(problem())


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_pytorchs_newer_switch(precision):
    products = torch.backends.cuda.matmul
    if not hasattr(products, "fp32_precision"):
        pytest.skip("this version of PyTorch has the older switch alone")
    before = products.fp32_precision
    products.fp32_precision = precision
    try:
        assert is_trusted(problem())
    finally:
        products.fp32_precision = before


def test_no_trial_while_a_graph_is_captured():
    pairs = problem()
    with mock.patch.object(arrival, "is_capturing", return_value=True):
        assert not is_trusted(pairs)
    assert not trial.OUTCOMES
    assert is_trusted(pairs)
    with mock.patch.object(arrival, "is_capturing", return_value=True):
        assert trial.is_trusted(pairs, 0.2)


def test_no_trial_of_tensors_without_numbers():
    pairs = problem()
    with FakeTensorMode() as mode:
        assert not is_trusted(pairs._replace(rows=mode.from_tensor(pairs.rows)))
    assert not is_trusted(pairs._replace(rows=pairs.rows.to("meta")))
    assert not trial.OUTCOMES


def test_no_trial_in_a_transform():
    pairs = problem()

    def function(rows):
        assert not is_trusted(pairs._replace(rows=rows))
        return rows.sum()

    torch.func.grad(function)(pairs.rows)
    torch.func.vmap(function)(pairs.rows.unsqueeze(0))
    assert not trial.OUTCOMES


# torch.compile itself uses what is deprecated, and finds Python 3.13.0 slow.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_compiled_graph_knows_what_was_known_before(kind, dynamic):
    def function(rows):
        return rows + trial.is_trusted(pairs._replace(rows=rows), 0.2)

    pairs = problem(kind)
    for known in (False, True):
        torch.compiler.reset()
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        assert torch.equal(compiled(pairs.rows), pairs.rows + known)
        assert len(trial.OUTCOMES) == known
        assert is_trusted(pairs)


@pytest.mark.parametrize(
    ("version", "capability", "can"),
    [
        ("3.6.0", (8, 0), True),
        ("3.10.0+git1", (9, 0), True),
        ("3.6.0", (7, 5), False),
        ("3.5.1", (9, 0), False),
    ],
)
def test_what_kernels_need(version, capability, can):
    with (
        mock.patch("triton.__version__", version),
        mock.patch("torch.cuda.get_device_capability", return_value=capability),
    ):
        assert trial._can_run(torch.device("cuda", 0)) == can


def test_without_the_package_nothing_is_said():
    with mock.patch.dict(sys.modules, {"triton": None}):
        assert not is_trusted(problem())


def test_a_users_choice_is_obeyed_without_a_trial():
    pairs = problem()
    with scaled_sums(1.01):
        sums = log_weighted_sums(pairs, 0.2, "triton", Ranks((6,)))
    expected = log_weighted_sums(pairs, 0.2, "dense", Ranks((6,)))
    torch.testing.assert_close(sums.exp(), 1.01 * expected.exp(), rtol=1e-4, atol=1e-4)
    assert not trial.OUTCOMES
