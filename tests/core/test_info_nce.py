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
    ENGINES,
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
from helpers.marks import compiling, engines, negatives_of
from helpers.rank_models import mean_over_ranks
from helpers.ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch.autograd import forward_ad

from pgcl_losses import Batch, InfoNCE, PGCLLoss
from pgcl_losses.contrast import NEGATIVES
from pgcl_losses.ranks import Ranks

LENGTHS = (3, 5, 4)
REWEIGHTED = [{"hardness": 1.0}, {"debias": 0.1}, {"hardness": 0.5, "debias": 0.2}]
reweighted = pytest.mark.parametrize("options", REWEIGHTED, ids=str)
plain_or_reweighted = pytest.mark.parametrize("options", [{}, *REWEIGHTED], ids=str)
# Half of the problems are InfoNCE itself.
MODES = st.fixed_dictionaries(PAIR_MODES).flatmap(
    lambda mode: (
        st.just(mode)
        | st.fixed_dictionaries(
            {
                **{name: st.just(value) for name, value in mode.items()},
                "hardness": st.sampled_from([0.0, 1e-9, 0.5, 2.0]),
                "debias": st.sampled_from([0.0, 1e-9, 0.1, 0.9]),
            }
        )
    )
)
problems = given(
    problem=any_sets(max_sets=4, max_length=6), mode=MODES, engine=ENGINES, block=BLOCKS
)


@settings(max_examples=200)
@problems
def test_the_loss_agrees_with_the_oracle(problem, mode, engine, block):
    sets, items = problem
    losses, have_positives = exact_losses(sets, items, **mode)
    for reduction, expected in (
        ("none", losses),
        ("sum", losses.sum()),
        ("mean", oracle.mean_of_queries(losses, have_positives)),
    ):
        with in_blocks(block):
            ours = InfoNCE(**mode, reduction=reduction, engine=engine)(*sets, items=items)
        np.testing.assert_allclose(ours.detach(), expected, rtol=1e-9, atol=1e-11)


@settings(max_examples=200)
@problems
def test_engines_have_the_same_gradient(problem, mode, engine, block):
    sets, items = problem
    results = []
    for name in ("dense", "streaming"):
        with in_blocks(block):
            losses = InfoNCE(**mode, reduction="none", engine=name)(*sets, items=items)
            results.append(gradients(weighted(losses), sets))
    rtol = 1e-6 if mode.get("hardness") or mode.get("debias") else 1e-8
    torch.testing.assert_close(*results, rtol=rtol, atol=1e-8)


