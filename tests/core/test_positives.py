"""Positives by index, decoupled losses, queries of the first set, negatives of the memory alone."""

import functools
import itertools

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.item_cases import (
    BLOCKS,
    DIM,
    arrays,
    exact_losses,
    gradients,
    numbers,
    random_sets,
    weighted,
)
from helpers.marks import compiling, engines, few_graphs
from helpers.rank_models import mean_over_ranks, of_seed
from helpers.ranks import on_ranks
from hypothesis import given, settings
from hypothesis import strategies as st
from live_bytes import LiveBytes
from torch.autograd import forward_ad

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses import positives as positives_of
from pgcl_losses.engine import blocks

MODES = {
    "temperature": st.sampled_from([0.01, 0.2, 1.0]),
    "negatives": st.sampled_from(["all", "cross", "memory"]),
    "queries": st.sampled_from(["all", "first"]),
    "decoupled": st.booleans(),
    "hardness": st.sampled_from([0.0, 0.0, 1.0]),
    "debias": st.sampled_from([0.0, 0.0, 0.1]),
}


def random_pairs(count, num_queries, num_pairs, seed=0):
    """Pairs of different positions, some of them repeated, and weights, some of them 0."""
    random = of_seed(seed)
    query = torch.randint(num_queries, (num_pairs,), generator=random)
    key = (query + torch.randint(1, count, (num_pairs,), generator=random)) % count
    weights = torch.rand(num_pairs, dtype=torch.float64, generator=random)
    return torch.stack([query, key]), weights * (weights > 0.3)


def of_oracle(pairs, weights=None):
    if pairs is None:
        return ()
    ones = torch.ones(pairs.shape[1]) if weights is None else weights
    return [(a, b, w) for (a, b), w in zip(pairs.T.tolist(), ones.tolist(), strict=True)]


@st.composite
def problems(draw):
    """Sets, items, positives, weights, options and a memory."""
    mode = draw(st.fixed_dictionaries(MODES))
    with_items, with_pairs = draw(st.booleans()), draw(st.booleans())
    may_be_one = mode["negatives"] == "all" and (with_items or with_pairs)
    lengths = draw(st.lists(st.integers(1, 5), min_size=1 if may_be_one else 2, max_size=3))
    seed = draw(st.integers(0, 10**6))
    if not with_items:
        lengths = lengths[:1] * len(lengths)
    sets, items = random_sets(lengths, seed)
    count, pairs, weights = sum(lengths), None, None
    if with_pairs and count > 1:
        of_queries = lengths[0] if mode["queries"] == "first" else count
        pairs, weights = random_pairs(count, of_queries, draw(st.integers(0, 12)), seed)
        weights = draw(st.sampled_from([None, weights]))
    elif len(lengths) == 1 and not with_items:
        with_items = True
    has_memory = mode["negatives"] == "memory" or draw(st.booleans())
    past = random_sets((4,), seed + 1) if has_memory else None
    return sets, items if with_items else None, pairs, weights, mode, past


@settings(max_examples=300)
@given(problem=problems(), block=BLOCKS)
def test_losses_agree_with_the_oracle_and_engines_in_their_gradient(problem, block):
    sets, items, pairs, weights, mode, past = problem
    memory, results, called = oracle.Memory(4), [], {"items": items, "positives": pairs}
    if past is not None:
        memory.store(arrays(past[0]), numbers(past[1]) if items else None)
    listed = of_oracle(pairs, weights)
    expected, have_positives = exact_losses(sets, items, memory, listed=listed, **mode)
    for engine in ("dense", "blocks"):
        options = {"memory_size": 4, "dim": DIM} if past is not None else {}
        loss = InfoNCE(**mode, **options, reduction="none", engine=engine).double()
        if past is not None:
            loss.remember(past[0][0], past[1][0] if items else None)
        with in_blocks(block):
            losses = loss(*sets, **called, positive_weights=weights)
            results.append(gradients(weighted(losses) + 0 * sets[0].sum(), sets))
        np.testing.assert_allclose(losses.detach(), expected, rtol=1e-8, atol=1e-9)
        loss.reduction = "mean"
        mean = oracle.mean_of_queries(expected, have_positives)
        ours = loss(*sets, **called, positive_weights=weights)
        np.testing.assert_allclose(ours.detach(), mean, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-7)


