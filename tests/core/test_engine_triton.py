"""On a CUDA machine the kernels run compiled; elsewhere in Triton's interpreter, on the CPU."""

import os
import sys
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.cases import MODES, cases, oracle_losses
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.testing import CompileCounterWithBackend

from pgcl_losses import PGCLLoss, PrototypeReweightedNCE
from pgcl_losses._normalize import unit_vectors
from pgcl_losses.engine import dense, tiles
from pgcl_losses.engine.contract import Factors, Gaussian, Pairs
from pgcl_losses.engine.pairs import ALL_PAIRS, Share
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

# Only after the interpreter was asked for:
from helpers.interpreter import bfloat16_products  # noqa: E402
from triton.runtime.errors import OutOfResources  # noqa: E402

from pgcl_losses.engine import triton  # noqa: E402

pytestmark = pytest.mark.slow

DEVICE = "cpu" if INTERPRETED else "cuda"
few = settings(max_examples=10)  # each takes the interpreter a second

# A table goes by the clusters of both rows, and most rows have one of few; lines are a row's own.
WEIGHTINGS = ["uniform", "table", "large table", "lines", "soft", "many soft", "gaussian"]
WEIGHTINGS += ["gaussian, table", "gaussian, soft"]
weightings = pytest.mark.parametrize("weighting", WEIGHTINGS)
some_weightings = pytest.mark.parametrize("weighting", ["uniform", "table", "gaussian, soft"])


@pytest.fixture(autouse=True)
def _bfloat16():
    with bfloat16_products() if INTERPRETED else nullcontext():
        yield


@pytest.fixture
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


def problem(num_rows, width, weighting, *, num_views=2, across_views=False):
    """Pairs in float64; with factors, some of them are left out."""
    torch.manual_seed(0)
    rows = unit_vectors(torch.randn(num_rows, width), torch.float64)
    columns = {"large table": 150, "many soft": 40}.get(weighting, 5)
    weights = []
    if "gaussian" in weighting:
        weights.append(Gaussian(*cosine_moments(rows)))
    if "table" in weighting:
        table = torch.rand(columns, columns, dtype=torch.float64)
        table = table.masked_fill(table < 0.3, 0.0).fill_diagonal_(0.0)
        clusters = torch.randint(columns, (num_rows,))
        clusters[torch.rand(num_rows) < 0.6] = columns // 2  # blocks of one cluster, and others
        weights.append(Factors(table.log(), clusters, clusters))
    elif "soft" in weighting or weighting == "lines":
        left, right = torch.rand(2, num_rows, columns, dtype=torch.float64)
        left[left < 0.3] = 0.0
        right[right < 0.7] = 0.0
        if weighting == "lines":
            right = torch.randint(columns, (num_rows,))
        weights.append(Factors(left.log(), right))
    return on_device(Pairs(rows, num_views, across_views, tuple(weights)))


def on_device(value):
    return mapped(value, lambda tensor: tensor.to(DEVICE))


