"""A memory of past embeddings, as further negatives, of one process and of many."""

import copy
import io
import pickle

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
from helpers.marks import compiling, engines, few_graphs, negatives_of
from helpers.rank_models import mean_over_ranks
from helpers.ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes

from pgcl_losses import InfoNCE, PGCLLoss

pytestmark = few_graphs

losses_with_memory = pytest.mark.parametrize(
    "make",
    [
        lambda size: InfoNCE(memory_size=size),
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
    past, loss = (
        oracle.Memory(size),
        InfoNCE(**mode, memory_size=size, reduction="none", engine=engine),
    )
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
@pytest.mark.parametrize("size", [3, 5, 100])
@negatives_of
def test_past_embeddings_are_constants_for_the_gradient(engine, size, negatives):
    """Also if later forwards have overwritten the memory before the backward."""
    loss = InfoNCE(memory_size=size, negatives=negatives, engine=engine)
    past, total, expected, leaves = oracle.Memory(size), 0.0, [], []
    for seed in range(3):
        sets, items = random_sets((3, 2), seed, num_items=2)
        with in_blocks(3):
            total = total + loss(*sets, items=items)
        leaves += sets
        for number in range(2):

            def at(z, number=number, sets=sets, items=items):
                moved = [*sets]
                moved[number] = torch.from_numpy(z)
                return exact_loss(moved, items, past, negatives=negatives)

            expected.append(oracle.gradient(at, arrays(sets)[number]))
        past.store(arrays(sets), numbers(items))
    with in_blocks(3):
        ours = gradients(total, leaves)
    for gradient, of_oracle in zip(ours, expected, strict=True):
        np.testing.assert_allclose(gradient, of_oracle, rtol=1e-5, atol=1e-7)


def test_a_loss_with_memory_is_differentiable_once():
    loss = InfoNCE(memory_size=6, engine="dense")
    step(loss, 0)
    assert torch.autograd.gradcheck(loss.eval(), views_of(1))
    views = views_of(1)
    with pytest.raises(RuntimeError, match=r"differentiable once here.*without a memory"):
        torch.autograd.grad(loss(*views), views[0], create_graph=True)


@pytest.mark.parametrize("by_hand", [False, True])
def test_a_first_call_in_inference_mode_stores_nothing(by_hand):
    loss, expected = InfoNCE(memory_size=6), InfoNCE(memory_size=6)
    with torch.inference_mode():
        if by_hand:
            loss.remember(views_of(7)[0])
            expected.remember(views_of(7)[0])
        loss.eval()(*views_of(8))
        assert (loss.memory.embeddings.shape[1] > 0) == by_hand
    for seed in range(2):
        torch.testing.assert_close(step(loss.train(), seed), step(expected, seed))


@pytest.mark.filterwarnings("ignore:for memory")  # a meta device holds nothing
def test_a_checkpoint_of_another_device_loads():
    loss = InfoNCE(memory_size=6)
    step(loss, 0)
    other = InfoNCE(memory_size=6).to("meta")
    other.load_state_dict(loss.state_dict())
    assert {buffer.device.type for buffer in other.buffers()} == {"meta"}


def test_an_empty_memory_changes_nothing():
    expected = step(InfoNCE(), 0)
    torch.testing.assert_close(step(InfoNCE(memory_size=100), 0), expected)
    assert InfoNCE().memory is None
    assert InfoNCE(memory_size=100).state_dict().keys() == {
        f"memory.{name}" for name in ("embeddings", "items", "written", "by_hand")
    }


def test_the_memory_holds_unit_embeddings_with_their_items():
    loss = InfoNCE(memory_size=20)
    assert loss.memory.embeddings.shape == (20, 0)
    sets, items = random_sets((3, 2))
    loss(*sets, items=items)
    unit = torch.nn.functional.normalize(torch.cat(sets).detach())
    assert loss.memory.embeddings.shape == (20, DIM)
    torch.testing.assert_close(loss.memory.embeddings[:5], unit)
    assert torch.equal(loss.memory.items[:5], torch.cat(items))
    assert int(loss.memory.written) == 5
    assert not loss.memory.embeddings.requires_grad


@losses_with_memory
@pytest.mark.parametrize("reason", ["eval", "no_grad", "nan", "inf"])
def test_only_finite_training_forwards_are_stored(make, reason):
    loss = make(5)
    step(loss, 0)
    before = state_of(loss)
    views = [view.detach() for view in views_of(1)]
    loss.train(reason != "eval")
    if reason in ("nan", "inf"):
        views[1][2, 0] = float(reason)
    with torch.set_grad_enabled(reason != "no_grad"):
        loss(*views)
    assert_same_state(loss, before)
    loss.train()
    step(loss, 1)
    assert not torch.equal(state_of(loss)["memory.written"], before["memory.written"])


@losses_with_memory
@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize("copied", ["state_dict", "deepcopy", "pickle", "torch.save"])
def test_a_copy_continues_with_the_same_losses(make, by_hand, copied):
    torch.manual_seed(0)
    loss = make(5)
    for seed in range(2):
        step(loss, seed, items=torch.tensor([0, 1, 2, 2]))
    if by_hand:
        loss.remember(views_of(9)[0], torch.tensor([0, 1, 7, 8]))
    if copied == "state_dict":
        twin = make(5)
        twin.load_state_dict(loss.state_dict())
    elif copied == "torch.save":
        file = io.BytesIO()
        torch.save(loss.state_dict(), file)
        file.seek(0)
        twin = make(5)
        twin.load_state_dict(torch.load(file, weights_only=True))
    else:
        twin = copy.deepcopy(loss) if copied == "deepcopy" else pickle.loads(pickle.dumps(loss))
    before = state_of(loss)
    for seed in (5, 6, 7):
        ours = step(twin, seed, items=torch.arange(4))
        assert_same_state(loss, before)  # nothing is shared
        expected = step(loss, seed, items=torch.arange(4))
        torch.testing.assert_close(ours, expected, rtol=0, atol=0)
        before = state_of(loss)
        assert_same_state(twin, before)


class TestRemember:
    @engines
    @pytest.mark.parametrize("with_items", [False, True])
    def test_after_its_first_call_the_memory_holds_nothing_else(self, engine, with_items):
        loss, past = InfoNCE(memory_size=7, engine=engine), oracle.Memory(7)
        step(loss, 0)
        for seed in range(4):
            (z, *_), (items, *_) = random_sets((3,), seed)
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

    def test_embeddings_of_one_item_are_no_negatives(self):
        views = views_of(0)
        loss = InfoNCE(memory_size=8)
        loss.remember(torch.randn(5, DIM, dtype=torch.float64), torch.full((5,), 3))
        items = torch.tensor([3, 3, 3, 3])  # of all embeddings, so that none is a negative
        assert loss(*views, items=items).item() == 0
        loss.remember(torch.randn(1, DIM, dtype=torch.float64))  # without items
        assert loss(*views, items=items).item() > 0

    @pytest.mark.parametrize("number", [1 - 2**63, -1, 0, 2**63 - 1])
    def test_embeddings_without_items_are_negatives_of_every_query(self, number):
        sets, _ = random_sets((4, 4))
        items = torch.full((4,), number)
        loss = InfoNCE(memory_size=8)
        loss.remember(torch.randn(1, DIM, dtype=torch.float64))
        assert loss(*sets, items=items).item() > 0

    def test_more_embeddings_than_the_memory_holds(self):
        z = torch.randn(9, DIM, dtype=torch.float64)
        results = []
        for given_embeddings in (z, z[-4:]):
            loss = InfoNCE(memory_size=4)
            loss.remember(given_embeddings)
            results.append(step(loss, 0))
        torch.testing.assert_close(*results)

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

    @pytest.mark.parametrize(
        "make", [InfoNCE, lambda **options: PGCLLoss(DIM, **options)], ids=["InfoNCE", "PGCLLoss"]
    )
    def test_wrong_embeddings_are_errors(self, make):
        with pytest.raises(ValueError, match="memory_size"):
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
        with pytest.raises(ValueError, match="4"):
            loss(*torch.randn(2, 5, DIM + 1))


@engines
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_lower_precision(engine, dtype, temperature):
    low = InfoNCE(memory_size=9, engine=engine, temperature=temperature)
    exact = InfoNCE(memory_size=9, temperature=temperature)
    for seed in range(3):
        views = [view.detach().to(dtype).requires_grad_() for view in views_of(seed)]
        with in_blocks(3):
            ours = low(*views)
            d_ours = gradients(ours, views)
        expected = exact(*(view.double() for view in views))
        torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-4)
        rtol = 4 * torch.finfo(dtype).eps + 1e-4
        torch.testing.assert_close(d_ours, gradients(expected, views), rtol=rtol, atol=rtol)


def test_peak_memory_grows_with_its_size_and_not_with_pairs():
    def peak(size):
        loss = InfoNCE(memory_size=size, engine="streaming")
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
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
@losses_with_memory
def test_compiled_as_one_graph(make, used):
    torch.compiler.reset()
    eager = make(5)
    if used:
        step(eager, 0)
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
    loss = InfoNCE(memory_size=5).to("meta")
    for _ in range(2):
        assert loss(*torch.empty(2, 6, DIM, device="meta")).shape == ()


class TestPGCL:
    def test_without_negatives_in_the_batch(self):
        """One graph alone: only the memory has negatives, at first none."""
        pgcl = PGCLLoss(DIM, 2, exclude_same_cluster=False, memory_size=4).double()
        losses = [pgcl.terms(*views_of(seed, 1)).contrast.item() for seed in range(2)]
        assert losses[0] == 0 < losses[1]


COUNTS = {1: [3], 2: [1, 4], 3: [2, 0, 3]}
OVER_RANKS = [
    (InfoNCE, {"reduction": "mean"}),
    (InfoNCE, {"reduction": "sum", "hardness": 1.0, "debias": 0.1, "negatives": "cross"}),
    (PGCLLoss, {"weighting": "prototype"}),
    (PGCLLoss, {"weighting": "sample", "num_prototypes": (3, 5), "warmup_steps": 1}),
    (PGCLLoss, {"num_prototypes": 4, "soft_clusters": True}),
]


def over_ranks(rank, num_ranks):
    counts = COUNTS[num_ranks]
    for kind, options in OVER_RANKS:
        losses = []
        for gather in (True, False):
            torch.manual_seed(0)
            dim = (DIM,) if kind is PGCLLoss else ()
            losses.append(kind(*dim, **options, memory_size=7, gather=gather).double())
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
    few = InfoNCE(memory_size=1).double()  # fewer past embeddings than processes
    for seed in range(2):
        few(*(view.split(counts)[rank] for view in random_sets((sum(counts),) * 2, seed)[0]))
    unlike = InfoNCE(memory_size=rank)
    if num_ranks > 1:
        with pytest.raises(ValueError, match="cannot compute one loss"):
            unlike.remember(torch.randn(2, DIM))
    return [ours.state_dict()]


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_loss_and_memory_over_ranks_are_those_of_one_process(num_ranks):
    first, *others = on_ranks(over_ranks, num_ranks)
    for state in others:
        torch.testing.assert_close(state, first, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("size", "error"), [(-1, ValueError), (2.5, TypeError), (True, TypeError), (None, TypeError)]
)
def test_wrong_sizes_are_errors(size, error):
    with pytest.raises(error, match="memory_size"):
        InfoNCE(memory_size=size)
    with pytest.raises(error, match="memory_size"):
        PGCLLoss(DIM, memory_size=size)
