"""One loss over many processes: that of one process on the whole batch, or a clear error."""

import copy
import datetime
import itertools
import os
import re
import time

import pytest
import torch
from helpers.blocks import in_blocks
from helpers.ranks import DEAD, on_ranks
from live_bytes import LiveBytes
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from pgcl_losses import PGCLLoss

MODES = [
    {"weighting": weighting, "exclude_same_cluster": exclude, "negatives": negatives}
    for weighting in ("prototype", "sample", "uniform")
    for exclude in (True, False)
    for negatives in ("all", "cross")
]
DIM = 4


def of_seed(seed):
    return torch.Generator().manual_seed(seed)


def model_of(seed, **options):
    """An encoder and a loss, alike for the same seed."""
    torch.manual_seed(seed)
    encoder = nn.Linear(3, DIM, dtype=torch.float64)
    return encoder, PGCLLoss(DIM, 3, **options).double()


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


class Inside(nn.Module):
    """Encoder and loss in one module."""

    def __init__(self, encoder, pgcl):
        super().__init__()
        self.encoder, self.pgcl = encoder, pgcl

    def forward(self, x1, x2):
        return self.pgcl(self.encoder(x1), self.encoder(x2))


def gradients(*modules):
    return [parameter.grad for module in modules for parameter in module.parameters()]


def mean_over_ranks(value):
    total = value.detach().clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()


LAYOUTS = ("equal", "unequal", "some empty")
WRAPPINGS = ("inside", "beside")
BLOCKS = ((1, 1), (3, 40), (640, 1 << 21))  # of streaming: rows, elements


def check_case(rank, num_ranks, options, layout, wrapping, random):
    counts = counts_of(layout, num_ranks, random)
    encoder, pgcl = model_of(7, **options)
    whole_encoder, whole = model_of(7, **options, gather=False)
    inside = wrapping == "inside"
    wrapped = DistributedDataParallel(Inside(encoder, pgcl) if inside else encoder)
    for _ in range(2):  # the second step meets rows of the first in the queue
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
            msg=lambda found: f"{options} {counts} {wrapping}: {found}",
        )


def every_mode(rank, num_ranks, engines):
    random = of_seed(num_ranks)

    def draw(choices):
        return choices[int(torch.randint(len(choices), (), generator=random))]

    for engine in engines:
        for layout, wrapping in itertools.product(LAYOUTS, WRAPPINGS):
            with in_blocks(*draw(BLOCKS)):
                check_case(rank, num_ranks, {"engine": engine}, layout, wrapping, random)
        for mode in MODES:
            options = {"engine": engine, **mode, "reduction": draw(("mean", "sum"))}
            options["queue_size"] = draw((0, 3, 20))
            with in_blocks(*draw(BLOCKS)):
                check_case(rank, num_ranks, options, draw(LAYOUTS), draw(WRAPPINGS), random)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_value_and_gradients_are_those_of_one_process(num_ranks):
    engines = ["dense", "streaming"]
    on_ranks(every_mode, num_ranks, ["triton", *engines] if num_ranks == 2 else engines)


def by_row(rank, num_ranks):
    counts = [3, 0, 4]
    z1, z2 = torch.randn(2, 7, DIM, generator=of_seed(1))
    _, whole = model_of(0, gather=False, reduction="none")
    _, pgcl = model_of(0, reduction="none")
    expected = whole(z1, z2).split([*counts, *counts])
    ours = pgcl(*(z.split(counts)[rank] for z in (z1, z2)))
    torch.testing.assert_close(ours, torch.cat([expected[rank], expected[3 + rank]]))
    assert [len(a.clusters) for a in pgcl.terms(z1[:rank], z2[:rank]).assignments] == [rank] * 2


def test_without_reduction_each_rank_gets_the_losses_of_its_rows():
    on_ranks(by_row, 3)


def one_view_learns(rank, num_ranks):
    """On rank 0, that is; on the other both do."""
    z1, z2 = torch.randn(2, 8, DIM, dtype=torch.float64, generator=of_seed(1))
    z1.requires_grad_()
    mine = slice(4 * rank, 4 * rank + 4)
    _, whole = model_of(0, gather=False)
    _, pgcl = model_of(0)
    (expected,) = torch.autograd.grad(whole(z1, z2), z1)
    (ours,) = torch.autograd.grad(pgcl(z1[mine], z2[mine].requires_grad_(rank == 1)), z1)
    torch.testing.assert_close(mean_over_ranks(ours), expected)


