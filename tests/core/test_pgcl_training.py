"""PGCLLoss over many steps: its state, checkpoints, and what must not change them."""

import copy
import io
import math

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from pgcl_losses import PGCLLoss

pytestmark = pytest.mark.slow

STATEFUL = {"queue_size": 20, "freeze_steps": 3}


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

        buffer.seek(0)
        resumed = encoder_and_loss(**STATEFUL)
        for module, state in zip(resumed, torch.load(buffer, weights_only=True), strict=True):
            module.load_state_dict(state)
        assert train(*resumed, batches(9)[4:]) == straight
        for name, tensor in modules[1].state_dict().items():
            assert torch.equal(resumed[1].state_dict()[name], tensor), name

    def test_determinism_under_a_seed(self):
        first, second = (train(*encoder_and_loss(), batches(5)) for _ in range(2))
        assert first == second
        assert first[-1] < first[0]

    def test_moving_to_double_gives_double(self):
        pgcl = PGCLLoss(4, 3, queue_size=5)
        z1, z2 = torch.randn(2, 6, 4)
        narrow = pgcl(z1, z2)
        pgcl.double()
        wide = pgcl(z1.double(), z2.double())
        assert wide.dtype == torch.float64
        assert pgcl(z1, z2).dtype == torch.float64
        assert narrow.dtype == torch.float32

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
        for name, tensor in pgcl.state_dict().items():
            assert torch.equal(tensor, before[name]), name

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_batch_that_is_not_finite_gives_nan_and_changes_no_state(self, bad):
        pgcl = PGCLLoss(4, 3, **STATEFUL)
        pgcl(*torch.randn(2, 6, 4))
        before = copy.deepcopy(pgcl.state_dict())
        z1, z2 = torch.randn(2, 6, 4)
        z2[4, 0] = bad
        terms = pgcl.terms(z1, z2)
        assert terms.loss.isnan()
        assert terms.contrast.isnan()
        assert terms.consistency.isnan()
        for name, tensor in pgcl.state_dict().items():
            assert torch.equal(tensor, before[name]), name

    def test_the_loss_does_not_jump_when_a_queue_is_added(self):
        encoder, pgcl, optimizer = encoder_and_loss()
        data = batches(120, n=32)
        before = train(encoder, pgcl, optimizer, data[:80])
        with_queue = PGCLLoss(4, 3, queue_size=256)
        with_queue.load_state_dict(pgcl.state_dict(), strict=False)

        # The first step is the same to the bit, as the queue is empty.
        views = [encoder(x) for x in data[80]]
        assert copy.deepcopy(with_queue)(*views) == copy.deepcopy(pgcl)(*views)

        # While the queue fills, changes from step to step stay as large as before.
        optimizer.param_groups[0]["params"][-1:] = [with_queue.prototypes.weight]
        after = train(encoder, with_queue, optimizer, data[80:])
        usual = max(abs(np.diff(before[40:])))
        assert abs(after[0] - before[-1]) <= 1.5 * usual
        assert max(abs(np.diff(after))) <= 1.5 * usual
