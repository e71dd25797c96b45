"""Engines agree with the oracle for blocks of any size; streaming needs memory for embeddings."""

import functools
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
from helpers.engine_oracle import exact, log_scaled
from helpers.marks import compiling, engines, negatives_of
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch import Tensor

from pgcl_losses import Assignment, PGCLLoss, PrototypeReweightedNCE
from pgcl_losses.contrast import NEGATIVES, WEIGHTINGS
from pgcl_losses.engine import blocks, dense, streaming
from pgcl_losses.engine.contract import (
    Factors,
    Gaussian,
    Pairs,
    Past,
    Portion,
    Table,
    compared_sets,
    couples,
)
from pgcl_losses.engine.dispatch import TRACEABLE, log_weighted_sums
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
@negatives_of
@pytest.mark.parametrize("temperature", [0.01, 0.03, 0.2])
def test_streaming_in_float32(weighting, negatives, temperature):
    z1, z2 = torch.randn(2, 700, 16)
    clusters = torch.randint(5, (2, 700))
    prototypes = torch.randn(5, 16)
    results = []
    for engine, dtype in (("streaming", torch.float32), ("dense", torch.float64)):
        views = [z.detach().to(dtype).requires_grad_() for z in (z1, z2)]
        loss = PrototypeReweightedNCE(
            weighting=weighting, negatives=negatives, temperature=temperature, engine=engine
        )(*views, *clusters, prototypes)
        loss.backward()
        results.append([tensor.double() for tensor in (loss, *(view.grad for view in views))])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-6)


def test_large_cluster_numbers_that_are_equal_as_floats():
    z1, z2 = torch.randn(2, 20, 4)
    near = 2**60 + torch.randint(3, (2, 20))  # one number in float64
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
@negatives_of
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_memory_of_streaming_grows_with_embeddings_not_pairs(weighting, negatives, temperature):
    mode = {"weighting": weighting, "negatives": negatives, "temperature": temperature}
    with in_blocks(128):
        small, large = (peak_bytes("streaming", n, **mode) for n in (300, 1200))
    assert large < 5 * small  # four times the embeddings, sixteen times the pairs
    assert large < peak_bytes("dense", 1200, **mode) / 8


def test_auto_is_dense_for_small_batches_and_streaming_for_large():
    for n, expected in ((64, "dense"), (1500, "streaming")):
        other = {"dense": "streaming", "streaming": "dense"}[expected]
        assert peak_bytes("auto", n) == peak_bytes(expected, n) != peak_bytes(other, n)


@engines
def test_an_unknown_kind_of_weight_is_an_error(engine):
    pairs = Pairs(F.normalize(torch.randn(8, 3)), (4, 4), ((0, 1),), by_cluster=torch.ones(8, 8))
    message = f"engine='{engine}' computes weights of the kinds Table and Factors, but got Tensor"
    with pytest.raises(TypeError, match=message):
        log_weighted_sums(pairs, 0.2, engine, Ranks((4,)))


class Beta(NamedTuple):
    """A pair weight that no engine was written for: (1 + s)^a (1 - s)^b, a mixture's component."""

    a: Tensor  # [M]
    b: Tensor

    def numbers(self, scale):
        return self.a, self.b, torch.full_like(self.a, 1 / scale)

    def formula(self, scaled, *numbers, out=None):
        a, b, unit = numbers
        cosines = scaled * unit
        return torch.add(a * (1.1 + cosines).log2(), b * (1.1 - cosines).log2(), out=out)


@st.composite
def pairs_of_any_kind(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    random = functools.partial(torch.rand, generator=generator, dtype=torch.float64)

    def number(below, *shape):
        return torch.randint(below, shape, generator=generator)

    lengths = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    if draw(st.booleans()):
        lengths = (draw(st.integers(1, 4)),) * len(lengths)
    m = max(1, sum(lengths))
    lengths = lengths if sum(lengths) else (1,)
    compared = draw(
        st.one_of(
            st.sampled_from([compared_sets(len(lengths), name) for name in ("all", "cross")]),
            st.sets(st.sampled_from(couples(len(lengths)))).map(sorted).map(tuple),
        )
    )
    items = draw(st.sampled_from([None, number(3, m), 2**60 + number(50, m)]))

    def log_table(size):
        table = random(size, size)
        return table.masked_fill(random(size, size) < 0.3, 0.0).log()

    sizes = draw(st.sampled_from([(1,), (4,), (30,), (3, 5, 2)]))
    tables = tuple([log_table(size) for size in sizes])
    table = Table(tables, torch.stack([number(size, m) for size in sizes], dim=1))
    excluding = Table((torch.log(1 - torch.eye(4).double()),), number(4, m, 1))
    left, right = (random(m, 3) * (random(m, 3) > 0.3) for _ in range(2))
    by_cluster = draw(st.sampled_from([None, table, excluding, Factors(left, right)]))
    by_cosine = draw(
        st.sampled_from(
            [None, Gaussian(random(m) - 0.5, random(m) + 0.05), Beta(random(m), random(m))]
        )
    )
    embeddings = F.normalize(random(m, 3) - 0.5)
    return Pairs(embeddings, lengths, compared, items, by_cluster, by_cosine)


@st.composite
def pairs_and_past(draw):
    """Some of the embeddings, and others behind them as the past."""
    every = draw(pairs_of_any_kind())
    size = draw(st.integers(0, 9))
    if size == 0:
        return every, None
    numbers = torch.arange(len(every.embeddings) + size) % len(every.embeddings)  # m, and B of them

    def longer(weights):
        if isinstance(weights, Table):
            return weights._replace(clusters=weights.clusters[numbers])
        return weights and type(weights)(*[of_all[numbers] for of_all in weights])

    of_past = numbers[-size:].flip(0)
    return every, Past(
        F.normalize(every.embeddings[of_past] + 0.3),
        None if every.items is None else every.items[of_past],
        draw(st.sampled_from([None, of_past % 2 == 0, of_past < 0])),
        longer(every.by_cluster),
    )


@given(
    both=pairs_and_past(),
    temperature=st.sampled_from([0.02, 0.2, 1.0]),
    engine=st.sampled_from(["dense", "streaming"]),
    block=st.sampled_from([1, 3, 640]),
    in_cache=st.sampled_from([0, 1 << 20]),
    learned=st.booleans(),
)
def test_engines_agree_with_the_contract(both, temperature, engine, block, in_cache, learned):
    pairs, past = both
    d_log_s = torch.linspace(-1, 2, len(pairs.embeddings), dtype=torch.float64)
    expected = exact(pairs, temperature, d_log_s, past)
    embeddings = pairs.embeddings.clone().requires_grad_()
    constant = pairs._replace(embeddings=embeddings)
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=learned)
    inputs = [embeddings, tau] if learned else [embeddings]
    with in_blocks(block), mock.patch.object(dense, "_IN_CACHE", in_cache):
        log_s = log_weighted_sums(
            constant, inputs[1] if learned else temperature, engine, Ranks((1,)), past
        )
        some = log_s.detach() > -torch.inf
        gradients = [torch.zeros_like(of) for of in inputs]
        if some.any():
            gradients = torch.autograd.grad((log_s * d_log_s)[some].sum(), inputs)
    close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)
    close(log_s.detach(), log_scaled(expected, pairs, past))
    close(gradients[0], expected.gradient)
    if learned:
        close(gradients[1], expected.d_temperature, atol=1e-6)


