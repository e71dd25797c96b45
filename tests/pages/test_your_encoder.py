"""The assignment without Sinkhorn of docs/your_encoder.md takes the place of the prototypes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.ranks import on_ranks
from helpers.scripts import ROOT
from test_docs import blocks
from torch import nn

from pgcl_losses import PGCLLoss

DIM, K, TAU = 5, 4, 0.3


def moving_prototypes(dtype=torch.float64):
    """PGCLLoss with the class as it stands on the page."""
    (block,) = [b for b in blocks(ROOT / "docs" / "your_encoder.md") if "MovingPrototypes" in b]
    names = {"torch": torch, "nn": nn, "F": F}
    exec(block.split("\n\n\nmodel = ")[0], names)
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, temperature=TAU, consistency_weight=2.0, memory_size=7)
    pgcl.prototypes = names["MovingPrototypes"](DIM, K, TAU, momentum=0.9)
    return pgcl.to(dtype)


def random_views(seed, num=6):
    random = torch.Generator().manual_seed(seed)
    return torch.randn(2, num, DIM, dtype=torch.float64, generator=random)


def test_two_steps_agree_with_the_oracle():
    pgcl, past = moving_prototypes(), torch.zeros(0, DIM, dtype=torch.float64)
    for step in range(2):
        views = [z.requires_grad_() for z in random_views(step)]
        at = [z.detach().requires_grad_() for z in views]
        weight = pgcl.prototypes.weight.clone()
        log_p = [oracle.log_predictions(z, weight, TAU) for z in (*at, past)]
        q = [each.detach().exp() for each in log_p]
        weights = oracle.family_weights(torch.cat([*at, past]), [torch.cat(q)], [weight])
        losses, exist = oracle.info_nce(at, None, past, weights=weights, temperature=TAU)
        consistency = oracle.consistency(log_p[:2], q[:2]).mean()
        expected = oracle.mean_of_queries(losses, exist) + 2 * consistency

        terms = pgcl.terms(*views)
        torch.testing.assert_close(terms.loss, expected)
        torch.testing.assert_close(
            torch.autograd.grad(terms.loss, views), torch.autograd.grad(expected, at)
        )
        means = [
            sum(q[v][i, k] * oracle.unit(at[v])[i] for v in (0, 1) for i in range(6))
            for k in range(K)
        ]
        moved = 0.9 * weight + 0.1 * oracle.unit(torch.stack(means).detach())
        torch.testing.assert_close(pgcl.prototypes.weight, oracle.unit(moved))
        past = oracle.unit(torch.cat(views).detach())[-7:]


def test_what_is_not_a_training_forward_moves_nothing():
    pgcl = moving_prototypes()
    before = copy.deepcopy(pgcl.state_dict())
    pgcl.eval()(*random_views(0))
    with pytest.warns(UserWarning, match="NaN"):
        pgcl.train()(*random_views(0).requires_grad_() * torch.nan)
    assert all(map(torch.equal, pgcl.state_dict().values(), before.values()))


def test_the_temperature_of_the_loss_is_also_that_of_the_module():
    pgcl = moving_prototypes()
    pgcl.temperature = 0.7
    assert pgcl.prototypes.temperature == pgcl.contrast.temperature == 0.7


def two_steps(rank, num_ranks):
    pgcl = moving_prototypes()
    for step in range(2):
        loss = pgcl(*random_views(step).requires_grad_().tensor_split(num_ranks, 1)[rank])
    return loss.detach(), pgcl.prototypes.weight


def test_two_processes_come_to_the_loss_and_the_prototypes_of_one():
    expected = two_steps(0, 1)
    for found in on_ranks(two_steps, 2):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("views", "words"),
    [
        (random_views(0)[:, :, :3], "z1 has dimension 3 but prototypes.weight has dimension 5"),
        (random_views(0)[:1], "views must be two or more"),
    ],
)
def test_the_loss_checks_the_views(views, words):
    with pytest.raises((TypeError, ValueError), match=words):
        moving_prototypes()(*views)