@engines
@negatives_of
@pytest.mark.parametrize(
    ("options", "with_items"),
    [
        ({"reduction": "mean"}, False),
        ({"reduction": "none"}, False),
        ({"reduction": "mean"}, True),
        ({"reduction": "none"}, True),
        ({"debias": 0.1, "temperature": 0.5}, True),
    ],
    ids=str,
)
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
@reweighted
@pytest.mark.parametrize("with_memory", [False, True])
def test_weights_are_constants_for_the_gradient(engine, negatives, options, with_memory):
    sets, items = random_sets((3, 4), num_items=3)
    loss = InfoNCE(**options, negatives=negatives, engine=engine, memory_size=4)
    past = ([], None)
    if with_memory:
        (z,), (past_items,) = random_sets((4,), 1, 3)
        loss.remember(z, past_items)
        past = arrays([z])[0], past_items.tolist()
    with in_blocks(3):
        ours = gradients(loss(*sets, items=items), sets)
    at, of_items = arrays(sets), numbers(items)
    mode = {"negatives": negatives, "hardness": options.get("hardness", 0.0)}
    weights = oracle.hard_weights(at, of_items, *past, **mode)
    mode = {"negatives": negatives, "debias": options.get("debias", 0.0), "weights": weights}
    for number, gradient in enumerate(ours):

        def value(z, number=number):
            moved = [*at]
            moved[number] = z
            return oracle.mean_of_queries(*oracle.info_nce(moved, of_items, *past, **mode))

        expected = oracle.gradient(value, at[number])
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("with_items", [False, True])
@reweighted
def test_forward_mode_derivatives_of_dense(options, with_items):
    views, items = random_sets((5, 5), num_items=3)
    loss = InfoNCE(**options, engine="dense")
    items = items if with_items else None
    directions = [torch.randn_like(view) for view in views]
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(*pair) for pair in zip(views, directions, strict=True)]
        derivative = forward_ad.unpack_dual(loss(*duals, items=items)).tangent
    of_views = zip(gradients(loss(*views, items=items), views), directions, strict=True)
    expected = sum((gradient * direction).sum() for gradient, direction in of_views)
    torch.testing.assert_close(derivative, expected)


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
            pytest.param([[4, 4, 4], [4, 4]], 0.01, id="one item: no negative"),
            pytest.param([[4, 4, 4], [4, 4]], 0.2, id="one item: no negative"),
            pytest.param([[1, -2, 3], [7, 0]], 0.01, id="all different: no positive"),
            pytest.param([[1, -2, 3], [7, 0]], 0.2, id="all different: no positive"),
            pytest.param([[1, 1, 2], [3, 3]], 0.2, id="one query without a positive"),
        ],
    )
    def test_without_positives_or_negatives(self, engine, negatives, options, temperature, items):
        """The loss of such a query is exactly 0, with a gradient of 0."""
        items = [torch.tensor(of_set) for of_set in items]
        sets, _ = random_sets((3, 2))
        options = {**options, "temperature": temperature, "negatives": negatives}
        losses, have_positives = exact_losses(sets, items, **options)
        for reduction, expected in (
            ("none", losses),
            ("sum", losses.sum()),
            ("mean", oracle.mean_of_queries(losses, have_positives)),
        ):
            ours = InfoNCE(**options, engine=engine, reduction=reduction)(*sets, items=items)
            np.testing.assert_allclose(ours.detach(), expected, rtol=1e-9)
            d_sets = gradients(ours.sum(), sets)
            assert all(d.isfinite().all() for d in d_sets)
            assert ours.any() or not any(d.any() for d in d_sets)

    @engines
    def test_the_mean_leaves_out_queries_without_a_positive(self, engine):
        sets, _ = random_sets((3, 2))
        items = [torch.tensor([1, 1, 2]), torch.tensor([1, 3])]  # one embedding of items 2 and 3
        each = InfoNCE(reduction="none", engine=engine)(*sets, items=items)
        assert (each != 0).tolist() == [True, True, False, True, False]
        mean = InfoNCE(engine=engine)(*sets, items=items)
        torch.testing.assert_close(mean, each.sum() / 3)
        torch.testing.assert_close(gradients(mean, sets), gradients(each.sum() / 3, sets))

    @engines
    @pytest.mark.parametrize("temperature", [0.05, 0.2])
    def test_the_floor_of_the_debiased_sum(self, engine, temperature):
        """Negatives are opposite and positives equal: the corrected sum would be negative."""
        z1 = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64, requires_grad=True)
        z2 = z1.detach().clone().requires_grad_()
        options = {"temperature": temperature, "debias": 0.5, "reduction": "none", "engine": engine}
        losses = InfoNCE(**options)(z1, z2)
        expected = math.log1p(2 * math.exp(-2 / temperature))  # two negatives at the floor
        torch.testing.assert_close(losses, torch.full_like(losses, expected), rtol=1e-9, atol=0)
        # The floor is constant, which leaves the gradient of the positive.
        views = [torch.randn(2, 2, dtype=torch.float64) * 0.1 + z.detach() for z in (z1, z2)]
        views = [view.requires_grad_() for view in views]
        losses = InfoNCE(**options)(*views)
        unit = [F.normalize(view) for view in views]
        positive = (unit[0] * unit[1]).sum(1).repeat(2)
        expected = torch.log1p(2 * ((-1 - positive) / temperature).exp())
        torch.testing.assert_close(losses, expected)
        torch.testing.assert_close(gradients(losses.sum(), views), gradients(expected.sum(), views))

    @engines
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
    @pytest.mark.parametrize(("temperature", "tolerance"), [(0.01, 1e-4), (0.2, 1e-5)])
    def test_lower_precision(self, engine, dtype, temperature, tolerance):
        sets, items = random_sets((40, 30), num_items=5)
        low = [z.detach().to(dtype).requires_grad_() for z in sets]
        options = {"temperature": temperature, "reduction": "none"}
        with in_blocks(16):
            losses = InfoNCE(**options, engine=engine)(*low, items=items)
        assert losses.dtype == torch.float32
        exact = InfoNCE(**options, engine="dense")(*(z.double() for z in low), items=items)
        torch.testing.assert_close(losses.double(), exact, rtol=tolerance, atol=tolerance)
        d_low, d_exact = gradients(losses.mean(), low), gradients(exact.mean(), low)
        assert {d.dtype for d in d_low} == {dtype}
        rtol = 4 * torch.finfo(dtype).eps + 1e-4
        torch.testing.assert_close(d_low, d_exact, rtol=rtol, atol=rtol)

    @engines
    @reweighted
    @pytest.mark.parametrize("temperature", [0.01, 0.003])
    def test_low_temperatures_in_float32(self, engine, options, temperature):
        sets, items = random_sets((30, 20), num_items=6)
        low = [z.detach().float().requires_grad_() for z in sets]
        results = []
        for leaves in (low, [z.detach().double().requires_grad_() for z in low]):
            loss = InfoNCE(**options, temperature=temperature, engine=engine, reduction="none")
            with in_blocks(16):
                losses = loss(*leaves, items=items)
            d_leaves = gradients(losses.mean(), leaves)
            results.append([losses.double(), *(d.double() for d in d_leaves)])
        assert all(d.isfinite().all() for d in results[0])
        torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3 / temperature)


