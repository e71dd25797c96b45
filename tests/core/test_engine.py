"""Every engine gives what the oracle gives, whatever its blocks, and streaming stays small."""

import functools
import itertools
import math
import os
from typing import NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.blocks import in_blocks
from helpers.cases import MODES, cases, oracle_losses
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import LiveBytes

from pgcl_losses import Assignment, PGCLLoss, PrototypeReweightedNCE
from pgcl_losses.contrast import NEGATIVES, WEIGHTINGS
from pgcl_losses.engine import (
    TRACEABLE,
    Factors,
    Gaussian,
    Pairs,
    blocks,
    dense,
    log_weighted_sums,
    mean_of,
    streaming,
)
from pgcl_losses.engine.pairs import Share
from pgcl_losses.ranks import Ranks


def losses_and_gradients(case, engine, mode):
    z1, z2, *others = case.tensors()
    z1.requires_grad_()
    z2.requires_grad_()
    losses = PrototypeReweightedNCE(**mode, reduction="none", engine=engine)(z1, z2, *others)
    losses.backward(torch.linspace(-1, 2, len(losses), dtype=torch.float64))
    lengths = torch.cat([z1, z2]).detach().norm(dim=1, keepdim=True)
    return losses.detach(), torch.cat([z1.grad, z2.grad]) * lengths


@given(
    case=cases(),
    mode=st.fixed_dictionaries({**MODES, "temperature": st.sampled_from([0.01, 0.2, 1.0])}),
    block=st.sampled_from([1, 2, 3, 512]),
)
def test_streaming_agrees_with_the_oracle_and_the_dense_gradient(case, mode, block):
    with in_blocks(block):
        ours, gradient = losses_and_gradients(case, "streaming", mode)
    _, dense_gradient = losses_and_gradients(case, "dense", mode)
    torch.testing.assert_close(gradient, dense_gradient, rtol=1e-9, atol=1e-9)
    if mode["temperature"] > 0.01:  # the oracle takes its exponentials as they come
        expected = oracle_losses(case, (case.z1, case.z2), **mode)
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("negatives", NEGATIVES)
@pytest.mark.parametrize("temperature", [0.01, 0.03, 0.2])
def test_streaming_in_float32(weighting, negatives, temperature):
    z1, z2 = torch.randn(2, 700, 16)
    clusters = torch.randint(5, (2, 700))
    prototypes = torch.randn(5, 16)
    results = []
    for engine, dtype in (("streaming", torch.float32), ("dense", torch.float64)):
        rows = [z.detach().to(dtype).requires_grad_() for z in (z1, z2)]
        loss = PrototypeReweightedNCE(
            weighting=weighting, negatives=negatives, temperature=temperature, engine=engine
        )(*rows, *clusters, prototypes)
        loss.backward()
        results.append([tensor.double() for tensor in (loss, *(row.grad for row in rows))])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("negatives", NEGATIVES)
def test_streaming_edges(weighting, negatives):
    loss = PrototypeReweightedNCE(
        weighting=weighting, negatives=negatives, engine="streaming", reduction="none"
    )
    for n, one_cluster in ((1, False), (9, True)):
        z1, z2 = torch.randn(2, n, 4, requires_grad=True).unbind()
        z1.retain_grad()
        clusters = torch.zeros(n, dtype=torch.long) if one_cluster else torch.arange(n) % 3
        losses = loss(z1, z2, clusters, clusters, torch.randn(3, 4))
        losses.sum().backward()
        assert not losses.any()
        assert not z1.grad.any()
    bad = torch.randn(9, 4)
    bad[3, 1] = torch.nan
    clusters = torch.arange(9) % 3
    assert loss(bad, torch.randn(9, 4), clusters, clusters, torch.randn(3, 4)).isnan().any()


