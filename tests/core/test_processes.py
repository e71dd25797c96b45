"""Each of many processes holds a portion of the batch: losses, gradients and state are of all."""

import copy
import datetime
import itertools
import os
import re
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import formulas
from helpers.cases import CUT, EVERY_MODE, FAMILY, NOT_CUT, in_chunks
from helpers.losses import (
    DIM,
    LOSSES,
    Apart,
    gradients_of,
    info_nce,
    mean_over_ranks,
    model_of,
    of_seed,
    pgcl,
    portions_of,
)
from helpers.marks import HAS_ONE_GRAPH
from helpers.ranks import on_ranks
from helpers.score_mods import by_distance, in_place, margin
from helpers.scripts import ROOT
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pgcl_losses import (
    ConsistencyLoss,
    InfoNCE,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
    diagnostics,
)
from pgcl_losses.base.distributed import checksum

EVERY_LOSS = (
    LOSSES
    | {f"{mode}": (partial(pgcl, **mode), "") for mode in EVERY_MODE}
    | {f"{member}": (partial(pgcl, **member, queue_size=3), "") for member in FAMILY}
    | {
        "modules by clusters": (partial(Apart, "clusters"), ""),
        "a memory smaller than the processes": (partial(info_nce, memory_size=1), "labels"),
        "consistency switched": (pgcl, "switch"),
        "made without consistency": (partial(pgcl, consistency_weight=0), "switch"),
    }
)
# How many embeddings of two sets, or of each of two views, the ranks hold in each step.
COUNTS = {
    1: [([7], [4]), ([3], [5])],
    2: [([4, 4], [6, 0]), ([7, 0], [1, 3])],
    3: [([2, 0, 5], [0, 3, 1]), ([1, 4, 3], [3, 0, 0]), ([2, 2, 2], [1, 2, 1])],
    4: [([3, 0, 1, 4], [0, 2, 0, 5]), ([0, 0, 6, 1], [1, 1, 1, 1])],
}
CLOSE = {"rtol": 1e-8, "atol": 1e-9}


def equals_one_process(rank, num_ranks, name, way):
    with in_chunks(way.chunk):
        train_beside_one_process(rank, num_ranks, name)


def train_beside_one_process(rank, num_ranks, name):
    make, inputs = EVERY_LOSS[name]
    model, whole = (model_of(make, gather=gather) for gather in (True, False))
    # An odd number of ranks wraps encoder and loss, an even one the encoder alone.
    is_inside = num_ranks % 2 == 1
    wrapped = DistributedDataParallel(model if is_inside else model.encoder)
    for seed, (first, second) in enumerate(COUNTS[num_ranks]):
        if "switch" in inputs:
            model.loss.consistency_weight = whole.loss.consistency_weight = 6 * (seed % 2)
        counts = [first, second if "sets" in inputs else first]
        of_all, *of_ranks = portions_of(counts, inputs, seed)
        mine = of_ranks[rank]
        accumulates = is_inside and seed == 0  # the next step adds its gradients and sends both
        with wrapped.no_sync() if accumulates else nullcontext():
            if is_inside:
                loss = wrapped(*mine.sets, **mine.given)
            else:
                z = wrapped(torch.cat(mine.sets)).split([len(x) for x in mine.sets])
                loss = model.loss(*z, **mine.given)
        expected = whole(*of_all.sets, **of_all.given)
        if getattr(model.loss, "contrast", model.loss).reduction == "none":
            own = mine.positions[mine.positions < len(expected)]
            torch.testing.assert_close(loss, expected[own], **CLOSE)
            slopes = torch.linspace(-1, 2, len(expected), dtype=torch.float64)
            loss, expected = loss @ slopes[own], expected @ slopes / num_ranks
        loss.backward()
        expected.backward()
        torch.testing.assert_close(mean_over_ranks(loss), expected.detach(), **CLOSE)
        if not accumulates:
            torch.testing.assert_close(gradients_of(model), gradients_of(whole), **CLOSE)
        if "remember" in inputs and seed > 0:
            z = torch.randn(sum(first), DIM, dtype=torch.float64, generator=of_seed(seed))
            model.loss.remember(z.split(first)[rank])
            whole.loss.remember(z)
        torch.testing.assert_close([*model.buffers()], [*whole.buffers()], **CLOSE)