@pytest.mark.parametrize(
    ("options", "num_items"),
    [
        ({}, None),
        *(({"negatives": negatives}, num) for negatives in NEGATIVES for num in (1, 10)),
        *((options, None) for options in REWEIGHTED),
    ],
    ids=str,
)
def test_streaming_memory_grows_with_embeddings_and_not_with_pairs(options, num_items):
    def peak(length):
        sets = [torch.randn(length, DIM, requires_grad=True) for _ in range(2)]
        items = [torch.randint(num_items, (length,)) for _ in range(2)] if num_items else None
        with LiveBytes() as live:
            InfoNCE(**options, engine="streaming")(*sets, items=items).backward()
        return live.peak

    with in_blocks(128):
        assert peak(1200) < 5 * peak(300)


@compiling
@pytest.mark.parametrize(
    ("options", "with_items"),
    [
        ({}, False),
        *(
            pytest.param(options, with_items, marks=pytest.mark.slow)
            for options, with_items in (
                ({}, True),
                ({"negatives": "cross"}, True),
                *((options, False) for options in REWEIGHTED),
            )
        ),
    ],
    ids=str,
)
def test_compiled_as_one_graph(options, with_items):
    torch.compiler.reset()
    loss = InfoNCE(**options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for seed in range(1 + with_items):
        sets, items = random_sets(LENGTHS if with_items else (6, 6, 6), seed)
        items = items if with_items else None
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
    {"negatives": "all", "reduction": "none"},
    *({**options, "negatives": negatives} for options in REWEIGHTED for negatives in NEGATIVES),
]


def over_ranks(rank, num_ranks):
    for (seed, options), with_items in itertools.product(enumerate(OVER_RANKS), (True, False)):
        counts = COUNTS[num_ranks]  # [R, sets]
        if not with_items:
            counts = [of_rank[:1] * 3 for of_rank in counts]
        portions = [list(of_set) for of_set in zip(*counts, strict=True)]
        lengths = [sum(portion) for portion in portions]
        (whole, items), (sets, _) = (random_sets(lengths, seed, 3) for _ in range(2))
        mine, items_of_mine = (
            [of_set.split(portion)[rank] for of_set, portion in zip(both, portions, strict=True)]
            for both in (sets, items)
        )
        if not with_items:
            items = items_of_mine = None
        expected = InfoNCE(**options, gather=False)(*whole, items=items)
        ours = InfoNCE(**options)(*mine, items=items_of_mine)
        if options.get("reduction") == "none":
            of_sets = zip(expected.split(lengths), portions, strict=True)
            own = torch.cat([of_set.split(portion)[rank] for of_set, portion in of_sets])
            torch.testing.assert_close(ours, own)
            continue
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
        d_ours = [mean_over_ranks(gradient) for gradient in gradients(ours, sets)]
        torch.testing.assert_close(d_ours, [*gradients(expected, whole)], rtol=1e-9, atol=1e-9)
    if num_ranks == 1:
        return ""
    with pytest.raises((TypeError, ValueError)) as caught:
        InfoNCE()(*mine, items=torch.arange(len(mine[0])) if rank == 0 else None)
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_loss_over_ranks_is_that_of_one_process(num_ranks):
    messages = on_ranks(over_ranks, num_ranks)
    assert len(set(messages)) == 1  # with items on one rank alone, all raise the same error