@engines
@pytest.mark.parametrize("queries", ["all", "first"])
@pytest.mark.parametrize(
    "options", [{"decoupled": True}, {"negatives": "cross"}, {"hardness": 0.0, "debias": 0.1}]
)
def test_gradcheck(engine, queries, options):
    """By embeddings, weights of positives and temperature."""
    sets, items = random_sets((4, 3), num_items=3)
    pairs, weights = random_pairs(7, 4, 9)
    tau = torch.tensor(0.4, dtype=torch.float64, requires_grad=True)
    inputs = [*sets, weights.add_(0.1).requires_grad_(), tau]

    def loss(z1, z2, positive_weights, temperature):
        of = InfoNCE(temperature=temperature, queries=queries, engine=engine, **options)
        return of(z1, z2, items=items, positives=pairs, positive_weights=positive_weights)

    with in_blocks(3):
        assert torch.autograd.gradcheck(loss, inputs)
    if engine == "dense":
        assert torch.autograd.gradgradcheck(loss, inputs)


@few_graphs
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    mode=st.fixed_dictionaries(
        {
            "negatives": MODES["negatives"],
            "queries": MODES["queries"],
            "decoupled": st.booleans(),
            "weighting": st.sampled_from(["prototype", "sample", "uniform"]),
            "soft_clusters": st.booleans(),
            "temperature": st.sampled_from([0.01, 0.2]),
        }
    ),
    engine=st.sampled_from(["dense", "blocks"]),
    block=BLOCKS,
    kept_up_to=st.sampled_from([0, 1 << 20]),
)
def test_pgcl_agrees_with_the_oracle(seed, mode, engine, block, kept_up_to):
    views, (items, _) = random_sets((5, 5), seed)
    (z, *_), _ = random_sets((6,), seed + 1)
    pairs, weights = random_pairs(10, 5, 12, seed)
    pgcl = PGCLLoss(DIM, 3, memory_size=6, engine=engine, **mode).double().eval()
    pgcl.remember(z)
    given = {"items": items, "positives": pairs, "positive_weights": weights}
    with in_blocks(block), pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_KEPT_UP_TO", kept_up_to)
        contrast = pgcl.terms(*views, **given).contrast
        ours = gradients(contrast, views)
    at, prototypes = arrays(views), arrays([pgcl.prototypes.weight])
    of_views, past = numbers([items] * 2), arrays([z])[0]
    pgcl.contrast.engine = "dense"
    torch.testing.assert_close(
        ours, gradients(pgcl.terms(*views, **given).contrast, views), rtol=1e-6, atol=1e-8
    )
    listed = of_oracle(pairs, weights)
    losses = oracle.pgcl_contrast(at, prototypes, of_views, past, listed=listed, **mode)
    listed_positives = {a for a, _, weight in listed if weight > 0}
    of_each = items.tolist() * 2
    exist = [
        i in listed_positives
        or any(
            j != i and of_each[j] == of_each[i] and (mode["negatives"] == "all" or i // 5 != j // 5)
            for j in range(10)
        )
        for i in range(len(losses))
    ]
    expected = oracle.mean_of_queries(losses, exist)
    assert contrast.item() == pytest.approx(expected, rel=1e-8, abs=1e-9)


def test_what_a_list_of_pairs_means():
    (z1, z2), _ = random_sets((5, 5))
    none = torch.empty(2, 0, dtype=torch.long)
    assert InfoNCE()(z1, z2, positives=none) == InfoNCE()(z1, z2)
    # The pairs of the views, of one set that holds both.
    i = torch.arange(5)
    both = torch.stack([torch.cat([i, i + 5]), torch.cat([i + 5, i])])
    torch.testing.assert_close(InfoNCE()(torch.cat([z1, z2]), positives=both), InfoNCE()(z1, z2))
    # A weight of 2 is a pair given twice; the order of pairs does not matter.
    pair, two = torch.tensor([[0], [3]]), torch.tensor([2.0], dtype=torch.float64)
    twice = InfoNCE()(z1, z2, positives=pair.expand(2, 2))
    torch.testing.assert_close(twice, InfoNCE()(z1, z2, positives=pair, positive_weights=two))
    torch.testing.assert_close(
        InfoNCE()(z1, z2, positives=both.flip(1)), InfoNCE()(z1, z2, positives=both)
    )
    # Without a positive nothing has a loss.
    zero = torch.zeros(1, dtype=torch.float64)
    assert InfoNCE()(z1, positives=pair, positive_weights=zero) == 0


@engines
@pytest.mark.parametrize("weight", [1e-3, 1e-8, 1e3])
def test_a_weight_that_all_positives_share_changes_nothing(engine, weight):
    """In float32: the 1 of an item's positive leaves no rounding behind a smaller weight."""
    (z1, z2), _ = random_sets((6, 6))
    views = [z.detach().float().requires_grad_() for z in (z1, z2)]
    i = torch.arange(6)
    pairs = torch.stack([torch.cat([i, i + 6, i]), torch.cat([i + 6, i, (i + 1) % 6])])
    loss = InfoNCE(engine=engine)
    losses = [
        loss(*views, positives=pairs, positive_weights=torch.full((18,), each))
        for each in (1.0, weight)
    ]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(gradients(of, views) for of in losses))


