"""Sizes of clusters, and calls that use a part of the prototypes."""

import math
import warnings

import pytest
import torch
import torch.nn.functional as F
from helpers.losses import gradients, of_seed
from helpers.marks import compiling, few_graphs, one_graph
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import (
    Assignment,
    ConsistencyLoss,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
    diagnostics,
    repulsion,
    sinkhorn,
)

pytestmark = few_graphs
DIM = 5


def views_of(num=9, seed=0, number=2):
    views = torch.randn(number, num, DIM, dtype=torch.float64, generator=of_seed(seed))
    return [view.requires_grad_() for view in views]


def literal_sinkhorn(scores, sizes, epsilon, iterations):
    q = [[math.exp(s / epsilon) for s in row] for row in scores]
    for _ in range(iterations):
        for k, size in enumerate(sizes):
            total = sum(row[k] for row in q)
            for row in q:
                row[k] *= size / sum(sizes) / total if size else 0
        for row in q:
            total = sum(row)
            for k in range(len(row)):
                row[k] /= total * len(q)
    return [[x / sum(row) for x in row] for row in q]


@pytest.mark.parametrize("temperature", [1e-30, 1e-10, 1e10])
def test_no_temperature_brings_back_a_prototype_that_is_not_in_use(temperature):
    z, sizes = torch.randn(2, 16, 8), torch.tensor([1.0, 0.0, 1.0, 1.0])
    prototypes = SinkhornPrototypes(8, 4, temperature=temperature)
    batch = prototypes(*z, sizes=sizes).batch
    assert batch.log_probs.isfinite().all()
    assert (batch.log_probs.exp()[:, 1] == 0).all()
    assert (batch.targets[:, 1] == 0).all()


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch's own vmap
@pytest.mark.parametrize("options", [{}, {"balance_predictions": True}, {"epsilon": 0.01}])
def test_many_sizes_under_vmap(options):
    views, sizes = torch.randn(2, 6, 4), torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]])
    prototypes = SinkhornPrototypes(4, 3, **options)

    def assigned(some):
        batch = prototypes(*views, sizes=some).batch
        return batch.log_probs, batch.targets, batch.clusters

    found = torch.vmap(assigned)(sizes)
    expected = [torch.stack(x) for x in zip(*map(assigned, sizes), strict=True)]
    torch.testing.assert_close([*found], expected)


@given(
    sizes=st.lists(st.floats(0.1, 9) | st.just(0.0), min_size=2, max_size=5).filter(any),
    num=st.integers(1, 6),
    epsilon=st.sampled_from([0.05, 0.5]),
    iterations=st.integers(1, 4),
)
def test_sinkhorn_balances_to_sizes(sizes, num, epsilon, iterations):
    scores = torch.rand(num, len(sizes), dtype=torch.float64, generator=of_seed(num)) - 0.5
    found = sinkhorn(scores, epsilon=epsilon, iterations=iterations, sizes=torch.tensor(sizes))
    expected = literal_sinkhorn(scores.tolist(), sizes, epsilon, iterations)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64))
    many = sinkhorn(scores, epsilon=0.5, iterations=200, sizes=torch.tensor(sizes))
    share = torch.tensor(sizes, dtype=torch.float64) / sum(sizes)
    torch.testing.assert_close(many.mean(0), share, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weighting": "sample"},
        {"weighting": "uniform", "negatives": "cross", "reduction": "sum"},
        {"exclude_same_cluster": False, "engine": "dense", "consistency_weight": 6.0},
        {"balance_predictions": True, "temperature": 0.05, "epsilon": 0.01},
        {"epsilon": 1e-4},
    ],
)
def test_prototypes_of_size_zero_are_as_if_they_were_not_there(options, kind):
    """Values, gradients, clusters and diagnostics are those of the prototypes in use."""
    in_use = torch.tensor([1, 0, 1, 1, 0, 1, 0])
    whole, part = (PGCLLoss(DIM, n, **options).double() for n in (7, 4))
    part.prototypes.weight.data = whole.prototypes.weight.data[in_use.bool()]
    views, sizes = views_of(), in_use.to(kind)
    results = []
    for loss, call in ((whole, {"sizes": sizes}), (part, {})):
        value = loss(*views, **call)
        *by_views, by_weight = gradients(value, [*views, loss.prototypes.weight])
        terms = loss.terms(*views, **call)
        results.append([value, by_views, by_weight, diagnostics(terms), terms.assignments])
    (value, by_views, by_weight, numbers, a), expected = results
    torch.testing.assert_close(value, expected[0])
    torch.testing.assert_close(by_views, expected[1])
    torch.testing.assert_close(by_weight[in_use.bool()], expected[2])
    assert (by_weight[~in_use.bool()] == 0).all()
    for name, number in expected[3].items():
        assert numbers[name] == pytest.approx(number), name
    places = in_use.nonzero().flatten()
    for view, other in zip(a, expected[4], strict=True):
        assert torch.equal(view.clusters, places[other.clusters])
        assert (view.targets[:, ~in_use.bool()] == 0).all()
        assert (view.log_probs.exp()[:, ~in_use.bool()] == 0).all()
    for z in views:
        nearest = whole.prototypes.assign(z.detach(), sizes=sizes)
        assert torch.equal(nearest, places[part.prototypes.assign(z.detach())])