@engines
def test_options_may_be_assigned_at_any_time(engine):
    views, _ = random_sets((5, 5))
    loss = InfoNCE(engine=engine)
    loss(*views)
    for options in ({"hardness": 1}, {"debias": 0.2}, {"hardness": 0, "debias": 0}):
        for name, value in options.items():
            setattr(loss, name, value)
        now = {"hardness": loss.hardness, "debias": loss.debias}
        torch.testing.assert_close(loss(*views), InfoNCE(**now)(*views))


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "error"),
        [
            ({"hardness": -1.0}, ValueError),
            ({"hardness": math.nan}, ValueError),
            ({"hardness": math.inf}, ValueError),
            ({"hardness": "1"}, TypeError),
            ({"hardness": None}, TypeError),
            ({"debias": -0.1}, ValueError),
            ({"debias": 1.0}, ValueError),
            ({"debias": math.nan}, ValueError),
            ({"debias": "0.1"}, TypeError),
            ({"debias": True}, TypeError),
            ({"negatives": "al"}, ValueError),
        ],
        ids=str,
    )
    def test_options(self, options, error):
        ((name, value),) = options.items()
        with pytest.raises(error, match=name):
            InfoNCE(**options)
        with pytest.raises(error, match=name):
            setattr(InfoNCE(), name, value)

    @pytest.mark.parametrize(
        ("items", "error"),
        [
            pytest.param([torch.arange(4), torch.arange(4)], ValueError, id="one too few"),
            pytest.param([torch.arange(4)], ValueError, id="of one set"),
            pytest.param([torch.arange(n) for n in (4, 5, 5)], ValueError, id="of three"),
            pytest.param([torch.arange(4), None], TypeError, id="None"),
            pytest.param([torch.arange(4), [0, 1, 2, 3, 4]], TypeError, id="a list of numbers"),
            pytest.param(3, TypeError, id="a number"),
            pytest.param([torch.arange(4), torch.arange(5).int()], TypeError, id="int32"),
            pytest.param([torch.arange(4), torch.randn(5)], TypeError, id="float"),
            pytest.param([torch.arange(4), torch.arange(5).view(5, 1)], ValueError, id="a matrix"),
            pytest.param([torch.arange(4), torch.arange(5).to("meta")], ValueError, id="device"),
            pytest.param(torch.arange(4), ValueError, id="one Tensor for different lengths"),
        ],
    )
    def test_items(self, items, error):
        sets, _ = random_sets((4, 5))
        with pytest.raises(error, match="items"):
            InfoNCE()(*sets, items=items)

    @pytest.mark.parametrize("loss", [InfoNCE(), PGCLLoss(DIM)], ids=["InfoNCE", "PGCLLoss"])
    @pytest.mark.parametrize("length", [3, 5])
    def test_one_tensor_of_items_of_another_length(self, loss, length):
        views, _ = random_sets((4, 4))
        with pytest.raises(ValueError, match="items"):
            loss(*views, items=torch.arange(length))

    def test_pgcl_needs_sets_of_one_length(self):
        sets, items = random_sets((4, 5))
        with pytest.raises(ValueError, match=r"(?s)row i of every view.*InfoNCE"):
            PGCLLoss(DIM)(*sets, items=items)

    z = torch.randn(5, DIM)

    @pytest.mark.parametrize(
        ("options", "sets", "items", "error", "message"),
        [
            ({}, (z,), None, TypeError, r"views must be two or more Tensors .* but got 1"),
            ({}, (), None, TypeError, r"views must be two or more Tensors .* but got 0"),
            ({}, ([z, z],), None, TypeError, r"but got 1, a list: unpack it, \*views"),
            ({}, (z, z, z[:4]), None, ValueError, r"z3 has shape \(4, 3\) but z1 has \(5, 3\)"),
            ({}, (z, z[:4]), None, ValueError, r"z2 has shape \(4, 3\) but z1 has \(5, 3\)"),
            ({}, (z, torch.randn(5, 4)), [torch.arange(5)] * 2, ValueError, "z2"),
            (
                {},
                (z, z.double()),
                [torch.arange(5)] * 2,
                TypeError,
                r"z2 is torch\.float64 but z1 is torch\.float32",
            ),
            (
                {"negatives": "cross"},
                (z,),
                (torch.arange(5),),
                TypeError,
                r"views must be two or more .* but got 1",
            ),
            ({}, (), (), TypeError, r"views must be one or more .* but got 0"),
            (
                {},
                (Batch(Ranks((5,)), torch.stack([z, z])), z),
                None,
                TypeError,
                "a batch has all views and items in it: give it alone",
            ),
        ],
    )
    def test_inputs(self, options, sets, items, error, message):
        with pytest.raises(error, match=message):
            InfoNCE(**options)(*sets, items=items)