WAYS = [(1, CUT), (2, CUT), (2, NOT_CUT)]
SLOW_WAYS = [pytest.param(*way, marks=pytest.mark.slow) for way in ((3, NOT_CUT), (4, CUT))]


@pytest.mark.parametrize(("num_ranks", "way"), [*WAYS, *SLOW_WAYS])
@pytest.mark.parametrize("name", EVERY_LOSS)
def test_values_gradients_and_state_are_those_of_one_process(num_ranks, way, name):
    on_ranks(equals_one_process, num_ranks, name, way)


def cut_and_not_cut(rank, num_ranks):
    """One process holds so few queries that its rows are not cut."""
    of_all, *of_ranks = portions_of([[2, 9], [2, 9]])
    model, whole = model_of(InfoNCE), model_of(InfoNCE, gather=False)
    wrapped = DistributedDataParallel(model)
    with in_chunks(100):  # the rows of rank 0 have 88 pairs, and of rank 1 396
        loss = wrapped(*of_ranks[rank].sets)
        loss.backward()
    expected = whole(*of_all.sets)
    expected.backward()
    torch.testing.assert_close(mean_over_ranks(loss), expected.detach(), **CLOSE)
    torch.testing.assert_close(gradients_of(model), gradients_of(whole), **CLOSE)


def test_some_processes_may_cut_their_rows_and_others_not():
    on_ranks(cut_and_not_cut, 2)


def training(rank, num_ranks, wrapping):
    model = model_of(pgcl, freeze_steps=5, queue_size=16, memory_size=16).float()
    step = model
    if wrapping == "encoder":
        model.encoder = DistributedDataParallel(model.encoder)
    else:
        step = DistributedDataParallel(model, static_graph=wrapping == "static graph")
    optimizer, random = torch.optim.Adam(model.parameters(), lr=1e-2), of_seed(rank)
    for _ in range(100):
        optimizer.zero_grad()
        step(*torch.randn(2, 6 + rank, 3, generator=random)).backward()
        optimizer.step()
    return [tensor.numpy().tobytes() for tensor in model.state_dict().values()]


@pytest.mark.slow
@pytest.mark.parametrize("wrapping", ["encoder", "model", "static graph"])
def test_training_keeps_ranks_bit_identical(wrapping):
    first, second = on_ranks(training, 2, wrapping)
    assert first == second


def gradients_of_inputs(rank, num_ranks):
    """Weights of positives have one; alone, with one view on rank 0 and with both on rank 1."""
    of_all, *of_ranks = portions_of([[4, 3], [4, 3]], "positives")
    counts = [len(portion.given["positive_weights"]) for portion in of_ranks]
    for of_views in (False, True):
        results = []
        for portion, gather in ((of_all, False), (of_ranks[rank], True)):
            z1, z2 = (x.clone().requires_grad_(of_views) for x in portion.sets)
            z1.requires_grad_(of_views and not (gather and rank == 0))
            weights = (portion.given["positive_weights"] + 0.1 * of_views).requires_grad_()
            given = {**portion.given, "positive_weights": weights}
            InfoNCE(gather=gather)(z1, z2, **given).backward()
            results.append((weights.grad, z2.grad) if of_views else (weights.grad,))
        expected = [d.split(of)[rank] for d, of in zip(results[0], (counts, [4, 3]), strict=False)]
        ours = [d / num_ranks for d in results[1]]  # of which the mean is taken
        torch.testing.assert_close(ours, expected, **CLOSE)


def test_gradients_of_views_and_of_weights_of_positives():
    on_ranks(gradients_of_inputs, 2)


def of_sets_that_are_no_views(rank, num_ranks):
    """Their lengths differ in each process; those of the whole batch are equal by chance."""
    of_all, *of_ranks = portions_of([[1, 2], [2, 1]], "positives")
    never = torch.arange(6).split(3)
    expected = InfoNCE(gather=False)(*of_all.sets, labels=never, **of_all.given)
    ours = InfoNCE()(*of_ranks[rank].sets, **of_ranks[rank].given)
    torch.testing.assert_close(ours, expected, **CLOSE)


def test_sets_of_unequal_length_have_the_listed_positives_alone():
    on_ranks(of_sets_that_are_no_views, 2)


