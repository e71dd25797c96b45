"""On a CUDA machine the kernels run compiled; elsewhere in Triton's interpreter, on the CPU."""

import os
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.cases import MODES, cases, oracle_losses
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pgcl_losses import PrototypeReweightedNCE
from pgcl_losses.engine import Bells, Pairs, SameCluster, Table
from pgcl_losses.engine.dense import dense
from pgcl_losses.rows import unit_rows
from pgcl_losses.weights import sample_bells

ON_GPU = torch.cuda.is_available()
if not ON_GPU and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read while triton is imported

pytest.importorskip("triton", minversion="3.6")
tl = pytest.importorskip("triton.language")
jit = pytest.importorskip("triton.runtime.jit")
INTERPRETED = not isinstance(tl.sum, jit.JITFunction)
if not ON_GPU and not INTERPRETED:
    pytest.skip("triton was imported before its interpreter was asked for", allow_module_level=True)

from pgcl_losses.engine.triton import triton  # noqa: E402  # only after the interpreter was asked for

DEVICE = "cpu" if INTERPRETED else "cuda"
few = settings(max_examples=25)


@pytest.fixture
def bfloat16_products(monkeypatch):
    """The interpreter keeps bfloat16 as 16-bit integers and multiplies those in tl.dot."""
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def widened(x):
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    original = InterpreterBuilder.create_dot
    monkeypatch.setattr(
        InterpreterBuilder,
        "create_dot",
        lambda self, a, b, *rest: original(self, widened(a), widened(b), *rest),
    )


def contrast_with(engine, mode, tensors):
    loss = PrototypeReweightedNCE(**mode, reduction="none")
    with mock.patch("pgcl_losses.contrast.contrast_pairs", lambda pairs, t, _: engine(pairs, t)):
        return loss(*(tensor.to(DEVICE) for tensor in tensors))


def pairs_of(case, mode):
    """What the loss would hand to an engine, in float64."""
    seen = []

    def engine(pairs, temperature):
        seen.append(pairs)
        return dense(pairs, temperature)

    contrast_with(engine, mode, case.tensors())
    return seen


def run(engine, pairs, temperature, dtype=torch.float64):
    """Losses and gradients in float64, from pairs in that dtype and an uneven upstream."""
    rows = pairs.rows.detach().to(DEVICE, dtype).requires_grad_()
    columns = rows
    if pairs.columns is not pairs.rows:
        columns = pairs.columns.detach().to(DEVICE, dtype).requires_grad_()
    weights = pairs.weights
    wide = dtype if dtype.itemsize > 2 else torch.float32
    if isinstance(weights, Table):
        weights = weights._replace(log_weights=weights.log_weights.to(wide))
    elif isinstance(weights, Bells):
        population = rows if weights.population is pairs.rows else weights.population.to(dtype)
        weights = Bells(weights.mean.to(wide), weights.variance.to(wide), population.detach())
    losses = engine(pairs._replace(rows=rows, columns=columns, weights=weights), temperature)
    assert losses.dtype == wide
    upstream = torch.linspace(-1, 2, len(losses), dtype=wide, device=DEVICE)
    losses.backward(upstream)
    gradients = (rows.grad,) if columns is rows else (rows.grad, columns.grad)
    assert all(gradient.dtype == dtype for gradient in gradients)
    return [tensor.detach().double() for tensor in (losses, *gradients)]


def assert_agree(pairs, temperature, dtype=torch.float64, rtol=1e-9, atol=1e-9):
    rounded = pairs
    if dtype.itemsize == 2:  # both start from the same rows
        same = pairs.columns is pairs.rows
        rows, columns = (x.detach().to(dtype).double() for x in (pairs.rows, pairs.columns))
        rounded = pairs._replace(rows=rows, columns=rows if same else columns)
        if isinstance(pairs.weights, Bells):
            population = pairs.weights.population.to(dtype).double()
            rounded = rounded._replace(weights=pairs.weights._replace(population=population))
    expected = run(dense, rounded, temperature)
    for ours, theirs in zip(run(triton, rounded, temperature, dtype), expected, strict=True):
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol * scale)


def problem(rows, columns, width, weighting, *, own=True, population=None):
    """Pairs of any shape, some columns of which are nobody's positive; 3 clusters, 5 table rows."""
    torch.manual_seed(0)
    queries = unit_rows(torch.randn(rows, width), torch.float64)
    same = columns is None
    samples = queries if same else unit_rows(torch.randn(columns, width), torch.float64)
    index = torch.arange(rows)
    positives = (index + 1) % len(samples)
    clusters = torch.randint(3, (rows,)), torch.randint(3, (len(samples),))
    weights = None
    if weighting == "table":
        table = torch.randn(5, 3, dtype=torch.float64)
        table[0, 1] = table[2] = -torch.inf
        weights = Table(table, torch.randint(5, (rows,)), clusters[1])
    elif weighting == "bells":
        others = samples if population is None else population
        weights = Bells(*sample_bells(queries, others), others)
    left_out = None if weighting == "table" else SameCluster(*clusters)
    pairs = Pairs(queries, samples, positives, index if own and same else None, weights, left_out)
    return on_device(pairs)


def on_device(value):
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    return type(value)(*map(on_device, value)) if isinstance(value, tuple) else value


@few
@given(case=cases(), mode=st.fixed_dictionaries(MODES))
def test_value_agrees_with_the_oracle(case, mode):
    ours = contrast_with(triton, mode, case.tensors()).cpu()
    expected = oracle_losses(case, (case.z1, case.z2), **mode)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-11)


