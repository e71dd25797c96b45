"""A memory of past embeddings, as further negatives, of one process and of many."""

import copy
import io
import pickle
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.item_cases import (
    BLOCKS,
    DIM,
    ENGINES,
    PAIR_MODES,
    any_sets,
    arrays,
    exact_loss,
    exact_losses,
    gradients,
    numbers,
    random_sets,
)
from helpers.marks import compiling, engines, few_graphs
from helpers.rank_models import mean_over_ranks
from helpers.ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes

from pgcl_losses import InfoNCE, PGCLLoss

pytestmark = few_graphs
info_nce = partial(InfoNCE, dim=DIM)
losses_with_memory = pytest.mark.parametrize(
    "make",
    [
        lambda size: info_nce(memory_size=size),
        lambda size: PGCLLoss(DIM, 3, memory_size=size).double(),
    ],
    ids=["InfoNCE", "PGCLLoss"],
)


def views_of(seed, length=4):
    return random_sets((length, length), seed)[0]


def step(loss, seed, length=4, **options):
    return loss(*views_of(seed, length), **options)


def state_of(loss):
    return copy.deepcopy(loss.state_dict())


def assert_same_state(loss, expected):
    torch.testing.assert_close(loss.state_dict(), expected, rtol=0, atol=0)


@settings(max_examples=60)
@given(
    steps=st.lists(any_sets(max_length=4), min_size=2, max_size=4),
    size=st.sampled_from([1, 3, 7, 50]),
    mode=st.fixed_dictionaries(
        {
            **PAIR_MODES,
            "hardness": st.sampled_from([0.0, 1.0]),
            "debias": st.sampled_from([0.0, 0.1]),
        }
    ),
    engine=ENGINES,
    block=BLOCKS,
)
def test_every_step_agrees_with_the_oracle(steps, size, mode, engine, block):
    past = oracle.Memory(size)
    loss = info_nce(**mode, memory_size=size, reduction="none", engine=engine).double()
    with_items = steps[0][1] is not None  # in all steps, or in none
    for seed, (sets, items) in enumerate(steps):
        if with_items and items is None:
            items = [torch.arange(len(z)) for z in sets]
        if not with_items and items is not None:
            sets, items = views_of(seed, len(sets[0])), None
        with in_blocks(block):
            ours = loss(*sets, items=items)
        expected, _ = exact_losses(sets, items, past, **mode)
        np.testing.assert_allclose(ours.detach(), expected, rtol=1e-8, atol=1e-10)
        past.store(arrays(sets), numbers(items))


@engines
def test_a_backward_after_later_forwards_is_that_of_its_own_memory(engine):
    for size in (3, 100):
        loss, later, total = info_nce(memory_size=size, engine=engine), [], 0.0
        for seed in range(3):
            views = views_of(seed)
            twin = copy.deepcopy(loss)
            later.append((views, gradients(twin(*views), views)))
            total = total + loss(*views)
        for views, expected in later:
            torch.testing.assert_close(
                torch.autograd.grad(total, views, retain_graph=True), expected
            )


def test_an_empty_memory_changes_nothing():
    torch.testing.assert_close(step(info_nce(memory_size=100), 0), step(InfoNCE(), 0))
    assert InfoNCE().memory is None


def test_it_holds_unit_embeddings_with_their_items():
    loss = info_nce(memory_size=20)
    empty = state_of(loss)
    assert empty.keys() == {
        f"memory.{name}" for name in ("embeddings", "items", "written", "by_hand")
    }
    sets, items = random_sets((3, 2))
    loss(*sets, items=items)
    assert loss.memory.embeddings.shape == (20, DIM)
    unit = torch.nn.functional.normalize(torch.cat(sets).detach())
    torch.testing.assert_close(loss.memory.embeddings[:5], unit.float())
    assert torch.equal(loss.memory.items[:5], torch.cat(items))
    assert int(loss.memory.written) == 5
    assert not loss.memory.embeddings.requires_grad
    loss.memory.reset_parameters()
    assert_same_state(loss, empty)


@losses_with_memory
@pytest.mark.parametrize("reason", ["eval", "no_grad", "inference_mode", "nan", "inf"])
def test_only_finite_training_forwards_are_stored(make, reason):
    loss = make(5)
    step(loss, 0)
    before = state_of(loss)
    views = [view.detach() for view in views_of(1)]
    loss.train(reason != "eval")
    if reason in ("nan", "inf"):
        views[1][2, 0] = float(reason)
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    with modes.get(reason, nullcontext)():
        loss(*views)
    assert_same_state(loss, before)
    loss.train()
    step(loss, 1)
    assert not torch.equal(state_of(loss)["memory.written"], before["memory.written"])


