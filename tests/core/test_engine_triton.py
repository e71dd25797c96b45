"""The fused kernels: compiled on a CUDA machine, elsewhere in Triton's interpreter on a CPU."""

import os
import sys
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.cases import MODES, cases, oracle_losses
from helpers.engine_cases import WEIGHTINGS, any_pairs, problem
from helpers.engine_oracle import exact, of_dtype
from helpers.marks import compiling
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch._dynamo.testing import CompileCounterWithBackend

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE
from pgcl_losses.engine.contract import ALL_PAIRS, Factors, Pairs, Portion, Table, compared_sets

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

from pgcl_losses.engine.triton import gradient, launch, layout, log_sums  # noqa: E402

pytestmark = pytest.mark.slow

DEVICE = "cpu" if INTERPRETED else "cuda"
few = settings(max_examples=10)  # an example takes a second in the interpreter
weightings = pytest.mark.parametrize("weighting", WEIGHTINGS)
some_weightings = pytest.mark.parametrize("weighting", ["uniform", "table", "gaussian, soft"])
# Terms that are no negatives may overflow before they are set to 0; the interpreter warns.
LEFT_OUT = pytest.mark.filterwarnings("ignore:overflow encountered", "ignore:invalid value")
CROSS = compared_sets(2, "cross")
# Two views with a memory, which is not compared with itself.
WITH_MEMORY = ((0, 0), (0, 1), (0, 2), (1, 1), (1, 2))


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


