"""InfoNCE of views, and of sets with items; hard negatives and the debiased sum.

Robinson et al., Contrastive learning with hard negative samples, 2021; Chuang et al., Debiased
contrastive learning, 2020.
"""

import itertools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.item_cases import (
    BLOCKS,
    DIM,
    PAIR_MODES,
    any_sets,
    arrays,
    exact_loss,
    exact_losses,
    gradients,
    numbers,
    random_sets,
    weighted,
)
from helpers.marks import NEGATIVES, compiling, engines, negatives_of
from helpers.rank_models import mean_over_ranks
from helpers.ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes

from pgcl_losses import Batch, InfoNCE, PGCLLoss
from pgcl_losses.distributed import Processes

LENGTHS = (3, 5, 4)
REWEIGHTED = [{"hardness": 1.0}, {"debias": 0.1}, {"hardness": 0.5, "debias": 0.2}]
plain_or_reweighted = pytest.mark.parametrize("options", [{}, *REWEIGHTED], ids=str)
MODES = st.fixed_dictionaries(
    {
        **PAIR_MODES,
        "hardness": st.sampled_from([0.0, 0.0, 1e-9, 0.5, 2.0]),
        "debias": st.sampled_from([0.0, 0.0, 1e-9, 0.1, 0.9]),
    }
)


@settings(max_examples=200)
@given(problem=any_sets(max_sets=4, max_length=6), mode=MODES, block=BLOCKS)
def test_losses_agree_with_the_oracle_and_engines_in_their_gradient(problem, mode, block):
    sets, items = problem
    expected, _ = exact_losses(sets, items, **mode)
    results = []
    for engine in ("dense", "blocks"):
        with in_blocks(block):
            losses = InfoNCE(**mode, reduction="none", engine=engine)(*sets, items=items)
            results.append(gradients(weighted(losses), sets))
        np.testing.assert_allclose(losses.detach(), expected, rtol=1e-9, atol=1e-11)
    rtol = 1e-6 if mode["hardness"] or mode["debias"] else 1e-8
    torch.testing.assert_close(*results, rtol=rtol, atol=1e-8)


@engines
@negatives_of
@pytest.mark.parametrize("options", [{"reduction": "none"}, {"debias": 0.1, "temperature": 0.5}])
@pytest.mark.parametrize("with_items", [False, True])
def test_gradcheck(engine, negatives, options, with_items):
    sets, items = random_sets(LENGTHS if with_items else (4, 4, 4), num_items=3)
    items = items if with_items else None
    loss = InfoNCE(**options, negatives=negatives, engine=engine)
    with in_blocks(3):
        assert torch.autograd.gradcheck(lambda *z: loss(*z, items=items), sets)
    if engine == "dense":
        assert torch.autograd.gradgradcheck(lambda *z: loss(*z, items=items), sets)


@engines
@negatives_of
@plain_or_reweighted
@pytest.mark.parametrize("with_items", [False, True])
@pytest.mark.parametrize("with_memory", [False, True])
def test_the_gradient_agrees_with_the_oracle(engine, negatives, options, with_items, with_memory):
    """By embeddings and temperature. Weights and past embeddings are constants."""
    sets, items = random_sets((4, 4), num_items=3)
    items = items if with_items else None
    tau, past = torch.tensor(0.3, dtype=torch.float64, requires_grad=True), ([], None)
    mode = {"negatives": negatives, "engine": engine, "memory_size": 4, "dim": DIM}
    loss = InfoNCE(temperature=tau, **options, **mode).double()
    if with_memory:
        (z,), (past_items,) = random_sets((4,), 1, 3)
        loss.remember(z, past_items if with_items else None)
        past = arrays([z])[0], past_items.tolist() if with_items else None
    with in_blocks(3):
        ours = gradients(loss(*sets, items=items), [*sets, tau])
    at, of_items = arrays([*sets, tau]), numbers(items)
    mode = {"negatives": negatives, "hardness": options.get("hardness", 0.0)}
    weights = oracle.hard_weights(at[:2], of_items, *past, **mode, temperature=0.3)
    mode = {"negatives": negatives, "debias": options.get("debias", 0.0), "weights": weights}
    for number, gradient in enumerate(ours):

        def value(moved, number=number):
            *views, temperature = [*at[:number], moved, *at[number + 1 :]]
            losses = oracle.info_nce(views, of_items, *past, **mode, temperature=temperature.item())
            return oracle.mean_of_queries(*losses)

        expected = oracle.gradient(value, at[number])
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@engines
@negatives_of
@pytest.mark.parametrize("items", [torch.arange(5), 7 - 2**60 * torch.arange(5)])
def test_views_are_sets_with_items_0_to_n(engine, negatives, items):
    views, _ = random_sets((5, 5, 5))
    loss = InfoNCE(negatives=negatives, engine=engine)
    expected = loss(*views)
    for form in (items, [items] * 3, (items, items.clone(), items)):
        ours = loss(*views, items=form)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(gradients(ours, views), gradients(loss(*views), views))


