"""Engines agree with the oracle for blocks of any size, and their losses under every transform."""

import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from helpers.blocks import in_blocks
from helpers.engine_cases import any_pairs
from helpers.engine_oracle import exact
from helpers.item_cases import gradients
from helpers.losses import DIM, LOSSES
from helpers.marks import compiling, engines, few_graphs
from helpers.memory import kept_for_backward, largest_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.distributed import Processes
from pgcl_losses.engine import blocks, dispatch
from pgcl_losses.engine.flex import Flex
from pgcl_losses.engine.pairs import Pairs

pytestmark = few_graphs
close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)


def sums_of(pairs, temperature, engine):
    processes = Processes([(length,) for length in pairs.lengths])
    return dispatch.log_weighted_sums(pairs, temperature, engine, processes)


def upstream(pairs):
    return torch.linspace(-1, 2, pairs.num_queries(), dtype=torch.float64)


def check_sums(pairs, temperature, engine, learned):
    d_log_s = upstream(pairs)
    expected, gradient, d_temperature = exact(pairs, temperature, d_log_s)
    embeddings = pairs.embeddings.clone().requires_grad_()
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    log_s = sums_of(pairs._replace(embeddings=embeddings), tau if learned else temperature, engine)
    close(log_s.detach(), expected)
    some = log_s.detach() > -torch.inf
    d_embeddings, d_tau = torch.autograd.grad(
        (log_s * d_log_s)[some].sum() + 0 * tau, (embeddings, tau), materialize_grads=True
    )
    close(d_embeddings, gradient)
    if learned:
        close(d_tau, d_temperature, atol=1e-6)


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
    expected, gradient, _ = exact(pairs, temperature, d_log_s)
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
    close(log_s, expected)
    close(sum(gradients), gradient)


@given(
    pairs=any_pairs(),
    temperature=st.sampled_from([0.005, 0.02, 0.2]),
    num_ranks=st.integers(1, 4),
    block=st.sampled_from([1, 3, 640]),
)
def test_portions_of_blocks_add_up(pairs, temperature, num_ranks, block):
    with in_blocks(block):
        check_portions(pairs, temperature, num_ranks, blocks.Blocks)


@pytest.mark.filterwarnings("ignore:flex_attention called")  # without a compiler
@settings(max_examples=20)
@given(
    pairs=any_pairs(factors=False, by_index=False),
    temperature=st.sampled_from([0.005, 0.02, 0.2, 1.0]),
    num_ranks=st.integers(1, 3),
    learned=st.booleans(),
)
def test_flex_agrees_with_the_oracle(pairs, temperature, num_ranks, learned):
    check_sums(pairs, temperature, "flex", learned)
    check_portions(pairs, temperature, num_ranks, Flex)


@pytest.mark.parametrize(
    ("views", "options", "message"),
    [
        (torch.ones(2, 4, 257), {}, "takes embeddings of a dimension up to 256, but got 257"),
        (torch.ones(2, 4097, 2), {}, "takes at most 8192 embeddings on a CPU, but got 8194"),
        (torch.ones(2, 4, 8).double().to("meta"), {}, "takes float32 on meta, but got torch.flo"),
        (torch.ones(2, 6, 4), {"soft_clusters": True}, "computes weights of kind Table, but got"),
        (torch.ones(2, 6, 4), {"negative_ranks": (1, 3)}, "computes weights of kind Table, but"),
    ],
)
def test_flex_refuses_what_it_cannot_compute(views, options, message):
    make = functools.partial(PGCLLoss, 4, 3, **options) if options else InfoNCE
    with pytest.raises((TypeError, ValueError), match=f"engine='flex' {message}"):
        make(engine="flex")(*views)


@engines
def test_an_unknown_kind_of_weight_is_an_error(engine):
    pairs = Pairs(F.normalize(torch.randn(8, 3)), (4, 4), weights=torch.ones(8, 8))
    message = f"engine='{engine}' computes weights of kind Table and Factors, but got Tensor"
    with pytest.raises(TypeError, match=message):
        sums_of(pairs, 0.2, engine)


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
def test_auto_by_shapes_and_device(device, num, num_past, num_ranks, expected):
    embeddings = torch.empty(num, 2, device=device)
    assert dispatch.choose("auto", embeddings, 0.2, num + num_past, num_ranks) == expected
    assert dispatch.choose("flex", embeddings, 0.2, num + num_past, num_ranks) == "flex"