def test_heads_have_sizes_side_by_side():
    whole, part = PGCLLoss(DIM, (4, 3)).double(), PGCLLoss(DIM, (2, 3)).double()
    sizes = torch.tensor([0, 1, 1, 0, 1, 1, 1])
    part.prototypes.weight.data = whole.prototypes.weight.data[sizes.bool()]
    views = views_of()
    torch.testing.assert_close(whole(*views, sizes=sizes), part(*views))
    numbers, expected = (
        diagnostics(loss.terms(*views, **call))
        for loss, call in ((whole, {"sizes": sizes}), (part, {}))
    )
    assert numbers == pytest.approx(expected)


def test_equal_sizes_are_no_sizes():
    pgcl, views = PGCLLoss(DIM, 6).double(), views_of()
    for sizes in (torch.ones(6), torch.full((6,), 7)):
        torch.testing.assert_close(pgcl(*views, sizes=sizes), pgcl(*views))


def test_by_hand_it_is_the_same():
    pgcl, views, sizes = PGCLLoss(DIM, 4).double(), views_of(), torch.tensor([3.0, 1.0, 0.0, 1.0])
    a = pgcl.prototypes(*views, sizes=sizes)
    by_hand = pgcl.contrast(*views, a) + pgcl.consistency_weight * pgcl.consistency(a)
    torch.testing.assert_close(by_hand, pgcl(*views, sizes=sizes))
    torch.testing.assert_close(pgcl.contrast(a), pgcl.terms(*views, sizes=sizes).contrast)
    repulsion(pgcl, *views, sizes=sizes)


def novae_head(z1, z2, prototypes, ilocs, temperature, epsilon=0.05, iterations=3):
    """The formula of the head of novae, which trains with a part of the prototypes of a slide."""
    prototypes = F.normalize(prototypes, dim=1)
    p1, p2 = (F.normalize(z, dim=1) @ prototypes.T for z in (z1, z2))
    p1, p2 = p1[:, ilocs], p2[:, ilocs]

    @torch.no_grad()
    def targets(projections):
        q = torch.exp(projections / epsilon)
        q /= q.sum()
        num, size = q.shape
        for _ in range(iterations):
            q /= q.sum(dim=0, keepdim=True)
            q /= size
            q /= q.sum(dim=1, keepdim=True)
            q /= num
        return q / q.sum(dim=1, keepdim=True)

    def entropy(q, p):
        return (q * F.log_softmax(p / temperature, dim=1)).sum(1).mean()

    return -0.5 * (entropy(targets(p1), p2) + entropy(targets(p2), p1))


