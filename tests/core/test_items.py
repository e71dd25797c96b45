"""Items say which embeddings are positives and which negatives, in sets of any lengths."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.cases import EVERY_MODE, FAMILY
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
from helpers.rank_models import mean_over_ranks
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import LiveBytes

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.contrast import NEGATIVES

pytestmark = pytest.mark.filterwarnings("ignore:PGCLLoss")  # of few graphs

LENGTHS = (3, 5, 4)
engines = pytest.mark.parametrize("engine", ["dense", "streaming"])
negatives_of = pytest.mark.parametrize("negatives", NEGATIVES)


@given(problem=any_sets(), mode=st.fixed_dictionaries(PAIR_MODES), engine=ENGINES, block=BLOCKS)
def test_agrees_with_the_oracle(problem, mode, engine, block):
    sets, items = problem
    losses, have_positives = exact_losses(sets, items, **mode)
    for reduction, expected in (
        ("none", losses),
        ("sum", losses.sum()),
        ("mean", oracle.mean_of_queries(losses, have_positives)),
    ):
        with in_blocks(block):
            ours = InfoNCE(**mode, reduction=reduction, engine=engine)(*sets, items=items)
        np.testing.assert_allclose(ours.detach(), expected, rtol=1e-8, atol=1e-10)


@given(problem=any_sets(), mode=st.fixed_dictionaries(PAIR_MODES), block=BLOCKS)
def test_streaming_has_the_gradient_of_dense(problem, mode, block):
    sets, items = problem
    results = []
    for engine in ("dense", "streaming"):
        with in_blocks(block):
            losses = InfoNCE(**mode, reduction="none", engine=engine)(*sets, items=items)
            results.append(gradients(weighted(losses), sets))
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)


@engines
@negatives_of
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(engine, negatives, reduction):
    sets, items = random_sets(LENGTHS, num_items=3)
    loss = InfoNCE(negatives=negatives, reduction=reduction, engine=engine)
    with in_blocks(3):
        assert torch.autograd.gradcheck(lambda *z: loss(*z, items=items), sets)
    if engine == "dense":
        assert torch.autograd.gradgradcheck(lambda *z: loss(*z, items=items), sets)


@engines
@negatives_of
@pytest.mark.parametrize("items", [torch.arange(5), 7 - 2**60 * torch.arange(5)])
def test_views_are_the_special_case_of_numbered_items(engine, negatives, items):
    views, _ = random_sets((5, 5, 5))
    loss = InfoNCE(negatives=negatives, engine=engine)
    expected = loss(*views)
    for given_items in (items, [items] * 3, (items, items.clone(), items)):
        ours = loss(*views, items=given_items)
        torch.testing.assert_close(ours, expected)
        torch.testing.assert_close(gradients(ours, views), gradients(loss(*views), views))


@engines
@negatives_of
def test_the_order_within_a_set_does_not_matter(engine, negatives):
    sets, items = random_sets((9, 7), num_items=4)
    loss = InfoNCE(negatives=negatives, engine=engine, reduction="none")
    orders = [torch.randperm(len(of_set)) for of_set in sets]
    shuffled = [
        [of_set[order] for of_set, order in zip(both, orders, strict=True)]
        for both in (sets, items)
    ]
    with in_blocks(3):
        expected = loss(*sets, items=items).split([9, 7])
        ours = loss(*shuffled[0], items=shuffled[1]).split([9, 7])
    for of_set, order, expected_of_set in zip(ours, orders, expected, strict=True):
        torch.testing.assert_close(of_set, expected_of_set[order])


@engines
@negatives_of
@pytest.mark.parametrize("temperature", [0.01, 0.2])
@pytest.mark.parametrize(
    "items",
    [
        pytest.param([[4, 4, 4], [4, 4]], id="one item: no negative"),
        pytest.param([[1, -2, 3], [7, 0]], id="all different: no positive"),
    ],
)
def test_without_positives_or_negatives_the_loss_is_zero(engine, negatives, temperature, items):
    items = [torch.tensor(of_set) for of_set in items]
    sets, _ = random_sets((3, 2))
    for reduction in ("mean", "sum", "none"):
        loss = InfoNCE(
            temperature=temperature, negatives=negatives, reduction=reduction, engine=engine
        )(*sets, items=items)
        loss.sum().backward()
        assert not loss.any()
        assert not any(z.grad.any() for z in sets)  # a NaN would be True


@engines
def test_a_query_without_a_positive_is_left_out_of_the_mean(engine):
    sets, _ = random_sets((3, 2))
    items = [torch.tensor([1, 1, 2]), torch.tensor([1, 3])]  # of items 2 and 3 there is one each
    each = InfoNCE(reduction="none", engine=engine)(*sets, items=items)
    assert (each != 0).tolist() == [True, True, False, True, False]
    mean = InfoNCE(engine=engine)(*sets, items=items)
    torch.testing.assert_close(mean, each.sum() / 3)
    torch.testing.assert_close(gradients(mean, sets), gradients(each.sum() / 3, sets))


@engines
def test_one_set_of_labelled_embeddings(engine):
    """Supervised contrast of one view."""
    (z,), items = random_sets((8,), num_items=3)
    ours = InfoNCE(engine=engine)(z, items=items)
    assert ours.item() == pytest.approx(exact_loss([z], items, negatives="all"))


@engines
def test_of_two_modalities_it_is_the_loss_of_clip(engine):
    (images, texts), _ = random_sets((6, 6))
    logits = F.normalize(images) @ F.normalize(texts).T / 0.07
    expected = (
        F.cross_entropy(logits, torch.arange(6)) + F.cross_entropy(logits.T, torch.arange(6))
    ) / 2
    loss = InfoNCE(temperature=0.07, negatives="cross", engine=engine)
    torch.testing.assert_close(loss(images, texts, items=torch.arange(6)), expected)


@engines
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_lower_precision(engine, dtype, temperature):
    sets, items = random_sets((40, 30), num_items=5)
    low = [z.detach().to(dtype).requires_grad_() for z in sets]
    options = {"temperature": temperature, "reduction": "none"}
    with in_blocks(16):
        losses = InfoNCE(**options, engine=engine)(*low, items=items)
    assert losses.dtype == torch.float32
    exact = InfoNCE(**options, engine="dense")(*(z.double() for z in low), items=items)
    torch.testing.assert_close(losses.double(), exact, rtol=1e-4, atol=1e-4)
    d_low, d_exact = gradients(losses.mean(), low), gradients(exact.mean(), low)
    assert {d.dtype for d in d_low} == {dtype}
    rtol = 4 * torch.finfo(dtype).eps + 1e-4
    torch.testing.assert_close(d_low, d_exact, rtol=rtol, atol=rtol)


@negatives_of
@pytest.mark.parametrize("num_items", [1, 10])
def test_memory_grows_with_embeddings_and_not_with_pairs(negatives, num_items):
    def peak(length):
        sets = [torch.randn(length, DIM, requires_grad=True) for _ in range(2)]
        items = [torch.randint(num_items, (length,)) for _ in range(2)]
        with LiveBytes() as live:
            InfoNCE(engine="streaming", negatives=negatives)(*sets, items=items).backward()
        return live.peak

    with in_blocks(128):
        assert peak(1200) < 5 * peak(300)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@negatives_of
def test_compiled_as_one_graph(negatives):
    torch.compiler.reset()
    loss = InfoNCE(negatives=negatives)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        sets, items = random_sets(LENGTHS, seed)
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


# How many embeddings of each set the ranks hold.
COUNTS = {1: [[3, 5]], 2: [[3, 0], [2, 5]], 3: [[1, 4, 2], [0, 3, 0], [5, 0, 2]]}


def over_ranks(rank, num_ranks):
    counts = COUNTS[num_ranks]  # [R, sets]
    lengths = [sum(of_set) for of_set in zip(*counts, strict=True)]
    for seed, (negatives, reduction) in enumerate(
        (("all", "mean"), ("cross", "sum"), ("all", "none"))
    ):
        options = {"negatives": negatives, "reduction": reduction}
        (whole, items), (sets, _) = (random_sets(lengths, seed, 3) for _ in range(2))
        shares = [of_set.tolist() for of_set in torch.tensor(counts).T]  # of each set
        mine, items_of_mine = (
            [of_set.split(share)[rank] for of_set, share in zip(both, shares, strict=True)]
            for both in (sets, items)
        )
        expected = InfoNCE(**options, gather=False)(*whole, items=items)
        ours = InfoNCE(**options)(*mine, items=items_of_mine)
        if reduction == "none":
            of_sets = zip(expected.split(lengths), shares, strict=True)
            torch.testing.assert_close(
                ours, torch.cat([of_set.split(share)[rank] for of_set, share in of_sets])
            )
            continue
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        d_ours = [mean_over_ranks(gradient) for gradient in gradients(ours, sets)]
        torch.testing.assert_close(d_ours, [*gradients(expected, whole)], rtol=1e-9, atol=1e-9)
    if num_ranks > 1:
        with pytest.raises((TypeError, ValueError)) as caught:
            InfoNCE()(*mine, items=items_of_mine if rank == 0 else None)
        return str(caught.value)
    return ""


@pytest.mark.parametrize("num_ranks", [1, 2, pytest.param(3, marks=pytest.mark.slow)])
def test_over_ranks(num_ranks):
    messages = on_ranks(over_ranks, num_ranks)
    assert len(set(messages)) == 1  # with items on one rank alone, all say what is wrong


class TestPGCL:
    @given(
        mode=st.sampled_from(EVERY_MODE),
        member=st.sampled_from([{"num_prototypes": 4}, *FAMILY]),
        num_views=st.integers(2, 3),
        seed=st.integers(0, 1000),
        engine=ENGINES,
        block=BLOCKS,
    )
    def test_agrees_with_the_oracle(self, mode, member, num_views, seed, engine, block):
        views, (items, *_) = random_sets((5,) * num_views, seed, num_items=3)
        options = {**mode, **member}
        pgcl = PGCLLoss(DIM, **options, engine=engine, reduction="none").double()
        with in_blocks(block):
            terms = pgcl.terms(*views, items=items)
        prototypes = arrays(pgcl.prototypes.weight.split(pgcl.prototypes.heads))
        del options["num_prototypes"]
        expected = oracle.pgcl_contrast(
            arrays(views), prototypes, numbers([items] * num_views), **options
        )
        np.testing.assert_allclose(terms.contrast.detach(), expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(terms.consistency, pgcl.terms(*views).consistency)

    @engines
    def test_with_uniform_weights_it_is_info_nce(self, engine):
        views, (items, *_) = random_sets((6, 6, 6), num_items=3)
        pgcl = PGCLLoss(
            DIM,
            weighting="uniform",
            exclude_same_cluster=False,
            consistency_weight=0,
            engine=engine,
        ).double()
        expected = InfoNCE(engine=engine)(*views, items=items)
        for form in (items, [items] * 3):
            ours = pgcl(*views, items=form)
            torch.testing.assert_close(ours, expected)
            torch.testing.assert_close(
                gradients(ours, views), gradients(InfoNCE()(*views, items=items), views)
            )

    @pytest.mark.parametrize("member", FAMILY, ids=str)
    def test_streaming_has_the_gradient_of_dense(self, member):
        views, (items, *_) = random_sets((7, 7, 7), num_items=4)
        results = []
        for engine in ("dense", "streaming"):
            torch.manual_seed(0)
            pgcl = PGCLLoss(DIM, **member, engine=engine).double()
            with in_blocks(3):
                results.append(gradients(pgcl(*views, items=items), views))
        torch.testing.assert_close(*results, rtol=1e-8, atol=1e-8)

    def test_sets_of_different_lengths_are_for_info_nce(self):
        sets, items = random_sets((4, 5))
        with pytest.raises(ValueError, match=r"(?s)row i of every view.*InfoNCE"):
            PGCLLoss(DIM)(*sets, items=items)


@pytest.mark.parametrize(
    ("items", "error"),
    [
        pytest.param([torch.arange(4), torch.arange(4)], ValueError, id="one too few"),
        pytest.param([torch.arange(4)], ValueError, id="of one set"),
        pytest.param(
            [torch.arange(4), torch.arange(5), torch.arange(5)], ValueError, id="of three"
        ),
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
def test_wrong_items_are_errors(items, error):
    sets, _ = random_sets((4, 5))
    with pytest.raises(error, match="items"):
        InfoNCE()(*sets, items=items)


@pytest.mark.parametrize("loss", [InfoNCE(), PGCLLoss(DIM)], ids=["InfoNCE", "PGCLLoss"])
def test_one_tensor_of_another_length_is_an_error(loss):
    views, _ = random_sets((4, 4))
    for length in (3, 5):
        with pytest.raises(ValueError, match="items"):
            loss(*views, items=torch.arange(length))


def test_different_lengths_need_items():
    sets, _ = random_sets((4, 5))
    with pytest.raises(ValueError, match=r"z2 has shape \(5, 3\) but z1 has \(4, 3\)"):
        InfoNCE()(*sets)


def test_sets_of_different_widths_or_dtypes_are_errors():
    (z, _), items = random_sets((4, 5))
    with pytest.raises(ValueError, match="z2"):
        InfoNCE()(z, torch.randn(5, 4, dtype=torch.float64), items=items)
    with pytest.raises(TypeError, match=r"z2 is torch\.float32 but z1 is torch\.float64"):
        InfoNCE()(z, torch.randn(5, 3), items=items)


def test_sets_that_have_none_to_be_compared_with():
    (z,), (items,) = random_sets((4,))
    with pytest.raises(TypeError, match=r"views must be two or more .* but got 1"):
        InfoNCE(negatives="cross")(z, items=(items,))
    with pytest.raises(TypeError, match=r"views must be one or more .* but got 0"):
        InfoNCE()(items=())
