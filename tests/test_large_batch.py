"""examples/large_batch.py: an encoder in chunks has the gradients of the whole batch."""

import inspect
import re
from functools import partial

import pytest
import torch
from helpers.marks import few_graphs
from helpers.ranks import on_ranks
from helpers.scripts import ROOT, run
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.live_bytes import LiveBytes
from examples.large_batch import encode_in_chunks
from pgcl_losses import InfoNCE, PGCLLoss

DIM = 4
LOSSES = {
    "InfoNCE": partial(InfoNCE, memory_size=8, dim=DIM),
    "PGCLLoss": partial(PGCLLoss, DIM, num_prototypes=3, memory_size=8, queue_size=8),
}


class Model(nn.Module):
    def __init__(self, loss, dropout=0.0, hidden=8):
        super().__init__()
        torch.manual_seed(0)
        layers = nn.Linear(3, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, DIM)
        self.encoder = nn.Sequential(*layers)
        self.loss = LOSSES[loss](temperature=nn.Parameter(torch.tensor(0.3)))
        self.double()

    def forward(self, *views, chunk=None):
        if chunk is None:
            return self.loss(*map(self.encoder, views))
        chunks = ([(part,) for part in view.split(chunk)] for view in views)
        return self.loss(*(encode_in_chunks(self.encoder, of_view) for of_view in chunks))


def views(num=16):
    return torch.randn(2, num, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def step(model, *views, **chunk):
    """The loss, the gradients, and the state of the loss after it."""
    loss = model(*views, **chunk)
    loss.backward()
    model = getattr(model, "module", model)
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return loss.detach(), gradients, dict(model.loss.named_buffers())


def step_on_rank(rank, num_ranks, loss):
    """Of batches, and numbers of chunks, of different sizes."""
    own, chunk = [(slice(10), 3), (slice(10, None), 4)][rank]
    return step(DistributedDataParallel(Model(loss)), *views()[:, own], chunk=chunk)


@few_graphs
@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_have_the_gradients_of_the_whole_batch(loss):
    result, expected = step(Model(loss), *views(), chunk=5), step(Model(loss), *views())
    torch.testing.assert_close(result, expected)
    assert all(gradient.any() for gradient in result[1].values())


@few_graphs
@pytest.mark.parametrize("loss", LOSSES)
def test_chunks_on_two_processes_have_the_gradients_of_one(loss):
    expected = step(Model(loss), *views())
    for result in on_ranks(step_on_rank, 2, loss):
        torch.testing.assert_close(result, expected)


def test_both_runs_of_the_encoder_drop_the_same():
    encoder = Model("InfoNCE", dropout=0.5).encoder
    chunks = [(part,) for part in views()[0].split(5)]
    gradients = []
    for encode in (encode_in_chunks, lambda *_: torch.cat([encoder(*chunk) for chunk in chunks])):
        torch.manual_seed(1)
        loss = encode(encoder, chunks).square().sum()
        gradients.append(torch.autograd.grad(loss, list(encoder.parameters())))
    torch.testing.assert_close(*gradients)


def test_activations_of_one_chunk_are_stored():
    encoder, peaks = Model("InfoNCE", hidden=256).encoder, []
    for size in (64, 1024):
        with LiveBytes() as live:
            chunks = [(part,) for part in views(1024)[0].split(size)]
            encode_in_chunks(encoder, chunks).sum().backward()
        peaks.append(live.peak)
    assert peaks[0] < peaks[1] / 8


@pytest.mark.parametrize("processes", [0, 2])
def test_the_script(processes):
    torchrun = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}")
    start = torchrun if processes else ()
    given = ("--graphs=64", "--chunk=20", "--epochs=3")
    printed = run(*start, "examples/large_batch.py", *given, CUDA_VISIBLE_DEVICES="")
    losses = [float(x) for x in re.findall(r"Epoch: \d+, Loss: (\d+\.\d+)", printed)]
    assert len(losses) == 3 * max(processes, 1)
    assert losses[-1] < losses[0]


def test_the_page_shows_the_function():
    page = (ROOT / "docs" / "distributed.md").read_text()
    assert inspect.getsource(encode_in_chunks) in page