@compiling
def test_compiled_as_one_graph_and_under_transforms():
    torch.compiler.reset()
    loss = InfoNCE(queries="first", decoupled=True)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        sets, _ = random_sets((6, 6), seed)
        pairs, weights = random_pairs(12, 6, 8 + seed, seed)
        given = {"positives": pairs, "positive_weights": weights}
        ours, expected = compiled(*sets, **given), loss(*sets, **given)
        torch.testing.assert_close(ours, expected)
        d_sets = gradients(expected, sets)
        torch.testing.assert_close(gradients(ours, sets), d_sets)
        of_first = functools.partial(loss, **given)
        torch.testing.assert_close(torch.func.grad(of_first)(*sets), d_sets[0])


# How many embeddings of each set, and how many pairs, the ranks hold.
COUNTS = {2: ([[3, 0], [2, 5]], (7, 0)), 3: ([[1, 4], [0, 3], [5, 0]], (2, 5, 0))}


def over_ranks(rank, num_ranks):
    modes = itertools.product(("all", "first"), (True, False), (0.0, 0.1), ("all", "cross"))
    for queries, with_items, debias, negatives in modes:
        counts, of_ranks = COUNTS[num_ranks]
        if not with_items:
            counts = [[of_rank[0]] * 2 for of_rank in counts]
        portions = [list(of_set) for of_set in zip(*counts, strict=True)]
        sets, items = random_sets([sum(portion) for portion in portions], 0, 3)
        split = [
            [of_set.split(portion) for of_set, portion in zip(both, portions, strict=True)]
            for both in (sets, items)
        ]
        starts = np.cumsum([0, *portions[0]]), np.cumsum([0, *portions[1]]) + len(sets[0])
        pairs, weights = [], []
        for r, (own, number) in enumerate(zip(counts, of_ranks, strict=True)):
            number = number if own[0] > 0 else 0
            of_rank, of_pairs = random_pairs(max(2, sum(own)), max(1, own[0]), number, r)
            pairs.append(of_rank)
            weights.append(of_pairs)
        positions = [
            torch.cat([torch.arange(n) + start[r] for n, start in zip(own, starts, strict=True)])
            for r, own in enumerate(counts)
        ]
        of_all = torch.cat([at[own] for at, own in zip(positions, pairs, strict=True)], 1)
        options = {"queries": queries, "debias": debias, "negatives": negatives}
        mine, of_mine = [of_set[rank] for of_set in split[0]], [of[rank] for of in split[1]]
        for reduction in ("mean", "sum", "none"):
            expected = InfoNCE(**options, gather=False, reduction=reduction)(
                *sets,
                items=items if with_items else None,
                positives=of_all,
                positive_weights=torch.cat(weights),
            )
            ours = InfoNCE(**options, reduction=reduction)(
                *mine,
                items=of_mine if with_items else None,
                positives=pairs[rank],
                positive_weights=weights[rank],
            )
            if reduction == "none":
                own = positions[rank]
                expected = expected[own[own < len(expected)]]
                torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
                continue
            torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-10)
            d_ours = [mean_over_ranks(gradient) for gradient in gradients(ours, sets)]
            torch.testing.assert_close(d_ours, [*gradients(expected, sets)], rtol=1e-9, atol=1e-9)
    with pytest.raises(ValueError, match="positives") as caught:
        InfoNCE()(*mine, positives=None if rank == 0 else pairs[rank])
    none = torch.empty(2, 0, dtype=torch.long)
    torch.testing.assert_close(
        InfoNCE()(*mine, items=of_mine, positives=none), InfoNCE()(*mine, items=of_mine)
    )
    return str(caught.value)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_the_loss_over_ranks_is_that_of_one_process(num_ranks):
    assert len(set(on_ranks(over_ranks, num_ranks))) == 1


def test_memory_grows_with_embeddings_and_pairs():
    def peak(length, **options):
        sets = [torch.randn(length, DIM, requires_grad=True) for _ in range(2)]
        pairs, _ = random_pairs(2 * length, length, 4 * length)
        with LiveBytes() as live:
            InfoNCE(**options, engine="blocks")(*sets, positives=pairs).backward()
        return live.peak

    for options in ({}, {"queries": "first", "debias": 0.1}):
        with in_blocks(128):
            assert peak(1200, **options) < 5 * peak(300, **options)