def test_clusters_are_told_apart_whatever_their_numbers():
    z1, z2 = torch.randn(2, 20, 4)
    near = 2**60 + torch.randint(3, (2, 20))  # one and the same number to a float
    loss = PrototypeReweightedNCE(weighting="sample", engine="streaming")
    torch.testing.assert_close(loss(z1, z2, *near), loss(z1, z2, *(near - 2**60)))


def test_streaming_with_many_small_clusters():
    z1, z2 = torch.randn(2, 20, 4)
    clusters, prototypes = torch.randint(300, (2, 20)), torch.randn(300, 4)
    streaming, dense = (
        PrototypeReweightedNCE(engine=engine)(z1, z2, *clusters, prototypes)
        for engine in ("streaming", "dense")
    )
    torch.testing.assert_close(streaming, dense)


def peak_bytes(engine, n, **mode):
    torch.manual_seed(0)  # how large blocks are depends on clusters
    z1, z2 = (torch.randn(n, 8, requires_grad=True) for _ in range(2))
    clusters = torch.randint(4, (n,))
    prototypes = torch.randn(4, 8)
    loss = PrototypeReweightedNCE(engine=engine, **mode)
    with LiveBytes() as live:
        loss(z1, z2, clusters, clusters, prototypes).backward()
    return live.peak


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("negatives", NEGATIVES)
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_streaming_memory_grows_with_rows_and_not_with_pairs(weighting, negatives, temperature):
    mode = {"weighting": weighting, "negatives": negatives, "temperature": temperature}
    with in_blocks(128):
        small, large = (peak_bytes("streaming", n, **mode) for n in (300, 1200))
    assert large < 5 * small  # four times the rows, sixteen times the pairs
    assert large < peak_bytes("dense", 1200, **mode) / 8


def test_auto_is_dense_for_small_batches_and_streaming_for_large():
    for n, expected in ((64, "dense"), (1500, "streaming")):
        other = {"dense": "streaming", "streaming": "dense"}[expected]
        assert peak_bytes("auto", n) == peak_bytes(expected, n) != peak_bytes(other, n)


@pytest.mark.parametrize("engine", ["dense", "streaming"])
def test_an_unknown_kind_of_weight_is_an_error(engine):
    class Periodic(NamedTuple):
        period: float

    rows = torch.nn.functional.normalize(torch.randn(8, 3))
    ranks = Ranks((4,))
    pairs = Pairs(rows, num_views=2, weights=(Periodic(0.5),))
    with pytest.raises(TypeError, match=f"engine='{engine}' computes weights of the kinds Factors"):
        log_weighted_sums(pairs, 0.2, engine, ranks)
    twice = Pairs(rows, num_views=2, weights=(Factors(torch.zeros(8, 1), torch.ones(8, 1)),) * 2)
    with pytest.raises(TypeError, match="weights must hold one Factors at most, but got 2"):
        log_weighted_sums(twice, 0.2, engine, ranks)


def literal_sums(pairs, temperature):
    """Log S of every row, in loops."""
    rows, n = pairs.rows, len(pairs.rows) // pairs.num_views
    weights = torch.ones(len(rows), len(rows), dtype=rows.dtype)
    for weight in pairs.weights:
        if isinstance(weight, Factors):
            left, right = weight.left_matrix(), weight.right_matrix()
            for i, j in itertools.product(range(len(rows)), repeat=2):
                weights[i, j] *= sum(left[i] * right[j])
        else:
            for i in range(len(rows)):
                cosines = torch.stack([rows[i] @ other for other in rows]).detach()
                values = torch.exp(-((cosines - weight.mean[i]) ** 2) / (2 * weight.variance[i]))
                weights[i] *= values / values.mean()
    sums = []
    for i in range(len(rows)):
        total = torch.zeros((), dtype=rows.dtype)
        for j in range(len(rows)):
            same_view = pairs.across_views and i // n == j // n
            if i % n != j % n and not same_view:
                total = total + weights[i, j] * torch.exp(rows[i] @ rows[j] / temperature)
        sums.append(total.log() if total > 0 else torch.tensor(-torch.inf, dtype=rows.dtype))
    return torch.stack(sums)