@engines
def test_one_set_with_labels_as_items(engine):
    """Supervised contrast of one view."""
    (z,), items = random_sets((8,), num_items=3)
    ours = InfoNCE(engine=engine)(z, items=items)
    assert ours.item() == pytest.approx(exact_loss([z], items, negatives="all"))


@engines
def test_two_modalities_give_the_loss_of_clip(engine):
    (images, texts), _ = random_sets((6, 6))
    logits = F.normalize(images) @ F.normalize(texts).T / 0.07
    expected = (
        F.cross_entropy(logits, torch.arange(6)) + F.cross_entropy(logits.T, torch.arange(6))
    ) / 2
    loss = InfoNCE(temperature=0.07, negatives="cross", engine=engine)
    torch.testing.assert_close(loss(images, texts, items=torch.arange(6)), expected)


class TestEdges:
    @engines
    @negatives_of
    @plain_or_reweighted
    @pytest.mark.parametrize(
        ("items", "temperature"),
        [
            ([[4, 4, 4], [4, 4]], 0.01),  # no negative
            ([[4, 4, 4], [4, 4]], 0.2),
            ([[1, -2, 3], [7, 0]], 0.01),  # no positive
            ([[1, -2, 3], [7, 0]], 0.2),
            ([[1, 1, 2], [3, 3]], 0.2),  # one query without a positive
        ],
    )
    def test_without_positives_or_negatives(self, engine, negatives, options, temperature, items):
        """The loss of a query without a positive is exactly 0, with a gradient of 0."""
        items = [torch.tensor(of_set) for of_set in items]
        sets, _ = random_sets((3, 2))
        options = {**options, "temperature": temperature, "negatives": negatives}
        losses, have_positives = exact_losses(sets, items, **options)
        for reduction, expected in (
            ("none", losses),
            ("sum", losses.sum()),
            ("mean", oracle.mean_of_queries(losses, have_positives)),
        ):
            ours = InfoNCE(**options, reduction=reduction, engine=engine)(*sets, items=items)
            np.testing.assert_allclose(ours.detach(), expected, rtol=1e-9, atol=1e-11)
            d_sets = gradients(ours.sum(), sets)
            assert all(d.isfinite().all() for d in d_sets)
            assert ours.any() or not any(d.any() for d in d_sets)

    @engines
    @pytest.mark.parametrize("temperature", [0.05, 0.2])
    def test_the_floor_of_the_debiased_sum(self, engine, temperature):
        """Negatives are opposite and positives equal: the corrected sum would be negative."""
        z = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
        views = [(z + 0.1 * torch.randn_like(z)).requires_grad_() for _ in range(2)]
        loss = InfoNCE(temperature=temperature, debias=0.5, reduction="none", engine=engine)
        losses = loss(*views)
        unit = [F.normalize(view) for view in views]
        positive = (unit[0] * unit[1]).sum(1).repeat(2)
        # The floor is constant, which leaves the gradient of the positive.
        expected = torch.log1p(2 * ((-1 - positive) / temperature).exp())
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(gradients(losses.sum(), views), gradients(expected.sum(), views))

    @engines
    @plain_or_reweighted
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize("temperature", [0.003, 0.01, 0.2])
    def test_lower_precision(self, engine, options, dtype, temperature):
        sets, items = random_sets((40, 30), num_items=5)
        low = [z.detach().to(dtype).requires_grad_() for z in sets]
        results = []
        for leaves in (low, [z.detach().double().requires_grad_() for z in low]):
            loss = InfoNCE(**options, temperature=temperature, engine=engine, reduction="none")
            with in_blocks(16):
                losses = loss(*leaves, items=items)
                d_leaves = gradients(losses.mean(), leaves)
            assert losses.dtype == (torch.float32 if leaves is low else torch.float64)
            assert all(d.isfinite().all() and d.dtype == leaves[0].dtype for d in d_leaves)
            results.append([losses.double(), [d.double() for d in d_leaves]])
        (losses, d_low), (exact, d_exact) = results
        rtol, eps = (1e-3 if options else 1e-4), torch.finfo(dtype).eps
        torch.testing.assert_close(losses, exact, rtol=rtol, atol=rtol)
        tolerance = {"rtol": 4 * eps + rtol, "atol": 4 * eps + rtol}
        torch.testing.assert_close(d_low, d_exact, **tolerance)


