"""Both engines agree with the oracle, in chunks of any size; chunks keep no matrix of all pairs."""

import functools
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
from helpers import oracle
from helpers.cases import CHUNKS, ENGINES, any_pairs, for_oracle, in_chunks, upstream
from helpers.losses import gradients
from helpers.marks import few_graphs
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcl_losses import rows
from pgcl_losses.chunks import loss_of_pairs
from pgcl_losses.distributed import Processes
from pgcl_losses.forms import Form

pytestmark = few_graphs
close = functools.partial(torch.testing.assert_close, rtol=1e-8, atol=1e-8)


def as_on(readable):
    """On a CPU, or on a device that Python must not read."""
    patched = mock.patch.object(rows, "can_be_read", lambda values: False)
    return nullcontext() if readable else patched


@settings(max_examples=600)
@given(
    problem=any_pairs(),
    temperature=st.sampled_from([0.01, 0.02, 0.2, 1.0]),
    engine=ENGINES,
    chunk=CHUNKS,
    learned=st.booleans(),
    readable=st.booleans(),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    form=st.fixed_dictionaries(
        {
            "over_positives": st.sampled_from(["mean", "supcon", "sum"]),
            "decoupled": st.booleans(),
            "debias": st.sampled_from([0.0, 0.0, 0.1, 0.9]),
        }
    ),
)
def test_losses_and_gradients(problem, temperature, engine, chunk, learned, readable, reduction, form):
    """By embeddings, weights of positives and the temperature."""
    pairs = problem.pairs
    is_unit = problem.z.norm(dim=1).max() < 1.1
    if pairs.weights is not None or pairs.pair_weight is not None or not is_unit:
        form = {**form, "debias": 0.0}
    form["decoupled"] &= form["over_positives"] != "supcon"
    tau = torch.tensor(temperature, dtype=torch.float64, requires_grad=True)
    weights = problem.positive_weights
    weights = weights if weights is None else weights.clone().requires_grad_()
    z = problem.z.clone().requires_grad_()
    losses, exist = oracle.info_nce(**for_oracle(problem, z, weights), **form, temperature=tau)
    with in_chunks(chunk), as_on(readable):
        ours = loss_of_pairs(
            pairs,
            z,
            tau if learned else temperature,
            weights,
            Form(**form),
            reduction,
            engine,
            Processes([(length,) for length in pairs.lengths]),
        )
        inputs = [z, *[weights] * (weights is not None), *[tau] * learned]
        gradient = gradients(upstream(ours) + 0 * z.sum(), inputs)
    expected = {"mean": oracle.mean_of_queries(losses, exist), "sum": losses.sum(), "none": losses}
    close(ours, expected[reduction])
    d_oracle = gradients(upstream(expected[reduction]), inputs)
    close(gradient[: len(inputs) - learned], d_oracle[: len(inputs) - learned])
    close(
        gradient[len(inputs) - learned :], d_oracle[len(inputs) - learned :], rtol=1e-6, atol=1e-6
    )
