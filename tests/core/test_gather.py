"""The loss over many ranks: that of one process on the whole batch, or a clear error.

And the bytes that ranks send, and the memory that they need.
"""

import copy
import datetime
import itertools
import os
import time

import pytest
import torch
from helpers.blocks import in_blocks
from helpers.cases import EVERY_MODE, FAMILY
from helpers.rank_models import (
    DIM,
    Inside,
    SentBytes,
    gradients,
    mean_over_ranks,
    model_of,
    of_seed,
)
from helpers.ranks import TIMEOUT, on_ranks
from live_bytes import LiveBytes
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pgcl_losses import PGCLLoss
from pgcl_losses._module import _COMPARE_STATE_EVERY

pytestmark = pytest.mark.slow


LAYOUTS = ("equal", "unequal", "some empty")
WRAPPINGS = ("inside", "beside")
BLOCKS = (1, 3, 640)


def counts_of(layout, num_ranks, generator):
    """How many graphs each rank holds."""
    counts = torch.randint(1, 8, (num_ranks,), generator=generator)
    if layout == "equal":
        return [int(counts[0])] * num_ranks
    if layout == "some empty":
        counts[torch.randperm(num_ranks, generator=generator)[: num_ranks // 2]] = 0
    return counts.tolist()


def check_case(rank, num_ranks, options, layout, wrapping, random):
    counts = counts_of(layout, num_ranks, random)
    model, whole = (Inside(*model_of(7, **options, gather=gather)) for gather in (True, False))
    inside = wrapping == "inside"
    wrapped = DistributedDataParallel(model if inside else model.encoder)
    for _ in range(2):  # in the second step the queue holds embeddings of the first
        views = torch.randn(2, sum(counts), 3, dtype=torch.float64, generator=random)
        mine = views.split(counts, dim=1)[rank]
        loss = wrapped(*mine) if inside else model.pgcl(*wrapped(mine))
        expected = whole(*views)
        loss.backward()
        expected.backward()
        torch.testing.assert_close(
            [mean_over_ranks(loss), *gradients(model), *model.buffers()],
            [expected.detach(), *gradients(whole), *whole.buffers()],
            rtol=1e-9,
            atol=1e-10,
            msg=lambda message: f"{options} {counts} {wrapping}: {message}",
        )


def every_mode(rank, num_ranks):
    random = of_seed(num_ranks)

    def draw(choices):
        return choices[int(torch.randint(len(choices), (), generator=random))]

    cases = [({}, *case) for case in itertools.product(LAYOUTS, WRAPPINGS)]
    for mode in EVERY_MODE:
        options = {**mode, "reduction": draw(("mean", "sum")), "queue_size": draw((0, 3, 20))}
        cases.append((options, draw(LAYOUTS), draw(WRAPPINGS)))
    for member in FAMILY:
        options = {**draw(EVERY_MODE), **member, "queue_size": draw((0, 3))}
        cases.append((options, draw(LAYOUTS), draw(WRAPPINGS)))
    for case in cases:
        with in_blocks(draw(BLOCKS)):
            check_case(rank, num_ranks, *case, random)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_value_and_gradients_are_those_of_one_process(num_ranks):
    on_ranks(every_mode, num_ranks)


def without_reduction(rank, num_ranks):
    counts = [3, 0, 4]
    z1, z2 = torch.randn(2, 7, DIM, generator=of_seed(1))
    _, whole = model_of(0, gather=False, reduction="none")
    _, pgcl = model_of(0, reduction="none")
    expected = whole(z1, z2).split([*counts, *counts])
    ours = pgcl(*(z.split(counts)[rank] for z in (z1, z2)))
    torch.testing.assert_close(ours, torch.cat([expected[rank], expected[3 + rank]]))
    assert [len(a.clusters) for a in pgcl.terms(z1[:rank], z2[:rank]).assignments] == [rank] * 2


def test_without_reduction_each_rank_gets_the_losses_of_its_embeddings():
    on_ranks(without_reduction, 3)


def gradient_of_one_view(rank, num_ranks):
    """On rank 0 one view has a gradient, on rank 1 both have."""
    z1, z2 = torch.randn(2, 8, DIM, dtype=torch.float64, generator=of_seed(1))
    z1.requires_grad_()
    mine = slice(4 * rank, 4 * rank + 4)
    _, whole = model_of(0, gather=False)
    _, pgcl = model_of(0)
    (expected,) = torch.autograd.grad(whole(z1, z2), z1)
    (ours,) = torch.autograd.grad(pgcl(z1[mine], z2[mine].requires_grad_(rank == 1)), z1)
    torch.testing.assert_close(mean_over_ranks(ours), expected)


def test_ranks_may_differ_in_the_views_that_have_a_gradient():
    on_ranks(gradient_of_one_view, 2)


def differing(rank):
    """Losses and embeddings of a rank, of which one of two differs, with the error."""
    z, first = torch.randn(4, DIM, generator=of_seed(rank), requires_grad=True), rank == 0
    too_wide = torch.randn(4, 9)
    ready = "rank 0: ready\n  rank 1: "
    return [
        (PGCLLoss(DIM), z if first else too_wide, ready + "ValueError: z1 has dimension 9 but"),
        (PGCLLoss(DIM), z if first else None, ready + "TypeError: z1 must be a Tensor"),
        (PGCLLoss(DIM), z if first else z.double(), "dtype=torch.float32.*1: dtype=torch.float64"),
        (PGCLLoss(DIM), z if first else z.detach(), "requires_grad=True.*1: requires_grad=False"),
        (PGCLLoss(DIM, temperature=0.2 + 0.1 * rank), z, "temperature=0.2.*1: .*temperature=0.3"),
        (PGCLLoss(DIM, 10 + rank), z, "num_prototypes=10.*1: .*num_prototypes=11"),
        (PGCLLoss(DIM, queue_size=4 * rank), z, "queue_size=0.*1: .*queue_size=4"),
        (PGCLLoss(DIM, engine=["auto", "blocks"][rank]), z, "engine=auto.*1: .*engine=blocks"),
        (PGCLLoss(DIM).train(first), z, "training=True.*1: training=False"),
        (PGCLLoss(DIM).requires_grad_(first), z, "requires_grad=True.*1: .*requires_grad=False"),
        (PGCLLoss(DIM, engine="dense"), z, "one matrix in one process, but 2 processes"),
        (PGCLLoss(DIM), z[:0], "the batch must not be empty on every rank"),
        (PGCLLoss(DIM), too_wide, "^z1 has dimension 9"),
        (PGCLLoss(DIM, iterations=1 + rank), too_wide, "^z1 has dimension 9"),
    ]


def errors(rank, num_ranks):
    messages = []
    for pgcl, z, words in differing(rank):
        nn.init.ones_(pgcl.prototypes.weight)
        start = time.monotonic()
        with pytest.raises((ValueError, TypeError), match=f"(?s){words}") as caught:
            pgcl(z, z)
        messages.append(str(caught.value))
        assert time.monotonic() - start < 10
    return messages


def test_ranks_that_differ_raise_the_same_error():
    first, second = on_ranks(errors, 2)
    assert first == second


def diverging(rank, num_ranks):
    z = torch.randn(3, DIM, dtype=torch.float64)
    message = "prototypes.*not the same on all ranks"
    with pytest.raises(ValueError, match=message):
        model_of(rank)[1](z, z)
    _, pgcl = model_of(0)
    pgcl(z, z)
    with torch.no_grad():
        pgcl.prototypes.weight += rank
    for _ in range(1, _COMPARE_STATE_EVERY):
        pgcl(z, z)
    with pytest.raises(ValueError, match=message):
        pgcl(z, z)


def test_state_is_compared_in_the_first_call_and_then_now_and_again():
    on_ranks(diverging, 2)


def nan_on_one(rank, num_ranks):
    _, pgcl = model_of(0, queue_size=5)
    z = torch.randn(6, DIM, dtype=torch.float64, generator=of_seed(rank))
    pgcl(z.requires_grad_(), z)
    before = copy.deepcopy(pgcl.state_dict())
    bad = z.detach().clone()
    bad[0, 0] = torch.nan if rank == 1 else 1.0
    loss = pgcl(bad.requires_grad_(), z)
    assert loss.isnan()
    torch.testing.assert_close(pgcl.state_dict(), before, rtol=0, atol=0)


def test_nan_on_one_rank_is_nan_on_all_and_enters_no_state():
    on_ranks(nan_on_one, 3)


def dying(rank, num_ranks, when):
    # The timeout counts from a moment at which all have started.
    group = distributed.new_group([0, 1], timeout=datetime.timedelta(seconds=3))
    distributed.barrier()
    z = torch.randn(5, DIM, requires_grad=True)
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, process_group=group)
    if when == "forward" and rank == 1:
        os._exit(1)
    start = time.monotonic()
    try:
        loss = pgcl(z, z)
        if rank == 1:
            time.sleep(5 * TIMEOUT if when == "late" else 0)
            os._exit(1)
        loss.backward()
    except RuntimeError as error:
        assert time.monotonic() - start < 11
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize(
    ("when", "collective"),
    [
        ("forward", "the all-gather of batch sizes failed on rank 0 of 2; has another rank died"),
        ("backward", "gradient of sums over pairs failed on rank 0 of 2; has another rank died"),
        ("late", "failed on rank 0 of 2; has another rank died, or does it not take part"),
    ],
)
def test_a_dead_rank_raises_an_error_that_names_the_collective(when, collective):
    survivor, _ = on_ranks(dying, 2, when, may_die=[1])
    assert collective in survivor


def subgroup(rank, num_ranks):
    group = distributed.new_group([0, 2])
    z1, z2 = torch.randn(2, 6, DIM, dtype=torch.float64, generator=of_seed(3))
    _, whole = model_of(0, gather=False)
    if rank == 1:
        with pytest.raises(ValueError, match="process_group does not contain this process"):
            PGCLLoss(DIM, process_group=group)
        assert torch.equal(model_of(0, gather=False)[1](z1, z2), whole(z1, z2))
        return None
    _, pgcl = model_of(0, process_group=group)
    mine = slice(0, 2) if rank == 0 else slice(2, 6)
    loss = pgcl(z1[mine], z2[mine])
    return loss.item(), whole(z1, z2).item()


def test_a_process_group_of_some_ranks():
    first, _, last = on_ranks(subgroup, 3)
    assert (first[0] + last[0]) / 2 == pytest.approx(first[1], rel=1e-9)


def without_gather(rank, num_ranks):
    z1, z2 = torch.randn(2, 3 + rank, DIM, dtype=torch.float64, generator=of_seed(rank))
    _, pgcl = model_of(0, gather=False)
    with SentBytes() as sent:
        loss = pgcl(z1.requires_grad_(), z2)
        loss.backward()
    assert sent.given == {}
    return loss.item(), z1.grad


def alone(rank, num_ranks):
    return [without_gather(rank, num_ranks) for rank in range(2)]


def test_without_gather_each_rank_has_the_loss_of_its_own_batch():
    (expected,) = on_ranks(alone, 1)
    torch.testing.assert_close(on_ranks(without_gather, 2), expected, rtol=0, atol=0)


def backward(num_graphs, **options):
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, 3, **options)
    views = torch.randn(2, num_graphs, DIM, requires_grad=True)
    pgcl(*views).backward()