def test_memory_of_blocks_grows_with_embeddings_and_not_with_pairs():
    def peak(length, num_items, **options):
        sets = [torch.randn(length, DIM, requires_grad=True) for _ in range(2)]
        items = [torch.randint(num_items, (length,)) for _ in range(2)]
        with LiveBytes() as live:
            InfoNCE(**options, engine="blocks")(*sets, items=items).backward()
        return live.peak

    for num_items, options in ((1, {"negatives": "cross"}), (10, {"hardness": 0.5, "debias": 0.2})):
        with in_blocks(128):
            assert peak(1200, num_items, **options) < 5 * peak(300, num_items, **options)


@compiling
@pytest.mark.parametrize("options", [{}, {"negatives": "cross", "debias": 0.1}])
def test_compiled_as_one_graph(options):
    torch.compiler.reset()
    loss = InfoNCE(**options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        sets, items = random_sets(LENGTHS if options else (6, 6, 6), seed)
        items = items if options else None
        ours, expected = compiled(*sets, items=items), loss(*sets, items=items)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(gradients(ours, sets), gradients(expected, sets))


def test_shapes_can_be_traced_without_data():
    sets = [torch.empty(length, DIM, device="meta", requires_grad=True) for length in LENGTHS]
    items = [torch.empty(length, dtype=torch.long, device="meta") for length in LENGTHS]
    loss = InfoNCE()(*sets, items=items)
    loss.backward()
    assert loss.shape == ()
    assert InfoNCE(reduction="none")(*sets, items=items).shape == (sum(LENGTHS),)


def test_as_the_contrast_of_pgcl():
    pgcl = PGCLLoss(DIM, 4).double()
    pgcl.contrast = InfoNCE()
    views, _ = random_sets((6, 6))
    terms = pgcl.terms(*views)
    torch.testing.assert_close(terms.contrast, InfoNCE()(*views))
    assert pgcl.prototypes.heads == (4,)
    pgcl.prototypes.requires_grad_(False)  # otherwise it warns that no optimizer moves them
    for _ in range(25):  # warnings read the batch in some of these steps
        pgcl(*views)


# How many embeddings of each set the ranks hold. Without items, of each view: the first number.
COUNTS = {1: [[3, 5]], 2: [[3, 0], [2, 5]], 3: [[1, 4, 2], [0, 3, 0], [5, 0, 2]]}
OVER_RANKS = [
    {"negatives": "all"},
    {"negatives": "cross", "reduction": "sum"},
    *({**options, "negatives": negatives} for options in REWEIGHTED for negatives in NEGATIVES),
]


def over_ranks(rank, num_ranks):
    for (seed, options), with_items in itertools.product(enumerate(OVER_RANKS), (True, False)):
        counts = COUNTS[num_ranks]  # [R, sets]
        if not with_items:
            counts = [of_rank[:1] * 3 for of_rank in counts]
        portions = [list(of_set) for of_set in zip(*counts, strict=True)]
        sets, items = random_sets([sum(portion) for portion in portions], seed, 3)
        mine, items_of_mine = (
            [of_set.split(portion)[rank] for of_set, portion in zip(both, portions, strict=True)]
            for both in (sets, items)
        )
        if not with_items:
            items = items_of_mine = None
        expected = InfoNCE(**options, gather=False)(*sets, items=items)
        ours = InfoNCE(**options)(*mine, items=items_of_mine)
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
        d_ours = [mean_over_ranks(gradient) for gradient in gradients(ours, sets)]
        torch.testing.assert_close(d_ours, [*gradients(expected, sets)], rtol=1e-9, atol=1e-9)
    if num_ranks == 1:
        return ""
    with pytest.raises((TypeError, ValueError)) as caught:
        InfoNCE()(*mine, items=torch.arange(len(mine[0])) if rank == 0 else None)
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_loss_over_ranks_is_that_of_one_process(num_ranks):
    messages = on_ranks(over_ranks, num_ranks)
    assert len(set(messages)) == 1  # with items on one rank alone, all raise the same error


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "values", "error"),
        [
            ("hardness", [-1.0, math.nan, math.inf], ValueError),
            ("debias", [-0.1, 1.0, math.nan], ValueError),
            ("negatives", ["al", None], ValueError),
            ("hardness", ["1", None, True], TypeError),
            ("debias", ["0.1", None, True], TypeError),
        ],
    )
    def test_options(self, name, values, error):
        for value in values:
            with pytest.raises(error, match=name):
                InfoNCE(**{name: value})
            with pytest.raises(error, match=name):
                setattr(InfoNCE(), name, value)

    @pytest.mark.parametrize(
        ("items", "error"),
        [
            ([torch.arange(4), torch.arange(4)], ValueError),
            ([torch.arange(4)], ValueError),
            ([torch.arange(n) for n in (4, 5, 5)], ValueError),
            ([torch.arange(4), None], TypeError),
            ([torch.arange(4), [0, 1, 2, 3, 4]], TypeError),
            (3, TypeError),
            ([torch.arange(4), torch.arange(5).int()], TypeError),
            ([torch.arange(4), torch.randn(5)], TypeError),
            ([torch.arange(4), torch.arange(5).view(5, 1)], ValueError),
            ([torch.arange(4), torch.arange(5).to("meta")], ValueError),
            (torch.arange(4), ValueError),  # one Tensor for different lengths
        ],
    )
    def test_items(self, items, error):
        sets, _ = random_sets((4, 5))
        with pytest.raises(error, match="items"):
            InfoNCE()(*sets, items=items)

    def test_items_of_pgcl(self):
        (views, _), (sets, items) = random_sets((4, 4)), random_sets((4, 5))
        for length in (3, 5):
            with pytest.raises(ValueError, match="items"):
                PGCLLoss(DIM)(*views, items=torch.arange(length))
        with pytest.raises(ValueError, match=r"(?s)row i of every view.*InfoNCE"):
            PGCLLoss(DIM)(*sets, items=items)

    z, items = torch.randn(5, DIM), torch.arange(5)
    batch = Batch(Processes([(5,), (5,)]), torch.cat([z, z]))

    @pytest.mark.parametrize(
        ("sets", "items", "error", "message"),
        [
            ((z,), None, TypeError, r"views must be two or more Tensors .* but got 1"),
            ((), None, TypeError, r"views must be two or more Tensors .* but got 0"),
            (([z, z],), None, TypeError, r"but got 1, a list: unpack it, \*views"),
            ((z, z, z[:4]), None, ValueError, r"z3 has shape \(4, 3\) but z1 has \(5, 3\)"),
            ((z, z, items), None, TypeError, "z3 is a Tensor of .*int64.*: give labels as items="),
            ((z, torch.randn(5, 4)), [items] * 2, ValueError, "z2"),
            (
                (z, z.double()),
                [items] * 2,
                TypeError,
                r"z2 is torch.float64 but z1 is torch.float32",
            ),
            ((z,), (items,), TypeError, r"views must be two or more .* but got 1"),
            ((batch, z), None, TypeError, "a batch has all views and items in it: give it alone"),
        ],
    )
    def test_inputs(self, sets, items, error, message):
        with pytest.raises(error, match=message):
            InfoNCE(negatives="cross")(*sets, items=items)

    def test_without_sets(self):
        with pytest.raises(TypeError, match=r"views must be one or more .* but got 0"):
            InfoNCE()(items=())