@few
@given(case=cases(), mode=st.fixed_dictionaries(MODES))
def test_gradient_agrees_with_dense(case, mode):
    for pairs in pairs_of(case, mode):
        assert_agree(pairs, mode["temperature"])


@few
@given(case=cases(), mode=st.fixed_dictionaries(MODES))
def test_float32_agrees_with_float64(case, mode):
    for pairs in pairs_of(case, mode):
        if isinstance(pairs.weights, Bells):  # narrow ones magnify float32's rounding of cosines
            assume((pairs.weights.variance > 1e-2).all())
        assert_agree(pairs, mode["temperature"], torch.float32, rtol=1e-5, atol=1e-5)


weightings = pytest.mark.parametrize("weighting", ["table", "bells", "uniform"])


@weightings
@pytest.mark.parametrize(
    ("rows", "columns"), [(2, None), (67, None), (130, None), (1, 35), (66, 31), (5, 1)]
)
def test_tails(rows, columns, weighting):
    assert_agree(problem(rows, columns, 6, weighting), 0.2, torch.float32, rtol=1e-5, atol=1e-5)


@weightings
@pytest.mark.parametrize("width", [1, 33, 257])
@pytest.mark.parametrize("columns", [None, 9])
def test_widths(width, columns, weighting):
    pairs = problem(12, columns, width, weighting)
    assert_agree(pairs, 0.2, torch.float32, rtol=1e-5, atol=1e-5)
    assert_agree(pairs, 0.2)


def test_a_population_of_its_own():
    population = unit_rows(torch.randn(40, 6), torch.float64)
    pairs = problem(10, 12, 6, "bells", population=population)
    assert_agree(pairs, 0.2)


def test_one_tensor_may_lack_an_own_column():
    assert_agree(problem(10, None, 6, "uniform", own=False), 0.2)


@weightings
@pytest.mark.parametrize("columns", [None, 70])
def test_low_temperature(columns, weighting):
    pairs = problem(70, columns, 6, weighting)
    assert_agree(pairs, 0.01, torch.float32, rtol=1e-4, atol=1e-5)


@weightings
@pytest.mark.parametrize("columns", [None, 40])
@pytest.mark.parametrize("width", [20, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("bfloat16_products")
def test_half_precision(dtype, width, columns, weighting):
    assert_agree(problem(70, columns, width, weighting), 0.2, dtype, rtol=1e-2, atol=1e-2)


def test_small_float16_gradients_survive():
    rows = problem(70, None, 6, "uniform").rows
    pairs = Pairs(rows, rows, torch.arange(70, device=DEVICE).roll(35))
    leaf = rows.half().requires_grad_()
    losses = triton(pairs._replace(rows=leaf, columns=leaf), 0.2)
    (gradient,) = torch.autograd.grad(losses, leaf, torch.full_like(losses, 1e-3))
    reference = rows.requires_grad_()
    losses = dense(pairs._replace(rows=reference, columns=reference), 0.2)
    (expected,) = torch.autograd.grad(losses, reference, torch.full_like(losses, 1e-3))
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-2, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("columns", [None, 8])
def test_no_negatives_no_loss(columns, dtype):
    pairs = problem(8, columns, 4, "uniform")
    one_cluster = torch.ones(8, dtype=torch.long, device=DEVICE)
    pairs = pairs._replace(left_out=SameCluster(one_cluster, one_cluster))
    for nothing in run(triton, pairs, 0.01, dtype):
        assert not nothing.any()

    table = Table(torch.full((2, 2), -torch.inf, device=DEVICE), one_cluster, one_cluster)
    for nothing in run(triton, pairs._replace(left_out=None, weights=table), 0.01, dtype):
        assert not nothing.any()


@weightings
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # of the interpreter
def test_nan_shows(weighting):
    pairs = problem(6, None, 4, weighting)
    rows = pairs.rows.clone()
    rows[3, 1] = torch.nan
    pairs = pairs._replace(rows=rows, columns=rows)
    assert triton(pairs, 0.2)[3].isnan()


def test_strides_do_not_matter():
    pairs = problem(9, 12, 6, "uniform")
    scattered = pairs._replace(
        rows=pairs.rows.T.contiguous().T,
        columns=pairs.columns.repeat(1, 2)[:, :6],
        positives=torch.stack((pairs.positives, pairs.positives), 1)[:, 0],
    )
    torch.testing.assert_close(triton(scattered, 0.2), triton(pairs, 0.2))


def test_only_the_gradient_asked_for():
    pairs = problem(9, 12, 6, "uniform")
    leaf = pairs.columns.clone().requires_grad_()
    triton(pairs._replace(columns=leaf), 0.2).sum().backward()
    expected = pairs.columns.clone().requires_grad_()
    dense(pairs._replace(columns=expected), 0.2).sum().backward()
    torch.testing.assert_close(leaf.grad, expected.grad)


def test_no_second_derivative():
    pairs = problem(4, None, 3, "uniform")
    rows = pairs.rows.clone().requires_grad_()
    loss = triton(pairs._replace(rows=rows, columns=rows), 0.2).square().sum()
    (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_integer_rows_are_refused():
    pairs = problem(4, None, 3, "uniform")
    rows = pairs.rows.long()
    with pytest.raises(TypeError, match=r"floating-point rows, but got torch\.int64"):
        triton(pairs._replace(rows=rows, columns=rows), 0.2)