def test_views_without_gradient_are_a_ranks_own_business():
    on_ranks(one_view_learns, 2)


def gradient_of_peers(rank, num_ranks):
    """Whole, global, averaged over ranks, and gathered without gradient to the others' rows."""
    x1, x2 = torch.randn(2, 8, 3, dtype=torch.float64, generator=of_seed(1))
    mine = slice(4 * rank, 4 * rank + 4)
    found = {}
    for name in ("whole", "ours", "averaged", "detached"):
        reduction = "none" if name == "detached" else "mean"
        options = {"reduction": reduction, "gather": name == "ours", "consistency_weight": 0.0}
        encoder, pgcl = model_of(0, **options, weighting="uniform")
        z1, z2 = encoder(x1), encoder(x2)
        if name == "whole":
            loss = pgcl(z1, z2)
        elif name == "detached":  # its own queries, held against all rows
            of_others = torch.ones(8, 1, dtype=torch.bool)
            of_others[mine] = False
            z1, z2 = (torch.where(of_others, z.detach(), z) for z in (z1, z2))
            loss = pgcl(z1, z2).view(2, -1)[:, mine].mean()
        else:
            loss = pgcl(z1[mine], z2[mine])
        loss.backward()
        found[name] = mean_over_ranks(encoder.weight.grad)
    return found


def test_what_peers_do_optimises_something_else():
    (found, _) = on_ranks(gradient_of_peers, 2)
    whole = found["whole"]
    assert (found["ours"] - whole).norm() < 1e-9 * whole.norm()
    for name in ("averaged", "detached"):
        # A factor alone would be the learning rate's business.
        factor = (found[name] * whole).sum() / whole.square().sum()
        assert (found[name] / factor - whole).norm() > 0.05 * whole.norm(), name


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
    found = {}
    for name, (pgcl, z) in cases.items():
        if name != "prototypes":
            nn.init.ones_(pgcl.prototypes.weight)
        start = time.monotonic()
        with pytest.raises((ValueError, TypeError)) as caught:
            pgcl(z, z)
        found[name] = str(caught.value)
        assert time.monotonic() - start < 10
    return found