@given(
    pairs=pairs_of_any_kind(),
    temperature=st.sampled_from([0.005, 0.02, 0.2]),
    num_ranks=st.integers(1, 4),
    block=st.sampled_from([1, 3, 640]),
    readable=st.booleans(),
    kept=st.booleans(),
)
def test_portions_of_streaming_add_up(pairs, temperature, num_ranks, block, readable, kept):
    """Also unsorted, as on a GPU, where blocks have another size."""
    d_log_s = torch.linspace(-1, 2, len(pairs.embeddings), dtype=torch.float64)
    expected = exact(pairs, temperature, d_log_s)
    portions = [Portion(rank, num_ranks) for rank in range(num_ranks)]
    with in_blocks(block), mock.patch.object(blocks, "can_be_read", return_value=readable):
        sums = [streaming.log_sums(pairs, temperature, portion) for portion in portions]
        log_sums = torch.stack([of_portion.log_sums for of_portion in sums]).logsumexp(0)
        gradients = [
            streaming.gradient(
                pairs, temperature, log_sums, d_log_s, portion, of_portion.layout if kept else None
            )
            for portion, of_portion in zip(portions, sums, strict=True)
        ]
    torch.testing.assert_close(log_sums, expected.log_sums, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(sum(gradients), expected.gradient, rtol=1e-8, atol=1e-8)
    if expected.log_totals is not None:
        log_totals = torch.stack([of_portion.log_totals for of_portion in sums]).logsumexp(0)
        torch.testing.assert_close(log_totals, expected.log_totals, rtol=1e-8, atol=1e-8)


def test_dense_is_for_one_process():
    pairs = Pairs(torch.randn(8, 3), (4, 4), ((0, 1),))
    with pytest.raises(ValueError, match="engine='dense' computes one matrix in one process"):
        log_weighted_sums(pairs, 0.2, "dense", Ranks((2, 2)))


@engines
@pytest.mark.parametrize("temperature", [0.002, 0.01, 0.02])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_tiny_weights_count_at_low_temperatures(engine, temperature, num_heads):
    # One outlier has a weight of e^-128, and is the only negative of the others.
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
def test_sums_that_underflow_in_float32_are_not_empty(num, angle):
    # The only negative of most embeddings is far from them and has a small weight.
    def point(at):
        return [math.cos(at), math.sin(at), 0.0]

    z1, z2 = torch.tensor([[point(0)] * num, [point(math.pi)] * num])
    z1[0] = z2[0] = torch.tensor(point(math.pi / 2 + angle))
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
        leaves = [view.clone().requires_grad_() for view in views]
        loss = PrototypeReweightedNCE(weighting=weighting, temperature=temperature, engine=engine)
        losses.append(loss(*leaves, *clusters, prototypes))
        losses[-1].backward()
        assert all(leaf.grad.isfinite().all() for leaf in leaves)
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
    with pytest.raises(RuntimeError, match="differentiable once here: engine='dense'"):
        torch.autograd.grad(loss * z1.sum(), z1, create_graph=True)


@compiling
@pytest.mark.parametrize(
    ("weighting", "negatives", "block"),
    [
        ("prototype", "all", 1000),
        ("sample", "cross", 1000),
        *((weighting, negatives, 25) for weighting in WEIGHTINGS[:2] for negatives in NEGATIVES),
    ],
)
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


@compiling
@engines
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


def test_triton_without_its_package_or_a_gpu_is_an_error():
    z = torch.randn(4, 3)
    uniform = {"weighting": "uniform", "exclude_same_cluster": False, "engine": "triton"}
    with (
        mock.patch("importlib.util.find_spec", return_value=None),
        pytest.raises(ModuleNotFoundError, match="pip install triton"),
    ):
        PrototypeReweightedNCE(**uniform)(z, z)
    with (
        mock.patch.dict(os.environ, {"TRITON_INTERPRET": "0"}),
        pytest.raises(ValueError, match=r"engine='triton' needs embeddings on a CUDA device.*cpu"),
    ):
        PrototypeReweightedNCE(**uniform)(z, z)