def contrast_of_clusters(rank, num_ranks):
    """Contrastive Clustering with the function of docs/distributed.md, and without it."""
    page = (ROOT / "docs" / "distributed.md").read_text()
    (block,) = re.findall(r"```python\n([^`]*def rows_of_all[^`]*)```", page)
    names = {"torch": torch}
    exec(block, names)
    model = nn.Sequential(nn.Linear(3, 5), nn.Softmax(dim=-1)).double()
    whole, wrapped = copy.deepcopy(model), DistributedDataParallel(model)
    views = torch.randn(2, 4 * num_ranks, 3, dtype=torch.float64, generator=of_seed(0))
    own = views.chunk(num_ranks, dim=1)[rank]

    c_i, c_j = map(names["rows_of_all"], wrapped(own))
    loss = InfoNCE.like("Contrastive-Clustering-clusters")(c_i.T, c_j.T)
    loss = loss + formulas.imbalance(c_i) + formulas.imbalance(c_j)
    expected = formulas.cluster_loss(*whole(views), tau=1.0)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, **CLOSE)
    torch.testing.assert_close(gradients_of(model), gradients_of(whole), **CLOSE)

    with torch.no_grad():
        (c_i, c_j), of_all = model(own), whole(views)
        parts_as_clusters = InfoNCE(temperature=1.0)(c_i.T, c_j.T)
        assert parts_as_clusters > formulas.molclr(*of_all.mT, 1.0) + 0.1


def test_rows_are_gathered_for_a_contrast_of_clusters():
    on_ranks(contrast_of_clusters, 2)


class Crops(nn.Module):
    """SwAV, by the lines of docs/swap.md: all crops predict the targets of the first two."""

    def __init__(self, **options):
        super().__init__()
        self.prototypes = SinkhornPrototypes(DIM, 3, **options)

    def forward(self, *crops):
        assigned = self.prototypes(*crops)
        pairs = [
            (large, other) for large in assigned[:2] for other in assigned if other is not large
        ]
        return sum(
            -(large.targets * other.log_probs).sum(1).mean() for large, other in pairs
        ) / len(pairs)


def targets_of_large_crops(rank, num_ranks):
    of_all, *of_ranks = portions_of([[4] * num_ranks] * 3)
    model, whole = (model_of(Crops, gather=gather) for gather in (True, False))
    wrapped = DistributedDataParallel(model)
    loss, expected = wrapped(*of_ranks[rank].sets), whole(*of_all.sets)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(mean_over_ranks(loss), expected.detach(), **CLOSE)
    torch.testing.assert_close(gradients_of(model), gradients_of(whole), **CLOSE)


def with_metadata(rank, num_ranks, dtype):
    of_all, *of_ranks = portions_of([[3, 4], [5, 0]])
    groups, loss = torch.arange(12).view(12, 1).expand(12, 2) % 3, InfoNCE(score_mod=same_group)
    whole = InfoNCE(score_mod=same_group, gather=False)

    def value(loss, portion):
        metadata = groups[portion.positions].to(dtype).split([len(x) for x in portion.sets])
        labels = torch.arange(12)[portion.positions] % 5
        sets = [F.pad(x, (0, 1)) for x in portion.sets]
        return loss(*sets, labels=labels.split([len(x) for x in sets]), metadata=metadata)

    torch.testing.assert_close(value(loss, of_ranks[rank]), value(whole, of_all))


def same_group(scores, pair):
    return scores.masked_fill((pair.query != pair.key).any(-1), -torch.inf)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int16, torch.float64, torch.complex64])
def test_metadata_of_any_dtype(dtype):
    on_ranks(with_metadata, 2, dtype)


def test_a_loss_by_hand_of_equal_batches():
    on_ranks(targets_of_large_crops, 2)


def alike(**options):
    """A loss with the same prototypes on every rank."""
    loss = PGCLLoss(DIM, **options)
    nn.init.ones_(loss.prototypes.weight)
    return loss


