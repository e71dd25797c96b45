"""Hard negatives (Robinson et al. 2021) and the debiased sum (Chuang et al. 2020)."""

import math

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.item_cases import (
    BLOCKS,
    ENGINES,
    PAIR_MODES,
    any_sets,
    arrays,
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
from torch.autograd import forward_ad

from pgcl_losses import InfoNCE
from pgcl_losses.contrast import NEGATIVES

engines = pytest.mark.parametrize("engine", ["dense", "streaming"])
negatives_of = pytest.mark.parametrize("negatives", NEGATIVES)
MODES = {
    **PAIR_MODES,
    "hardness": st.sampled_from([0.0, 0.5, 2.0]),
    "debias": st.sampled_from([0.0, 0.1, 0.9]),
}
BOTH = [
    {"hardness": 1.0},
    {"debias": 0.1},
    {"hardness": 0.5, "debias": 0.2},
]
options_of = pytest.mark.parametrize("options", BOTH, ids=str)


@given(problem=any_sets(), mode=st.fixed_dictionaries(MODES), engine=ENGINES, block=BLOCKS)
def test_agrees_with_the_oracle(problem, mode, engine, block):
    sets, items = problem
    losses, have_positives = exact_losses(sets, items, **mode)
    mean = oracle.mean_of_queries(losses, have_positives)
    for reduction, expected in (("none", losses), ("mean", mean)):
        with in_blocks(block):
            ours = InfoNCE(**mode, reduction=reduction, engine=engine)(*sets, items=items)
        np.testing.assert_allclose(ours.detach(), expected, rtol=1e-9, atol=1e-11)


@given(problem=any_sets(), mode=st.fixed_dictionaries(MODES), block=BLOCKS)
def test_streaming_has_the_gradient_of_dense(problem, mode, block):
    sets, items = problem
    results = []
    for engine in ("dense", "streaming"):
        with in_blocks(block):
            losses = InfoNCE(**mode, reduction="none", engine=engine)(*sets, items=items)
            results.append(gradients(weighted(losses), sets))
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-8)


@engines
@negatives_of
@options_of
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
    for place, gradient in enumerate(ours):

        def value(z, place=place):
            moved = [*at]
            moved[place] = z
            return oracle.mean_of_queries(*oracle.info_nce(moved, of_items, *past, **mode))

        expected = oracle.gradient(value, at[place])
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


@engines
@negatives_of
def test_gradcheck_of_the_debiased_sum(engine, negatives):
    sets, items = random_sets((3, 5, 4), num_items=3)
    loss = InfoNCE(debias=0.1, temperature=0.5, negatives=negatives, engine=engine)
    with in_blocks(3):
        assert torch.autograd.gradcheck(lambda *z: loss(*z, items=items), sets)
    if engine == "dense":
        assert torch.autograd.gradgradcheck(lambda *z: loss(*z, items=items), sets)


@pytest.mark.parametrize("with_items", [False, True])
@options_of
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
@pytest.mark.parametrize("with_items", [False, True])
def test_zeros_are_info_nce_itself(engine, negatives, with_items):
    sets, items = random_sets((5, 5))
    items = items if with_items else None
    values = []
    for options in ({}, {"hardness": 0.0, "debias": 0.0}, {"hardness": 0, "debias": 0}):
        loss = InfoNCE(**options, negatives=negatives, engine=engine)(*sets, items=items)
        values.append([loss, *gradients(loss, sets)])
    torch.testing.assert_close(values[1:], values[:1] * 2, rtol=0, atol=0)


@engines
def test_small_values_are_near_info_nce(engine):
    sets, items = random_sets((6, 7))
    expected = InfoNCE()(*sets, items=items)
    ours = InfoNCE(hardness=1e-9, debias=1e-9, engine=engine)(*sets, items=items)
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-7)


@engines
@pytest.mark.parametrize("temperature", [0.05, 0.2])
def test_the_floor_of_the_debiased_sum(engine, temperature):
    """Negatives lie opposite and positives alike: what is left of the sum would be negative."""
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
    unit = [torch.nn.functional.normalize(view) for view in views]
    positive = (unit[0] * unit[1]).sum(1).repeat(2)
    expected = torch.log1p(2 * ((-1 - positive) / temperature).exp())
    torch.testing.assert_close(losses, expected)
    torch.testing.assert_close(gradients(losses.sum(), views), gradients(expected.sum(), views))


