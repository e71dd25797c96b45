"""Two views at once: the values and gradients of chunks, at any size, temperature and dtype."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers.cases import CUT, NOT_CUT, in_chunks, upstream
from helpers.losses import DIM, gradients, of_seed
from helpers.marks import NEGATIVES, few_graphs
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from pgcl_losses import InfoNCE, PrototypeReweightedNCE
from pgcl_losses.contrast import WEIGHTINGS
from pgcl_losses.pairs.loss import choose_way
from pgcl_losses.pairs.rows import all_rows

pytestmark = few_graphs
# 0.05 is the lowest temperature at which no peak of a row is taken out of the powers.
TEMPERATURES = (0.01, math.nextafter(0.05, 0), 0.05, 0.2, 1.0)


def views_of(kind, num, generator):
    """Random views, views that agree as after training, or views with zeros and huge numbers."""
    z1, z2 = torch.randn(2, num, DIM, generator=generator, dtype=torch.float64)
    if kind == "aligned":
        z2 = z1 + 0.2 * z2
    if kind == "extreme":
        z1[0], z2[-1] = 0.0, 1e18 * z2[-1]
    return z1, z2


@st.composite
def losses(draw):
    options = {
        "negatives": draw(st.sampled_from(["all", "cross"])),
        "queries": draw(st.sampled_from(["all", "first"])),
        "decoupled": draw(st.booleans()),
        "over_positives": draw(st.sampled_from(["mean", "sum"])),
    }
    num = draw(st.one_of(st.integers(1, 6), st.integers(100, 512)))
    if draw(st.booleans()):
        similarity = draw(st.sampled_from(["cosine", "dot"]))
        return InfoNCE(similarity=similarity, **options), {}, num
    weighting, excluded = draw(st.sampled_from(WEIGHTINGS)), draw(st.booleans())
    generator = of_seed(draw(st.integers(0, 99)))
    clusters = torch.randint(3, (2, num), generator=generator)
    given = {"clusters": clusters.unbind(), "prototypes": torch.randn(3, DIM, generator=generator)}
    contrast = PrototypeReweightedNCE(weighting=weighting, exclude_same_cluster=excluded, **options)
    return contrast, given if weighting == "prototype" or excluded else {}, num


@given(
    problem=losses(),
    temperature=st.sampled_from(TEMPERATURES),
    learns=st.booleans(),
    kind=st.sampled_from(["random", "aligned", "extreme"]),
    reduction=st.sampled_from(["mean", "sum", "none"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 10**6),
)
def test_value_and_gradient_are_those_of_chunks(
    problem, temperature, learns, kind, reduction, dtype, seed
):
    loss, given, num = problem
    views = [z.to(dtype).requires_grad_() for z in views_of(kind, num, of_seed(seed))]
    if getattr(loss, "similarity", "cosine") == "dot":  # float32 holds the scores at 0.01
        views = [(3 * F.normalize(z.detach())).requires_grad_() for z in views]
    tau = torch.nn.Parameter(torch.tensor(temperature, dtype=torch.float64))
    loss.temperature, loss.reduction = tau if learns else temperature, reduction
    results = []
    for way in (NOT_CUT, CUT):
        with in_chunks(1 << 20 if way == NOT_CUT else 20 * num):
            value = loss(*views, **given)
            leaves = [*views, tau] if learns else views
            results.append([value, *gradients(upstream(value), leaves)])
    for ours, expected in zip(*results, strict=True):
        size = float(expected.detach().abs().max())
        close = 1e-9 if dtype == torch.float64 else 2e-4
        torch.testing.assert_close(ours, expected, rtol=close, atol=close * size + 1e-30)


def test_what_is_computed_at_once():
    """What the test above compares with chunks is not computed in chunks."""
    views = views_of("random", 6, of_seed(0))
    for negatives in NEGATIVES[:2]:
        for options in ({}, {"weighting": "sample"}, {"weighting": "uniform"}):
            kind = PrototypeReweightedNCE if options else InfoNCE
            loss = kind(negatives=negatives, **options)
            given = {"clusters": torch.zeros(2, 6).long().unbind()} if options else {}
            pairs, inputs = loss.pairs_and_inputs(loss.batch_of(views, **given))
            # With "cross", a weight by the cosine depends on embeddings that are no keys.
            is_cut = options == {"weighting": "sample"} and negatives == "cross"
            way = choose_way("auto", pairs, inputs, all_rows(pairs), 1)
            assert way == ("one chunk" if is_cut else "two views")


# Where a hook keeps a tensor until the backward: elsewhere, with others, or in another order.
HOOKS = {
    "a copy": torch.clone,
    "a part of a pool": lambda x: torch.cat([x.new_zeros(7), x.flatten()])[7:].view(x.shape),
    "transposed": lambda x: x.T.contiguous().T if x.dim() == 2 else x.clone(),
}


@pytest.mark.parametrize("kept_as", HOOKS)
@pytest.mark.parametrize("queries", ["all", "first"])
@pytest.mark.parametrize("negatives", ["all", "cross"])
@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_what_is_saved_may_be_elsewhere_until_the_backward(
    negatives, queries, temperature, kept_as
):
    views = [z.requires_grad_() for z in views_of("random", 20, of_seed(0))]
    loss = InfoNCE(temperature=temperature, negatives=negatives, queries=queries)
    expected, sizes = gradients(loss(*views), views), []

    def pack(x):
        sizes.append(x.numel())
        return HOOKS[kept_as](x)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        value = loss(*views)
    torch.testing.assert_close(gradients(value, views), expected)
    # With both views as queries, one matrix serves both where no row has a peak.
    num_matrices = (1 + (negatives == "all")) * (1 + (queries == "all"))
    shared = negatives == "cross" and queries == "all" and temperature == 0.2
    assert max(sizes) == 400 * (1 if shared else num_matrices)


def test_the_number_of_graphs_may_be_a_symbol():
    mode = FakeTensorMode(shape_env=ShapeEnv())
    views = [mode.from_tensor(torch.randn(12, DIM), static_shapes=False) for _ in range(2)]
    with mode:
        assert InfoNCE()(*views).shape == InfoNCE(negatives="cross")(*views).shape == ()


def test_a_large_factor_of_the_loss_does_not_overflow():
    """As of a GradScaler, where the sum over negatives is as small as it can be."""
    x = torch.tensor([[1.0, 0.0], [-1.0, 1e-3]], requires_grad=True)
    loss_of = InfoNCE(negatives="cross", temperature=0.05, decoupled=True)
    (plain,) = gradients(loss_of(x, x.detach()), [x])
    for factor in (1e-15, 1e15):
        (scaled,) = gradients(loss_of(x, x.detach()) * factor, [x])
        torch.testing.assert_close(scaled / factor, plain)


@pytest.mark.parametrize("temperature", [0.01, 0.2])
def test_nan_in_one_embedding_is_nan_in_the_losses_that_see_it(temperature):
    z1, z2 = (z.float() for z in views_of("random", 5, of_seed(0)))
    z2[3] = math.nan
    values = InfoNCE(temperature=temperature, negatives="cross", queries="first", reduction="none")
    assert values(z1, z2).isnan().all()
    both = InfoNCE(temperature=temperature, negatives="cross", reduction="none")(z1, z2)
    assert both.isnan().tolist() == [True] * 5 + [False] * 3 + [True, False]