def test_ranks_that_disagree_get_the_same_error():
    first, second = on_ranks(errors, 2)
    assert first == second
    for name, words in {
        "width": "rank 0: ready\n  rank 1: ValueError: z1 has width 9 but prototypes",
        "dtype": "rank 0: torch.float32.*\n  rank 1: torch.float64",
        "options": "temperature=0.2.*\n  rank 1: .*temperature=0.3",
        "K": "num_prototypes=10.*\n  rank 1: .*num_prototypes=11",
        "mode": "training=True.*\n  rank 1: training=False",
        "gradient": "requires_grad=True.*\n  rank 1: .*requires_grad=False",
        "empty": "z1 must not be empty on every rank",
        "no tensor": "rank 1: TypeError: z1 must be a Tensor",
        "queue": "queue_size=0.*\n  rank 1: .*queue_size=4",
        "frozen": "float32 with requires_grad=True\n  rank 1: .*requires_grad=False",
        "engine": "rank 0: [A-Za-z]+Error: engine='triton' needs.*\n  rank 1: ready",
        "all alike": "^z1 has width 9",
        "alike, but for options": "^z1 has width 9",
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


def test_nan_on_one_rank_shows_on_all_and_enters_no_state():
    on_ranks(nan_on_one, 3)


def dying(rank, num_ranks, when):
    # All start before the clock does.
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
            time.sleep(12 if when == "late" else 0)
            os._exit(1)
        loss.backward()
    except RuntimeError as error:
        assert time.monotonic() - start < 11
        return str(error)
    return "nothing happened"


@pytest.mark.parametrize(
    ("when", "collective"),
    [
        ("forward", "the all-gather of row counts failed on rank 0 of 2; has another rank died"),
        ("backward", "gradient failed on rank 0 of 2; has another rank died"),
        ("late", "gradient failed on rank 0 of 2; has another rank died, or does it not take part"),
    ],
)
def test_a_rank_that_is_gone_ends_the_others_with_the_collectives_name(when, collective):
    survivor, other = on_ranks(dying, 2, when, may_die=[1])
    assert collective in survivor
    assert other == DEAD


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


def test_a_process_group_may_be_a_part_of_all():
    first, _, last = on_ranks(subgroup, 3)
    assert (first[0] + last[0]) / 2 == pytest.approx(first[1], rel=1e-9)


def apart(rank, num_ranks):
    z1, z2 = torch.randn(2, 3 + rank, DIM, dtype=torch.float64, generator=of_seed(rank))
    _, pgcl = model_of(0, gather=False)
    with SentBytes() as sent:
        loss = pgcl(z1.requires_grad_(), z2)
        loss.backward()
    assert sent.given == {}
    return loss.item(), z1.grad


def alone(rank, num_ranks):
    return [apart(rank, num_ranks) for rank in range(2)]


def test_without_gather_each_rank_has_the_loss_of_its_own_rows():
    (expected,) = on_ranks(alone, 1)
    torch.testing.assert_close(on_ranks(apart, 2), expected, rtol=0, atol=0)


def compiled(rank, num_ranks):
    """Losses and gradients of a compiled model beside those of an eager one, as rows vary."""
    for mode in ({}, {"negatives": "cross"}, {"weighting": "sample", "queue_size": 4}):
        torch.compiler.reset()
        eager, twin = (Inside(*model_of(3, **mode)) for _ in range(2))
        whole = Inside(*model_of(3, **mode, gather=False))
        twin.compile(backend="aot_eager")
        random = of_seed(9)
        for counts in ([4, 4], [3, 6], [6, 3], [5, 5], [1, 7], [7, 0]):
            x1, x2 = torch.randn(2, sum(counts), 3, dtype=torch.float64, generator=random)
            found = []
            for model in (eager, twin):
                loss = model(x1.split(counts)[rank], x2.split(counts)[rank])
                loss.backward()
                found.append([mean_over_ranks(loss), *gradients(model), *model.buffers()])
            torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
            expected = whole(x1, x2)
            torch.testing.assert_close(found[1][0], expected.detach(), rtol=1e-9, atol=1e-10)


def test_compiled_models_may_meet_any_number_of_rows():
    on_ranks(compiled, 2)


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


def test_a_checkpoint_of_rank_0_serves_all(tmp_path):
    on_ranks(resuming, 3, tmp_path)


class SentBytes(TorchDispatchMode):
    """What collectives hand over, by name: a ring sends it on from rank to rank."""

    def __init__(self):
        super().__init__()
        self.given = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            name = str(function).split(".")[1].strip("_")
            # all-gather and reduce-scatter take (output, input, ...)
            tensors = args[1] if name.endswith("base") else args[0][0]
            self.given[name] = self.given.get(name, 0) + tensors.nbytes
        return function(*args, **(kwargs or {}))


def counted(rank, num_ranks, batches):
    found = []
    for counts in batches:
        torch.manual_seed(0)
        pgcl = PGCLLoss(DIM, 3, queue_size=8)
        z1, z2 = torch.randn(2, counts[rank], DIM, requires_grad=True).unbind()
        with SentBytes() as sent:
            pgcl(z1, z2).backward()
        found.append(sent.given)
    return found


@pytest.mark.parametrize("batches", [[[50]], [[1, 1], [50, 50], [3, 8]], [[7, 7, 7], [2, 30, 0]]])
def test_bytes_are_those_of_the_documentation(batches):
    num_ranks = len(batches[0])
    for of_rank in on_ranks(counted, num_ranks, batches):
        for given, counts in zip(of_rank, batches, strict=True):
            rows, prototypes = 2 * max(counts) * DIM * 4, 3 * DIM * 4
            documented = {
                "allgather_base": rows + 3 * 8,
                "reduce_scatter_base": num_ranks * rows,
                "allreduce": prototypes,
            }
            assert given == (documented if num_ranks > 1 else {})


def peak(rank, num_ranks, num_rows):
    pgcl = model_of(0, engine="streaming")[1].float()
    z1, z2 = torch.randn(2, num_rows, DIM, requires_grad=True).unbind()
    with in_blocks(640, 1 << 13), LiveBytes() as live:
        pgcl(z1, z2).backward()
    return live.peak


def test_memory_grows_with_rows_and_not_with_pairs():
    (small, _), (large, _) = (on_ranks(peak, 2, num_rows) for num_rows in (150, 600))
    assert large < 5 * small  # four times the rows, sixteen times the pairs
