"""Training over many ranks: compiled, accumulated, and resumed from a checkpoint."""

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


def switched(rank, num_ranks, weights):
    """The gradients of a wrapped model as lambda goes to 0 or from it, and those of one process."""
    model, whole = (
        Inside(*model_of(3, consistency_weight=weights[0], gather=g)) for g in (True, False)
    )
    wrapped = DistributedDataParallel(model)
    random = of_seed(9)
    for weight in weights:
        model.pgcl.consistency_weight = whole.pgcl.consistency_weight = weight
        model.zero_grad(), whole.zero_grad()
        x1, x2 = torch.randn(2, 9, 3, dtype=torch.float64, generator=random)
        wrapped(x1.split([4, 5])[rank], x2.split([4, 5])[rank]).backward()
        whole(x1, x2).backward()
        torch.testing.assert_close(gradients(model), gradients(whole), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("weights", [(6, 0, 0, 6), (0, 0, 6, 0)])
def test_the_consistency_may_be_switched_under_ddp(weights):
    on_ranks(switched, 2, weights)


def training(rank, num_ranks, wrapping):
    torch.manual_seed(0)
    encoder, pgcl = nn.Linear(3, DIM), PGCLLoss(DIM, 3, freeze_steps=5, queue_size=16)
    options = {"static_graph": True} if wrapping == "static graph" else {}
    if wrapping == "beside":
        encoder = DistributedDataParallel(encoder)
        step = lambda x1, x2: pgcl(encoder(x1), encoder(x2))  # noqa: E731
        no_sync = encoder.no_sync
    else:
        step = DistributedDataParallel(Inside(encoder, pgcl), **options)
        no_sync = step.no_sync
    if wrapping == "compiled":
        step.module.compile(backend="aot_eager")
    optimizer = torch.optim.Adam([*encoder.parameters(), *pgcl.parameters()], lr=1e-2)
    random = of_seed(rank)
    steps = 10 if wrapping == "compiled" else 200
    for _ in range(steps):
        if wrapping == "accumulated":
            with no_sync():
                step(*torch.randn(2, 6, 3, generator=random)).backward()
        step(*torch.randn(2, 6 + rank, 3, generator=random)).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach() for p in [*encoder.parameters(), *pgcl.parameters()]]
    return [weight.numpy().tobytes() for weight in weights], int(pgcl.prototypes.step)


@pytest.mark.parametrize(
    "wrapping", ["inside", "beside", "static graph", "accumulated", "compiled"]
)
def test_training_keeps_ranks_bit_identical(wrapping):
    first, second = on_ranks(training, 2, wrapping)
    assert first == second


def accumulating(rank, num_ranks):
    batches = torch.randn(2, 2, 8, 3, dtype=torch.float64, generator=of_seed(5))
    encoder, pgcl = model_of(0)
    wrapped = DistributedDataParallel(Inside(encoder, pgcl))
    whole_encoder, whole = model_of(0, gather=False)
    mine = slice(4 * rank, 4 * rank + 4)
    with wrapped.no_sync():
        wrapped(*batches[0][:, mine]).backward()
    wrapped(*batches[1][:, mine]).backward()
    for x1, x2 in batches:
        whole(whole_encoder(x1), whole_encoder(x2)).backward()
    torch.testing.assert_close(
        gradients(encoder, pgcl), gradients(whole_encoder, whole), rtol=1e-9, atol=1e-10
    )


def test_accumulated_gradients_are_those_of_one_process():
    on_ranks(accumulating, 2)


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
