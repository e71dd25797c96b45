"""The loss and its parts: one door each, live options, any number of views, one process or many."""

from typing import ClassVar

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.rank_models import mean_over_ranks
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import (
    Batch,
    ConsistencyLoss,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
)
from pgcl_losses.contrast import NEGATIVES, WEIGHTINGS
from pgcl_losses.ranks import Ranks

PARTS = ("prototypes", "contrast", "consistency")
DIM = 4


class HalfConsistency(ConsistencyLoss):
    def forward(self, *assignments):
        return 0.5 * super().forward(*assignments)


class HalfContrast(PrototypeReweightedNCE):
    def forward(self, *given):
        return 0.5 * super().forward(*given)


class Turned(SinkhornPrototypes):
    """Cluster numbers one further on."""

    def forward(self, *views):
        batch = super().forward(*views)
        return batch._replace(clusters=(batch.clusters + 1) % self.num_prototypes)


def views_of(num_views, num_rows=6, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_views, num_rows, DIM, dtype=torch.float64, generator=generator)


def pgcl_of(**options):
    torch.manual_seed(0)
    return PGCLLoss(DIM, **{"num_prototypes": 3, **options}).double()


def every_part_is_called(rank=0, num_ranks=1):
    pgcl, called = pgcl_of(), []
    for name in PARTS:
        part = getattr(pgcl, name)
        part.register_forward_hook(lambda *_, name=name: called.append(name))
    views = views_of(2, seed=rank)
    plain = pgcl.terms(*views)
    assert sorted(called) == sorted(PARTS)

    pgcl.consistency = HalfConsistency()
    terms = pgcl.terms(*views)
    torch.testing.assert_close(terms.consistency, plain.consistency / 2)
    torch.testing.assert_close(terms.loss, plain.contrast + 6 * plain.consistency / 2)

    pgcl.contrast = HalfContrast()
    torch.testing.assert_close(pgcl.terms(*views).contrast, plain.contrast / 2)

    turned = Turned(DIM, 3).double()
    turned.load_state_dict(pgcl.prototypes.state_dict())
    pgcl.prototypes = turned
    for ours, before in zip(pgcl.terms(*views).assignments, plain.assignments, strict=True):
        assert torch.equal(ours.clusters, (before.clusters + 1) % 3)

    pgcl.consistency = torch.nn.Identity()  # any module: it is given the batch
    with pytest.raises(TypeError, match="Batch"):
        pgcl(*views)
    return True


def test_hooks_fire_and_a_subclass_in_a_parts_place_is_obeyed():
    every_part_is_called()


def test_so_it_is_on_two_ranks():
    assert on_ranks(every_part_is_called, 2) == [True, True]


def test_parts_by_themselves_are_the_loss():
    pgcl, views = pgcl_of(), views_of(2)
    terms = pgcl.terms(*views)
    assignments = pgcl_of().prototypes(*views)
    clusters = [assignment.clusters for assignment in assignments]
    contrast = PrototypeReweightedNCE()(*views, *clusters, pgcl.prototypes.weight)
    torch.testing.assert_close(contrast, terms.contrast)
    torch.testing.assert_close(ConsistencyLoss()(*assignments), terms.consistency)


def test_a_batch_says_what_it_lacks():
    batch = Batch(Ranks((6,)), torch.nn.functional.normalize(views_of(2), dim=-1))
    for module in (ConsistencyLoss(), PrototypeReweightedNCE(weighting="uniform")):
        with pytest.raises(ValueError, match=r"has no prototypes, log_probs.*: call Sinkh"):
            module(batch)
    plain = PrototypeReweightedNCE(weighting="sample", exclude_same_cluster=False)
    torch.testing.assert_close(plain(batch), plain(*views_of(2)))


def test_a_batch_is_given_alone():
    batch, views = pgcl_of().prototypes(Batch(Ranks((6,)), embeddings=views_of(2))), views_of(2)
    for name in PARTS:
        with pytest.raises(TypeError, match="a batch has all views and items in it: give it alone"):
            getattr(pgcl_of(), name)(batch, views[0])


