"""Engines agree with the oracle for blocks of any size; blocks need memory for embeddings."""

import functools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.blocks import in_blocks
from helpers.engine_cases import any_pairs
from helpers.engine_oracle import exact
from helpers.marks import compiling, engines, few_graphs, negatives_of
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch.autograd import forward_ad

from pgcl_losses import Assignment, InfoNCE, PGCLLoss, PrototypeReweightedNCE
from pgcl_losses.contrast import WEIGHTINGS
from pgcl_losses.distributed import Processes
from pgcl_losses.engine import blocks, dispatch
from pgcl_losses.engine.pairs import Pairs

pytestmark = few_graphs
on_a_cpu = pytest.mark.filterwarnings("ignore:flex_attention called")  # without a compiler
close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)


def sums_of(pairs, temperature, engine):
    processes = Processes([(length,) for length in pairs.lengths])
    return dispatch.log_weighted_sums(pairs, temperature, engine, processes)


def upstream(pairs):
    return torch.linspace(-1, 2, pairs.num_queries(), dtype=torch.float64)


def check_sums(pairs, temperature, engine, learned):
    d_log_s = upstream(pairs)
    expected = exact(pairs, temperature, d_log_s)
    embeddings = pairs.embeddings.clone().requires_grad_()
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    log_s = sums_of(pairs._replace(embeddings=embeddings), tau if learned else temperature, engine)
    close(log_s.detach(), expected.log_s)
    some = log_s.detach() > -torch.inf
    d_embeddings, d_tau = torch.autograd.grad(
        (log_s * d_log_s)[some].sum() + 0 * tau, (embeddings, tau), materialize_grads=True
    )
    close(d_embeddings, expected.gradient)
    if learned:
        close(d_tau, expected.d_temperature, atol=1e-6)


@settings(max_examples=300)
@given(
    pairs=any_pairs(),
    temperature=st.sampled_from([0.01, 0.02, 0.2, 1.0]),
    engine=st.sampled_from(["dense", "blocks"]),
    block=st.sampled_from([1, 3, 640]),
    kept_up_to=st.sampled_from([0, 1 << 20]),
    learned=st.booleans(),
)
def test_sums_and_gradients(pairs, temperature, engine, block, kept_up_to, learned):
    with in_blocks(block), mock.patch.object(blocks, "_KEPT_UP_TO", kept_up_to):
        check_sums(pairs, temperature, engine, learned)


def check_portions(pairs, temperature, num_ranks, engine):
    d_log_s = upstream(pairs)
    expected = exact(pairs, temperature, d_log_s)
    computations = [engine(pairs, temperature, rank, num_ranks) for rank in range(num_ranks)]
    each = [of_portion.log_sums(with_gradient=True) for of_portion in computations]
    log_s = torch.stack([sums.log_sums for sums in each]).logsumexp(0)
    gradients = [
        of_portion.gradient(log_s, d_log_s, sums.kept)[0]
        for of_portion, sums in zip(computations, each, strict=True)
    ]
    if pairs.pair_weight is not None:
        log_totals = torch.stack([sums.log_totals for sums in each]).logsumexp(0)
        log_s = log_s + pairs.num_samples().log() - log_totals
    close(log_s, expected.log_s)
    close(sum(gradients), expected.gradient)


@given(
    pairs=any_pairs(),
    temperature=st.sampled_from([0.005, 0.02, 0.2]),
    num_ranks=st.integers(1, 4),
    block=st.sampled_from([1, 3, 640]),
)
def test_portions_of_blocks_add_up(pairs, temperature, num_ranks, block):
    with in_blocks(block):
        check_portions(pairs, temperature, num_ranks, blocks.Blocks)


def flex_engine():
    return pytest.importorskip("pgcl_losses.engine.flex", exc_type=ImportError).Flex