@st.composite
def pairs_of_any_kind(draw):
    num_views, num_graphs = draw(st.integers(2, 4)), draw(st.integers(1, 4))
    m, r = num_views * num_graphs, draw(st.integers(1, 5))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    random = functools.partial(torch.rand, generator=generator, dtype=torch.float64)
    rows = torch.nn.functional.normalize(random(m, 3) - 0.5)
    left = random(m, r) * (random(m, r) > 0.3)
    columns = torch.randint(r, (m,), generator=generator)
    right = draw(st.sampled_from([columns, random(m, r) * (random(m, r) > 0.3)]))
    factors, gaussian = Factors(left.log(), right), Gaussian(random(m) - 0.5, random(m) + 0.05)
    table = Factors(random(r, r).log(), columns, lines=columns)
    excluding = Factors(torch.log(1 - torch.eye(r).double()), columns, columns)
    more, of_more = random(r + 2, r + 1), torch.randint(r + 1, (m,), generator=generator)
    lines = torch.randint(r + 2, (m,), generator=generator)
    heads = mean_of([table, Factors(more.log(), of_more, lines=lines), excluding])
    few = [(), (factors,), (table,), (excluding,), (heads,)]
    weights = draw(st.sampled_from([*few, *((gaussian, *some) for some in few)]))
    return Pairs(rows, num_views, draw(st.booleans()), weights)


@given(
    pairs=pairs_of_any_kind(),
    temperature=st.sampled_from([0.02, 0.2, 1.0]),
    engine=st.sampled_from(["dense", "streaming"]),
    block=st.sampled_from([1, 3, 640]),
    in_cache=st.sampled_from([0, 1 << 20]),
)
def test_an_engine_computes_the_sentence_of_its_contract(
    pairs, temperature, engine, block, in_cache
):
    results = []
    slopes = torch.linspace(-1, 2, len(pairs.rows), dtype=torch.float64)
    for function in (
        lambda pairs: literal_sums(pairs, temperature),
        lambda pairs: log_weighted_sums(pairs, temperature, engine, Ranks((1,))),
    ):
        rows = pairs.rows.clone().requires_grad_()
        constant = pairs._replace(rows=rows)
        with in_blocks(block), mock.patch.object(dense, "_IN_CACHE", in_cache):
            log_sums = function(constant)
            there = log_sums.detach() > -torch.inf
            gradient = torch.zeros_like(rows)
            if there.any():
                (gradient,) = torch.autograd.grad((log_sums * slopes)[there].sum(), rows)
        results.append((log_sums.detach(), gradient))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


@given(
    pairs=pairs_of_any_kind(),
    temperature=st.sampled_from([0.02, 0.2]),
    num_ranks=st.integers(1, 4),
    block=st.sampled_from([1, 3, 640]),
)
def test_shares_of_streaming_add_up(pairs, temperature, num_ranks, block):
    shares = [Share(rank, num_ranks) for rank in range(num_ranks)]
    slopes = torch.linspace(-1, 2, len(pairs.rows), dtype=torch.float64)
    with in_blocks(block):
        whole = streaming.log_sums(pairs, temperature)
        parts = [streaming.log_sums(pairs, temperature, share) for share in shares]
        for ours, expected in zip(zip(*parts, strict=True), whole, strict=True):
            if expected is not None:
                torch.testing.assert_close(torch.stack(ours).logsumexp(0), expected)
        gradients = [
            streaming.gradient(pairs, temperature, whole.log_sums, slopes, share)
            for share in [Share(), *shares]
        ]
    torch.testing.assert_close(sum(gradients[1:]), gradients[0])


