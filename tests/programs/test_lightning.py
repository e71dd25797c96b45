"""A training by Lightning, which resumes bit for bit."""

import math
from functools import partial

import lightning
import pytest
import torch
from helpers.losses import DIM, info_nce, pgcl

pytestmark = [
    pytest.mark.lightning,
    # What Lightning and its dependencies warn of.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning",
        "ignore::FutureWarning",
        "ignore:.*does not have many workers",
    ),
]

MADE = {
    "InfoNCE": partial(info_nce, memory_size=40),
    "PGCLLoss": partial(pgcl, queue_size=40, memory_size=40, freeze_steps=5),
}


class Contrast(lightning.LightningModule):
    """An encoder and its loss, whose state validation leaves as it is."""

    def __init__(self, loss):
        super().__init__()
        torch.manual_seed(0)
        layers = torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.ReLU()
        self.encoder = torch.nn.Sequential(*layers, torch.nn.Linear(16, DIM))
        self.loss = MADE[loss]()
        self.validations = []

    def forward(self, views):
        return self.loss(*map(self.encoder, views))

    def training_step(self, views):
        return self(views)

    def on_validation_epoch_start(self):
        self.before = {name: value.clone() for name, value in self.loss.state_dict().items()}

    def validation_step(self, views):
        self.log("validation", self(views))

    def on_validation_epoch_end(self):
        assert_equal(self.loss.state_dict(), self.before)
        self.validations.append(float(self.trainer.callback_metrics["validation"]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def views_of(seed):
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(48, 6, generator=random)
    return torch.utils.data.TensorDataset(x, x + 0.1 * torch.randn(48, 6, generator=random))


def assert_equal(state, expected):
    torch.testing.assert_close(state, expected, rtol=0, atol=0)


def fit(loss, epochs, **checkpoint):
    """A new module and a new trainer, which go on from the checkpoint, if one is given."""
    shown = "logger enable_checkpointing enable_model_summary enable_progress_bar"
    quiet = dict.fromkeys(shown.split(), False)
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=epochs, **quiet)
    loaders = (torch.utils.data.DataLoader(views_of(seed), batch_size=16) for seed in (1, 2))
    trainer.fit(Contrast(loss), *loaders, **checkpoint)
    return trainer


@pytest.mark.parametrize("loss", MADE)
def test_lightning_resumes_bit_for_bit_and_validation_moves_no_state(loss, tmp_path):
    whole, first = fit(loss, epochs=4), fit(loss, epochs=2)
    first.save_checkpoint(tmp_path / "two_epochs.ckpt")
    resumed = fit(loss, epochs=4, ckpt_path=tmp_path / "two_epochs.ckpt")
    states = [trainer.lightning_module.state_dict() for trainer in (whole, first, resumed)]
    assert_equal(states[2], states[0])
    assert states[0]["loss.memory.num_stored"] == 4 * 48 * 2
    assert not torch.equal(states[0]["loss.memory.embeddings"], states[1]["loss.memory.embeddings"])
    moments = [trainer.optimizers[0].state_dict()["state"] for trainer in (whole, resumed)]
    assert_equal(moments[1], moments[0])
    validations = whole.lightning_module.validations
    assert all(map(math.isfinite, validations))
    assert validations[-1] < validations[1]  # the first is that of the sanity check
    assert resumed.lightning_module.validations[-2:] == validations[-2:]