@on_a_cpu
class TestFlex:
    @settings(max_examples=20)
    @given(
        pairs=any_pairs(factors=False, by_index=False),
        temperature=st.sampled_from([0.01, 0.2, 1.0]),
        learned=st.booleans(),
    )
    def test_sums_and_gradients(self, pairs, temperature, learned):
        flex_engine()
        check_sums(pairs, temperature, "flex", learned)

    @settings(max_examples=10)
    @given(
        pairs=any_pairs(factors=False, by_index=False),
        temperature=st.sampled_from([0.005, 0.02, 0.2]),
        num_ranks=st.integers(1, 3),
    )
    def test_portions_add_up(self, pairs, temperature, num_ranks):
        check_portions(pairs, temperature, num_ranks, flex_engine())

    @pytest.mark.parametrize(
        ("views", "problem"),
        [
            (torch.empty(2, 4, 257), "embeddings of a dimension up to 256, but got 257"),
            (torch.empty(2, 4097, 2), "at most 8192 embeddings on a CPU, but got 8194"),
            (torch.empty(2, 4, 8).double().to("meta"), "float32 on meta, but got torch.float64"),
        ],
    )
    def test_what_it_refuses(self, views, problem):
        message = rf"engine='flex' takes {problem}: choose engine='blocks'"
        with pytest.raises(ValueError, match=message):
            InfoNCE(engine="flex")(*views)

    @pytest.mark.parametrize("option", [{"soft_clusters": True}, {"negative_ranks": (1, 3)}])
    def test_factors_are_refused(self, option):
        with pytest.raises(TypeError, match="'flex' computes weights of kind Table, but got"):
            PGCLLoss(4, 3, engine="flex", **option)(*torch.randn(2, 6, 4))


@engines
def test_an_unknown_kind_of_weight_is_an_error(engine):
    pairs = Pairs(F.normalize(torch.randn(8, 3)), (4, 4), weights=torch.ones(8, 8))
    message = f"engine='{engine}' computes weights of kind Table and Factors, but got Tensor"
    with pytest.raises(TypeError, match=message):
        sums_of(pairs, 0.2, engine)


class TestChoice:
    @pytest.mark.parametrize(
        ("device", "num", "num_past", "num_ranks", "expected"),
        [
            ("cpu", 64, 0, 1, "blocks"),
            ("cpu", 10**6, 0, 1, "blocks"),
            ("meta", 8192, 0, 1, "dense"),
            ("meta", 8193, 0, 1, "blocks"),
            ("meta", 4096, 4096, 1, "dense"),
            ("meta", 4096, 4097, 1, "blocks"),
            ("meta", 64, 0, 2, "blocks"),
        ],
    )
    def test_auto_by_shapes_and_device(self, device, num, num_past, num_ranks, expected):
        embeddings = torch.empty(num, 2, device=device)
        assert dispatch.choose("auto", embeddings, 0.2, num + num_past, num_ranks) == expected
        assert dispatch.choose("flex", embeddings, 0.2, num + num_past, num_ranks) == "flex"

    def test_auto_is_dense_under_a_transform(self):
        chosen = []

        def choose(z):
            chosen.append(dispatch.choose("auto", z, 0.2, len(z), 1))
            return z.sum()

        z = torch.zeros(20_000, 1)
        torch.func.grad(choose)(z)
        torch.func.jvp(choose, (z,), (z,))
        with forward_ad.dual_level():
            choose(forward_ad.make_dual(z, z))
        choose(z)
        assert chosen == ["dense", "dense", "dense", "blocks"]

    def test_dense_is_for_one_process(self):
        with pytest.raises(ValueError, match="engine='dense' computes one matrix in one process"):
            dispatch.choose("dense", torch.empty(8, 2), 0.2, 8, 2)


