"""On a CUDA machine the kernels run compiled; elsewhere in Triton's interpreter, on the CPU."""

import os
import sys

import numpy as np
import pytest
import torch
from helpers.cases import MODES, cases, oracle_losses
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcl_losses import PrototypeReweightedNCE
from pgcl_losses.engine import Factors, Gaussian, Pairs, dense
from pgcl_losses.engine.pairs import ALL_PAIRS, Share
from pgcl_losses.rows import unit_rows
from pgcl_losses.weights import cosine_moments

ON_GPU = torch.cuda.is_available()
if not ON_GPU and "triton" not in sys.modules:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read while triton is imported

pytest.importorskip("triton", minversion="3.6")
tl = pytest.importorskip("triton.language")
jit = pytest.importorskip("triton.runtime.jit")
INTERPRETED = not isinstance(tl.sum, jit.JITFunction)
if not ON_GPU and not INTERPRETED:
    pytest.skip("triton was imported before its interpreter was asked for", allow_module_level=True)

from pgcl_losses.engine import triton  # noqa: E402  # only after the interpreter was asked for

DEVICE = "cpu" if INTERPRETED else "cuda"
few = settings(max_examples=25)

WEIGHTINGS = ["uniform", "table", "large table", "soft", "many soft", "gaussian", "gaussian, soft"]
weightings = pytest.mark.parametrize("weighting", WEIGHTINGS)
some_weightings = pytest.mark.parametrize("weighting", ["uniform", "table", "gaussian, soft"])


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


def problem(num_rows, width, weighting, *, num_views=2, across_views=False):
    """Pairs in float64; with factors, some of them are left out."""
    torch.manual_seed(0)
    rows = unit_rows(torch.randn(num_rows, width), torch.float64)
    columns = {"large table": 150, "many soft": 40}.get(weighting, 5)
    weights = []
    if "gaussian" in weighting:
        weights.append(Gaussian(*cosine_moments(rows)))
    if "table" in weighting or "soft" in weighting:
        left, right = torch.rand(2, num_rows, columns, dtype=torch.float64)
        left[left < 0.3] = 0.0
        right[right < 0.7] = 0.0
        if "table" in weighting:
            right = torch.randint(columns, (num_rows,))
        weights.append(Factors(left.log(), right))
    return on_device(Pairs(rows, num_views, across_views, tuple(weights)))


def on_device(value):
    return mapped(value, lambda tensor: tensor.to(DEVICE))


