"""Temperatures that are a Tensor or a Parameter, with gradient."""

import copy
import itertools
from functools import partial

import pytest
import torch
from helpers.losses import ARITHMETIC, DIM, gradients, loss_of
from helpers.marks import few_graphs
from torch import nn
from torch.autograd import forward_ad

from pgcl_losses import InfoNCE, PGCLLoss

pytestmark = few_graphs
makes = pytest.mark.parametrize("make", [InfoNCE, partial(PGCLLoss, DIM)], ids=["NCE", "PGCL"])


def parameter(value=0.3, dtype=torch.float64):
    return nn.Parameter(torch.tensor(value, dtype=dtype))


def views_of():
    return torch.randn(2, 5, DIM, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("name", [name for name in ARITHMETIC if "hard" not in name])
@pytest.mark.parametrize("value", [0.05, 0.4])
def test_the_gradient_is_the_difference_of_losses_with_numbers(name, engine, value):
    """Of losses whose weights do not depend on the temperature."""
    views, tau = views_of(), parameter(value)
    losses = [
        loss_of(name, views, temperature=temperature, engine=engine, reduction="mean")
        for temperature in (tau, value, 0.99999 * value, 1.00001 * value)
    ]
    d_tau, d_views = gradients(losses[0], [tau, views])
    (expected,) = gradients(losses[1], [views])
    torch.testing.assert_close([losses[0], d_views], [losses[1], expected])
    difference = (losses[3] - losses[2]).item() / (2e-5 * value)
    assert d_tau.item() == pytest.approx(difference, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("of_tau", [torch.float16, torch.float32, torch.float64])
def test_dtypes_of_temperature_and_embeddings_may_differ(engine, dtype, of_tau):
    views, tau = [view.detach().to(dtype) for view in views_of()], parameter(0.25, of_tau)
    loss = InfoNCE(temperature=tau, engine=engine)(*views)
    exact_tau = parameter(0.25)
    exact = InfoNCE(temperature=exact_tau)(*(view.double() for view in views))
    torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=1e-5)
    (d_tau,), (expected,) = gradients(loss, [tau]), gradients(exact, [exact_tau])
    assert d_tau.dtype == of_tau
    torch.testing.assert_close(d_tau.double(), expected, rtol=1e-2, atol=1e-4)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@makes
def test_a_parameter_belongs_to_the_loss(make):
    tau = parameter(dtype=torch.float32)
    loss = make(temperature=tau)
    assert loss.temperature is tau
    fresh = make(temperature=parameter(0.9, torch.float32))
    fresh.load_state_dict(loss.state_dict())
    assert fresh.temperature.item() == tau.item()
    twin = copy.deepcopy(loss).double()
    assert twin.temperature.dtype == torch.float64 != tau.dtype
    for each in (loss, twin):  # its modules share one
        assert [p is each.temperature for p in each.parameters() if p.dim() == 0] == [True]


@makes
def test_numbers_tensors_and_parameters_may_replace_each_other(make):
    views = views_of()
    kinds = {
        "number": lambda: 0.5,
        "Tensor": lambda: torch.tensor(0.5, requires_grad=True).square().sqrt(),
        "Parameter": lambda: parameter(0.5, torch.float32),
    }
    for before, after in itertools.product(kinds, kinds):
        torch.manual_seed(0)
        loss = make(temperature=kinds[before]()).double()
        loss(*views)
        loss.temperature = value = kinds[after]()
        assert loss.temperature is value or loss.temperature == value == 0.5
        is_parameter = [p is value for p in loss.parameters() if p.dim() == 0]
        assert is_parameter == ([True] if after == "Parameter" else [])
        torch.manual_seed(0)
        expected = make(temperature=0.5).double()
        torch.testing.assert_close(loss(*views), expected(*views))


@makes
@pytest.mark.parametrize(
    "value", [torch.full((2, 2), 0.2), torch.tensor(True), torch.tensor(0.2 + 0j), "0.2", -0.2]
)
def test_invalid_temperatures_are_not_assigned(make, value):
    loss = make(temperature=0.2)
    with pytest.raises((TypeError, ValueError), match="temperature"):
        loss.temperature = value
    assert loss.temperature == 0.2


def test_a_dual_temperature_has_the_derivative():
    z, tau = torch.randn(2, 3, 2), parameter(0.2)
    expected = gradients(InfoNCE(temperature=tau)(*z), [tau])[0]
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(tau.detach(), torch.ones_like(tau))
        ours = forward_ad.unpack_dual(InfoNCE(temperature=dual)(*z)).tangent
    torch.testing.assert_close(ours.to(expected), expected)