@given(
    pairs=pairs_of_any_kind(),
    temperature=st.sampled_from([0.005, 0.02, 0.2]),
    num_ranks=st.integers(1, 3),
    block=st.sampled_from([1, 3, 4096]),
)
def test_streaming_where_python_cannot_look_at_numbers(pairs, temperature, num_ranks, block):
    """As on a GPU: rows are not sorted, and blocks have a size of their own."""
    slopes = torch.linspace(-1, 2, len(pairs.rows), dtype=torch.float64)
    leaf = pairs.rows.clone().requires_grad_()
    expected = literal_sums(pairs._replace(rows=leaf), temperature)
    there = expected > -torch.inf
    d_rows = torch.zeros_like(leaf)
    if there.any():
        (d_rows,) = torch.autograd.grad((expected * slopes)[there].sum(), leaf)

    shares = [Share(rank, num_ranks) for rank in range(num_ranks)]
    unread = {"can_be_read": lambda values: False}
    with (
        in_blocks(block),
        mock.patch.multiple(blocks, **unread),
        mock.patch.multiple(streaming, **unread),
    ):
        parts = [streaming.log_sums(pairs, temperature, share) for share in shares]
        log_sums, *log_masses = (
            torch.stack(of_shares).logsumexp(0)
            for of_shares in zip(*parts, strict=True)
            if of_shares[0] is not None
        )
        gradients = [
            streaming.gradient(pairs, temperature, log_sums, slopes, share) for share in shares
        ]
    scales = [math.log(len(log_sums)) - of_rows for of_rows in log_masses]
    ours = sum(scales, log_sums)
    torch.testing.assert_close(ours, expected.detach(), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(sum(gradients), d_rows, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("engine", ["dense", "streaming"])
@pytest.mark.parametrize("temperature", [0.002, 0.01, 0.02])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_weights_too_small_for_float32_count_at_low_temperatures(engine, temperature, num_heads):
    # One outlier, which weighs e^-128 and is the only negative that others have.
    z1 = F.normalize(torch.randn(128, 3) + 2, dim=-1)
    z2 = F.normalize(torch.randn(128, 3) - 2, dim=-1)
    clusters = torch.zeros(2, 128, num_heads, dtype=torch.long)
    clusters[0, 0] = 1
    q = F.one_hot(clusters, 2).flatten(2)  # [2, N, H * 2], alike in all heads
    if num_heads == 1:
        clusters = clusters.squeeze(-1)
    assignments = [
        Assignment(q.log(), q.double(), of_view, (2,) * num_heads)
        for q, of_view in zip(q.double(), clusters, strict=True)
    ]
    prototypes = torch.eye(3)[:2].repeat(num_heads, 1)
    loss = PrototypeReweightedNCE(temperature=temperature, engine=engine, reduction="none")
    losses = [
        loss([z1.to(dtype), z2.to(dtype)], assignments=assignments, prototypes=prototypes.to(dtype))
        for dtype in (torch.float32, torch.float64)
    ]
    assert losses[1].max() > 0.3 / temperature
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("num", [10, 58, 700])
@pytest.mark.parametrize("angle", [0.5, 0.55, 0.6])
def test_a_sum_that_leaves_float32_is_no_lack_of_negatives(num, angle):
    # The others' only negative lies away from them and weighs little.
    def row(at):
        return [math.cos(at), math.sin(at), 0.0]

    z1, z2 = torch.tensor([[row(0)] * num, [row(math.pi)] * num])
    z1[0] = z2[0] = torch.tensor(row(math.pi / 2 + angle))
    clusters = torch.zeros(num, dtype=torch.long)
    clusters[0] = 1
    results = []
    for engine in ("streaming", "dense"):
        leaf = z1.clone().requires_grad_()
        losses = PrototypeReweightedNCE(temperature=0.0101, engine=engine, reduction="none")(
            leaf, z2, clusters, clusters, torch.eye(3)[:2]
        )
        losses.sum().backward()
        results.append((losses.detach(), leaf.grad))
    torch.testing.assert_close(*results, rtol=1e-3, atol=0.05)  # of gradients of 84


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("temperature", [1e-30, 1e-20, 1e-9, 1e-8, 1e9, 1e20, 1e30])
def test_any_temperature_gives_finite_losses_and_gradients(weighting, temperature):
    views = torch.randn(2, 40, 4)
    clusters, prototypes = torch.randint(3, (2, 40)), torch.randn(3, 4)
    losses = []
    for engine in ("streaming", "dense"):
        rows = [view.clone().requires_grad_() for view in views]
        loss = PrototypeReweightedNCE(weighting=weighting, temperature=temperature, engine=engine)
        losses.append(loss(*rows, *clusters, prototypes))
        losses[-1].backward()
        assert all(row.grad.isfinite().all() for row in rows)
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-4)


def test_forward_mode_derivatives_of_dense():
    pgcl = PGCLLoss(4, 3, engine="dense").double().eval()
    views = torch.randn(2, 5, 4, dtype=torch.float64)
    directions = torch.randn(2, 5, 4, dtype=torch.float64)
    with torch.autograd.forward_ad.dual_level():
        duals = [
            torch.autograd.forward_ad.make_dual(*pair)
            for pair in zip(views, directions, strict=True)
        ]
        derivative = torch.autograd.forward_ad.unpack_dual(pgcl(*duals)).tangent
    leaf = views.clone().requires_grad_()
    pgcl(*leaf).backward()
    torch.testing.assert_close(derivative, (leaf.grad * directions).sum())


def test_streaming_is_differentiable_once():
    z1, z2 = torch.randn(2, 6, 4, requires_grad=True).unbind()
    loss = PrototypeReweightedNCE(
        weighting="uniform", exclude_same_cluster=False, engine="streaming"
    )(z1, z2)
    (gradient,) = torch.autograd.grad(loss * z1.sum(), z1, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# torch.compile itself uses what is deprecated, and finds Python 3.13.0 slow.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@pytest.mark.parametrize("weighting", ["prototype", "sample"])
@pytest.mark.parametrize("negatives", NEGATIVES)
@pytest.mark.parametrize("block", [1000, 25], ids=["one block", "blocks"])
def test_streaming_compiles(weighting, negatives, block):
    torch.compiler.reset()
    pgcl = PGCLLoss(4, 3, engine="streaming", weighting=weighting, negatives=negatives)
    compiled = torch.compile(pgcl, fullgraph=TRACEABLE, backend="aot_eager")
    views = torch.randn(2, 30, 4)
    results = []
    for loss in (pgcl, compiled):
        mine = [view.clone().requires_grad_() for view in views]
        with in_blocks(block):
            value = loss(*mine)
            value.backward()
        results.append((value, *(view.grad for view in mine)))
    torch.testing.assert_close(*results)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@pytest.mark.parametrize("engine", ["dense", "streaming", "auto"])
@pytest.mark.skipif(not TRACEABLE, reason="torch.compile sees autograd functions wrong there")
def test_a_compiled_loss_follows_its_temperature(engine):
    torch.compiler.reset()
    loss = PGCLLoss(4, 3, engine=engine)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for temperature in (0.2, 0.3, 0.02):
        loss.temperature = temperature
        views = [view.requires_grad_() for view in torch.randn(2, 9, 4)]
        expected = torch.autograd.grad(loss(*views), views)
        torch.testing.assert_close(torch.autograd.grad(compiled(*views), views), expected)


def test_triton_says_what_is_missing():
    rows = torch.randn(4, 3)
    uniform = {"weighting": "uniform", "exclude_same_cluster": False, "engine": "triton"}
    with (
        mock.patch("importlib.util.find_spec", return_value=None),
        pytest.raises(ModuleNotFoundError, match="pip install triton"),
    ):
        PrototypeReweightedNCE(**uniform)(rows, rows)
    with (
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "0"}),
        pytest.raises(ValueError, match=r"engine='triton' needs rows on a CUDA device.*cpu"),
    ):
        PrototypeReweightedNCE(**uniform)(rows, rows)
