"""Temperatures that are a Tensor or a Parameter, with gradient."""

import copy
import itertools

import pytest
import torch
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.item_cases import (
    DIM,
    arrays,
    exact_loss,
    gradients,
    numbers,
    random_sets,
)
from helpers.marks import compiling, engines, few_graphs, negatives_of
from helpers.rank_models import mean_over_ranks
from helpers.ranks import on_ranks
from torch import nn

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.contrast import NEGATIVES

pytestmark = few_graphs
# Losses of views and items. Only hard negatives have weights that depend on the temperature.
LOSSES = {
    "InfoNCE": lambda **options: InfoNCE(**options),
    "with memory": lambda **options: InfoNCE(memory_size=7, **options),
    "debiased": lambda **options: InfoNCE(debias=0.05, **options),
    "PGCL": lambda **options: pgcl_of(**options),
    "weighted by samples": lambda **options: pgcl_of(weighting="sample", **options),
    "uniform": lambda **options: pgcl_of(
        weighting="uniform", exclude_same_cluster=False, consistency_weight=0.0, **options
    ),
    "consistency alone": lambda **options: pgcl_of(contrast_weight=0.0, **options),
    "heads": lambda **options: pgcl_of(num_prototypes=(3, 4), soft_clusters=True, **options),
    "PGCL with memory": lambda **options: pgcl_of(memory_size=7, queue_size=5, **options),
    "warm-up": lambda **options: pgcl_of(warmup_steps=9, **options),
}
losses_of = pytest.mark.parametrize("name", LOSSES)


def pgcl_of(num_prototypes=3, **options):
    torch.manual_seed(0)
    return PGCLLoss(DIM, num_prototypes, **options).double()


def parameter(value=0.3, dtype=torch.float64):
    return nn.Parameter(torch.tensor(value, dtype=dtype))


def views_of(seed=0, length=5):
    return random_sets((length, length), seed)[0]


def loss_after_a_step(name, temperature, engine, negatives="all"):
    """In eval mode, so that one call is like another."""
    loss = LOSSES[name](temperature=0.2, engine=engine, negatives=negatives)
    loss(*views_of(1))
    loss.temperature = temperature
    return loss.eval()


@losses_of
@engines
@negatives_of
@pytest.mark.parametrize("value", [0.05, 0.4])
def test_the_gradient_is_the_difference_of_losses_with_numbers(name, engine, negatives, value):
    views, tau = views_of(), parameter(value)
    with in_blocks(3):
        loss = loss_after_a_step(name, tau, engine, negatives)
        ours = loss(*views)
        d_tau, *d_views = gradients(ours, [tau, *views])
        values = []
        for step in (-1e-5 * value, 0.0, 1e-5 * value):
            loss.temperature = value + step
            values.append(loss(*views))
    torch.testing.assert_close(ours, values[1])
    torch.testing.assert_close(d_views, [*gradients(values[1], views)])
    expected = (values[2] - values[0]).item() / (2e-5 * value)
    assert d_tau.item() == pytest.approx(expected, rel=1e-4, abs=1e-6)


@engines
@negatives_of
@pytest.mark.parametrize("name", ["InfoNCE", "with memory", "debiased", "uniform"])
def test_gradcheck(name, engine, negatives):
    def loss_of(tau, *views):
        loss.temperature = tau
        return loss(*views)

    with in_blocks(3):
        loss = loss_after_a_step(name, 0.5, engine, negatives)
        inputs = torch.tensor(0.5, dtype=torch.float64, requires_grad=True), *views_of()
        assert torch.autograd.gradcheck(loss_of, inputs)
        if engine == "dense" and name != "with memory":
            assert torch.autograd.gradgradcheck(loss_of, inputs)