@losses_with_memory
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_copy_continues_with_the_same_losses(make, by_hand):
    torch.manual_seed(0)
    loss, loaded, file = make(5), make(5), io.BytesIO()
    for seed in range(2):
        step(loss, seed, items=torch.tensor([0, 1, 2, 2]))
    if by_hand:
        loss.remember(views_of(9)[0], torch.tensor([0, 1, 7, 8]))
    torch.save(loss.state_dict(), file)
    file.seek(0)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    twins = [loss, loaded, pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)]
    for seed in (5, 6, 7):
        values = [step(twin, seed, items=torch.arange(4)) for twin in twins]
        for twin, value in zip(twins, values, strict=True):
            torch.testing.assert_close(value, values[0], rtol=0, atol=0)
            assert_same_state(twin, loss.state_dict())


class TestRemember:
    @engines
    @pytest.mark.parametrize("with_items", [False, True])
    def test_after_its_first_call_the_memory_holds_nothing_else(self, engine, with_items):
        loss, past = info_nce(memory_size=7, engine=engine).double(), oracle.Memory(7)
        step(loss, 0)
        for seed in range(4):  # in one of them more than the memory holds
            (z, *_), (items, *_) = random_sets((3 if seed else 9,), seed)
            given_items = items if with_items else None
            loss.train(seed % 2 == 0)
            with torch.set_grad_enabled(seed < 2):
                assert loss.remember(10 * z, given_items) is None
            past.store(arrays([z]), numbers([items]) if with_items else None)
            loss.train()
            sets, items = random_sets((4, 2), 10 + seed)
            for _ in range(2):  # a training forward no longer stores its batch
                ours = loss(*sets, items=items)
                assert ours.item() == pytest.approx(exact_loss(sets, items, past), rel=1e-9)
                gradients(ours, sets)

    @pytest.mark.parametrize("number", [1 - 2**63, -1, 0, 3, 2**63 - 1])
    def test_embeddings_of_one_item_are_no_negatives(self, number):
        views, items = views_of(0), torch.full((4,), number)  # none of the batch is a negative
        loss = info_nce(memory_size=8)
        loss.remember(torch.randn(5, DIM, dtype=torch.float64), torch.full((5,), number))
        assert loss(*views, items=items).item() == 0
        loss.remember(torch.randn(1, DIM, dtype=torch.float64))  # one without items
        assert loss(*views, items=items).item() > 0

    def test_pgcl_with_remembered_embeddings(self):
        (z, *_), (items, *_) = random_sets((6,), 3)
        pgcl = PGCLLoss(DIM, 3, memory_size=9).double().eval()
        pgcl.remember(z, items)
        views, (of_graphs, *_) = random_sets((4, 4), 4)
        expected = oracle.pgcl_contrast(
            arrays(views),
            arrays([pgcl.prototypes.weight]),
            numbers([of_graphs] * 2),
            arrays([z])[0],
            items.tolist(),
        )
        ours = pgcl.terms(*views, items=of_graphs).contrast
        assert ours.item() == pytest.approx(oracle.mean(expected), rel=1e-9)

    def test_pgcl_without_negatives_in_the_batch(self):
        """One graph alone: only the memory has negatives, at first none."""
        pgcl = PGCLLoss(DIM, 2, exclude_same_cluster=False, memory_size=4).double()
        losses = [pgcl.terms(*views_of(seed, 1)).contrast.item() for seed in range(2)]
        assert losses[0] == 0 < losses[1]

    @pytest.mark.parametrize("make", [info_nce, partial(PGCLLoss, DIM)], ids=["NCE", "PGCL"])
    def test_wrong_embeddings_are_errors(self, make):
        with pytest.raises(ValueError, match="memory_size is 0"):
            make().remember(torch.randn(4, DIM))
        loss = make(memory_size=5)
        loss.remember(torch.randn(4, DIM))
        before = state_of(loss)
        for embeddings, items, error in (
            (torch.randn(4, DIM + 1), None, ValueError),
            (torch.randn(4), None, ValueError),
            (torch.arange(12).view(4, 3), None, TypeError),
            ("z", None, TypeError),
            (torch.randn(4, DIM), torch.arange(3), ValueError),
            (torch.randn(4, DIM), torch.arange(4.0), TypeError),
            (torch.randn(4, DIM), [0, 1, 2, 3], TypeError),
        ):
            with pytest.raises(error):
                loss.remember(embeddings, items)
        assert_same_state(loss, before)
        with pytest.raises(ValueError, match=f"z1 has dimension {DIM + 1}"):
            loss(*torch.randn(2, 5, DIM + 1))


