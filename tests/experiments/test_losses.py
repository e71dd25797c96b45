"""Losses by their options: Barlow Twins against literal loops, the schedule of prototypes."""

import pytest
import torch

from experiments.common.losses import FirstInfoNCE, Objective
from experiments.common.rivals import BarlowTwins
from pgcl_losses import InfoNCE, PGCLLoss, SinkhornPrototypes


def views(n, d, seed, count=2):
    torch.manual_seed(seed)
    return [torch.randn(n, d, dtype=torch.float64) for _ in range(count)]


def test_debiased_is_an_option_of_info_nce():
    z1, z2 = views(6, 5, 0)
    loss, _ = Objective({"rival": "debiased", "hardness": 1.0}, 5, 0.3, 10)(z1, z2)
    assert loss == InfoNCE(temperature=0.3, debias=0.1, hardness=1.0)(z1, z2)


def test_barlow_twins():
    z1, z2 = views(9, 4, 0)
    one, other = ((z - z.mean(0)) / z.std(0) for z in (z1, z2))
    total = 0.0
    for i in range(4):
        for j in range(4):
            c = sum(one[n, i] * other[n, j] for n in range(9)) / 9
            total += (1 - c) ** 2 if i == j else c**2 / 4
    assert BarlowTwins()(z1, z2).item() == pytest.approx(float(total), rel=1e-4)


def test_no_options_are_info_nce_and_others_pgcl():
    z1, z2 = views(6, 5, 0)
    loss, numbers = Objective({}, 5, 0.3, 10)(z1, z2)
    assert loss == InfoNCE(temperature=0.3)(z1, z2)
    assert numbers()["loss"] == loss.item()
    objective = Objective({"num_prototypes": 3, "consistency_weight": 2.0}, 5, 0.3, 10).double()
    same = PGCLLoss(5, 3, consistency_weight=2.0, temperature=0.3).double()
    same.load_state_dict(objective.loss.state_dict())
    loss, numbers = objective(z1, z2)
    assert loss == same(z1, z2)
    assert numbers().keys() >= {"agreement", "mean_cosine", "loss"}


@pytest.mark.parametrize("starts", [(), (0.0, 0.5)])
def test_info_nce_and_initialisation_at_fractions_of_the_run(starts):
    options = {"num_prototypes": 3, "lead": 0.5, "start": starts}
    objective = Objective(options, 5, 0.3, 10).double()
    before = objective.pgcl().prototypes.weight.detach().clone()
    embeddings = views(8, 5, 0, count=1)[0]
    steps = []
    for step in range(10):
        objective.begin(step, lambda step=step: (steps.append(step), embeddings)[1])
        is_first = step < 5
        z1, z2 = (z.requires_grad_() for z in views(8, 5, step))
        loss, _ = objective(z1, z2)
        (gradient,) = torch.autograd.grad(loss, z1)
        (plain,) = torch.autograd.grad(InfoNCE(temperature=0.3)(z1, z2), z1)
        assert torch.allclose(gradient, plain) == is_first
    assert steps == [10 * fraction for fraction in starts]
    assert not torch.equal(objective.pgcl().prototypes.weight, before)


def test_prototypes_are_initialised_once_from_the_last_embeddings(monkeypatch):
    given = []
    monkeypatch.setattr(SinkhornPrototypes, "start_from_", lambda _, z: given.append(z.clone()))
    loss_of = FirstInfoNCE(PGCLLoss(5, 3, temperature=0.3).double(), 3, kept=20).double()
    batches = [views(4, 5, seed) for seed in range(5)]
    for z1, z2 in batches[:2]:
        loss_of(z1, z2)
    state = loss_of.state_dict()  # half of the kept embeddings are there
    loss_of = FirstInfoNCE(PGCLLoss(5, 3, temperature=0.3).double(), 3, kept=20).double()
    loss_of.load_state_dict(state)
    for z1, z2 in batches[2:]:
        assert len(given) == (int(loss_of.step) > 3)
        loss_of(z1, z2)
    (last,) = given
    assert torch.equal(last, torch.cat([z for pair in batches[:3] for z in pair])[-20:])


def test_the_encoder_gets_the_gradient_of_the_contrast_alone():
    options = {"num_prototypes": 3, "consistency_weight": 2.0}
    objective = Objective(options | {"rows_learn": False}, 5, 0.3, 10).double()
    z1, z2 = (z.requires_grad_() for z in views(8, 5, 0))
    loss, _ = objective(z1, z2)
    terms = objective.loss.eval().terms(z1, z2)
    weight = objective.loss.prototypes.weight
    assert loss.item() == pytest.approx(terms.loss.item())
    ours = torch.autograd.grad(loss, [z1, z2, weight], retain_graph=True)
    theirs = torch.autograd.grad(terms.contrast, [z1, z2], retain_graph=True)
    assert all(torch.allclose(a, b) for a, b in zip(ours[:2], theirs, strict=True))
    assert torch.allclose(ours[2], torch.autograd.grad(terms.loss, weight)[0])


@pytest.mark.parametrize(
    "options",
    [{}, {"num_prototypes": 3, "consistency_weight": 1.0, "start": (0.0,)}, {"hardness": 1.0}],
    ids=str,
)
def test_a_loss_leaves_the_generator_as_it_is(options):
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    objective = Objective(options, 5, 0.3, 10)
    objective.begin(0, lambda: torch.eye(5))
    assert torch.equal(torch.rand(3), expected)
