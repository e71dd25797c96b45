"""docs/distributed.md: an encoder in chunks has the gradients of the whole batch."""

from functools import partial

import pytest
import torch
from helpers.losses import DIM, Model, gradients_of, info_nce, learned_temperature, of_seed, pgcl
from helpers.marks import few_graphs
from helpers.memory import kept_for_backward
from helpers.ranks import on_ranks
from helpers.scripts import ROOT
from test_docs import blocks
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# The function of the page, without what the page does with it.
names = {}
exec(blocks(ROOT / "docs" / "distributed.md")[0].split("\n\n\nencoder, pgcl = ")[0], names)
encode_in_chunks = names["encode_in_chunks"]

MADE = {
    "InfoNCE": partial(learned_temperature, info_nce, memory_size=8),
    "PGCLLoss": partial(learned_temperature, pgcl, memory_size=8, queue_size=8),
}


class Chunked(Model):
    def forward(self, *views, chunk=None):
        if chunk is None:
            return super().forward(*views)
        chunks = ([(part,) for part in view.split(chunk)] for view in views)
        return self.loss(*(encode_in_chunks(self.encoder, of_view) for of_view in chunks))


def model_of(loss):
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, DIM))
    return Chunked(MADE[loss](), encoder).double()


def views():
    return torch.randn(2, 16, 3, dtype=torch.float64, generator=of_seed(1))


def step(model, *views, **chunk):
    """The loss, the gradients, and the state of the loss after it."""
    loss = model(*views, **chunk)
    loss.backward()
    model = getattr(model, "module", model)
    return loss.detach(), gradients_of(model), dict(model.loss.named_buffers())


def step_on_rank(rank, num_ranks, loss):
    """Of batches, and numbers of chunks, of different sizes."""
    own, chunk = [(slice(10), 3), (slice(10, None), 4)][rank]
    return step(DistributedDataParallel(model_of(loss)), *views()[:, own], chunk=chunk)


@few_graphs
@pytest.mark.parametrize("loss", MADE)
def test_chunks_have_the_gradients_of_the_whole_batch_also_on_two_processes(loss):
    expected = step(model_of(loss), *views())
    assert all(gradient.any() for gradient in expected[1])
    for result in (step(model_of(loss), *views(), chunk=5), *on_ranks(step_on_rank, 2, loss)):
        torch.testing.assert_close(result, expected)


def test_only_the_input_is_stored():
    chunks, encoder = [(part,) for part in views()[0].split(5)], model_of("InfoNCE").encoder
    _, kept = kept_for_backward(lambda: encode_in_chunks(encoder, chunks))
    assert kept <= views()[0].numel()