def test_peak_memory_grows_with_its_size_and_not_with_pairs():
    def peak(size):
        loss = info_nce(memory_size=size, engine="blocks")
        loss.remember(torch.randn(size, DIM))
        views = torch.randn(2, 300, DIM, requires_grad=True)
        with LiveBytes() as live:
            loss(*views).backward()
        return live.peak

    with in_blocks(128):
        small, large = peak(1000), peak(4000)
    assert large < 5 * small
    assert large < 600 * 4000  # a quarter of the pairs with the memory


@pytest.mark.slow
@compiling
@losses_with_memory
def test_compiled_as_one_graph(make):
    torch.compiler.reset()
    eager = make(5)
    compiled = torch.compile(copy.deepcopy(eager), fullgraph=True, backend="aot_eager")
    for seed in range(1, 4):
        results = []
        for loss in (eager, compiled):
            views = views_of(seed)
            value = loss(*views)
            results.append([value, *gradients(value, views)])
        torch.testing.assert_close(*results)
    torch.testing.assert_close(compiled._orig_mod.state_dict(), eager.state_dict())


def test_shapes_can_be_traced_without_data():
    loss = info_nce(memory_size=5).to("meta")
    for _ in range(2):
        assert loss(*torch.empty(2, 6, DIM, device="meta")).shape == ()


COUNTS = {1: [3], 2: [1, 4], 3: [2, 0, 3]}
OVER_RANKS = [
    (info_nce, {"reduction": "mean"}),
    (info_nce, {"reduction": "sum", "hardness": 1.0, "debias": 0.1, "negatives": "cross"}),
    (PGCLLoss, {"dim": DIM}),
    (PGCLLoss, {"dim": DIM, "weighting": "sample", "num_prototypes": (3, 5)}),
    (PGCLLoss, {"dim": DIM, "num_prototypes": 4, "soft_clusters": True}),
]


def over_ranks(rank, num_ranks):
    counts = COUNTS[num_ranks]
    for kind, options in OVER_RANKS:
        losses = []
        for gather in (True, False):
            torch.manual_seed(0)
            losses.append(kind(**options, memory_size=7, gather=gather).double())
        ours, whole = losses
        for seed in range(5):
            views, (items, *_) = random_sets((sum(counts),) * 2, seed)
            mine = [view.split(counts)[rank] for view in views]
            if seed == 4:  # after steps of training
                z = torch.cat([views[0], views[1]]).detach()
                ours.remember(z.split([2 * count for count in counts])[rank])
                whole.remember(z)
            with_items = {"items": items} if seed > 2 else {}
            of_mine = {"items": items.split(counts)[rank]} if seed > 2 else {}
            value, expected = ours(*mine, **of_mine), whole(*views, **with_items)
            torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-9)
            d_ours = [mean_over_ranks(gradient) for gradient in gradients(value, views)]
            torch.testing.assert_close(d_ours, [*gradients(expected, views)], rtol=1e-8, atol=1e-9)
            torch.testing.assert_close(ours.state_dict(), whole.state_dict(), rtol=0, atol=1e-12)
    few = info_nce(memory_size=1).double()  # fewer past embeddings than processes
    for seed in range(2):
        few(*(view.split(counts)[rank] for view in random_sets((sum(counts),) * 2, seed)[0]))
    if num_ranks > 1:
        with pytest.raises(ValueError, match="cannot compute one loss"):
            info_nce(memory_size=rank).remember(torch.randn(2, DIM))
    return [ours.state_dict()]


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_loss_and_memory_over_ranks_are_those_of_one_process(num_ranks):
    first, *others = on_ranks(over_ranks, num_ranks)
    for state in others:
        torch.testing.assert_close(state, first, rtol=0, atol=0)


def test_wrong_sizes_are_errors():
    for make in (info_nce, partial(PGCLLoss, DIM)):
        for size, error in (
            (-1, ValueError),
            (2.5, TypeError),
            (True, TypeError),
            (None, TypeError),
        ):
            with pytest.raises(error, match="memory_size"):
                make(memory_size=size)
    with pytest.raises(TypeError, match=r"needs the embedding dimension.*dim=\.\.\."):
        InfoNCE(memory_size=5)
    loss = info_nce(memory_size=5)
    for name in ("memory_size", "dim"):
        with pytest.raises(AttributeError, match=f"{name} is .* make a new one"):
            setattr(loss, name, 9)
