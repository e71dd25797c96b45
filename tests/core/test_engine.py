"""Engines agree with the oracle for blocks of any size, and their losses under every transform."""

import functools
from unittest import mock

import pytest
import torch
from helpers import engine_oracle
from helpers.blocks import in_blocks
from helpers.engine_cases import any_pairs
from helpers.losses import DIM, LOSSES
from helpers.marks import few_graphs
from helpers.memory import kept_for_backward, largest_tensor
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from pgcl_losses import InfoNCE
from pgcl_losses.distributed import Processes
from pgcl_losses.engine import blocks, dense
from pgcl_losses.engine.blocks import Blocks
from pgcl_losses.engine.contrast import contrast
from pgcl_losses.engine.pairs import Pairs
from pgcl_losses.forms import Form

pytestmark = few_graphs
close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)


def upstream(count):
    return torch.linspace(-1, 2, count, dtype=torch.float64)


def oracle(pairs, inputs, reduction, learned, **form):
    """The loss, and its gradient by embeddings, temperature and weights of positives."""
    embeddings, tau, weights = inputs
    losses, exist = engine_oracle.losses(pairs, embeddings, tau, weights, **form)
    if reduction == "mean":
        losses = losses.sum() / max(1, int(exist.sum()))
    elif reduction == "sum":
        losses = losses.sum()
    return losses, gradient_of(losses, inputs)


def gradient_of(loss, inputs):
    total = (loss * upstream(loss.numel())).sum() if loss.dim() else 2 * loss
    inputs = [x for x in inputs if x is not None]
    zero = sum((0 * x).sum() for x in inputs)
    return torch.autograd.grad(total + zero, inputs, materialize_grads=True)


@settings(max_examples=400)
@given(
    pairs=any_pairs(),
    temperature=st.sampled_from([0.01, 0.02, 0.2, 1.0]),
    engine=st.sampled_from(["dense", "blocks"]),
    block=st.sampled_from([1, 3, 640]),
    kept_up_to=st.sampled_from([0, 1 << 20]),
    learned=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    form=st.fixed_dictionaries(
        {
            "over_positives": st.sampled_from(["mean", "supcon", "sum"]),
            "decoupled": st.booleans(),
            "debias": st.sampled_from([0.0, 0.0, 0.1, 0.9]),
        }
    ),
)
def test_losses_and_gradients(
    pairs, temperature, engine, block, kept_up_to, learned, reduction, form
):
    if pairs.weights is not None or pairs.pair_weight is not None or not pairs.is_unit:
        form = {**form, "debias": 0.0}
    if form["over_positives"] == "supcon":
        form = {**form, "decoupled": False}
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    weights = pairs.positive_weights
    weights = None if weights is None else weights.clone().requires_grad_()
    inputs = pairs.embeddings.clone().requires_grad_(), tau, weights
    expected = oracle(pairs, inputs, reduction, learned, **form)
    of_inputs = pairs._replace(embeddings=inputs[0], positive_weights=weights)
    with in_blocks(block), mock.patch.object(blocks, "_KEPT_UP_TO", kept_up_to):
        loss = contrast(
            of_inputs,
            tau if learned else temperature,
            Form(**form),
            reduction,
            engine,
            Processes([(length,) for length in pairs.lengths]),
        )
        gradient = gradient_of(loss, inputs)
    close(loss, expected[0])
    if engine == "dense" and weights is not None:
        # Autograd subtracts what e^x / E of a positive of weight 0 multiplies.
        for gradients in (gradient, expected[1]):
            gradients[2].masked_fill_(weights == 0, 0.0)
    for n, (ours, theirs) in enumerate(zip(gradient, expected[1], strict=True)):
        if n != 1 or learned:
            close(ours, theirs, rtol=1e-6 if n == 1 else 1e-8, atol=1e-6 if n == 1 else 1e-8)


@given(
    pairs=any_pairs(),
    temperature=st.sampled_from([0.005, 0.02, 0.2]),
    num_ranks=st.integers(1, 4),
    block=st.sampled_from([1, 3, 640]),
)
def test_portions_of_blocks_add_up(pairs, temperature, num_ranks, block):
    pairs, d_log_s = pairs.sorted_by_item()[0], upstream(pairs.num_queries())
    with in_blocks(block):
        whole, *portions = (
            Blocks(pairs, temperature, rank, of)
            for rank, of in [(0, 1), *((rank, num_ranks) for rank in range(num_ranks))]
        )
        each = [portion.log_sums(with_gradient=True) for portion in portions]
        expected, log_s = whole.log_sums(with_gradient=True), [sums.log_s for sums in each]
        close(torch.stack(log_s).logsumexp(0), expected.log_s)
        if pairs.pair_weight is not None:
            log_totals = torch.stack([sums.log_totals for sums in each]).logsumexp(0)
            close(log_totals, expected.log_totals)
        gradients = [part.gradient(expected.log_s, d_log_s) for part in (whole, *portions)]
        for whole_part, *parts in zip(*gradients, strict=True):
            if whole_part is not None:
                close(sum(parts), whole_part)


def test_auto_is_dense_under_a_transform_and_dense_is_for_one_process(monkeypatch):
    dense_calls = []
    losses, z = dense.losses, torch.randn(6, 2)

    def loss(z, temperature=0.2):
        return InfoNCE(temperature=temperature)(*z.view(2, 3, 2))

    monkeypatch.setattr(dense, "losses", lambda *given: dense_calls.append(1) or losses(*given))
    torch.func.grad(loss)(z)
    torch.func.jvp(loss, (z,), (z,))
    with forward_ad.dual_level():
        loss(forward_ad.make_dual(z, z))
        loss(z, forward_ad.make_dual(torch.tensor(0.2), torch.ones(())))
    assert len(dense_calls) == 4
    loss(z)
    assert len(dense_calls) == 4
    two = Processes([(2, 1), (2, 1)])
    with pytest.raises(ValueError, match="engine='dense' computes one matrix in one process"):
        contrast(Pairs(z, (3, 3)), 0.2, Form(), "mean", "dense", two)


def test_processes_have_about_equally_many_pairs():
    for num_ranks in (2, 3, 4, 8, 13):
        pairs = Pairs(torch.empty(6000, 1), (6000,))
        each = [Blocks(pairs, 0.2, rank, num_ranks).blocks for rank in range(num_ranks)]
        counts = [
            sum((b.i.stop - b.i.start) * (b.j.stop - b.j.start) * (1 + (b.i != b.j)) for b in of)
            for of in each
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
    scratch = mock.patch.object(blocks, "_shared", blocks._Shared())
    with in_blocks(64), scratch, mock.patch.object(blocks, "_KEPT_UP_TO", 0):
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


def test_without_gradients_there_is_no_second_pass(monkeypatch):
    pairs = Pairs(torch.randn(6, 2, requires_grad=True), (3, 3))
    monkeypatch.setattr(Blocks, "gradient", lambda *given: pytest.fail("a second pass"))
    with torch.no_grad():
        contrast(pairs, 0.2, Form(), "mean", "blocks", Processes([(3,), (3,)]))