@engines
@negatives_of
@pytest.mark.parametrize("with_items", [False, True])
def test_weights_of_hard_negatives_are_constants_for_the_gradient(engine, negatives, with_items):
    sets, items = random_sets((5, 5), num_items=3)
    items = items if with_items else None
    (z,), (of_memory,) = random_sets((4,), 1)
    mode = {"negatives": negatives, "debias": 0.05}
    tau = parameter()
    loss = InfoNCE(temperature=tau, hardness=1.0, memory_size=4, engine=engine, **mode)
    loss.remember(z, of_memory if with_items else None)
    with in_blocks(3):
        (ours,) = gradients(loss(*sets, items=items), [tau])
    past = arrays([z])[0], of_memory.tolist() if with_items else None
    given = arrays(sets), numbers(items), *past
    weights = oracle.hard_weights(*given, temperature=0.3, negatives=negatives, hardness=1.0)

    def value(at):
        options = {**mode, "temperature": float(at), "weights": weights}
        return oracle.mean_of_queries(*oracle.info_nce(*given, **options))

    expected = oracle.gradient(value, tau.detach().numpy())
    assert ours.item() == pytest.approx(expected.item(), rel=1e-5)


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


@pytest.mark.parametrize(
    "make", [InfoNCE, lambda **options: PGCLLoss(DIM, **options)], ids=["InfoNCE", "PGCLLoss"]
)
class TestOption:
    def test_a_parameter_belongs_to_the_loss(self, make):
        tau = parameter(dtype=torch.float32)
        loss = make(temperature=tau)
        assert loss.temperature is tau
        assert sum(p is tau for p in loss.parameters()) == 1
        assert any(torch.equal(value, tau) for value in loss.state_dict().values())
        assert "temperature" in repr(loss)
        fresh = make(temperature=parameter(0.9, torch.float32))
        fresh.load_state_dict(loss.state_dict())
        assert fresh.temperature.item() == tau.item()
        twin = copy.deepcopy(loss)
        assert twin.temperature is not tau
        assert sum(p.dim() == 0 for p in twin.parameters()) == 1
        assert loss.double().temperature.dtype == torch.float64

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
            views = views_of()
            value = loss(*views)
            d_tau, d_scale = torch.autograd.grad(value, [tau, logit_scale])
            assert d_tau != 0
            torch.testing.assert_close(d_scale, -d_tau * tau)
            with torch.no_grad():
                logit_scale -= 0.1 * d_scale

    def test_an_optimizer_moves_it(self, make):
        loss = make(temperature=parameter(0.5, torch.float32))
        optimizer = torch.optim.SGD(loss.parameters(), lr=0.002)
        views = torch.randn(2, 8, DIM)
        views[1] = views[0]  # the loss of equal views falls with the temperature
        losses = []
        for _ in range(5):
            optimizer.zero_grad()
            losses.append(loss(*views))
            losses[-1].backward()
            optimizer.step()
        assert loss.temperature.item() < 0.5
        assert losses[-1] < losses[0]

    @pytest.mark.parametrize(
        ("value", "error"),
        [
            (torch.tensor([0.2]), ValueError),
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
        loss = make(temperature=parameter(dtype=torch.float32))
        with torch.no_grad():
            loss.temperature.fill_(value)
        with pytest.raises(ValueError, match="temperature"):
            loss(*torch.randn(2, 5, DIM))

    def test_a_temperature_on_another_device_is_an_error(self, make):
        with pytest.raises(ValueError, match="temperature is on meta"):
            make(temperature=torch.tensor(0.2, device="meta"))(*torch.randn(2, 5, DIM))

    def test_the_value_is_read_on_a_cpu_alone(self, make):
        loss = make(temperature=nn.Parameter(torch.empty((), device="meta"))).to("meta")
        z = torch.empty(6, DIM, device="meta", requires_grad=True)
        value = loss(z, z)
        value.backward()
        assert value.shape == loss.temperature.grad.shape == ()

    @pytest.mark.slow
    @compiling
    @engines
    def test_compiled_as_one_graph(self, make, engine):
        torch.compiler.reset()
        loss = make(temperature=parameter(dtype=torch.float32), engine=engine)
        twin = copy.deepcopy(loss)
        compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
        for value in (0.3, 0.1):
            views = [view.requires_grad_() for view in torch.randn(2, 9, DIM)]
            results = []
            for of_kind in (loss, twin):
                with torch.no_grad():
                    of_kind.temperature.fill_(value)
                result = (loss if of_kind is loss else compiled)(*views)
                results.append([result, *gradients(result, [of_kind.temperature, *views])])
            torch.testing.assert_close(*results)


def test_modules_of_pgcl_share_a_parameter():
    pgcl = PGCLLoss(DIM, temperature=parameter(dtype=torch.float32))
    assert pgcl.contrast.temperature is pgcl.prototypes.temperature is pgcl.temperature
    before = [p.data_ptr() for p in pgcl.parameters()]
    pgcl.double()
    assert pgcl.contrast.temperature is pgcl.prototypes.temperature
    assert len(before) == len([*pgcl.parameters()]) == 2


def test_the_gradient_is_the_sum_over_contrast_and_consistency():
    views, of_terms = views_of(), []
    for weights in ((1.0, 0.0), (0.0, 6.0), (1.0, 6.0)):
        tau = parameter()
        pgcl = pgcl_of(contrast_weight=weights[0], consistency_weight=weights[1])
        pgcl.temperature = tau
        of_terms += gradients(pgcl(*views), [tau])
    assert all(d != 0 for d in of_terms)
    torch.testing.assert_close(of_terms[0] + of_terms[1], of_terms[2])


@engines
@pytest.mark.parametrize("value", [1e-3, 0.01, 1e3])
def test_extreme_values_in_float32(engine, value):
    views, tau = torch.randn(2, 20, DIM), parameter(value, torch.float32)
    loss = InfoNCE(temperature=tau, engine=engine)(*views)
    (d_tau,) = gradients(loss, [tau])
    exact_tau = parameter(tau.item())
    exact = InfoNCE(temperature=exact_tau, engine="dense")(*views.double())
    (expected,) = gradients(exact, [exact_tau])
    torch.testing.assert_close(loss.double(), exact, rtol=1e-3, atol=1e-4)
    assert d_tau.item() == pytest.approx(expected.item(), rel=1e-2, abs=1e-4)


@engines
def test_loss_and_gradient_with_items_agree_with_the_oracle(engine):
    sets, items = random_sets((4, 6), num_items=3)
    tau = parameter()
    loss = InfoNCE(temperature=tau, engine=engine)(*sets, items=items)
    assert loss.item() == pytest.approx(exact_loss(sets, items, temperature=0.3))
    (ours,) = gradients(loss, [tau])
    expected = oracle.gradient(
        lambda at: exact_loss(sets, items, temperature=float(at)), tau.detach().numpy()
    )
    assert ours.item() == pytest.approx(expected.item(), rel=1e-5)


COUNTS = {2: [4, 1], 3: [2, 0, 3]}
OVER_RANKS = [*LOSSES, "hard"]


def over_ranks(rank, num_ranks):
    counts = COUNTS[num_ranks]
    for name in OVER_RANKS:
        make = LOSSES.get(name, lambda **options: InfoNCE(hardness=1.0, **options))
        for negatives in NEGATIVES:
            taus = [parameter() for _ in range(2)]
            ours, whole = (
                make(temperature=tau, negatives=negatives, gather=gather)
                for tau, gather in zip(taus, (True, False), strict=True)
            )
            for seed in range(2):
                views = views_of(seed)
                mine = [view.split(counts)[rank] for view in views]
                value, expected = ours(*mine), whole(*views)
                torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
                d_tau, *d_views = gradients(value, [taus[0], *views])
                d_whole = [*gradients(expected, [taus[1], *views])]
                torch.testing.assert_close(d_tau, d_whole[0], rtol=1e-8, atol=1e-9)  # on each rank
                d_ours = [d_tau, *map(mean_over_ranks, d_views)]
                torch.testing.assert_close(
                    d_ours, d_whole, rtol=1e-8, atol=1e-9, msg=lambda text, name=name: name + text
                )


@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_the_gradient_over_ranks_is_that_of_one_process(num_ranks):
    on_ranks(over_ranks, num_ranks)
