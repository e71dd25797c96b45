"""PGCLLoss over many steps: its state, checkpoints, and what must not change them."""

import copy
import functools
import io
import math

import pytest
import torch
from helpers.ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from pgcl_losses import InfoNCE, PGCLLoss

pytestmark = pytest.mark.slow

STATEFUL = {"queue_size": 20, "memory_size": 30, "freeze_steps": 3}


assert_equal = functools.partial(torch.testing.assert_close, rtol=0, atol=0)


def encoder_and_loss(**options):
    torch.manual_seed(0)
    encoder = torch.nn.Linear(6, 4)
    pgcl = PGCLLoss(4, 3, **options)
    optimizer = torch.optim.Adam([*encoder.parameters(), *pgcl.parameters()], lr=0.05)
    return encoder, pgcl, optimizer


def train(encoder, pgcl, optimizer, batches):
    losses = []
    for x1, x2 in batches:
        optimizer.zero_grad()
        loss = pgcl(encoder(x1), encoder(x2))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def batches(count, n=8):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(count, 1, n, 6, generator=generator)
    return x + 0.1 * torch.randn(count, 2, n, 6, generator=generator)


class TestTraining:
    def test_a_checkpoint_continues_bit_for_bit(self):
        modules = encoder_and_loss(**STATEFUL)
        train(*modules, batches(4))
        buffer = io.BytesIO()
        torch.save([module.state_dict() for module in modules], buffer)
        straight = train(*modules, batches(9)[4:])
        assert straight[-1] < straight[0]

        buffer.seek(0)
        resumed = encoder_and_loss(**STATEFUL)
        for module, state in zip(resumed, torch.load(buffer, weights_only=True), strict=True):
            module.load_state_dict(state)
        assert train(*resumed, batches(9)[4:]) == straight
        assert_equal(resumed[1].state_dict(), modules[1].state_dict())

    def test_two_forwards_before_one_backward(self):
        z = torch.randn(4, 6, 4)
        together = PGCLLoss(4, 3, freeze_steps=1)
        apart = copy.deepcopy(together)
        (together(z[0], z[1]) + together(z[2], z[3])).backward()
        for pair in (z[:2], z[2:]):  # gradient accumulation
            apart(*pair).backward()
        assert together.prototypes.weight.grad.any()
        torch.testing.assert_close(together.prototypes.weight.grad, apart.prototypes.weight.grad)

    # torch 2.4 warns of itself there.
    @pytest.mark.filterwarnings("ignore:.*amp.autocast:FutureWarning")
    @pytest.mark.parametrize("use_reentrant", [True, False])
    def test_activation_checkpointing(self, use_reentrant):
        pgcl = PGCLLoss(4, 3)
        gradients = []
        for run in (pgcl, lambda *views: checkpoint(pgcl, *views, use_reentrant=use_reentrant)):
            views = [view.clone().requires_grad_() for view in batches(1)[0, :, :, :4]]
            run(*views).backward()
            gradients.append(views[0].grad)
        torch.testing.assert_close(*gradients)

    def test_state_changes_in_training_forwards_alone(self):
        pgcl = PGCLLoss(4, 3, **STATEFUL)
        z1, z2 = torch.randn(2, 6, 4)
        pgcl(z1, z2)
        before = copy.deepcopy(pgcl.state_dict())
        with torch.no_grad():
            pgcl(z1, z2)
        (-pgcl.eval()(z1.requires_grad_(), z2)).backward()  # a maximising phase
        assert_equal(pgcl.state_dict(), before)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_batch_that_is_not_finite_gives_nan_and_changes_no_state(self, bad):
        pgcl = PGCLLoss(4, 3, **STATEFUL)
        pgcl(*torch.randn(2, 6, 4))
        before = copy.deepcopy(pgcl.state_dict())
        z1, z2 = torch.randn(2, 6, 4)
        z2[4, 0] = bad
        terms = pgcl.terms(z1, z2)
        assert all(term.isnan() for term in terms[:3])
        assert_equal(pgcl.state_dict(), before)

    def test_an_empty_queue_that_is_added_changes_nothing(self):
        modules = encoder_and_loss()
        train(*modules, batches(9))
        with_queue = PGCLLoss(4, 3, queue_size=256)
        with_queue.load_state_dict(modules[1].state_dict(), strict=False)
        views = torch.randn(2, 6, 4)
        assert with_queue(*views) == modules[1](*views)


COUNTS = {1: [8], 2: [3, 5]}


def info_nce_then_pgcl(rank, num_ranks, wrapped):
    """Losses of a training, and its prototypes."""
    encoder, pgcl, _ = encoder_and_loss()
    info_nce = InfoNCE()
    model = Inside(encoder, pgcl)
    of_ranks = DistributedDataParallel(model) if wrapped else model
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    x1, x2 = [x.split(COUNTS[num_ranks])[rank] for x in batches(1)[0]]
    for step in range(9):
        if step == 4:
            random = pgcl.prototypes.weight.detach().clone()
            with torch.no_grad():
                pgcl.prototypes.start_from_(torch.cat([encoder(x1), encoder(x2)]))
            assert not torch.equal(pgcl.prototypes.weight, random)
        model.loss = info_nce if step < 4 else pgcl
        loss = of_ranks(x1, x2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, pgcl.prototypes.weight.detach().clone()


class Inside(torch.nn.Module):
    def __init__(self, encoder, pgcl):
        super().__init__()
        self.encoder, self.pgcl = encoder, pgcl

    def forward(self, x1, x2):
        loss = self.loss(self.encoder(x1), self.encoder(x2))
        # DistributedDataParallel waits for a gradient of every parameter.
        return loss + 0 * self.pgcl.prototypes.weight.sum()


@pytest.mark.parametrize(("num_ranks", "wrapped"), [(1, False), (2, True)])
def test_info_nce_first_and_pgcl_later(num_ranks, wrapped):
    (losses, weight), *others = on_ranks(info_nce_then_pgcl, num_ranks, wrapped)
    assert losses[3] < losses[0]
    assert losses[-1] < losses[4]
    for of_rank in others:
        assert of_rank[0] == losses
        assert torch.equal(of_rank[1], weight)