class TestBlocks:
    @given(
        lengths=st.lists(st.integers(0, 9), min_size=1, max_size=3),
        num_past=st.integers(0, 5),
        negatives=st.sampled_from(["all", "cross", "memory"]),
        first_queries=st.booleans(),
        num_ranks=st.integers(1, 5),
        block=st.sampled_from([1, 3, 100]),
    )
    def test_each_pair_is_in_one_portion(
        self, lengths, num_past, negatives, first_queries, num_ranks, block
    ):
        count, past = sum(lengths), torch.randn(num_past, 2)
        z, options = torch.randn(count, 2), {"past": past, "first_queries": first_queries}
        pairs = Pairs(z, tuple(lengths), negatives, **options)
        times = torch.zeros(count, count + num_past, dtype=torch.int64)
        for rank in range(num_ranks):
            with in_blocks(block):
                of_portion = blocks.Blocks(pairs, 0.2, rank, num_ranks).blocks
            for i, j in of_portion:
                times[i, j] += 1
                if i != j and j.start < pairs.num_queries():
                    times[j, i] += 1
        expected = torch.ones_like(times)
        if negatives != "all":
            of_set = torch.repeat_interleave(torch.tensor(lengths))
            expected[:, :count] = of_set.unsqueeze(1) != of_set if negatives == "cross" else 0
        expected[pairs.num_queries() :] = 0
        assert torch.equal(times, expected)

    def test_ranks_have_about_equally_many_pairs(self):
        for num_ranks in (2, 3, 4, 8, 13):
            pairs = Pairs(torch.empty(6000, 1), (6000,))
            each = [blocks.Blocks(pairs, 0.2, rank, num_ranks).blocks for rank in range(num_ranks)]
            counts = [
                sum((i.stop - i.start) * (j.stop - j.start) * (1 + (i != j)) for i, j in of_rank)
                for of_rank in each
            ]
            assert sum(counts) == 6000**2
            assert max(counts) < 1.6 * min(counts)

    def test_their_sizes(self):
        for device, size in (("cpu", 640), ("meta", 4096)):
            for num, num_blocks in ((size, 1), (size + 1, 3), (32 * size, 32 * 33 // 2)):
                pairs = Pairs(torch.empty(num, 1, device=device), (num,))
                assert len(blocks.Blocks(pairs, 0.2).blocks) == num_blocks

    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    @negatives_of
    @pytest.mark.parametrize("temperature", [0.01, 0.2])
    def test_memory_grows_with_embeddings_not_pairs(self, weighting, negatives, temperature):
        mode = {"weighting": weighting, "negatives": negatives, "temperature": temperature}
        with in_blocks(128):
            small, large = (peak_bytes("blocks", num, **mode) for num in (300, 1200))
        assert large < 5 * small  # four times the embeddings, sixteen times the pairs
        assert large < peak_bytes("dense", 1200, **mode) / 8


def contrast_of(views, clusters, prototypes, **options):
    return PrototypeReweightedNCE(**options)(*views, clusters=clusters, prototypes=prototypes)


def peak_bytes(engine, num, **mode):
    views = [torch.randn(num, 8, requires_grad=True) for _ in range(2)]
    clusters, prototypes = torch.randint(4, (2, num)), torch.randn(4, 8)
    with LiveBytes() as live:
        contrast_of(views, clusters, prototypes, engine=engine, **mode).backward()
    return live.peak


class TestNumbers:
    @engines
    @pytest.mark.parametrize("temperature", [0.002, 0.01, 0.02])
    @pytest.mark.parametrize("num_heads", [1, 2])
    def test_tiny_weights_count_at_low_temperatures(self, engine, temperature, num_heads):
        # One outlier has a weight of e^-128, and is the only negative of the others.
        views = F.normalize(torch.randn(2, 128, 3) + torch.tensor([2.0, -2.0]).view(2, 1, 1), dim=2)
        clusters = torch.zeros(2, 128, num_heads, dtype=torch.long)
        clusters[0, 0] = 1
        q = F.one_hot(clusters, 2).flatten(2).double()  # [2, N, H * 2], alike in all heads
        if num_heads == 1:
            clusters = clusters.squeeze(-1)
        assignments = [Assignment(q[v].log(), q[v], clusters[v], (2,) * num_heads) for v in (0, 1)]
        prototypes = torch.eye(3)[:2].repeat(num_heads, 1)
        loss = PrototypeReweightedNCE(temperature=temperature, engine=engine, reduction="none")
        losses = [
            loss(*views.to(dtype), assignments=assignments, prototypes=prototypes.to(dtype))
            for dtype in (torch.float32, torch.float64)
        ]
        assert losses[1].max() > 0.3 / temperature
        torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-3, atol=1e-3)

    @pytest.mark.parametrize("num", [10, 700])
    @pytest.mark.parametrize("angle", [0.5, 0.55, 0.6])
    def test_sums_that_underflow_in_float32_are_not_empty(self, num, angle):
        # The only negative of most embeddings is far from them and has a small weight.
        def point(at):
            return torch.tensor([math.cos(at), math.sin(at), 0.0])

        views = torch.stack([point(0), point(math.pi)]).unsqueeze(1).repeat(1, num, 1)
        views[:, 0] = point(math.pi / 2 + angle)
        clusters = torch.zeros(2, num, dtype=torch.long)
        clusters[:, 0] = 1
        results = []
        for engine in ("blocks", "dense"):
            leaf = views.clone().requires_grad_()
            options = {"temperature": 0.0101, "engine": engine, "reduction": "none"}
            losses = contrast_of(leaf, clusters, torch.eye(3)[:2], **options)
            losses.sum().backward()
            results.append((losses.detach(), leaf.grad[0]))
        torch.testing.assert_close(*results, rtol=1e-3, atol=0.05)  # of gradients of 84

    @pytest.mark.parametrize("weighting", WEIGHTINGS)
    @negatives_of
    @pytest.mark.parametrize("temperature", [1e-30, 1e-20, 1e-8, 0.01, 0.03, 0.2, 1e9, 1e30])
    def test_float32(self, weighting, negatives, temperature):
        options = {"weighting": weighting, "negatives": negatives, "temperature": temperature}
        views, clusters, prototypes = (
            torch.randn(2, 700, 4),
            torch.randint(3, (2, 700)),
            torch.randn(3, 4),
        )
        results = []
        for engine, dtype in (
            ("blocks", torch.float32),
            ("dense", torch.float32),
            ("dense", torch.float64),
        ):
            leaf = views.clone().to(dtype).requires_grad_()
            loss = contrast_of(leaf, clusters, prototypes, engine=engine, **options)
            loss.backward()
            assert leaf.grad.isfinite().all()
            results.append([loss.double(), leaf.grad.double()])
        for result in results[:2]:
            of_which = slice(2 if 0.01 <= temperature <= 1 else 1)
            torch.testing.assert_close(result[of_which], results[2][of_which], rtol=1e-3, atol=1e-6)


# Losses in eval mode, of which a call is like another, with a memory that is half full.
LOSSES = {
    "InfoNCE": InfoNCE,
    "hard and debiased": functools.partial(InfoNCE, hardness=0.5, debias=0.2),
    "items": functools.partial(InfoNCE, debias=0.2),
    "memory": lambda **options: remembering(InfoNCE(memory_size=10, dim=4, **options)),
    "PGCL": lambda **options: PGCLLoss(4, 3, **options),
    "PGCL with memory": lambda **options: remembering(
        PGCLLoss(4, (3, 4), memory_size=10, soft_clusters=True, **options)
    ),
}
losses_of = pytest.mark.parametrize("name", LOSSES)


def remembering(loss):
    loss.double().remember(torch.randn(5, 4).double())
    return loss


def views_of(num):
    return torch.randn(2, num, 4, dtype=torch.float64)


class TestDerivatives:
    @losses_of
    @pytest.mark.parametrize("num", [5, 700])
    def test_torch_func_and_forward_mode_of_auto(self, name, num):
        loss = LOSSES[name]().double().eval()
        if name == "items":
            loss = functools.partial(loss, items=torch.arange(num) // 2)
        leaf, direction = views_of(num).requires_grad_(), views_of(num)
        value = loss(*leaf)
        (expected,) = torch.autograd.grad(value, leaf)
        by_func = torch.func.grad_and_value(lambda views: loss(*views))(leaf.detach())
        torch.testing.assert_close(by_func, (expected, value.detach()))
        with forward_ad.dual_level():
            views = forward_ad.make_dual(leaf.detach(), direction)
            derivative = forward_ad.unpack_dual(loss(*views)).tangent
        torch.testing.assert_close(derivative, (expected * direction).sum())

    def test_a_training_forward_under_a_transform_stores_nothing(self):
        loss = InfoNCE(memory_size=10, dim=4).double()
        torch.func.grad(lambda views: loss(*views))(views_of(5))
        assert loss.memory.written == 0

    @pytest.mark.parametrize(
        "make",
        [
            InfoNCE,
            functools.partial(PGCLLoss, 4, 3),
            functools.partial(PGCLLoss, 4, 3, soft_clusters=True, queue_size=4),
        ],
    )
    def test_forward_mode_by_the_temperature_alone(self, make):
        views, tau = views_of(5), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        loss = make().double().eval()
        loss.temperature = tau
        (expected,) = torch.autograd.grad(loss(*views), tau)
        with forward_ad.dual_level():
            loss.temperature = forward_ad.make_dual(tau.detach(), torch.ones_like(tau))
            derivative = forward_ad.unpack_dual(loss(*views)).tangent
        torch.testing.assert_close(derivative, expected)

    @pytest.mark.parametrize("name", ["InfoNCE", "memory", "contrast"])
    def test_second_derivatives_of_dense(self, name):
        """Of losses whose weights do not depend on the views: they are constants."""
        loss_of = functools.partial(contrast_of, clusters=torch.arange(8).view(2, 4) % 3)
        loss_of = functools.partial(loss_of, prototypes=torch.randn(3, 4), engine="dense")
        if name != "contrast":
            loss = LOSSES[name](engine="dense").eval()
            loss_of = lambda views: loss(*views)  # noqa: E731
        assert torch.autograd.gradgradcheck(loss_of, views_of(4).requires_grad_())

    def test_jacobian_and_hessian(self):
        loss = InfoNCE(reduction="none")
        views = views_of(4)
        jacobian = torch.func.jacrev(lambda views: loss(*views))(views)
        leaf = views.clone().requires_grad_()
        losses = loss(*leaf)
        for row, each in zip(jacobian, losses, strict=True):
            torch.testing.assert_close(row, torch.autograd.grad(each, leaf, retain_graph=True)[0])
        hessian = torch.func.hessian(lambda views: InfoNCE()(*views))(views).view(32, 32)
        torch.testing.assert_close(hessian, hessian.T)

    @pytest.mark.parametrize("items", [None, torch.tensor([0, 0, 1, 2, 1])])
    def test_by_the_temperature_alone(self, items):
        """With a frozen encoder."""
        views = views_of(5)

        def loss_of(tau):
            return InfoNCE(temperature=tau, engine="dense")(*views, items=items)

        tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(loss_of, tau)
        assert torch.autograd.gradgradcheck(loss_of, tau)

    @pytest.mark.parametrize("items", [None, torch.arange(6) // 2])
    def test_blocks_are_differentiable_once(self, items):
        views = torch.randn(2, 6, 4, requires_grad=True)
        loss = InfoNCE(engine="blocks")(*views, items=items)
        with pytest.raises(RuntimeError, match="differentiable once: engine='dense', in one"):
            torch.autograd.grad(loss, views, create_graph=True)


@compiling
class TestCompiled:
    def compare(self, compiled, loss, num):
        views = [torch.randn(num, 4, requires_grad=True) for _ in range(2)]
        expected, ours = loss(*views), compiled(*views)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(
            torch.autograd.grad(ours, views), torch.autograd.grad(expected, views)
        )

    @pytest.mark.parametrize(("engine", "dynamic"), [("auto", True), ("dense", None)])
    def test_one_graph_that_follows_the_temperature(self, engine, dynamic):
        torch.compiler.reset()
        loss = PGCLLoss(4, 3, engine=engine)
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for num, temperature in ((9, 0.2), (12, 0.3), (12, 0.02)):
            loss.temperature = temperature
            self.compare(compiled, loss, num)

    # torch's own, where a graph begins within the loss.
    @pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
    @pytest.mark.parametrize("options", [{"engine": "blocks"}, {"weighting": "sample"}])
    def test_blocks_run_outside_of_the_graph(self, options, monkeypatch):
        """So do large batches, here more than 8 embeddings."""
        monkeypatch.setattr(dispatch, "_DENSE_UP_TO", 8)
        torch.compiler.reset()
        loss = PGCLLoss(4, 3, **options)
        compiled = torch.compile(loss, backend="aot_eager")
        for num in (4, 9, 30):
            with in_blocks(25):
                self.compare(compiled, loss, num)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="engine='dense' can be traced"):
            torch.compile(loss, fullgraph=True, backend="aot_eager")(*torch.randn(2, 9, 4))
