"""Temperatures that are a Tensor or a Parameter, with gradient."""

import copy
import itertools
from functools import partial

import pytest
import torch
from helpers.blocks import in_blocks
from helpers.item_cases import DIM, gradients, random_sets
from helpers.marks import NEGATIVES, compiling, engines, few_graphs, negatives_of
from helpers.rank_models import mean_over_ranks
from helpers.ranks import on_ranks
from torch import nn

from pgcl_losses import InfoNCE, PGCLLoss

pytestmark = few_graphs


def pgcl_of(num_prototypes=3, **options):
    torch.manual_seed(0)
    return PGCLLoss(DIM, num_prototypes, **options).double()


# Losses of views and items. Only hard negatives have weights that depend on the temperature.
LOSSES = {
    "InfoNCE": InfoNCE,
    "with memory": partial(InfoNCE, memory_size=7, dim=DIM),
    "debiased": partial(InfoNCE, debias=0.05),
    "PGCL": pgcl_of,
    "weighted by samples": partial(pgcl_of, weighting="sample"),
    "uniform": partial(
        pgcl_of, weighting="uniform", exclude_same_cluster=False, consistency_weight=0.0
    ),
    "consistency alone": partial(pgcl_of, contrast_weight=0.0),
    "heads": partial(pgcl_of, num_prototypes=(3, 4), soft_clusters=True),
    "PGCL with memory": partial(pgcl_of, memory_size=7, queue_size=5),
}
makes = pytest.mark.parametrize("make", [InfoNCE, partial(PGCLLoss, DIM)], ids=["NCE", "PGCL"])


def parameter(value=0.3, dtype=torch.float64):
    return nn.Parameter(torch.tensor(value, dtype=dtype))


def views_of(seed=0, length=5):
    return random_sets((length, length), seed)[0]


@pytest.mark.parametrize("name", LOSSES)
@engines
@negatives_of
@pytest.mark.parametrize("value", [0.05, 0.4])
def test_the_gradient_is_the_difference_of_losses_with_numbers(name, engine, negatives, value):
    views, tau = views_of(), parameter(value)
    with in_blocks(3):
        loss = LOSSES[name](engine=engine, negatives=negatives).double()
        loss(*views_of(1))
        loss.eval().temperature = tau
        ours = loss(*views)
        d_tau, *d_views = gradients(ours, [tau, *views])
        values = []
        for step in (-1e-5 * value, 0.0, 1e-5 * value):
            loss.temperature = value + step
            values.append(loss(*views))
        d_expected = [*gradients(values[1], views)]
    torch.testing.assert_close([ours, *d_views], [values[1], *d_expected])
    expected = (values[2] - values[0]).item() / (2e-5 * value)
    assert d_tau.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@engines
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
class TestOption:
    def test_a_parameter_belongs_to_the_loss(self, make):
        tau = parameter(dtype=torch.float32)
        loss = make(temperature=tau)
        assert loss.temperature is tau
        assert "temperature" in repr(loss)
        fresh = make(temperature=parameter(0.9, torch.float32))
        fresh.load_state_dict(loss.state_dict())
        assert fresh.temperature.item() == tau.item()
        twin = copy.deepcopy(loss).double()
        assert twin.temperature is not tau
        assert twin.temperature.dtype == torch.float64
        for each in (loss, twin):  # its modules share one
            assert sum(p is each.temperature for p in each.parameters()) == 1
            assert sum(p.dim() == 0 for p in each.parameters()) == 1

    def test_numbers_tensors_and_parameters_may_replace_each_other(self, make):
        views = views_of()
        kinds = {
            "number": lambda: 0.5,
            "Tensor": lambda: torch.tensor(0.5),
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

    def test_a_new_tensor_in_each_step(self, make):
        logit_scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        loss = make().double()
        for _ in range(3):
            loss.temperature = tau = 1 / logit_scale.exp()
            d_tau, d_scale = torch.autograd.grad(loss(*views_of()), [tau, logit_scale])
            assert d_tau != 0
            torch.testing.assert_close(d_scale, -d_tau * tau)
            with torch.no_grad():
                logit_scale -= 0.1 * d_scale

    @pytest.mark.parametrize(
        ("value", "error"),
        [
            (torch.full((2, 2), 0.2), ValueError),
            (torch.tensor(1), TypeError),
            (torch.tensor(True), TypeError),
            (torch.tensor(0.2 + 0j), TypeError),
            ("0.2", TypeError),
            (None, TypeError),
            ([0.2], TypeError),
            (True, TypeError),
            (0.0, ValueError),
            (-0.2, ValueError),
        ],
        ids=str,
    )
    def test_invalid_temperatures_are_errors(self, make, value, error):
        with pytest.raises(error, match="temperature"):
            make(temperature=value)
        loss = make()
        with pytest.raises(error, match="temperature"):
            loss.temperature = value
        assert loss.temperature == 0.2

    @pytest.mark.parametrize("value", [-0.2, 0.0, torch.nan])
    def test_the_value_is_checked_in_the_forward(self, make, value):
        with pytest.raises(ValueError, match="temperature"):
            make(temperature=torch.tensor(value))(*torch.randn(2, 5, DIM))

    def test_other_devices(self, make):
        """On which the value is not read."""
        with pytest.raises(ValueError, match="temperature is on meta"):
            make(temperature=torch.tensor(0.2, device="meta"))(*torch.randn(2, 5, DIM))
        loss = make(temperature=nn.Parameter(torch.empty((), device="meta"))).to("meta")
        z = torch.empty(6, DIM, device="meta", requires_grad=True)
        value = loss(z, z)
        value.backward()
        assert value.shape == loss.temperature.grad.shape == ()

    @pytest.mark.slow
    @compiling
    def test_compiled_as_one_graph(self, make):
        torch.compiler.reset()
        loss = make(temperature=parameter(dtype=torch.float32))
        compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
        for value in (0.3, 0.1):
            with torch.no_grad():
                loss.temperature.fill_(value)
            views = [torch.randn(9, DIM, requires_grad=True) for _ in range(2)]
            inputs = [loss.temperature, *views]
            values = [each(*views) for each in (loss, compiled)]
            torch.testing.assert_close(*[[each, *gradients(each, inputs)] for each in values])


COUNTS = {2: [4, 1], 3: [2, 0, 3]}
OVER_RANKS = LOSSES | {"hard": partial(InfoNCE, hardness=1.0)}


def over_ranks(rank, num_ranks):
    counts = COUNTS[num_ranks]
    for (name, make), negatives in itertools.product(OVER_RANKS.items(), NEGATIVES):
        taus = [parameter() for _ in range(2)]
        ours, whole = (
            make(temperature=tau, negatives=negatives, gather=gather).double()
            for tau, gather in zip(taus, (True, False), strict=True)
        )
        for seed in range(2):
            views = views_of(seed)
            value, expected = ours(*(z.split(counts)[rank] for z in views)), whole(*views)
            d_tau, *d_views = gradients(value, [taus[0], *views])
            torch.testing.assert_close(
                [value, d_tau, *map(mean_over_ranks, d_views)],  # d_tau on each rank
                [expected, *gradients(expected, [taus[1], *views])],
                rtol=1e-8,
                atol=1e-9,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_gradient_over_ranks_is_that_of_one_process(num_ranks):
    on_ranks(over_ranks, num_ranks)
