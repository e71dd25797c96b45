"""Every engine gives what the oracle gives, whatever its blocks, and streaming stays small."""

import os
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.blocks import in_blocks, streaming_file
from helpers.cases import MODES, cases, oracle_losses
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import LiveBytes

from pgcl_losses import PGCLLoss, PrototypeReweightedNCE


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
    block=st.sampled_from([(1, 1), (2, 7), (3, 30), (512, 1 << 21)]),
)
def test_streaming_agrees_with_the_oracle_and_the_dense_gradient(case, mode, block):
    with in_blocks(*block):
        ours, gradient = losses_and_gradients(case, "streaming", mode)
    _, dense_gradient = losses_and_gradients(case, "dense", mode)
    torch.testing.assert_close(gradient, dense_gradient, rtol=1e-9, atol=1e-9)
    if mode["temperature"] > 0.01:  # the oracle takes its exponentials as they come
        expected = oracle_losses(case, (case.z1, case.z2), **mode)
        np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("weighting", ["prototype", "sample", "uniform"])
@pytest.mark.parametrize("negatives", ["all", "cross"])
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


@pytest.mark.parametrize("weighting", ["prototype", "sample", "uniform"])
@pytest.mark.parametrize("negatives", ["all", "cross"])
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


def test_streaming_with_more_clusters_than_products_are_worth():
    z1, z2 = torch.randn(2, 20, 4)
    clusters, prototypes = torch.randint(300, (2, 20)), torch.randn(300, 4)
    streaming, dense = (
        PrototypeReweightedNCE(engine=engine)(z1, z2, *clusters, prototypes)
        for engine in ("streaming", "dense")
    )
    torch.testing.assert_close(streaming, dense)


def peak_bytes(engine, n, **mode):
    z1, z2 = (torch.randn(n, 8, requires_grad=True) for _ in range(2))
    clusters = torch.randint(4, (n,))
    prototypes = torch.randn(4, 8)
    loss = PrototypeReweightedNCE(engine=engine, **mode)
    with LiveBytes() as live:
        loss(z1, z2, clusters, clusters, prototypes).backward()
    return live.peak


@pytest.mark.parametrize("weighting", ["prototype", "sample", "uniform"])
@pytest.mark.parametrize("negatives", ["all", "cross"])
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_streaming_memory_grows_with_rows_and_not_with_pairs(weighting, negatives, temperature):
    mode = {"weighting": weighting, "negatives": negatives, "temperature": temperature}
    with in_blocks(128, 128 * 128):
        small, large = (peak_bytes("streaming", n, **mode) for n in (300, 1200))
    assert large < 5 * small  # four times the rows, sixteen times the pairs
    assert large < peak_bytes("dense", 1200, **mode) / 8


def test_auto_is_dense_for_small_batches_and_streaming_for_large():
    for n, expected in ((64, "dense"), (1500, "streaming")):
        other = {"dense": "streaming", "streaming": "dense"}[expected]
        assert peak_bytes("auto", n) == peak_bytes(expected, n) != peak_bytes(other, n)


def test_streaming_is_differentiable_once():
    z1, z2 = torch.randn(2, 6, 4, requires_grad=True).unbind()
    loss = PrototypeReweightedNCE(
        weighting="uniform", exclude_same_cluster=False, engine="streaming"
    )(z1, z2)
    (gradient,) = torch.autograd.grad(loss * z1.sum(), z1, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


# Affairs of torch.compile: what it uses itself is deprecated, and Python 3.13.0 is slow for it.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@pytest.mark.parametrize("weighting", ["prototype", "sample"])
@pytest.mark.parametrize("negatives", ["all", "cross"])
@pytest.mark.parametrize("block", [1000, 25], ids=["one block", "blocks"])
def test_streaming_compiles(weighting, negatives, block):
    torch.compiler.reset()
    pgcl = PGCLLoss(4, 3, engine="streaming", weighting=weighting, negatives=negatives)
    compiled = torch.compile(pgcl, fullgraph=streaming_file.TRACEABLE, backend="aot_eager")
    views = torch.randn(2, 30, 4)
    results = []
    for loss in (pgcl, compiled):
        mine = [view.clone().requires_grad_() for view in views]
        with in_blocks(block, 30 * block):
            value = loss(*mine)
            value.backward()
        results.append((value, *(view.grad for view in mine)))
    torch.testing.assert_close(*results)


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