def differing(rank):
    """Losses and embeddings of a rank, of which one of two differs, with the error."""
    z, first = torch.randn(4, DIM, generator=of_seed(rank), requires_grad=True), rank == 0
    too_wide, one_pair = torch.randn(4, 9), torch.tensor([[0], [1]])
    weights = torch.ones(1, requires_grad=first)
    info_nce = InfoNCE(memory_size=5, dim=DIM)
    if not first:
        info_nce.memory.embeddings += 1
    return [
        (alike(), z if first else too_wide, "0: ready.*1: ValueError: z1 has dimension 9 but"),
        (alike(), z if first else z.double(), "dtype=torch.float32.*1: dtype=torch.float64"),
        (alike(), z if first else z.detach(), "requires_grad=True.*1: requires_grad=False"),
        (alike(temperature=0.2 + 0.1 * rank), z, "temperature=0.2.*1: .*temperature=0.3"),
        (alike(queue_size=4 * rank), z, "queue_size=0.*1: .*queue_size=4"),
        (alike().train(first), z, "training=True.*1: training=False"),
        (alike().requires_grad_(first), z, "requires_grad=True.*1: .*requires_grad=False"),
        (alike(engine="dense"), z, "one matrix in one process, but 2 processes"),
        (alike(), z[:0], "z1 must not be empty on every rank"),
        # Within torch.func, an older torch cannot read what processes exchange.
        *[(torch.func.grad(InfoNCE()), z, "^torch.func .*gather=False")] * HAS_ONE_GRAPH,
        (alike(iterations=1 + rank), too_wide, "^z1 has dimension 9"),
        (partial(InfoNCE(), labels=torch.arange(4) if first else None), z, "labels"),
        (
            partial(InfoNCE(), positives=one_pair, positive_weights=weights),
            z,
            "positive_weights=True.*1: .*positive_weights=False",
        ),
        (lambda *views: alike()(*views, *views[:rank]), z, "views=2.*1: .*views=3"),
        (torch.no_grad()(alike()) if first else alike(), z, "gradients enabled=False.*=True"),
        (info_nce, z, "not the same on all ranks"),
        (alike(score_mod=margin if first else in_place), z, "score_mods.margin.*1: .*in_place"),
        (
            partial(
                InfoNCE(score_mod=margin), metadata=torch.arange(4) if first else z.detach()[:, 0]
            ),
            z,
            "metadata=.*int64.*1: metadata=.*float32",
        ),
    ]


def errors(rank, num_ranks):
    messages = []
    for loss, z, words in differing(rank):
        with pytest.raises((ValueError, TypeError), match=f"(?s){words}") as caught:
            loss(z, z)
        messages.append(str(caught.value))
    return messages


def test_ranks_that_differ_raise_the_same_error():
    first, second = on_ranks(errors, 2)
    assert first == second


def no_such_slide(*_):
    raise KeyError("no such slide")


def fails_on(rank, reason):
    """A function of scores that fails in one process."""

    def function(scores, pair):
        if rank == 1 and reason == "shape":
            return scores[:1, :1]
        if rank == 1 and reason == "backward":
            scores.register_hook(no_such_slide)
        elif rank == 1:
            no_such_slide()
        return scores * 2

    function.__qualname__ = "function"
    return function


def failures_of_score_mod(rank, num_ranks, reason, reduction, lengths, way):
    """The error is the same on all ranks, and the next batch trains."""
    z = torch.randn(lengths[rank], DIM, requires_grad=True)
    with in_chunks(way.chunk):
        with pytest.raises(
            ValueError, match=r"rank 0: ready\n  rank 1: (KeyError|TypeError)"
        ) as caught:
            InfoNCE(score_mod=fails_on(rank, reason), reduction=reduction)(z, z + 1)
        InfoNCE(score_mod=margin)(z, z + 1).backward()
    return str(caught.value)


@pytest.mark.parametrize("way", [NOT_CUT, CUT], ids=["not cut", "cut"])
@pytest.mark.parametrize("lengths", [(4, 3), (0, 3)])
@pytest.mark.parametrize(
    ("reason", "reduction"),  # the backward of losses [Q] runs after the forward
    [*itertools.product(["shape", "error"], ["mean", "none"]), ("backward", "mean")],
)
def test_a_function_that_fails_on_one_rank_is_an_error_on_all(reason, reduction, lengths, way):
    first, second = on_ranks(failures_of_score_mod, 2, reason, reduction, lengths, way)
    assert first == second
    assert "score_mod must return" in first or "no such slide" in first


def fails_everywhere(rank, num_ranks):
    """Each rank raises its own error, as one process does."""
    z = torch.randn(4, DIM, requires_grad=True)
    with pytest.raises(AttributeError, match="give the loss metadata="):
        InfoNCE(score_mod=by_distance)(z, z + 1)


def test_a_function_that_fails_on_all_ranks():
    on_ranks(fails_everywhere, 2)


