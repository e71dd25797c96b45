"""Checkpoints of earlier releases load, and the losses go on with the values of that release.

Each release adds its checkpoint: .venv/bin/python tests/core/test_checkpoints.py
"""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import pgcl_losses
from pgcl_losses import InfoNCE, PGCLLoss

FOLDER = Path(__file__).with_name("checkpoints")
FILES = sorted(FOLDER.glob("*.pt"))
assert FILES, f"{FOLDER} has no checkpoint"
DIM = 4


def learned(loss, *dim, **options):
    """A loss that learns its temperature."""
    return loss(*dim, temperature=nn.Parameter(torch.tensor(0.3)), **options)


# Options are not in a checkpoint: whoever loads it makes the loss with the same options.
LOSSES = {
    "PGCL": partial(PGCLLoss, DIM, 3),
    "PGCL with all states": partial(
        learned, PGCLLoss, DIM, (2, 3), queue_size=8, memory_size=8, freeze_steps=2
    ),
    "a memory": partial(learned, InfoNCE, memory_size=8, dim=DIM),
}


def numbers():
    return torch.arange(48.0, dtype=torch.float64).view(2, 6, DIM)


def trained(loss):
    """The loss after two steps, in which its temperature and prototypes move."""
    loss, parameters = loss.double(), [*loss.parameters()]
    for step in range(2):
        value = loss(*(numbers() * (step + 1.7)).sin().requires_grad_())
        for x, d in zip(parameters, torch.autograd.grad(value, parameters), strict=True):
            x.data -= 0.1 * d
    return loss


def value_of(loss):
    return loss.eval()(*numbers().cos()).detach()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("name", LOSSES)
def test_a_checkpoint_loads(name, file):
    saved = torch.load(file, weights_only=True)
    loss = LOSSES[name]().double()
    before = value_of(loss)
    expected = saved[name]["value"].to(before)
    assert not torch.allclose(before, expected, rtol=1e-3)
    loss.load_state_dict(saved[name]["state"])
    torch.testing.assert_close(value_of(loss), expected)
    assert loss.state_dict().keys() == saved[name]["state"].keys()


if __name__ == "__main__":
    file = FOLDER / f"{pgcl_losses.__version__}.pt"
    if file.exists():
        raise SystemExit(f"{file} is there already")
    torch.manual_seed(0)
    losses = {name: trained(make()) for name, make in LOSSES.items()}
    torch.save(
        {n: {"state": x.state_dict(), "value": value_of(x)} for n, x in losses.items()}, file
    )