def moved(value):
    """Pairs on the device that the kernels run on."""
    if isinstance(value, torch.Tensor):
        return value.to(DEVICE)
    if not isinstance(value, tuple):
        return value
    parts = [moved(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def run(pairs, temperature, num_ranks=1):
    """Log-sums, log-totals (None without a pair weight) and gradient, of all portions."""
    portions = [Portion(rank, num_ranks) for rank in range(num_ranks)]
    sums = [log_sums(pairs, temperature, portion) for portion in portions]
    log_s, log_totals = (
        None if of_ranks[0] is None else torch.stack(of_ranks).logsumexp(0)
        for of_ranks in list(zip(*sums, strict=True))[:2]
    )
    d_log_s = uneven(log_s)
    of_ranks = [gradient(pairs, temperature, log_s, d_log_s, portion) for portion in portions]
    assert log_s.dtype == pairs.embeddings.dtype
    assert all(d_embeddings.dtype == log_s.dtype for d_embeddings in of_ranks)
    return log_s, log_totals, sum(of_ranks)


def uneven(log_s):
    return torch.linspace(-1, 2, len(log_s), dtype=torch.float64, device=log_s.device).to(log_s)


def assert_exact(pairs, temperature=0.2, rtol=1e-9, *, dtype=torch.float64, ranks=1):
    pairs = of_dtype(moved(pairs), dtype)
    results = run(pairs, temperature, ranks)
    expected = exact(pairs, temperature, uneven(results[0]))[:3]
    for ours, reference in zip(results, expected, strict=True):
        assert (ours is None) == (reference is None)
        if reference is not None:
            finite = reference[reference.isfinite()].abs()
            largest = max(1.0, finite.max().item()) if len(finite) else 1.0
            torch.testing.assert_close(ours.double(), reference, rtol=rtol, atol=rtol * largest)
    return results


@few
@given(case=cases(), mode=st.fixed_dictionaries(MODES))
def test_loss_agrees_with_the_oracle(case, mode):
    views = (tensor.to(DEVICE) for tensor in case.tensors())
    losses = PrototypeReweightedNCE(**mode, reduction="none", engine="triton")(*views)
    expected = oracle_losses(case, (case.z1, case.z2), **mode)
    np.testing.assert_allclose(losses.cpu(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda **options: InfoNCE(**options, hardness=1.0, debias=0.1),
        lambda **options: PGCLLoss(4, 3, **options).double(),
        lambda **options: PGCLLoss(4, 3, **options, weighting="sample").double(),
    ],
)
def test_a_learnable_temperature_and_a_memory(loss_of):
    results = []
    for engine in ("dense", "triton"):
        torch.manual_seed(0)
        temperature = torch.tensor(0.3, dtype=torch.float64, device=DEVICE, requires_grad=True)
        loss = loss_of(temperature=temperature, memory_size=7, engine=engine).to(DEVICE)
        for _ in range(2):  # the second step has a memory
            views = torch.randn(2, 9, 4, dtype=torch.float64, device=DEVICE).requires_grad_()
            value = loss(*views)
        results.append([value, *torch.autograd.grad(value, (views, temperature))])
    torch.testing.assert_close(*results)


@settings(max_examples=25)
@given(
    pairs=any_pairs(),
    temperature=st.sampled_from([0.02, 0.2, 1.0]),
    ranks=st.integers(1, 3),
)
def test_any_pairs_agree_with_the_oracle(pairs, temperature, ranks):
    assert_exact(pairs, temperature, ranks=ranks)


@weightings
@pytest.mark.parametrize("lengths", [(1, 1), (33, 33, 33), (3, 126, 1)], ids=str)
def test_tails_and_block_edges_in_float32(lengths, weighting):
    assert_exact(problem(lengths, 6, weighting), rtol=5e-5, dtype=torch.float32)


@pytest.mark.parametrize("weighting", ["uniform", "table", "large table", "gaussian, table"])
@pytest.mark.parametrize("lengths", [(200, 200), (40, 40, 320)], ids=str)
@pytest.mark.parametrize("temperature", [0.2, 0.01])
def test_blocks_of_one_cluster_and_of_several(weighting, lengths, temperature):
    pairs = problem(lengths, 6, weighting)
    if len(lengths) == 2:
        assert_exact(pairs, temperature)
    assert_exact(pairs._replace(compared=CROSS if len(lengths) == 2 else WITH_MEMORY), temperature)


@some_weightings
@pytest.mark.parametrize("negatives", ["all", "cross"])
def test_items_in_many_tiles(weighting, negatives):
    lengths = (120, 50)
    items = torch.arange(170) * 7 % 100 + 2**60
    pairs = problem(lengths, 6, weighting, compared=compared_sets(2, negatives), items=items)
    assert_exact(pairs)
    assert_exact(pairs._replace(items=torch.arange(170) % 3), 0.01, ranks=2)


@pytest.mark.parametrize("count", [7, 9])
@pytest.mark.parametrize("negatives", ["all", "cross"])
def test_many_sets(count, negatives):
    assert_exact(problem((10,) * count, 6, compared=compared_sets(count, negatives)))


@some_weightings
@pytest.mark.parametrize(
    ("precision", "rtol"),
    [("highest", 5e-5), ("high", 5e-5), ("medium", 2e-2)],
    indirect=["precision"],
)
def test_precision_follows_the_switch_of_pytorch(precision, rtol, weighting):
    pairs = problem((65, 65), 70, weighting)
    assert_exact(pairs, rtol=rtol, dtype=torch.float32)
    if precision == "medium":  # it has errors because it computes less
        with pytest.raises(AssertionError):
            assert_exact(pairs, rtol=5e-5, dtype=torch.float32)


def on_card(shared_memory, processors):
    return mock.patch.object(launch, "_card", return_value=launch.Card(shared_memory, processors))


@some_weightings
@pytest.mark.parametrize("dim", [70, 300])
@pytest.mark.parametrize("kib", [99, 227])
def test_gpus_with_less_shared_memory_give_the_same_results(kib, dim, weighting):
    """They hold embeddings as a whole, or take them in slices."""
    with on_card(kib << 10, 2):
        assert_exact(problem((70, 70), dim, weighting), rtol=5e-5, dtype=torch.float32)


@some_weightings
def test_few_embeddings_are_split_over_many_programs(weighting):
    pairs = moved(of_dtype(problem((150, 150), 6, weighting, compared=CROSS), torch.float32))
    with on_card(227 << 10, 40):
        results = []
        grids = launches(lambda: results.append(run(pairs, 0.2)))
        assert all(grid[1] > 2 for _, grid, _ in grids)
        results.append(assert_exact(pairs, rtol=5e-5, dtype=torch.float32))
        torch.testing.assert_close(*results, rtol=0, atol=0)
        assert_exact(pairs, 0.02, rtol=1e-3, dtype=torch.float32)


def test_wide_embeddings_are_computed_block_by_block():
    pairs = moved(problem((150, 150), 70, "table"))
    with on_card(99 << 10, 2), mock.patch.object(launch, "_PAIRS_IN_MEMORY", 1):
        names = [name for name, _, _ in launches(lambda: run(pairs, 0.2))]
        assert names.count("_multiply_kernel") == 3 * 2  # blocks of 64 embeddings of 384
        assert_exact(pairs)


def launches(function):
    """The kernels' names, grids and arguments in a call."""
    names = [name for name in vars(launch) if name.endswith("_kernel")]
    made = []

    class Launches:
        def __init__(self, name):
            self.name, self.kernel = name, getattr(launch, name)

        def __getitem__(self, grid):
            def start(*args, **options):
                made.append((self.name, grid, args))
                self.kernel[grid](*args, **options)

            return start

    with mock.patch.multiple(launch, **{name: Launches(name) for name in names}):
        function()
    return made


@some_weightings
def test_the_last_batch_needs_no_kernels_of_its_own(weighting):
    """Triton compiles anew where a number is 1, or where one is no multiple of 16 any more."""
    for length in (1, 17, 64, 125):
        pairs = moved(problem((length, length), 6, weighting))
        for _, _, (p, *others) in launches(lambda pairs=pairs: run(pairs, 0.2)):
            numbers = [value for value in (*p, *others) if isinstance(value, int)]
            assert len(numbers) >= 3
            assert all(number > 1 and number % 16 == 0 for number in numbers)


@pytest.mark.parametrize("most_runs", [8, 0.02])
@pytest.mark.parametrize("portion", [ALL_PAIRS, Portion(1, 2)])
def test_tiles_that_are_masked(portion, most_runs):
    """They have an item of the block or an embedding that fills up."""
    pairs = moved(problem((150, 0, 150), 6, "table"))
    laid = layout.lay_out(pairs, 0.2, portion, forward=True)
    with mock.patch.object(layout, "_MOST_RUNS", most_runs):
        masked, run = laid.masked_tiles(64, 32)
    assert (run > 1) == (most_runs < 1)
    assert masked.shape == (len(laid.mine.order) // 64, 384 // 32 // run)
    for items, of_block in zip(laid.mine.items.split(64), masked, strict=True):
        expected = torch.isin(laid.others.items, items) | (laid.others.items < 0)
        assert of_block.bool().tolist() == expected.view(-1, 32 * run).any(1).tolist()


def test_runs_of_masked_tiles_give_the_same_results():
    with mock.patch.object(layout, "_MOST_RUNS", 0.02):
        assert_exact(problem((150, 100, 50), 6, "table", compared=WITH_MEMORY))


def test_memory_is_linear_in_the_number_of_embeddings():
    def bytes_of_each(count):
        pairs = Pairs(torch.zeros(count, 4), (count // 2,) * 2, compared_sets(2, "all"))
        with LiveBytes() as live:
            laid = layout.lay_out(pairs, 0.2, ALL_PAIRS, forward=True)
            launch._arguments(laid, 0.2, backward=False)
        return live.peak / count

    assert bytes_of_each(1 << 20) <= 1.01 * bytes_of_each(1 << 17)


def test_a_portion_has_the_sums_of_its_own_embeddings():
    pairs = moved(problem((3, 3, 3), 4, "gaussian"))
    whole = log_sums(pairs, 0.2)
    d_log_s = torch.ones_like(whole.log_sums)
    d_whole = gradient(pairs, 0.2, whole.log_sums, d_log_s, ALL_PAIRS)
    portion = Portion(1, 2)
    part = log_sums(pairs, 0.2, portion)
    d_part = gradient(pairs, 0.2, whole.log_sums, d_log_s, portion)
    for of_all, mine in zip(whole[:2], part[:2], strict=True):
        torch.testing.assert_close(mine[4:], of_all[4:])
        assert mine[:4].isneginf().all()
    torch.testing.assert_close(d_part[4:], d_whole[4:])
    assert not d_part[:4].any()


@pytest.mark.parametrize("dim", [4, 257])
@some_weightings
def test_more_processes_than_embeddings(weighting, dim):
    assert_exact(problem((1, 1), dim, weighting), ranks=5)


@some_weightings
@pytest.mark.parametrize("dim", [1, 33, 257])
def test_dimensions(dim, weighting):
    pairs = problem((6, 6), dim, weighting)
    assert_exact(pairs, rtol=5e-5, dtype=torch.float32)
    assert_exact(pairs)


@LEFT_OUT
@weightings
def test_low_temperature(weighting):
    assert_exact(problem((35, 35), 6, weighting), 0.01, rtol=2e-3, dtype=torch.float32)


@LEFT_OUT
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_maximum_is_over_negatives_alone(dtype):
    """Each meets itself, two that are left out, and one negative of cosine -1."""
    embeddings = torch.tensor([[1.0], [1.0], [1.0], [-1.0]], dtype=dtype)
    clusters = torch.tensor([[0], [0], [0], [1]])
    table = Table((torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=dtype).log(),), clusters)
    pairs = moved(Pairs(embeddings, (4,), ((0, 0),), by_cluster=table))
    expected = torch.tensor([-100.0, -100.0, -100.0, np.log(3) - 100.0], dtype=dtype)
    torch.testing.assert_close(log_sums(pairs, 0.01).log_sums.cpu(), expected)
    assert_exact(pairs, 0.01, 1e-3, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weighting", ["table", "heads", "soft", "gaussian, soft"])
def test_without_negatives(weighting, dtype):
    pairs = moved(of_dtype(problem((4, 4), 4, weighting), dtype))
    weights = pairs.by_cluster
    if isinstance(weights, Table):
        left_out = tuple(table.fill_(-torch.inf) for table in weights.log_weights)
        no_weight = pairs._replace(by_cluster=weights._replace(log_weights=left_out))
    else:
        no_weight = pairs._replace(by_cluster=Factors(0 * weights.left, weights.right))
    one_item = pairs._replace(items=torch.full((8,), 5, device=DEVICE))
    for empty in (no_weight, one_item, pairs._replace(compared=())):
        log_s, _, d_embeddings = run(empty, 0.01)
        assert log_s.isneginf().all()
        assert not d_embeddings.any()


@pytest.mark.parametrize("weighting", ["table", "large table", "heads"])
def test_weights_at_the_edge_of_float32(weighting):
    tiny = torch.finfo(torch.float32).tiny
    pairs = problem((6, 6), 4, weighting)

    def scaled(by):
        tables = [table.exp().sign().mul(by).log() for table in pairs.by_cluster.log_weights]
        return pairs._replace(by_cluster=pairs.by_cluster._replace(log_weights=tuple(tables)))

    assert_exact(scaled(1e4 * tiny), rtol=5e-5, dtype=torch.float32)
    log_s, _, d_embeddings = run(moved(of_dtype(scaled(tiny / 100), torch.float32)), 0.2)
    assert log_s.isneginf().all()
    assert not d_embeddings.any()


@weightings
@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")  # of the interpreter
def test_nan_of_an_embedding_gives_nan(weighting):
    pairs = moved(problem((3, 3), 4, weighting))
    pairs.embeddings[3, 1] = torch.nan
    log_s, _, d_embeddings = run(pairs, 0.2)
    assert log_s[3].isnan()
    assert d_embeddings[3].isnan().any()


def test_nan_of_a_weight_gives_nan():
    pairs = moved(problem((3, 3), 4, "soft"))
    pairs.by_cluster.left[3] = torch.nan
    log_s, _, _ = run(pairs, 0.2)
    assert log_s.isnan().tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize("weighting", ["gaussian, soft", "large table"])
def test_strides_do_not_matter(weighting):
    def scattered(value):
        if isinstance(value, torch.Tensor):
            return torch.stack((value, value), -1)[..., 0]
        if isinstance(value, tuple):
            parts = [scattered(part) for part in value]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    pairs = moved(problem((6, 6), 6, weighting))
    results = run(scattered(pairs), 0.2)
    assert not scattered(pairs).embeddings.is_contiguous()
    torch.testing.assert_close(results, run(pairs, 0.2))


@pytest.mark.parametrize("name", ["tf32", "ieee"])
def test_the_newer_switch_of_pytorch_for_tf32(name):
    products = torch.backends.cuda.matmul
    if not hasattr(products, "fp32_precision"):
        pytest.skip("this version of PyTorch has the older switch alone")
    before = products.fp32_precision
    products.fp32_precision = name
    try:
        assert layout.precision() == {"tf32": "high", "ieee": "highest"}[name]
        assert_exact(problem((33, 33), 40, "gaussian, soft"), rtol=1e-2, dtype=torch.float32)
    finally:
        products.fp32_precision = before


@compiling
@pytest.mark.parametrize(
    ("weighting", "negatives"), [("prototype", "cross"), ("sample", "all"), ("uniform", "cross")]
)
def test_compiled_as_one_graph(weighting, negatives):
    torch.compiler.reset()
    pgcl = PGCLLoss(4, 3, weighting=weighting, negatives=negatives, engine="triton").to(DEVICE)
    views = torch.randn(2, 9, 4, device=DEVICE)
    results = []
    for function in (pgcl, torch.compile(pgcl, fullgraph=True, backend="aot_eager")):
        z1, z2 = (view.clone().requires_grad_() for view in views)
        value = function(z1, z2)
        results.append((value, *torch.autograd.grad(value, (z1, z2))))
    torch.testing.assert_close(*results)


@compiling
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


def test_the_loss_is_differentiable_once():
    z1, z2 = torch.randn(2, 4, 3, device=DEVICE, requires_grad=True).unbind()
    loss = PrototypeReweightedNCE(weighting="uniform", exclude_same_cluster=False, engine="triton")
    with pytest.raises(RuntimeError, match="differentiable once here: engine='dense'"):
        torch.autograd.grad(loss(z1, z2), z1, create_graph=True)


def test_unknown_dtypes_and_weights_are_errors():
    pairs = moved(problem((2, 2), 3))
    for dtype in (torch.int64, torch.float16):
        with pytest.raises(TypeError, match=rf"float32 or float64 embeddings, but got {dtype}"):
            log_sums(pairs._replace(embeddings=pairs.embeddings.to(dtype)), 0.2)
    for kind in ("by_cluster", "by_cosine"):
        with pytest.raises(TypeError, match=r"engine='triton' computes .* but got Tensor"):
            log_sums(pairs._replace(**{kind: torch.ones(4, 4)}), 0.2)