class TestViews:
    """More than two of them."""

    @given(
        num_views=st.integers(2, 4),
        num_rows=st.integers(1, 5),
        seed=st.integers(0, 1000),
        weighting=st.sampled_from(WEIGHTINGS),
        exclude=st.booleans(),
        negatives=st.sampled_from(NEGATIVES),
        engine=st.sampled_from(["dense", "streaming"]),
    )
    def test_the_loss_is_the_oracles(
        self, num_views, num_rows, seed, weighting, exclude, negatives, engine
    ):
        views = views_of(num_views, num_rows, seed)
        pgcl = pgcl_of(
            weighting=weighting,
            exclude_same_cluster=exclude,
            negatives=negatives,
            engine=engine,
            reduction="none",
        )
        terms = pgcl.terms(*views)
        prototypes = pgcl.prototypes.weight.detach().numpy()
        exact = [view.numpy() for view in views]
        q = [oracle.targets(z, prototypes, epsilon=0.05, iterations=3) for z in exact]
        clusters = np.concatenate(q).argmax(1)
        weights = oracle.pair_weights(np.concatenate(exact), clusters, prototypes, weighting)
        contrast = oracle.contrast(exact, weights, clusters, 0.2, exclude, negatives)
        log_p = [oracle.log_predictions(z, prototypes, 0.2) for z in exact]
        np.testing.assert_allclose(terms.contrast.detach(), contrast, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(
            terms.consistency.detach(), oracle.consistency(log_p, q), rtol=1e-9
        )

    @pytest.mark.parametrize("negatives", NEGATIVES)
    def test_engines_have_one_gradient(self, negatives):
        gradients = []
        for engine in ("dense", "streaming"):
            views = views_of(3).requires_grad_()
            pgcl_of(negatives=negatives, engine=engine)(*views).backward()
            gradients.append(views.grad)
        torch.testing.assert_close(*gradients)

    def test_gradcheck(self):
        pgcl = pgcl_of(consistency_weight=0.0).eval()
        inputs = [view.requires_grad_() for view in views_of(3, 4)]
        assert torch.autograd.gradcheck(pgcl, inputs)
        assert torch.autograd.gradgradcheck(pgcl, inputs)

    def test_the_queue_keeps_as_many_views_as_it_is_told(self):
        pgcl = pgcl_of(queue_size=8, queue_views=3)
        assert pgcl(*views_of(3)).isfinite()
        assert pgcl.prototypes.queue.shape == (3, 8, DIM)
        with pytest.raises(ValueError, match="views must be 3 when queue_size > 0, but got 2"):
            pgcl(*views_of(2))

    def test_one_view_is_an_error(self):
        with pytest.raises(TypeError, match=r"views must be two or more Tensors.*but got 1"):
            pgcl_of()(views_of(1)[0])


class TestOptions:
    def test_what_is_assigned_reaches_every_part_that_has_it(self):
        pgcl, views = pgcl_of(), views_of(2)
        for name, value in {
            "temperature": 0.5,
            "epsilon": 0.1,
            "iterations": 5,
            "weighting": "sample",
            "exclude_same_cluster": False,
            "negatives": "cross",
            "reduction": "sum",
            "engine": "streaming",
            "consistency_weight": 2.0,
            "contrast_weight": 3.0,
        }.items():
            setattr(pgcl, name, value)
            assert getattr(pgcl, name) == value
            expected = pgcl_of(**{name: value})
            for other in ("temperature", "epsilon", "iterations", "weighting", "negatives"):
                setattr(expected, other, getattr(pgcl, other))
            for other in ("exclude_same_cluster", "reduction", "engine"):
                setattr(expected, other, getattr(pgcl, other))
            expected.consistency_weight = pgcl.consistency_weight
            expected.contrast_weight = pgcl.contrast_weight
            assert repr(pgcl) == repr(expected)
            torch.testing.assert_close(pgcl(*views), expected(*views))
        assert (pgcl.prototypes.temperature, pgcl.contrast.temperature) == (0.5, 0.5)
        assert (pgcl.consistency.reduction, pgcl.contrast.reduction) == ("sum", "sum")

    def test_a_part_may_have_a_temperature_of_its_own(self):
        pgcl = pgcl_of()
        pgcl.contrast.temperature = 0.5
        with pytest.raises(ValueError, match=r"temperature differs from module to module: .*0\.5"):
            print(pgcl.temperature)
        pgcl.temperature = 0.3
        assert pgcl.temperature == 0.3

    @pytest.mark.parametrize(
        ("name", "value", "error", "message"),
        [
            ("temperature", -1, ValueError, "temperature must be .* at least"),
            ("weighting", "prototpye", ValueError, "weighting must be one of 'prototype'"),
            ("engine", "fast", ValueError, "engine must be one of"),
            ("consistency_weight", "6", TypeError, "consistency_weight must be a finite number"),
            ("freeze_steps", -1, ValueError, "freeze_steps must be at least 0"),
            ("gather", 1, TypeError, "gather must be True or False"),
            ("process_group", "all", TypeError, "process_group must be a ProcessGroup or None"),
            ("dim", 5, AttributeError, "dim is 4 and cannot change in this Sinkh"),
            ("num_prototypes", 4, AttributeError, "num_prototypes is 3 and cannot change"),
            ("queue_size", 4, AttributeError, "queue_size is 0 and cannot change"),
        ],
    )
    def test_what_cannot_be_is_an_error_when_assigned(self, name, value, error, message):
        pgcl = pgcl_of()
        before = repr(pgcl)
        with pytest.raises(error, match=message):
            setattr(pgcl, name, value)
        assert repr(pgcl) == before

    def test_gather_reaches_the_parts(self):
        pgcl = pgcl_of(gather=False)
        assert not any(getattr(pgcl, name).gather for name in PARTS)
        pgcl.gather = True
        assert all(getattr(pgcl, name).gather for name in PARTS)


COUNTS = {1: [5], 2: [2, 4], 3: [3, 0, 4]}


def parts_over_ranks(rank, num_ranks):
    """Each part by itself, its value and gradient, against one process with the whole batch."""
    counts = COUNTS[num_ranks]
    whole_views = views_of(3, sum(counts)).requires_grad_()
    views = views_of(3, sum(counts)).requires_grad_()
    mine = [view.split(counts)[rank] for view in views]
    family = {"num_prototypes": (3, 4), "negative_ranks": (0, 2), "soft_clusters": True}
    for options in ({"reduction": "mean"}, {"reduction": "sum"}, family):
        pgcl, whole = pgcl_of(**options), pgcl_of(**options, gather=False)
        assignments, expected = pgcl.prototypes(*mine), whole.prototypes(*whole_views)
        for ours, theirs in zip(assignments, expected, strict=True):
            for one, other in zip(ours[:3], theirs[:3], strict=True):
                torch.testing.assert_close(one, other.split(counts)[rank])
        clusters, of_all = ([a.clusters for a in some[:2]] for some in (assignments, expected))
        weight, whole_weight = pgcl.prototypes.weight, whole.prototypes.weight
        pairs = [
            (pgcl.consistency(*assignments), whole.consistency(*expected)),
            (
                pgcl.contrast(mine, assignments=assignments, prototypes=weight),
                whole.contrast(list(whole_views), assignments=expected, prototypes=whole_weight),
            ),
        ]
        if options is not family:
            by_numbers = pgcl.contrast(*mine[:2], *clusters, weight)
            pairs.append((by_numbers, whole.contrast(*whole_views[:2], *of_all, whole_weight)))
        for loss, other in pairs:
            torch.testing.assert_close(mean_over_ranks(loss), other.detach())
            options = {"retain_graph": True, "materialize_grads": True}
            ours = torch.autograd.grad(loss, [views, weight], **options)
            theirs = torch.autograd.grad(other, [whole_views, whole_weight], **options)
            torch.testing.assert_close([mean_over_ranks(one) for one in ours], list(theirs))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parts_by_themselves_are_global(num_ranks):
    on_ranks(parts_over_ranks, num_ranks)


def more_views(rank, num_ranks):
    counts = COUNTS[num_ranks]
    for negatives in ("all", "cross"):
        for weighting in ("prototype", "sample"):
            options = {"negatives": negatives, "weighting": weighting}
            views = views_of(3, sum(counts)).requires_grad_()
            whole_views = views_of(3, sum(counts)).requires_grad_()
            loss = pgcl_of(**options)(*(view.split(counts)[rank] for view in views))
            expected = pgcl_of(**options, gather=False)(*whole_views)
            loss.backward()
            expected.backward()
            torch.testing.assert_close(loss, expected)  # the same on every rank
            torch.testing.assert_close(mean_over_ranks(views.grad), whole_views.grad)


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_three_views_over_ranks(num_ranks):
    on_ranks(more_views, num_ranks)


class Stubborn(ConsistencyLoss):
    """Has an option that its repr does not show."""

    options: ClassVar = {**ConsistencyLoss.options, "strength": lambda name, value: value}

    def __init__(self, strength):
        super().__init__()
        self.strength = strength

    def extra_repr(self):
        return ""


class Broken(PrototypeReweightedNCE):
    def facts(self):
        raise OSError("no facts today")


def different_strengths(rank, num_ranks):
    pgcl = pgcl_of()
    pgcl.consistency = Stubborn(rank)
    with pytest.raises(ValueError, match=r"consistency\.strength=0\n.*consistency\.strength=1"):
        pgcl(*views_of(2))
    with pytest.raises(
        ValueError, match=r"rank 0: contrast\.negatives=all\n.*1: contrast\.negatives=cross"
    ):
        pgcl_of(negatives=("all", "cross")[rank])(*views_of(2))
    alone = PrototypeReweightedNCE(temperature=0.1 + rank, weighting="uniform")
    with pytest.raises(ValueError, match=r"rank 0: temperature=0\.1\n  rank 1: temperature=1\.1"):
        alone(*views_of(2), *torch.zeros(2, 6, dtype=torch.long))


def test_ranks_compare_every_option():
    on_ranks(different_strengths, 2)


def trouble_on_one_rank(rank, num_ranks):
    """All raise, at once, whatever it is that one of them cannot do."""
    first = rank == 0
    views, wide = views_of(2), torch.randn(2, 6, DIM + 2, dtype=torch.float64)
    info_nce = PrototypeReweightedNCE(weighting="uniform", exclude_same_cluster=False)
    with pytest.raises(ValueError, match=f"rank 0: dimension={DIM}\n  rank 1: dimension={DIM + 2}"):
        info_nce(*(views if first else wide))
    few, many = (SinkhornPrototypes(DIM, k, gather=False).double()(*views) for k in (3, 4))
    with pytest.raises(ValueError, match="rank 0: dimension=3\n  rank 1: dimension=4"):
        ConsistencyLoss()(*(few if first else many))
    clusters = torch.zeros(2, 6, dtype=torch.long)
    for prototypes in ([[1.0] * DIM], torch.ones(3, DIM, dtype=torch.bool)):
        given = torch.ones(3, DIM, dtype=torch.float64) if first else prototypes
        with pytest.raises(ValueError, match="rank 0: ready\n  rank 1: TypeError: prototypes must"):
            PrototypeReweightedNCE()(*views, *clusters, given)
    foreign = pgcl_of()
    if not first:
        foreign.contrast = Broken()
    with pytest.raises(ValueError, match="rank 0: ready\n  rank 1: OSError"):
        foreign(*views)
    heads = (4, 6) if first else (6, 4)
    assignments = SinkhornPrototypes(DIM, heads, gather=False).double()(*views)
    differ = r"rank 0: heads=\(4, 6\)\n  rank 1: heads=\(6, 4\)"
    with pytest.raises(ValueError, match=differ):
        ConsistencyLoss()(*assignments)
    with pytest.raises(ValueError, match=differ):
        PrototypeReweightedNCE(weighting="uniform")(*views, assignments=assignments)


def test_trouble_on_one_rank_stops_all():
    on_ranks(trouble_on_one_rank, 2)