def counted(rank, num_ranks, batches):
    given = []
    for counts in batches:
        with SentBytes() as sent:
            backward(counts[rank], queue_size=8)
        given.append(sent.given)
    return given


@pytest.mark.parametrize("batches", [[[50]], [[1, 1], [50, 50], [3, 8]], [[7, 7, 7], [2, 30, 0]]])
def test_bytes_are_those_of_the_documentation(batches):
    num_ranks = len(batches[0])
    for of_rank in on_ranks(counted, num_ranks, batches):
        for given, counts in zip(of_rank, batches, strict=True):
            embeddings, prototypes = 2 * max(counts) * DIM * 4, 3 * DIM * 4
            sums, state = 2 * sum(counts) * 4, prototypes + 2 * 8 * DIM * 4 + 2 * 8
            documented = {
                "allgather_base": embeddings + sums + 3 * 8,
                # of the gradient of embeddings too, and of the state in the first call
                "allreduce": 2 * sum(counts) * DIM * 4 + sums + prototypes + 2 * state,
            }
            assert given == (documented if num_ranks > 1 else {})


def peak(rank, num_ranks, num_graphs):
    with in_blocks(64), LiveBytes() as live:
        backward(num_graphs)
    return live.peak


def test_memory_grows_with_embeddings_and_not_with_pairs():
    (small, _), (large, _) = (on_ranks(peak, 2, num_graphs) for num_graphs in (150, 600))
    assert large < 5 * small  # four times the embeddings, sixteen times the pairs
