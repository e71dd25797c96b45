"""The loss over many ranks: that of one process on the whole batch, or a clear error."""

import copy
import datetime
import itertools
import os
import re
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
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pgcl_losses import PGCLLoss

pytestmark = pytest.mark.slow


def counts_of(layout, num_ranks, generator):
    """How many graphs each rank holds."""
    if layout == "equal":
        return [int(torch.randint(1, 5, (), generator=generator))] * num_ranks
    counts = torch.randint(1, 8, (num_ranks,), generator=generator).tolist()
    if layout == "some empty" and num_ranks > 1:
        empty = torch.randperm(num_ranks, generator=generator).tolist()[1:]
        for rank in empty[: num_ranks // 2]:
            counts[rank] = 0
    return counts


LAYOUTS = ("equal", "unequal", "some empty")
WRAPPINGS = ("inside", "beside")
BLOCKS = (1, 3, 640)  # of streaming


def check_case(rank, num_ranks, options, layout, wrapping, random):
    counts = counts_of(layout, num_ranks, random)
    encoder, pgcl = model_of(7, **options)
    whole_encoder, whole = model_of(7, **options, gather=False)
    inside = wrapping == "inside"
    wrapped = DistributedDataParallel(Inside(encoder, pgcl) if inside else encoder)
    for _ in range(2):  # in the second step the queue holds embeddings of the first
        x1, x2 = torch.randn(2, sum(counts), 3, dtype=torch.float64, generator=random)
        mine1, mine2 = x1.split(counts)[rank], x2.split(counts)[rank]
        loss = wrapped(mine1, mine2) if inside else pgcl(*wrapped(torch.stack([mine1, mine2])))
        expected = whole(whole_encoder(x1), whole_encoder(x2))
        loss.backward()
        expected.backward()
        torch.testing.assert_close(
            [mean_over_ranks(loss), *gradients(encoder, pgcl), *pgcl.buffers()],
            [expected.detach(), *gradients(whole_encoder, whole), *whole.buffers()],
            rtol=1e-9,
            atol=1e-10,
            msg=lambda message: f"{options} {counts} {wrapping}: {message}",
        )


def every_mode(rank, num_ranks, engines):
    random = of_seed(num_ranks)

    def draw(choices):
        return choices[int(torch.randint(len(choices), (), generator=random))]

    for engine in engines:
        # Triton's interpreter is slow: one of each weighting, and one of the wrappings.
        wrappings = WRAPPINGS[:1] if engine == "triton" else WRAPPINGS
        for layout, wrapping in itertools.product(LAYOUTS, wrappings):
            with in_blocks(draw(BLOCKS)):
                check_case(rank, num_ranks, {"engine": engine}, layout, wrapping, random)
        for mode in EVERY_MODE[:: 5 if engine == "triton" else 1]:
            options = {"engine": engine, **mode, "reduction": draw(("mean", "sum"))}
            options["queue_size"] = draw((0, 3, 20))
            with in_blocks(draw(BLOCKS)):
                check_case(rank, num_ranks, options, draw(LAYOUTS), draw(WRAPPINGS), random)
        for member in FAMILY:
            options = {"engine": engine, **draw(EVERY_MODE), **member}
            options |= {"queue_size": draw((0, 3)), "warmup_steps": draw((0, 1))}
            with in_blocks(draw(BLOCKS)):
                check_case(rank, num_ranks, options, draw(LAYOUTS), draw(WRAPPINGS), random)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_value_and_gradients_are_those_of_one_process(num_ranks):
    engines = {1: ["dense", "streaming"], 2: ["triton", "streaming"]}
    on_ranks(every_mode, num_ranks, engines.get(num_ranks, ["streaming"]))


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


def gradient_of_peers(rank, num_ranks):
    """One process, our loss, the mean of local losses, and embeddings gathered without gradient."""
    x1, x2 = torch.randn(2, 8, 3, dtype=torch.float64, generator=of_seed(1))
    mine = slice(4 * rank, 4 * rank + 4)
    gradient_of = {}
    for name in ("whole", "ours", "averaged", "detached"):
        reduction = "none" if name == "detached" else "mean"
        options = {"reduction": reduction, "gather": name == "ours", "consistency_weight": 0.0}
        encoder, pgcl = model_of(0, **options, weighting="uniform")
        z1, z2 = encoder(x1), encoder(x2)
        if name == "whole":
            loss = pgcl(z1, z2)
        elif name == "detached":  # its own queries against all embeddings
            of_others = torch.ones(8, 1, dtype=torch.bool)
            of_others[mine] = False
            z1, z2 = (torch.where(of_others, z.detach(), z) for z in (z1, z2))
            loss = pgcl(z1, z2).view(2, -1)[:, mine].mean()
        else:
            loss = pgcl(z1[mine], z2[mine])
        loss.backward()
        gradient_of[name] = mean_over_ranks(encoder.weight.grad)
    return gradient_of


def test_local_losses_and_detached_gathering_have_another_gradient():
    (gradient_of, _) = on_ranks(gradient_of_peers, 2)
    whole = gradient_of["whole"]
    assert (gradient_of["ours"] - whole).norm() < 1e-9 * whole.norm()
    for name in ("averaged", "detached"):
        # Not even up to a factor, which a learning rate could undo.
        factor = (gradient_of[name] * whole).sum() / whole.square().sum()
        assert (gradient_of[name] / factor - whole).norm() > 0.05 * whole.norm(), name


def errors(rank, num_ranks):
    os.environ.pop("TRITON_INTERPRET", None)
    rows = torch.randn(4, DIM, generator=of_seed(rank), requires_grad=True)
    first = rank == 0
    cases = {
        "width": (PGCLLoss(DIM), rows if first else torch.randn(4, 9)),
        "dtype": (PGCLLoss(DIM), rows if first else rows.double()),
        "options": (PGCLLoss(DIM, temperature=0.2 if first else 0.3), rows),
        "K": (PGCLLoss(DIM, 10 if first else 11), rows),
        "mode": (PGCLLoss(DIM).train(first), rows),
        "queue": (PGCLLoss(DIM, queue_size=0 if first else 4), rows),
        "frozen": (PGCLLoss(DIM).requires_grad_(first), rows),
        "engine": (PGCLLoss(DIM, engine="triton" if first else "dense"), rows),
        "gradient": (PGCLLoss(DIM), rows if first else rows.detach()),
        "empty": (PGCLLoss(DIM), rows[:0]),
        "no tensor": (PGCLLoss(DIM), rows if first else None),
        "all alike": (PGCLLoss(DIM), torch.randn(4, 9)),
        "alike, but for options": (PGCLLoss(DIM, iterations=1 if first else 2), torch.randn(4, 9)),
    }
    torch.manual_seed(rank)
    cases["prototypes"] = (PGCLLoss(DIM), rows)
    messages = {}
    for name, (pgcl, z) in cases.items():
        if name != "prototypes":
            nn.init.ones_(pgcl.prototypes.weight)
        start = time.monotonic()
        with pytest.raises((ValueError, TypeError)) as caught:
            pgcl(z, z)
        messages[name] = str(caught.value)
        assert time.monotonic() - start < 10
    return messages


def test_ranks_that_differ_raise_the_same_error():
    first, second = on_ranks(errors, 2)
    assert first == second
    for name, words in {
        "width": "rank 0: ready\n  rank 1: ValueError: z1 has dimension 9 but prototypes",
        "dtype": "rank 0: dtype=torch.float32\n  rank 1: dtype=torch.float64",
        "options": "temperature=0.2.*\n  rank 1: .*temperature=0.3",
        "K": "num_prototypes=10.*\n  rank 1: .*num_prototypes=11",
        "mode": "training=True.*\n  rank 1: training=False",
        "gradient": "requires_grad=True.*\n  rank 1: .*requires_grad=False",
        "empty": "the batch must not be empty on every rank",
        "no tensor": "rank 1: TypeError: z1 must be a Tensor",
        "queue": "queue_size=0.*\n  rank 1: .*queue_size=4",
        "frozen": "float32, requires_grad=True\n  rank 1: .*requires_grad=False",
        "engine": "rank 0: [A-Za-z]+Error: engine='triton' needs.*\n  rank 1: ready",
        "all alike": "^z1 has dimension 9",
        "alike, but for options": "^z1 has dimension 9",
        "prototypes": "prototypes.*not the same on all ranks",
    }.items():
        assert re.search(words, first[name]), first[name]


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
        ("backward", "gradient failed on rank 0 of 2; has another rank died"),
        ("late", "gradient failed on rank 0 of 2; has another rank died, or does it not take part"),
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
