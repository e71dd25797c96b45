"""Engines agree with the oracle for blocks of any size, and their losses under every transform."""

import functools
from unittest import mock

import pytest
import torch
from helpers import oracle
from helpers.cases import BLOCKS, ENGINES, any_pairs, for_oracle, in_blocks, upstream
from helpers.losses import ARITHMETIC, DIM, function_of, gradients, loss_of
from helpers.marks import few_graphs
from helpers.memory import kept_for_backward, largest_tensor
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcl_losses.distributed import Processes
from pgcl_losses.engine import blocks
from pgcl_losses.engine.blocks import Blocks
from pgcl_losses.engine.contrast import contrast
from pgcl_losses.engine.pairs import Pairs
from pgcl_losses.forms import Form

pytestmark = few_graphs
close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)


@settings(max_examples=400)
@given(
    pairs=any_pairs(),
    temperature=st.sampled_from([0.01, 0.02, 0.2, 1.0]),
    engine=ENGINES,
    block=BLOCKS,
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
    """By embeddings, weights of positives and the temperature."""
    if pairs.weights is not None or pairs.pair_weight is not None or not pairs.is_unit:
        form = {**form, "debias": 0.0}
    form["decoupled"] &= form["over_positives"] != "supcon"
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    weights = pairs.positive_weights
    weights = weights if weights is None else weights.clone().requires_grad_()
    embeddings = pairs.embeddings.clone().requires_grad_()
    losses, exist = oracle.info_nce(
        **for_oracle(pairs, embeddings, weights), **form, temperature=tau
    )
    of_inputs = pairs._replace(embeddings=embeddings, positive_weights=weights)
    with in_blocks(block), mock.patch.object(blocks, "_KEPT_UP_TO", kept_up_to):
        ours = contrast(
            of_inputs,
            tau if learned else temperature,
            Form(**form),
            reduction,
            engine,
            Processes([(length,) for length in pairs.lengths]),
        )
        inputs = [embeddings, *[weights] * (weights is not None), *[tau] * learned]
        gradient = gradients(upstream(ours) + 0 * embeddings.sum(), inputs)
    expected = {"mean": oracle.mean_of_queries(losses, exist), "sum": losses.sum(), "none": losses}
    close(ours, expected[reduction])
    d_oracle = gradients(upstream(expected[reduction]), inputs)
    if engine == "dense" and weights is not None:
        # Autograd subtracts what e^x / E of a positive of weight 0 multiplies.
        for of_weights in (gradient[1], d_oracle[1]):
            of_weights.masked_fill_(weights == 0, 0.0)
    close(gradient[: len(inputs) - learned], d_oracle[: len(inputs) - learned])
    close(
        gradient[len(inputs) - learned :], d_oracle[len(inputs) - learned :], rtol=1e-6, atol=1e-6
    )


@given(
    pairs=any_pairs(),
    temperature=st.sampled_from([0.005, 0.02, 0.2]),
    num_ranks=st.integers(1, 4),
    block=BLOCKS,
)
def test_portions_of_blocks_add_up(pairs, temperature, num_ranks, block):
    pairs = pairs.sorted_by_item()[0]
    d_log_s = torch.linspace(-1, 2, pairs.num_queries(), dtype=torch.float64)
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


every_loss = pytest.mark.parametrize("name", ARITHMETIC)


@every_loss
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_blocks_make_and_keep_no_matrix_of_all_pairs(name, temperature):
    options = {"engine": "blocks", "temperature": temperature, "reduction": "mean"}
    views = views_of(400, torch.float32)
    scratch = mock.patch.object(blocks, "_shared", blocks._Shared())
    with in_blocks(64), scratch, mock.patch.object(blocks, "_KEPT_UP_TO", 0):
        assert largest_tensor(lambda: loss_of(name, views, **options).backward()) < 400 * 64
        _, kept = kept_for_backward(lambda: loss_of(name, views, **options))
    assert kept < 400 * 200


@pytest.mark.parametrize("name", ["InfoNCE", "sets with items", "positives and items", "memory"])
def test_first_and_second_derivatives_of_dense(name):
    """Of losses whose weights do not depend on the views: they are constants."""
    value = functools.partial(loss_of, name, engine="dense", reduction="mean")
    assert torch.autograd.gradcheck(value, views_of(4))
    assert torch.autograd.gradgradcheck(value, views_of(4))
    value = function_of(name, 4, engine="dense", reduction="mean")
    hessian = torch.func.hessian(value)(views_of(4).detach()).view(32, 32)
    torch.testing.assert_close(hessian, hessian.T)


@pytest.mark.parametrize("name", ["InfoNCE", "SupCon"])
def test_blocks_are_differentiable_once(name):
    views = views_of(6)
    loss = loss_of(name, views, engine="blocks")
    with pytest.raises(RuntimeError, match="differentiable once: engine='dense', in one"):
        torch.autograd.grad(loss, views, create_graph=True)


def test_without_gradients_there_is_no_second_pass(monkeypatch):
    pairs = Pairs(torch.randn(6, 2, requires_grad=True), (3, 3))
    monkeypatch.setattr(Blocks, "gradient", lambda *given: pytest.fail("a second pass"))
    with torch.no_grad():
        contrast(pairs, 0.2, Form(), "mean", "blocks", Processes([(3,), (3,)]))