def cast(value, dtype):
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def mapped(value, function):
    """A function of every tensor in a tuple of tuples; what is one tensor stays one."""
    done = {}

    def of(value):
        if isinstance(value, torch.Tensor):
            if id(value) not in done:
                done[id(value)] = function(value)
            return done[id(value)]
        if not isinstance(value, tuple):
            return value
        parts = [of(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)

    return of(value)


def run(pairs, temperature, num_ranks=1):
    """Log-sums, log-masses (if any) and gradient, added up over the shares, in float64."""
    dtype = pairs.rows.dtype
    shares = [Share(rank, num_ranks) for rank in range(num_ranks)]
    sums = [triton.log_sums(pairs, temperature, share) for share in shares]
    log_s, *log_masses = (
        torch.stack(of_ranks).logsumexp(0)
        for of_ranks in zip(*sums, strict=True)
        if of_ranks[0] is not None
    )
    slopes = uneven(log_s)
    gradients = [triton.gradient(pairs, temperature, log_s, slopes, share) for share in shares]
    assert log_s.dtype == dtype
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
    ours = ours._replace(weights=cast(pairs.weights, dtype))
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
@pytest.mark.parametrize(("num_rows", "num_views"), [(2, 2), (99, 3), (130, 2)], ids=str)
def test_tails_and_block_edges_in_float32(num_rows, num_views, weighting):
    pairs = problem(num_rows, 6, weighting, num_views=num_views)
    assert_agrees_with_dense(pairs, rtol=5e-5, dtype=torch.float32)


@pytest.mark.parametrize("weighting", ["uniform", "table", "large table", "gaussian, table"])
@pytest.mark.parametrize("across_views", [False, True])
@pytest.mark.parametrize("temperature", [0.2, 0.01])
def test_blocks_of_one_cluster_and_of_several(weighting, across_views, temperature):
    pairs = problem(400, 6, weighting, across_views=across_views)
    assert_agrees_with_dense(pairs, temperature)


@some_weightings
@pytest.mark.parametrize(
    ("precision", "rtol"),
    [("highest", 5e-5), ("high", 5e-5), ("medium", 2e-2)],
    indirect=["precision"],
)
def test_products_are_as_precise_as_pytorch_is_told(precision, rtol, weighting):
    pairs = problem(130, 70, weighting)
    assert_agrees_with_dense(pairs, rtol=rtol, dtype=torch.float32)
    if precision == "medium":  # of less work
        with pytest.raises(AssertionError):
            assert_agrees_with_dense(pairs, rtol=5e-5, dtype=torch.float32)


def on_card(shared_memory, processors):
    return mock.patch.object(triton, "_card", return_value=triton.Card(shared_memory, processors))


@some_weightings
@pytest.mark.parametrize("width", [70, 300])
@pytest.mark.parametrize("kib", [99, 227])
def test_every_gpu_gives_the_same(kib, width, weighting):
    """Rows are held as a whole on some, and taken in parts on others."""
    pairs = problem(140, width, weighting)
    with on_card(kib << 10, 2):
        assert_agrees_with_dense(pairs, rtol=5e-5, dtype=torch.float32)


@some_weightings
def test_others_are_split_where_rows_are_few(weighting):
    pairs = cast(problem(300, 6, weighting, across_views=True), torch.float32)
    with on_card(227 << 10, 40):
        grids = launches(lambda: run(pairs, 0.2))
        assert all(grid[1] > 2 for _, grid, _ in grids)
        assert_agrees_with_dense(pairs, rtol=5e-5, dtype=torch.float32)
        assert_agrees_with_dense(pairs, 0.02, rtol=1e-3, dtype=torch.float32)
        torch.testing.assert_close(run(pairs, 0.2), run(pairs, 0.2), rtol=0, atol=0)


def test_blocks_of_wide_rows_one_after_the_other():
    pairs = problem(300, 70, "table")
    with on_card(99 << 10, 2), mock.patch.object(triton, "_PAIRS_IN_MEMORY", 1):
        names = [name for name, _, _ in launches(lambda: run(pairs, 0.2))]
        assert names.count("_multiply_kernel") == 3 * 2  # blocks of 64 rows of 384
        assert_agrees_with_dense(pairs)


def launches(function):
    """The kernels' names, grids and arguments in a call."""
    names = [name for name in vars(triton) if name.endswith("_kernel")]
    found = []

    class Launches:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(triton, name)

        def __getitem__(self, grid):
            def launch(*args, **options):
                found.append((self.name, grid, args))
                self.kernel[grid](*args, **options)

            return launch

    with mock.patch.multiple(triton, **{name: Launches(name) for name in names}):
        function()
    return found


@some_weightings
def test_the_last_batch_needs_no_kernels_of_its_own(weighting):
    """Triton compiles anew where a number is 1, or where one is no multiple of 16 any more."""
    for num_rows in (2, 34, 128, 250):
        pairs = problem(num_rows, 6, weighting)
        for _, _, (p, *others) in launches(lambda pairs=pairs: run(pairs, 0.2)):
            numbers = [value for value in (*p, *others) if isinstance(value, int)]
            assert len(numbers) >= 3
            assert all(number > 1 and number % 16 == 0 for number in numbers)


def test_kernels_that_do_not_fit_are_left_to_streaming():
    class TooLarge:
        def __getitem__(self, grid):
            raise OutOfResources(300_000, 99_000, "shared memory")

    pairs = problem(20, 4, "gaussian, table")
    expected = run_dense(pairs, 0.2)
    too_large = dict.fromkeys(("_forward_kernel", "_backward_kernel"), TooLarge())
    with (
        mock.patch.multiple(triton, **too_large),
        pytest.warns(UserWarning, match="engine='triton' takes engine='streaming' instead"),
    ):
        torch.testing.assert_close(run(pairs, 0.2), expected)
    with mock.patch.multiple(triton, **too_large), pytest.raises(OutOfResources):
        run(pairs, 0.2, num_ranks=2)


@weightings
@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_add_up_to_the_whole(ranks, weighting):
    pairs = problem(132, 6, weighting, num_views=3, across_views=True)
    assert_agrees_with_dense(pairs, rtol=5e-5, dtype=torch.float32, ranks=ranks)


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
    assert_agrees_with_dense(pairs, rtol=5e-5, dtype=torch.float32)
    assert_agrees_with_dense(pairs)


@weightings
def test_low_temperature(weighting):
    pairs = problem(70, 6, weighting)
    assert_agrees_with_dense(pairs, 0.01, rtol=2e-3, dtype=torch.float32)


def test_more_ranks_than_rows():
    assert_agrees_with_dense(problem(2, 4, "gaussian"), ranks=5)


# What is left out may be any power; the interpreter warns of it, and it is put to 0.
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2", "ignore:invalid value")
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
    assert_agrees_with_dense(pairs._replace(rows=rows.double()), 0.01, 1e-3, dtype=dtype)


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
    smallest = pairs._replace(weights=(factors._replace(log_left=(is_one * 1e4 * tiny).log()),))
    if weighting == "soft":  # a product, none of whose terms is smaller
        right = (factors.right > 0).double()
        smallest = pairs._replace(weights=(Factors((is_one * 1e4 * tiny).log(), right),))
    assert_agrees_with_dense(smallest, rtol=5e-5, dtype=torch.float32)
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


@pytest.mark.parametrize("name", ["tf32", "ieee"])
def test_pytorchs_newer_switch_for_tf32(name):
    products = torch.backends.cuda.matmul
    if not hasattr(products, "fp32_precision"):
        pytest.skip("this version of PyTorch has the older switch alone")
    before = products.fp32_precision
    products.fp32_precision = name
    try:
        pairs = problem(66, 40, "gaussian, soft")
        assert tiles.precision() == {"tf32": "high", "ieee": "highest"}[name]
        assert_agrees_with_dense(pairs, rtol=1e-2, dtype=torch.float32)
    finally:
        products.fp32_precision = before


# Affairs of torch.compile, as in test_engine.py.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@pytest.mark.parametrize("weighting", ["prototype", "sample", "uniform"])
@pytest.mark.parametrize("negatives", ["all", "cross"])
def test_torch_compiles_it_as_one_graph(weighting, negatives):
    torch.compiler.reset()
    pgcl = PGCLLoss(4, 3, weighting=weighting, negatives=negatives, engine="triton").to(DEVICE)
    views = torch.randn(2, 9, 4, device=DEVICE)
    results = []
    for function in (pgcl, torch.compile(pgcl, fullgraph=True, backend="aot_eager")):
        z1, z2 = (view.clone().requires_grad_() for view in views)
        value = function(z1, z2)
        results.append((value, *torch.autograd.grad(value, (z1, z2))))
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@pytest.mark.parametrize("weighting", ["prototype", "sample"])
def test_one_graph_serves_batches_of_any_size(weighting):
    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    pgcl = PGCLLoss(4, 3, weighting=weighting, engine="triton").to(DEVICE)
    compiled = torch.compile(pgcl, fullgraph=True, backend=counter)
    for num_graphs in (9, 12, 20, 7):
        views = [torch.randn(num_graphs, 4, device=DEVICE, requires_grad=True) for _ in range(2)]
        compiled(*views).backward()
    assert counter.frame_count <= 2  # of a size, and of any


def test_no_second_derivative():
    z1, z2 = torch.randn(2, 4, 3, device=DEVICE, requires_grad=True).unbind()
    loss = PrototypeReweightedNCE(weighting="uniform", exclude_same_cluster=False, engine="triton")(
        z1, z2
    )
    (gradient,) = torch.autograd.grad(loss * z1.sum(), z1, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_rows_of_another_dtype_are_refused():
    pairs = problem(4, 3, "uniform")
    for dtype in (torch.int64, torch.float16):
        with pytest.raises(TypeError, match=rf"float32 or float64 rows, but got {dtype}"):
            triton.log_sums(pairs._replace(rows=pairs.rows.to(dtype)), 0.2)


def test_an_unknown_kind_of_weight_is_refused():
    pairs = problem(4, 3, "uniform")
    with pytest.raises(TypeError, match=r"engine='triton' computes .* but got Tensor"):
        triton.log_sums(pairs._replace(weights=(torch.ones(4, 4),)), 0.2)