def cast(value, dtype):
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def mapped(value, function):
    """A function of every tensor in a tuple of tuples."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if not isinstance(value, tuple):
        return value
    parts = [mapped(part, function) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def run(pairs, temperature, num_ranks=1):
    """Log-sums, log-masses (if any) and gradient, added up over the shares, in float64."""
    dtype = pairs.rows.dtype
    wide = dtype if dtype.itemsize > 2 else torch.float32
    shares = [Share(rank, num_ranks) for rank in range(num_ranks)]
    sums = [triton.log_sums(pairs, temperature, share) for share in shares]
    log_s, *log_masses = (
        torch.stack(of_ranks).logsumexp(0)
        for of_ranks in zip(*sums, strict=True)
        if of_ranks[0] is not None
    )
    slopes = uneven(log_s)
    gradients = [triton.gradient(pairs, temperature, log_s, slopes, share) for share in shares]
    assert log_s.dtype == wide
    assert all(gradient.dtype == dtype for gradient in gradients)
    return [tensor.double() for tensor in (log_s, *log_masses, sum(gradients))]


def run_dense(pairs, temperature, slopes=None):
    rows = pairs.rows.detach().requires_grad_()
    log_s, log_masses = dense.log_sums(pairs._replace(rows=rows), temperature)
    slopes = uneven(log_s) if slopes is None else slopes
    slopes = slopes.masked_fill(log_s.isneginf(), 0.0)  # nothing is to come of those
    (gradient,) = torch.autograd.grad(log_s, rows, slopes)
    return [log_s.detach(), *([] if log_masses is None else [log_masses]), gradient]


def uneven(log_s):
    return torch.linspace(-1, 2, len(log_s), dtype=log_s.dtype, device=DEVICE)


def assert_agrees_with_dense(pairs, temperature=0.2, rtol=1e-9, *, dtype=torch.float64, ranks=1):
    ours = pairs._replace(rows=pairs.rows.to(dtype))
    theirs = cast(ours, torch.float64)  # both start from the same rows
    ours = ours._replace(weights=cast(pairs.weights, torch.promote_types(dtype, torch.float32)))
    expected = run_dense(theirs, temperature)
    for mine, reference in zip(run(ours, temperature, ranks), expected, strict=True):
        finite = reference[reference.isfinite()]
        largest = max(1.0, finite.abs().max().item()) if len(finite) > 0 else 1.0
        torch.testing.assert_close(mine, reference, rtol=rtol, atol=rtol * largest)


def losses_and_gradient(case, engine, mode):
    z1, z2, *others = (tensor.to(DEVICE) for tensor in case.tensors())
    leaves = z1.requires_grad_(), z2.requires_grad_()
    losses = PrototypeReweightedNCE(**mode, reduction="none", engine=engine)(*leaves, *others)
    losses.backward(torch.linspace(-1, 2, len(losses), dtype=torch.float64, device=DEVICE))
    lengths = torch.cat(leaves).detach().norm(dim=1, keepdim=True)
    return losses.detach().cpu(), torch.cat([leaf.grad for leaf in leaves]) * lengths


@few
@given(case=cases(), mode=st.fixed_dictionaries(MODES))
def test_loss_agrees_with_the_oracle_and_its_gradient_with_dense(case, mode):
    ours, gradient = losses_and_gradient(case, "triton", mode)
    expected = oracle_losses(case, (case.z1, case.z2), **mode)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-11)
    _, dense_gradient = losses_and_gradient(case, "dense", mode)
    torch.testing.assert_close(gradient, dense_gradient, rtol=1e-9, atol=1e-9)


@few
@given(
    num_graphs=st.integers(1, 7),
    num_views=st.integers(2, 4),
    width=st.integers(2, 6),
    weighting=st.sampled_from(WEIGHTINGS),
    across_views=st.booleans(),
    temperature=st.sampled_from([0.05, 0.2, 1.0]),
    ranks=st.integers(1, 3),
)
def test_any_pairs_agree_with_dense(
    num_graphs, num_views, width, weighting, across_views, temperature, ranks
):
    num_rows = num_graphs * num_views
    pairs = problem(num_rows, width, weighting, num_views=num_views, across_views=across_views)
    assert_agrees_with_dense(pairs, temperature, ranks=ranks)


@weightings
@pytest.mark.parametrize(
    ("num_rows", "num_views"), [(2, 2), (64, 2), (66, 2), (99, 3), (130, 2)], ids=str
)
def test_tails_and_block_edges_in_float32(num_rows, num_views, weighting):
    pairs = problem(num_rows, 6, weighting, num_views=num_views)
    assert_agrees_with_dense(pairs, rtol=1e-5, dtype=torch.float32)


@weightings
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_add_up_to_the_whole(ranks, weighting):
    pairs = problem(132, 6, weighting, num_views=3, across_views=True)
    assert_agrees_with_dense(pairs, rtol=1e-5, dtype=torch.float32, ranks=ranks)


def test_a_share_is_of_its_own_rows():
    pairs = problem(9, 4, "gaussian", num_views=3)
    whole = triton.log_sums(pairs, 0.2)
    slopes = torch.ones_like(whole.log_sums)
    gradient = triton.gradient(pairs, 0.2, whole.log_sums, slopes, ALL_PAIRS)
    share = Share(1, 2)
    part = triton.log_sums(pairs, 0.2, share)
    d_rows = triton.gradient(pairs, 0.2, whole.log_sums, slopes, share)
    for of_all, mine in zip(whole, part, strict=True):
        torch.testing.assert_close(mine[4:], of_all[4:])
        assert mine[:4].isneginf().all()
    torch.testing.assert_close(d_rows[4:], gradient[4:])
    assert not d_rows[:4].any()


@some_weightings
@pytest.mark.parametrize("width", [1, 33, 257])
def test_widths(width, weighting):
    pairs = problem(12, width, weighting)
    assert_agrees_with_dense(pairs, rtol=1e-5, dtype=torch.float32)
    assert_agrees_with_dense(pairs)


@weightings
def test_low_temperature(weighting):
    pairs = problem(70, 6, weighting)
    assert_agrees_with_dense(pairs, 0.01, rtol=1e-4, dtype=torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_maximum_is_over_negatives_alone(dtype):
    """Each row meets itself, two rows that are left out, and one negative of cosine -1."""
    rows = torch.tensor([[1.0], [1.0], [1.0], [-1.0]], dtype=dtype, device=DEVICE)
    left = torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]], device=DEVICE)
    clusters = torch.tensor([0, 0, 0, 1], device=DEVICE)
    pairs = Pairs(rows, 1, weights=(Factors(left.to(dtype).log(), clusters),))
    expected = torch.tensor([-100.0, -100.0, -100.0, np.log(3) - 100.0], dtype=dtype)
    sums = triton.log_sums(pairs, 0.01)
    torch.testing.assert_close(sums.log_sums.cpu(), expected)
    assert_agrees_with_dense(pairs._replace(rows=rows.double()), 0.01, 1e-5, dtype=dtype)


@some_weightings
@pytest.mark.parametrize("width", [20, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("bfloat16_products")
def test_half_precision(dtype, width, weighting):
    assert_agrees_with_dense(problem(70, width, weighting), rtol=1e-2, dtype=dtype)


def test_small_float16_gradients_survive():
    pairs = problem(70, 6, "uniform")
    pairs = pairs._replace(rows=pairs.rows.half())
    log_s = triton.log_sums(pairs, 0.2).log_sums
    slopes = torch.full_like(log_s, 1e-6)
    gradient = triton.gradient(pairs, 0.2, log_s, slopes, ALL_PAIRS).double()
    _, expected = run_dense(cast(pairs, torch.float64), 0.2, slopes.double())
    torch.testing.assert_close(gradient, expected, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighting", ["table", "large table", "soft", "gaussian, soft"])
def test_rows_without_negatives(weighting, dtype):
    pairs = cast(problem(8, 4, weighting), dtype)
    *others, factors = pairs.weights
    left_out = factors._replace(log_left=torch.full_like(factors.log_left, -torch.inf))
    one_graph = pairs._replace(num_views=8)
    for empty in (pairs._replace(weights=(*others, left_out)), one_graph):
        log_s, *_, gradient = run(empty, 0.01)
        assert log_s.isneginf().all()
        assert not gradient.any()


@pytest.mark.parametrize("weighting", ["table", "large table", "soft"])
def test_weights_at_the_edge_of_float32(weighting):
    tiny = torch.finfo(torch.float32).tiny
    pairs = problem(12, 4, weighting)
    (factors,) = pairs.weights
    is_one = (factors.log_left > -torch.inf).double()
    smallest = pairs._replace(weights=(factors._replace(log_left=(is_one * 4 * tiny).log()),))
    if weighting == "soft":  # a product, none of whose terms is smaller
        right = (factors.right > 0).double()
        smallest = pairs._replace(weights=(Factors((is_one * 4 * tiny).log(), right),))
    assert_agrees_with_dense(smallest, rtol=1e-5, dtype=torch.float32)
    lost = pairs._replace(weights=(factors._replace(log_left=(is_one * tiny / 100).log()),))
    log_s, gradient = run(cast(lost, torch.float32), 0.2)
    assert log_s.isneginf().all()
    assert not gradient.any()


@weightings
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # of the interpreter
def test_nan_shows(weighting):
    pairs = problem(6, 4, weighting)
    pairs.rows[3, 1] = torch.nan
    log_s, *_, gradient = run(pairs, 0.2)
    assert log_s[3].isnan()
    assert gradient[3].isnan().all()


def test_nan_of_a_weight_shows():
    pairs = problem(6, 4, "soft")
    pairs.weights[0].log_left[3] = torch.nan
    log_s, _ = run(pairs, 0.2)
    assert log_s.isnan().tolist() == [False, False, False, True, False, False]


def test_strides_do_not_matter():
    for weighting in ("gaussian, soft", "large table"):
        pairs = problem(12, 6, weighting)
        scattered = mapped(pairs, lambda tensor: torch.stack((tensor, tensor), -1)[..., 0])
        assert not scattered.rows.is_contiguous()
        torch.testing.assert_close(run(scattered, 0.2), run(pairs, 0.2))


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_pytorchs_newer_switch_for_tf32(precision):
    products = torch.backends.cuda.matmul
    if not hasattr(products, "fp32_precision"):
        pytest.skip("this version of PyTorch has the older switch alone")
    before = products.fp32_precision
    products.fp32_precision = precision
    try:
        pairs = problem(66, 40, "gaussian, soft")
        assert_agrees_with_dense(pairs, rtol=1e-2, dtype=torch.float32)
    finally:
        products.fp32_precision = before


# Affairs of torch.compile, as in test_engine.py.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_compiled_by_torch_it_gives_the_same():
    torch.compiler.reset()
    loss = PrototypeReweightedNCE(weighting="sample", engine="triton", exclude_same_cluster=False)
    views = torch.randn(2, 9, 4, device=DEVICE)
    results = []
    for function in (loss, torch.compile(loss, backend="aot_eager")):
        z1, z2 = (view.clone().requires_grad_() for view in views)
        value = function(z1, z2)
        results.append((value, *torch.autograd.grad(value, (z1, z2))))
    torch.testing.assert_close(*results)


def test_no_second_derivative():
    z1, z2 = torch.randn(2, 4, 3, device=DEVICE, requires_grad=True).unbind()
    loss = PrototypeReweightedNCE(weighting="uniform", exclude_same_cluster=False, engine="triton")(
        z1, z2
    )
    (gradient,) = torch.autograd.grad(loss * z1.sum(), z1, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_integer_rows_are_refused():
    pairs = problem(4, 3, "uniform")
    with pytest.raises(TypeError, match=r"floating-point rows, but got torch\.int64"):
        triton.log_sums(pairs._replace(rows=pairs.rows.long()), 0.2)


def test_an_unknown_kind_of_weight_is_refused():
    pairs = problem(4, 3, "uniform")
    with pytest.raises(TypeError, match=r"engine='triton' computes .* but got Tensor"):
        triton.log_sums(pairs._replace(weights=(torch.ones(4, 4),)), 0.2)