@engines
@options_of
@pytest.mark.parametrize("temperature", [0.01, 0.003])
def test_low_temperatures_in_float32(engine, options, temperature):
    sets, items = random_sets((30, 20), num_items=6)
    low = [z.detach().float().requires_grad_() for z in sets]
    results = []
    for leaves in (low, [z.detach().double().requires_grad_() for z in low]):
        loss = InfoNCE(**options, temperature=temperature, engine=engine, reduction="none")
        with in_blocks(16):
            losses = loss(*leaves, items=items)
        results.append([losses.double(), *(d.double() for d in gradients(losses.mean(), leaves))])
    assert all(d.isfinite().all() for d in results[0])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-3 / temperature)


@engines
@options_of
@pytest.mark.parametrize("items", [[[4, 4, 4], [4, 4]], [[1, -2, 3], [7, 0]], [[1, 1, 2], [3, 3]]])
def test_without_positives_or_negatives_a_loss_is_zero(engine, options, items):
    items = [torch.tensor(of_set) for of_set in items]
    sets, _ = random_sets((3, 2))
    each = InfoNCE(**options, engine=engine, reduction="none")(*sets, items=items)
    losses, have_positives = exact_losses(sets, items, **options)
    np.testing.assert_allclose(each.detach(), losses, rtol=1e-9)
    mean = InfoNCE(**options, engine=engine)(*sets, items=items)
    assert mean.item() == pytest.approx(oracle.mean_of_queries(losses, have_positives))
    d_sets = gradients(mean, sets)
    assert all(d.isfinite().all() for d in d_sets)
    assert mean.item() > 0 or not any(d.any() for d in d_sets)


@options_of
def test_streaming_grows_with_embeddings_and_not_with_pairs(options):
    def peak(length):
        views = torch.randn(2, length, 3, requires_grad=True)
        with LiveBytes() as live:
            InfoNCE(**options, engine="streaming")(*views).backward()
        return live.peak

    with in_blocks(128):
        assert peak(1200) < 5 * peak(300)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
@options_of
def test_compiled_as_one_graph(options):
    torch.compiler.reset()
    loss = InfoNCE(**options)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    views, _ = random_sets((6, 6, 6))
    ours, expected = compiled(*views), loss(*views)
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, views), gradients(expected, views))


def over_ranks(rank, num_ranks):
    counts = [2, 4]
    for negatives in NEGATIVES:
        for options in BOTH:
            views, (items, *_) = random_sets((6, 6), num_items=4)
            for of_all in (None, items):
                of_mine = None if of_all is None else items.split(counts)[rank]
                mine = [view.split(counts)[rank] for view in views]
                ours = InfoNCE(**options, negatives=negatives)(*mine, items=of_mine)
                expected = InfoNCE(**options, negatives=negatives, gather=False)(
                    *views, items=of_all
                )
                torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
                d_ours = [mean_over_ranks(gradient) for gradient in gradients(ours, views)]
                torch.testing.assert_close(d_ours, [*gradients(expected, views)])


def test_over_ranks():
    on_ranks(over_ranks, 2)


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
    ],
    ids=str,
)
def test_errors(options, error):
    (name,) = options
    with pytest.raises(error, match=name):
        InfoNCE(**options)
    loss = InfoNCE()
    with pytest.raises(error, match=name):
        setattr(loss, name, options[name])


@engines
def test_options_may_be_assigned_at_any_time(engine):
    views, _ = random_sets((5, 5))
    loss = InfoNCE(engine=engine)
    loss(*views)
    for options in ({"hardness": 1.0}, {"debias": 0.2}, {"hardness": 0.0, "debias": 0.0}):
        for name, value in options.items():
            setattr(loss, name, value)
        now = {"hardness": loss.hardness, "debias": loss.debias}
        torch.testing.assert_close(loss(*views), InfoNCE(**now)(*views))