def test_transforms_of_any_number_of_pairs(monkeypatch):
    monkeypatch.setattr(positives_of, "_PAIRS", 1)
    (z1, z2), _ = random_sets((6, 6))
    pairs, weights = random_pairs(12, 12, 40)
    loss = InfoNCE(engine="dense")
    of_first = functools.partial(loss, positives=pairs)
    expected = gradients(of_first(z1, z2), [z1])[0]
    torch.testing.assert_close(torch.func.grad(of_first)(z1, z2), expected)
    lists = torch.stack([pairs, pairs.flip(1), random_pairs(12, 12, 40, 1)[0]])
    of_lists = torch.vmap(lambda of_list: loss(z1, z2, positives=of_list))(lists)
    each = [loss(z1, z2, positives=of_list) for of_list in lists]
    torch.testing.assert_close(of_lists, torch.stack(each))
    pairs = torch.stack([torch.arange(6), torch.arange(6, 12)])  # of the items

    def of_weights(given):
        return loss(z1.detach(), z2.detach(), positives=pairs, positive_weights=given)

    ones, tangent = torch.ones(6, dtype=torch.float64), weights[:6]
    with forward_ad.dual_level():
        ours = forward_ad.unpack_dual(of_weights(forward_ad.make_dual(ones, tangent))).tangent
    torch.testing.assert_close(ours, torch.func.jvp(of_weights, (ones,), (tangent,))[1])


@engines
def test_weights_of_a_query_without_positives_have_no_gradient(engine):
    (z,), _ = random_sets((4,))
    weights = torch.tensor([0.0, 1.0], dtype=torch.float64, requires_grad=True)
    pairs = torch.tensor([[0, 1], [1, 2]])
    InfoNCE(engine=engine)(z, positives=pairs, positive_weights=weights).backward()
    torch.testing.assert_close(weights.grad, torch.zeros_like(weights))


def test_embeddings_of_pairs_are_not_stored(monkeypatch):
    z = torch.randn(100, 64, requires_grad=True)
    pairs, _ = random_pairs(100, 100, 40_000)
    (expected,) = gradients(InfoNCE()(z, positives=pairs), [z])
    monkeypatch.setattr(positives_of, "_PAIRS", 500)
    with LiveBytes() as live:
        (ours,) = gradients(InfoNCE()(z, positives=pairs), [z])
    assert live.peak < pairs.shape[1] * z.shape[1] * 4 / 2
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize(
    ("positives", "weights", "error", "message"),
    [
        ([[0, 1], [1, 2]], None, TypeError, r"positives must be .*\[2, P\], but got .*list"),
        (torch.zeros(3, 2).long(), None, TypeError, r"positives must be .* but got .*\(3, 2\)"),
        (torch.zeros(2, 3), None, TypeError, "positives must be an int64 Tensor"),
        (torch.tensor([[0], [8]]), None, ValueError, r"a key from 0 to 7, but got \[0, 8\]"),
        (torch.tensor([[1, -1], [0, 1]]), None, ValueError, r"but got \[-1, 1\]"),
        (torch.tensor([[4], [1]]), None, ValueError, r"a query from 0 to 3 .* but got \[4, 1\]"),
        (torch.tensor([[2], [2]]), None, ValueError, r"two different .* but got \[2, 2\]"),
        (torch.tensor([[2], [1]]).to("meta"), None, ValueError, "positives is on meta"),
        (
            torch.tensor([[2], [1]]),
            torch.ones(2),
            TypeError,
            r"positive_weights .* but got .*\(2,\)",
        ),
        (torch.tensor([[2], [1]]), [1.0], TypeError, r"positive_weights .* but got .*list"),
        (
            torch.tensor([[2], [1]]),
            -torch.ones(1),
            ValueError,
            "positive_weights must be numbers from 0",
        ),
        (None, torch.ones(1), TypeError, "positive_weights need positives"),
    ],
)
def test_errors(positives, weights, error, message):
    given, sets = {"positives": positives, "positive_weights": weights}, random_sets((4, 4))[0]
    for loss in (InfoNCE(queries="first"), PGCLLoss(DIM, 2, queries="first").double()):
        with pytest.raises(error, match=message):
            loss(*sets, **given)


def test_options_that_do_not_go_together():
    sets, _ = random_sets((4, 4))
    pairs, _ = random_pairs(8, 8, 3)
    with pytest.raises(ValueError, match="memory_size is 0"):
        InfoNCE(negatives="memory")(*sets)
    with pytest.raises(ValueError, match="engine='flex' takes no positives by index"):
        InfoNCE(engine="flex")(*sets, positives=pairs)
    with pytest.raises(ValueError, match="queries='first'"):
        PGCLLoss(DIM, 2, queries="first", reduction="none").double()(*sets)