@given(
    seed=st.integers(0, 999),
    num=st.integers(1, 20),
    in_use=st.lists(st.booleans(), min_size=8, max_size=8).filter(any),
    temperature=st.sampled_from([0.1, 0.5]),
)
def test_the_head_of_novae(seed, num, in_use, temperature):
    prototypes = SinkhornPrototypes(DIM, 8, temperature=temperature).double()
    views, consistency = views_of(num, seed), ConsistencyLoss()
    ours = consistency(prototypes(*views, sizes=torch.tensor(in_use)))
    ilocs = torch.tensor(in_use).nonzero().flatten()
    theirs = novae_head(*views, prototypes.weight.detach(), ilocs, temperature)
    close = {"rtol": 1e-12, "atol": 1e-12}
    torch.testing.assert_close(ours, theirs, **close)
    torch.testing.assert_close(gradients(ours, views), gradients(theirs, views), **close)


def test_gradcheck():
    """Targets and weights are constants, so only the prediction is differentiated."""
    prototypes, sizes = SinkhornPrototypes(DIM, 4).double(), torch.tensor([1.0, 0.0, 2.0, 1.0])
    targets = torch.tensor([0.2, 0.0, 0.5, 0.3])

    def value(*views):
        return -sum((targets * view.log_probs).sum() for view in prototypes(*views, sizes=sizes))

    assert torch.autograd.gradcheck(value, views_of(3))


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ([1, 1], {}, "sizes must be a Tensor of shape"),
        (
            torch.ones(3),
            {},
            r"sizes must have shape \(4,\), one for each prototype, but got \(3,\)",
        ),
        (torch.zeros(4), {}, "above 0 for one prototype of each head, but got 0, 0, 0, 0"),
        (torch.tensor([1.0, -1, 1, 1]), {}, "at least 0, .* but got 1, -1, 1, 1"),
        (torch.tensor([1.0, torch.nan, 1, 1]), {}, "must be finite, .* but got 1, nan"),
        (torch.tensor([1.0, torch.inf, 1, 1]), {}, "must be finite"),
        (
            torch.ones(4) * 1j,
            {},
            "sizes must be a dense Tensor of numbers or bools, but got torch.complex64",
        ),
        (torch.ones(4).to_sparse(), {}, "with layout torch.sparse_coo"),
        (torch.ones(4, device="meta"), {}, "sizes is on meta but"),
        (torch.tensor([1.0, 1, 0, 0]), {"num_prototypes": (2, 2)}, "but got 0, 0"),
        (torch.ones(4), {"queue_size": 3}, "sizes cannot be combined with a queue"),
        (torch.ones(4), {"memory_size": 3}, "sizes cannot be combined with a memory"),
    ],
)
def test_what_sizes_must_be(sizes, options, message):
    pgcl, views = PGCLLoss(DIM, **{"num_prototypes": 4, **options}).double(), views_of()
    with pytest.raises((TypeError, ValueError), match=message):
        pgcl(*views, sizes=sizes)
    if "memory" not in message:
        with pytest.raises((TypeError, ValueError), match=message):
            pgcl.prototypes(*views, sizes=sizes)
    if not options:
        with pytest.raises((TypeError, ValueError), match=message):
            sinkhorn(torch.ones(3, 4), sizes=sizes)
        with pytest.raises((TypeError, ValueError), match=message):
            pgcl.prototypes.assign(views[0].detach(), sizes=sizes)


class Fixed(torch.nn.Module):
    """Takes the place of the prototypes, and knows no sizes."""

    heads, temperature = (4,), 0.5

    def __init__(self, inner):
        super().__init__()
        self.inner, self.weight = inner, inner.weight

    def forward(self, batch):
        return self.inner(batch)

    def check(self, views):
        pass

    def advance(self, batch):
        pass