def test_auto_is_dense_under_a_transform_and_dense_is_for_one_process():
    chosen = []

    def choose(z, temperature=0.2):
        chosen.append(dispatch.choose("auto", z, temperature, len(z), 1))
        return z.sum()

    z = torch.zeros(20_000, 1)
    torch.func.grad(choose)(z)
    torch.func.jvp(choose, (z,), (z,))
    with forward_ad.dual_level():
        choose(forward_ad.make_dual(z, z))
        choose(z, forward_ad.make_dual(z[0], z[0]))
    choose(z)
    assert chosen == ["dense"] * 4 + ["blocks"]
    with pytest.raises(ValueError, match="engine='dense' computes one matrix in one process"):
        dispatch.choose("dense", z, 0.2, len(z), 2)


def test_processes_have_about_equally_many_pairs():
    for num_ranks in (2, 3, 4, 8, 13):
        pairs = Pairs(torch.empty(6000, 1), (6000,))
        each = [blocks.Blocks(pairs, 0.2, rank, num_ranks).blocks for rank in range(num_ranks)]
        counts = [
            sum((i.stop - i.start) * (j.stop - j.start) * (1 + (i != j)) for i, j in of_rank)
            for of_rank in each
        ]
        assert sum(counts) == 6000**2
        assert max(counts) < 1.6 * min(counts)


def views_of(num, dtype=torch.float64):
    return torch.randn(2, num, DIM, dtype=dtype).requires_grad_()


every_loss = pytest.mark.parametrize("loss_of", LOSSES.values(), ids=[*LOSSES])


@every_loss
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_blocks_make_and_keep_no_matrix_of_all_pairs(loss_of, temperature):
    views, options = views_of(400, torch.float32), {"engine": "blocks", "temperature": temperature}
    with in_blocks(64), mock.patch.object(blocks, "_KEPT_UP_TO", 0):
        assert largest_tensor(lambda: loss_of(views, **options).backward()) < 400 * 64
        _, kept = kept_for_backward(lambda: loss_of(views, **options))
    assert kept < 400 * 200


@pytest.mark.parametrize("name", ["InfoNCE", "of items", "by index", "with a memory"])
def test_first_and_second_derivatives_of_dense(name):
    """Of losses whose weights do not depend on the views: they are constants."""
    loss_of = functools.partial(LOSSES[name], engine="dense")
    assert torch.autograd.gradcheck(loss_of, views_of(4))
    assert torch.autograd.gradgradcheck(loss_of, views_of(4))
    hessian = torch.func.hessian(loss_of)(views_of(4).detach()).view(32, 32)
    torch.testing.assert_close(hessian, hessian.T)


@pytest.mark.parametrize("name", ["InfoNCE", "of items"])
def test_blocks_are_differentiable_once(name):
    views = views_of(6)
    loss = LOSSES[name](views, engine="blocks")
    with pytest.raises(RuntimeError, match="differentiable once: engine='dense', in one"):
        torch.autograd.grad(loss, views, create_graph=True)


@compiling
# torch's own, where a graph begins within the loss.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("options", [{"engine": "blocks"}, {"weighting": "sample"}])
def test_blocks_run_outside_of_a_compiled_graph(options, monkeypatch):
    """So do large batches, here more than 8 embeddings."""
    monkeypatch.setattr(dispatch, "_DENSE_UP_TO", 8)
    torch.compiler.reset()
    loss = PGCLLoss(DIM, 3, **options)
    compiled = torch.compile(loss, backend="aot_eager")
    for num in (4, 9, 30):
        views = views_of(num, torch.float32)
        with in_blocks(25):
            values = [each(*views) for each in (compiled, loss)]
            torch.testing.assert_close(*[[value, *gradients(value, [views])] for value in values])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="engine='dense' can be traced"):
        torch.compile(loss, fullgraph=True, backend="aot_eager")(*torch.randn(2, 9, DIM))