def transpose_strides(prototypes, rank):
    prototypes.weight.data = prototypes.weight.data.mT.contiguous().mT


# Changes of the prototypes of a rank.
DIFFERENT = {
    "a bit": lambda prototypes, rank: prototypes.weight.data.mul_(1 + 3e-16 * rank),
    "the queue": lambda prototypes, rank: prototypes.queue.embeddings[0, -1].fill_(rank),
}
ALIKE = {
    "NaN": lambda prototypes, rank: prototypes.queue.embeddings.fill_(torch.nan),
    "strides": transpose_strides,
}


def states(rank, num_ranks):
    z = torch.randn(3, DIM, dtype=torch.float64)
    differs = partial(pytest.raises, ValueError, match=r"prototypes.*not the same on all ranks")
    for what, change in (DIFFERENT | ALIKE).items():
        loss = model_of(pgcl, queue_size=9).loss
        change(loss.prototypes, min(rank, 1))
        with differs() if what in DIFFERENT else nullcontext():
            loss(z, z)
    loss = model_of(pgcl).loss
    loss(z, z)
    loss.prototypes.step += rank
    with differs():
        loss(z, z)


def test_state_that_differs_is_noticed_in_every_call():
    on_ranks(states, 3)


NUMBERS = torch.randn((1 << 14) - 1, generator=of_seed(0))
CHANGES = {
    "one bit": lambda x: x.index_fill(0, torch.tensor([77]), float(x[77].nextafter(x[78]))),
    "all doubled": lambda x: 2 * x,
    "all negated": lambda x: -x,
    "two exchanged": lambda x: torch.cat([x[1:2], x[:1], x[2:]]),
    "turned": lambda x: x.roll(1),
    "reversed": lambda x: x.flip(0),
    "another tensor first": lambda x: x,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(
    "values", [NUMBERS, torch.ones_like(NUMBERS).cumsum(0)], ids=["random", "counts"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_checksum_changes_with_its_tensors(change, values, dtype):
    values, other, cpu = values.to(dtype), torch.arange(5), torch.device("cpu")
    changed = [CHANGES[change](values), other]
    if change == "another tensor first":
        changed = changed[::-1]
    plain = checksum([values, other], cpu)
    assert checksum([values.clone(), other], cpu) == plain != checksum(changed, cpu)


def test_a_checksum_is_computed_on_its_device():
    """And takes any dtype."""
    dtypes = (torch.float16, torch.bfloat16, torch.float64, torch.bool, torch.int8, torch.int64)
    tensors = [torch.ones(3, 2, dtype=dtype, device="meta") for dtype in dtypes]
    assert checksum(tensors, torch.device("meta")).is_meta


def given_prototypes(rank, num_ranks):
    """Prototypes that are an argument, and no state of the module."""
    z, clusters = torch.randn(4, DIM), (torch.tensor([0, 1, 2, 0]),) * 2
    prototypes = torch.randn(3, DIM, generator=of_seed(0))
    contrast = PrototypeReweightedNCE()
    assert contrast(z, z, clusters=clusters, prototypes=prototypes).isfinite()
    with pytest.raises(ValueError, match=r"prototypes.*not the same on all ranks"):
        contrast(z, z, clusters=clusters, prototypes=prototypes + (rank == 1))


def test_given_prototypes_that_differ_are_noticed():
    on_ranks(given_prototypes, 2)


def assigned_by_each_rank(rank, num_ranks):
    torch.manual_seed(0)
    z, weight = torch.randn(2, 4, DIM), SinkhornPrototypes(DIM, 3).state_dict()
    for gather in (True, False):
        prototypes = SinkhornPrototypes(DIM, 3, gather=gather)
        prototypes.load_state_dict(weight)
        contrast, a = PrototypeReweightedNCE(gather=not gather), prototypes(*z)
        calls = [(contrast, *z, a), (contrast, a), (ConsistencyLoss(gather=not gather), a)]
        for module, *given in calls:
            with pytest.raises(ValueError, match=f"gather={not gather}: make it and the proto"):
                module(*given)
    alone = [distributed.new_group([r]) for r in range(num_ranks)][rank]
    with pytest.raises(ValueError, match="the same gather and process_group"):
        PrototypeReweightedNCE(process_group=alone)(*z, SinkhornPrototypes(DIM, 3)(*z))


def test_assignments_of_other_processes_than_the_contrasts_are_an_error():
    on_ranks(assigned_by_each_rank, 2)


def k_means(rank, num_ranks):
    """Calls of a method with arguments by name, and with one that is too many on one rank."""
    z = torch.randn(2, 9, DIM, generator=of_seed(0))
    gathered, whole = SinkhornPrototypes(DIM, 3), SinkhornPrototypes(DIM, 3, gather=False)
    gathered.load_state_dict(whole.state_dict())
    distributed.broadcast(whole.weight.detach(), 0)
    gathered.load_state_dict(whole.state_dict())
    for prototypes, embeddings in ((gathered, z[rank]), (whole, z.flatten(0, 1))):
        torch.manual_seed(0)
        prototypes.start_from_(embeddings=embeddings)
    torch.testing.assert_close(gathered.weight, whole.weight)
    messages = []
    for extra, fewer in (((z[0],), 0), ((), 1)):
        given = (z[0], *extra)[fewer:] if rank == 0 else (z[0],)
        with pytest.raises(ValueError, match="takes embeddings, but") as caught:
            gathered.start_from_(*given)
        messages.append(str(caught.value))
    return messages


def test_prototypes_start_from_the_embeddings_of_all_processes():
    first, second = on_ranks(k_means, 2)
    assert first == second


def nan_on_one(rank, num_ranks):
    loss = model_of(pgcl, queue_size=5, memory_size=5).loss
    z = torch.randn(6, DIM, dtype=torch.float64, generator=of_seed(rank))
    loss(z.requires_grad_(), z)
    before = copy.deepcopy(loss.state_dict())
    bad = z.detach().clone()
    bad[0, 0] = torch.nan if rank == 1 else 1.0
    assert loss(bad.requires_grad_(), z).isnan()
    torch.testing.assert_close(loss.state_dict(), before, rtol=0, atol=0)


def test_nan_on_one_rank_is_nan_on_all_and_enters_no_state():
    on_ranks(nan_on_one, 3)


def dying(rank, num_ranks, when, collective):
    # The timeout counts from a moment at which all have started.
    group = distributed.new_group([0, 1], timeout=datetime.timedelta(seconds=10))
    distributed.barrier()
    z = torch.randn(5, DIM, requires_grad=True)
    torch.manual_seed(0)
    pgcl = PGCLLoss(DIM, process_group=group)
    call = pgcl(z, z).backward if when == "backward" else partial(pgcl, z, z)
    if rank == 1:
        os._exit(1)
    with pytest.raises(RuntimeError, match=f"{collective} failed on rank 0 of 2; has another"):
        call()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("when", "collective"),
    [("forward", "the all-gather of batch sizes"), ("backward", "gradient of the loss")],
)
def test_a_dead_rank_raises_an_error_that_names_the_collective(when, collective):
    on_ranks(dying, 2, when, collective, may_die=[1])


def subgroup(rank, num_ranks):
    group = distributed.new_group([0, 2])
    of_all, *of_ranks = portions_of([[2, 0, 4], [2, 0, 4]])
    whole = model_of(pgcl, gather=False)
    if rank == 1:
        with pytest.raises(ValueError, match="process_group does not contain this process"):
            PGCLLoss(DIM, process_group=group)
        return
    model = model_of(pgcl, process_group=group)
    loss, expected = model(*of_ranks[rank].sets), whole(*of_all.sets)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    for mine, other in zip(gradients_of(model), gradients_of(whole), strict=True):
        distributed.all_reduce(mine, group=group)
        torch.testing.assert_close(mine / 2, other)


def test_a_process_group_of_some_ranks():
    on_ranks(subgroup, 3)


def within_of_all_processes(rank, num_ranks):
    whole = SinkhornPrototypes(DIM, 3, gather=False).double()
    mine = SinkhornPrototypes(DIM, 3).double()
    nn.init.normal_(whole.weight, generator=of_seed(1))
    mine.load_state_dict(whole.state_dict())
    z = torch.randn(2, 12, DIM, dtype=torch.float64, generator=of_seed(0))
    expected = diagnostics(whole(*z))["within"]
    assert diagnostics(mine(*z.chunk(num_ranks, 1)[rank]))["within"] == pytest.approx(expected)


def test_within_is_of_the_embeddings_of_all_processes():
    on_ranks(within_of_all_processes, 2)