def test_a_module_in_place_of_prototypes_without_sizes_is_an_error():
    pgcl, views = PGCLLoss(DIM, 4).double(), views_of()
    pgcl.prototypes = Fixed(pgcl.prototypes)
    pgcl(*views)
    with pytest.raises(TypeError, match="prototypes is a Fixed, which takes none"):
        pgcl(*views, sizes=torch.ones(4))
    with pytest.raises(TypeError, match="no argument sizes"):
        PrototypeReweightedNCE()(*views, sizes=torch.ones(4))


def test_a_batch_is_compared_with_the_prototypes_in_use():
    pgcl, sizes = PGCLLoss(DIM, 16).double(), torch.arange(16) < 4
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            pgcl(*views_of(9, step), sizes=sizes)
    pgcl = PGCLLoss(DIM, 16).double()
    for step in range(2):
        pgcl(*views_of(9, step), sizes=torch.arange(16) < 12)
    with pytest.warns(UserWarning, match="9 graphs of a batch and 0 of the queue .* over 12"):
        pgcl(*views_of(9, 2), sizes=torch.arange(16) < 12)


def of_processes(rank, num_ranks):
    views, sizes = views_of(8), torch.tensor([1.0, 2.0, 0.0, 1.0])
    torch.manual_seed(0)
    pgcl, alone = PGCLLoss(DIM, 4).double(), PGCLLoss(DIM, 4, gather=False).double()
    alone.load_state_dict(pgcl.state_dict())
    own = [view.chunk(2)[rank] for view in views]
    torch.testing.assert_close(pgcl(*own, sizes=sizes), alone(*views, sizes=sizes))
    alone(*own, sizes=sizes.roll(rank))  # each process has a slide of its own
    with pytest.raises(ValueError, match="sizes"):
        pgcl(*own, sizes=sizes.roll(rank))
    with pytest.raises(ValueError, match="sizes"):
        pgcl(*own, sizes=sizes if rank else None)


def test_processes_agree_on_sizes():
    on_ranks(of_processes, 2)


@pytest.mark.slow
@one_graph
@compiling
def test_sizes_compile():
    torch.compiler.reset()
    pgcl, views = PGCLLoss(DIM, 4).double(), views_of()
    compiled = torch.compile(pgcl, fullgraph=True, backend="aot_eager")
    for sizes in (torch.tensor([1, 0, 2, 1]), torch.tensor([1, 3, 2, 0])):
        torch.testing.assert_close(compiled(*views, sizes=sizes), pgcl(*views, sizes=sizes))


def test_scores_of_a_prototype_that_is_not_in_use_do_not_matter():
    scores, used = (
        torch.tensor([[0.0, -1e38, -1e38], [0, 0, 0], [0, 0, -1]]),
        torch.tensor([0, 1, 1]),
    )
    expected = sinkhorn(scores[:, 1:])
    for of_unused in (0.0, 1e38, -torch.inf):
        found = sinkhorn(torch.cat([torch.full((3, 1), of_unused), scores[:, 1:]], 1), sizes=used)
        assert (found[:, 0] == 0).all()
        torch.testing.assert_close(found[:, 1:], expected)


@pytest.mark.parametrize("factor", [1e-50, 1e40])
def test_sizes_may_be_beyond_float32(factor):
    prototypes, sizes = SinkhornPrototypes(DIM, 4), torch.tensor([1.0, 2, 0, 1]).double()
    z = torch.randn(9, DIM)
    (found,), (expected,) = prototypes(z, sizes=factor * sizes), prototypes(z, sizes=sizes)
    torch.testing.assert_close(found.targets, expected.targets)
    assert 2 not in prototypes.assign(z, sizes=factor * sizes)


def test_a_prediction_of_probability_zero_is_no_prototype_out_of_use():
    probabilities = torch.tensor([[0.9, 0.1, 0.0], [0.2, 0.8, 0.0]])
    clusters = torch.tensor([0, 1])
    view = Assignment(probabilities.log(), torch.eye(3)[clusters], clusters)
    assert diagnostics([view, view])["dead_prototypes"] == 1
