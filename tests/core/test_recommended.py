"""The recommended setting: its rule, and what it makes of a run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss


@pytest.mark.parametrize(
    ("batch_size", "steps", "temperature", "expected"),
    [
        (2708, 200, 0.4, (902, 0.5, 150, 0.4, 0.2)),
        (50_000, 200, 0.2, (1000, 1.0, 150, 0.2, 0.2)),
        (128, 100, 0.2, (42, 1.0, 75, 0.2, 0.2)),
        (32, 7, 0.1, (10, 1.0, 5, 0.1, 0.1)),
        (4, 2, 0.8, (2, 0.25, 1, 0.8, 0.2)),
        (8, 1, 0.2, (2, 1.0, 0, 0.2, 0.2)),
    ],
)
def test_the_rule(batch_size, steps, temperature, expected):
    options = {"batch_size": batch_size, "steps": steps, "temperature": temperature}
    pgcl = PGCLLoss.recommended(8, **options)
    of_parts = pgcl.contrast.temperature, pgcl.prototypes.temperature
    weight = pytest.approx(pgcl.consistency_weight)
    assert (pgcl.num_prototypes, weight, pgcl.warmup_steps, *of_parts) == expected
    untouched = ("weighting", "exclude_same_cluster", "epsilon", "negatives", "freeze_steps")
    default = PGCLLoss(8)
    assert all(getattr(pgcl, name) == getattr(default, name) for name in untouched)


def test_options_go_before_the_rule():
    options = {"num_prototypes": (3, 5), "warmup_steps": 2, "weighting": "uniform", "queue_size": 4}
    pgcl = PGCLLoss.recommended(8, batch_size=90, steps=10, **options)
    assert {name: getattr(pgcl, name) for name in options} == options
    assert pgcl.consistency_weight == 1


def test_a_subclass_stays_one():
    class Mine(PGCLLoss):
        pass

    assert type(Mine.recommended(8, batch_size=90, steps=10)) is Mine


def test_the_loss_is_info_nce_until_the_warm_up_ends():
    torch.manual_seed(0)
    pgcl = PGCLLoss.recommended(8, batch_size=30, steps=8, temperature=0.5).double()
    plain = InfoNCE(temperature=0.5)
    for step in range(8):
        views = torch.randn(2, 30, 8, dtype=torch.float64, requires_grad=True)
        (ours,) = torch.autograd.grad(pgcl(*views), views)
        (theirs,) = torch.autograd.grad(plain(*views), views)
        assert torch.allclose(ours, theirs) == (step < 6)


@given(batch_size=st.integers(2, 40), steps=st.integers(1, 9), seed=st.integers(0, 99))
@settings(deadline=None)
def test_pgcl_teaches_the_rows_before_the_run_ends(batch_size, steps, seed):
    torch.manual_seed(seed)
    pgcl = PGCLLoss.recommended(8, batch_size=batch_size, steps=steps)
    for _ in range(steps):
        views = torch.randn(2, batch_size, 8, requires_grad=True)
        terms = pgcl.terms(*views)
    assert torch.autograd.grad(terms.consistency, views)[0].abs().sum() > 0


def test_tau_above_the_predictions():
    pgcl = PGCLLoss.recommended(8, batch_size=30, steps=8, temperature=0.4)
    with pytest.raises(ValueError, match="temperature differs from module to module"):
        _ = pgcl.temperature
    pgcl.temperature = 0.3
    assert pgcl.contrast.temperature == pgcl.prototypes.temperature == 0.3


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batch_size": 0, "steps": 5}, ValueError, "batch_size must be at least 1, but got 0"),
        ({"batch_size": 8, "steps": 0.5}, TypeError, "steps must be a whole number, but got 0.5"),
        ({"batch_size": 8, "steps": 5, "temperature": 0}, ValueError, "temperature"),
        ({"batch_size": 8, "steps": 5, "lambda_": 1}, TypeError, "lambda_"),
        ({"steps": 5}, TypeError, "batch_size"),
    ],
)
def test_bad_options(options, error, message):
    with pytest.raises(error, match=message):
        PGCLLoss.recommended(8, **options)
