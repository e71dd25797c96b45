"""Training over many ranks: compiled, accumulated, and resumed from a checkpoint."""

from contextlib import nullcontext

import pytest
import torch
from helpers.rank_models import DIM, Inside, gradients, mean_over_ranks, model_of, of_seed
from helpers.ranks import on_ranks
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pgcl_losses import PGCLLoss

pytestmark = pytest.mark.slow


def compiled(rank, num_ranks):
    """Losses and gradients of a compiled model, and of an eager one, for batches of many sizes."""
    for mode in ({}, {"negatives": "cross"}, {"weighting": "sample", "queue_size": 4}):
        torch.compiler.reset()
        eager, twin = (Inside(*model_of(3, **mode)) for _ in range(2))
        whole = Inside(*model_of(3, **mode, gather=False))
        twin.compile(backend="aot_eager")
        random = of_seed(9)
        for counts in ([4, 4], [3, 6], [6, 3], [5, 5], [1, 7], [7, 0]):
            x1, x2 = torch.randn(2, sum(counts), 3, dtype=torch.float64, generator=random)
            results = []
            for model in (eager, twin):
                loss = model(x1.split(counts)[rank], x2.split(counts)[rank])
                loss.backward()
                results.append([mean_over_ranks(loss), *gradients(model), *model.buffers()])
            torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)
            expected = whole(x1, x2)
            torch.testing.assert_close(results[1][0], expected.detach(), rtol=1e-9, atol=1e-10)


def test_compiled_models_take_batches_of_any_size():
    on_ranks(compiled, 2)


def steps(rank, num_ranks, weights, accumulated):
    """Gradients of a wrapped model for each lambda, and those of one process."""
    model, whole = (
        Inside(*model_of(3, consistency_weight=weights[0], gather=g)) for g in (True, False)
    )
    wrapped, random = DistributedDataParallel(model), of_seed(9)
    for step, weight in enumerate(weights):
        model.pgcl.consistency_weight = whole.pgcl.consistency_weight = weight
        x1, x2 = torch.randn(2, 9, 3, dtype=torch.float64, generator=random)
        waits = accumulated and step % 2 == 0
        with wrapped.no_sync() if waits else nullcontext():
            wrapped(x1.split([4, 5])[rank], x2.split([4, 5])[rank]).backward()
        whole(x1, x2).backward()
        if not waits:
            torch.testing.assert_close(gradients(model), gradients(whole), rtol=1e-9, atol=1e-10)
            model.zero_grad(), whole.zero_grad()


@pytest.mark.parametrize(
    ("weights", "accumulated"),
    [((6, 0, 0, 6), False), ((0, 0, 6, 0), False), ((6, 6, 6, 6), True)],
)
def test_the_consistency_may_be_switched_and_gradients_accumulated(weights, accumulated):
    on_ranks(steps, 2, weights, accumulated)


def training(rank, num_ranks, wrapping):
    torch.manual_seed(0)
    model = Inside(nn.Linear(3, DIM), PGCLLoss(DIM, 3, freeze_steps=5, queue_size=16))
    if wrapping == "beside":
        encoder = DistributedDataParallel(model.encoder)
        step = Inside(encoder, model.pgcl)
    else:
        step = DistributedDataParallel(model, static_graph=wrapping == "static graph")
    if wrapping == "compiled":
        model.compile(backend="aot_eager")
    optimizer, random = torch.optim.Adam(model.parameters(), lr=1e-2), of_seed(rank)
    for _ in range(10 if wrapping == "compiled" else 200):
        step(*torch.randn(2, 6 + rank, 3, generator=random)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().numpy().tobytes() for p in model.parameters()]
    return weights, int(model.pgcl.prototypes.step)


@pytest.mark.parametrize("wrapping", ["inside", "beside", "static graph", "compiled"])
def test_training_keeps_ranks_bit_identical(wrapping):
    first, second = on_ranks(training, 2, wrapping)
    assert first == second


def resuming(rank, num_ranks, folder):
    batches = torch.randn(6, 2, 5, DIM, generator=of_seed(rank), requires_grad=True)
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, queue_size=12)
    for views in batches[:3]:
        pgcl(*views)
    if rank == 0:
        torch.save(pgcl.state_dict(), folder / "state.pt")
    distributed.barrier()
    resumed = PGCLLoss(DIM, queue_size=12)
    resumed.load_state_dict(torch.load(folder / "state.pt"))
    for views in batches[3:]:
        assert torch.equal(pgcl(*views), resumed(*views))


def test_all_ranks_load_the_checkpoint_of_rank_0(tmp_path):
    on_ranks(resuming, 3, tmp_path)
