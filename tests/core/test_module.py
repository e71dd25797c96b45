"""Modules of PGCLLoss: hooks, subclasses, options that change, and one result of many ranks."""

import copy
import pickle
import warnings
from typing import ClassVar

import pytest
import torch
from helpers.rank_models import mean_over_ranks, of_seed
from helpers.ranks import on_ranks

from pgcl_losses import (
    Batch,
    ConsistencyLoss,
    InfoNCE,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
)
from pgcl_losses.distributed import Processes

MODULES = ("prototypes", "contrast", "consistency")
DIM = 4


class HalfConsistency(ConsistencyLoss):
    def forward(self, *assignments):
        return 0.5 * super().forward(*assignments)


class HalfContrast(PrototypeReweightedNCE):
    def forward(self, *given):
        return 0.5 * super().forward(*given)


class NextCluster(SinkhornPrototypes):
    """Each embedding is in the cluster after its own."""

    def forward(self, *views):
        batch = super().forward(*views)
        return batch._replace(clusters=(batch.clusters + 1) % self.num_prototypes)


def views_of(num_views, num_graphs=6, seed=1):
    random = of_seed(seed)
    return torch.randn(num_views, num_graphs, DIM, dtype=torch.float64, generator=random)


def batch_of_views():
    units = torch.nn.functional.normalize(views_of(2), dim=-1)
    return Batch(Processes([(6,), (6,)]), units.flatten(0, 1))


def pgcl_of(**options):
    torch.manual_seed(0)
    return PGCLLoss(DIM, **{"num_prototypes": 3, **options}).double()


def hooks_and_subclasses(rank=0, num_ranks=1):
    pgcl, called = pgcl_of(), []
    for name in MODULES:
        module = getattr(pgcl, name)
        module.register_forward_hook(lambda *_, name=name: called.append(name))
    views = views_of(2, seed=rank)
    plain = pgcl.terms(*views)
    assert sorted(called) == sorted(MODULES)

    pgcl.consistency = HalfConsistency()
    terms = pgcl.terms(*views)
    torch.testing.assert_close(terms.consistency, plain.consistency / 2)
    torch.testing.assert_close(terms.loss, plain.contrast + 6 * plain.consistency / 2)

    pgcl.contrast = HalfContrast()
    torch.testing.assert_close(pgcl.terms(*views).contrast, plain.contrast / 2)

    replaced = NextCluster(DIM, 3).double()
    replaced.load_state_dict(pgcl.prototypes.state_dict())
    pgcl.prototypes = replaced
    for ours, before in zip(pgcl.terms(*views).assignments, plain.assignments, strict=True):
        assert torch.equal(ours.clusters, (before.clusters + 1) % 3)

    pgcl.consistency = torch.nn.Identity()  # it returns the batch that it is called with
    with pytest.raises(TypeError, match="Batch"):
        pgcl(*views)
    return True


def test_hooks_fire_and_subclasses_replace_modules():
    hooks_and_subclasses()


def test_hooks_fire_and_subclasses_replace_modules_on_two_ranks():
    assert on_ranks(hooks_and_subclasses, 2) == [True, True]


def test_a_batch_without_assignments_is_an_error():
    batch = batch_of_views()
    for module in (ConsistencyLoss(), PrototypeReweightedNCE(weighting="uniform")):
        with pytest.raises(ValueError, match=r"has no prototypes and targets: call Sinkh"):
            module(batch)
    plain = PrototypeReweightedNCE(weighting="sample", exclude_same_cluster=False)
    torch.testing.assert_close(plain(batch), plain(*views_of(2)))


def test_a_batch_is_the_only_argument():
    pgcl = pgcl_of()
    batch = pgcl.prototypes(batch_of_views())
    for name in MODULES:
        with pytest.raises(TypeError, match="a batch has all views and items in it: give it alone"):
            getattr(pgcl, name)(batch, views_of(2)[0])


def test_the_queue_has_as_many_views_as_its_option_says():
    pgcl = pgcl_of(queue_size=8, queue_views=3)
    assert pgcl(*views_of(3)).isfinite()
    assert pgcl.prototypes.queue.shape == (3, 8, DIM)
    with pytest.raises(ValueError, match="views must be 3 when queue_size > 0, but got 2"):
        pgcl(*views_of(2))


ASSIGNED = {
    "temperature": 0.5,
    "epsilon": 0.1,
    "iterations": 5,
    "weighting": "sample",
    "exclude_same_cluster": False,
    "negatives": "cross",
    "reduction": "sum",
    "engine": "dense",
    "consistency_weight": 2.0,
    "contrast_weight": 3.0,
    "gather": False,
}


class TestOptions:
    def test_an_assigned_option_reaches_every_module_that_has_it(self):
        pgcl, views = pgcl_of(), views_of(2)
        for name, value in ASSIGNED.items():
            setattr(pgcl, name, value)
            assert getattr(pgcl, name) == value
            expected = pgcl_of(**{other: getattr(pgcl, other) for other in ASSIGNED})
            assert repr(pgcl) == repr(expected)
            torch.testing.assert_close(pgcl(*views), expected(*views))
        assert (pgcl.prototypes.temperature, pgcl.contrast.temperature) == (0.5, 0.5)
        assert (pgcl.consistency.reduction, pgcl.contrast.reduction) == ("sum", "sum")

    def test_a_module_may_have_a_temperature_of_its_own(self):
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
            ("consistency_weight", "6", TypeError, "consistency_weight must be a finite number"),
            ("dim", 5, AttributeError, "dim is 4 and cannot change in this Sinkh"),
            ("num_prototypes", 4, AttributeError, "num_prototypes is 3 and cannot change"),
            ("queue_size", 4, AttributeError, "queue_size is 0 and cannot change"),
        ],
    )
    def test_assigning_an_invalid_value_is_an_error(self, name, value, error, message):
        pgcl = pgcl_of()
        before = repr(pgcl)
        with pytest.raises(error, match=message):
            setattr(pgcl, name, value)
        assert repr(pgcl) == before

    @pytest.mark.parametrize(
        ("make", "name", "message"),
        [
            (pgcl_of, "tau", "^PGCLLoss has no option tau: did you mean temperature"),
            (pgcl_of, "temprature", "no option temprature: did you mean temperature"),
            (lambda: pgcl_of().prototypes, "K", "K: did you mean num_prototypes"),
            (InfoNCE, "foo", "^InfoNCE has no option foo: it has temperature, negatives, "),
        ],
    )
    def test_assigning_an_unknown_option_is_an_error(self, make, name, message):
        with pytest.raises(AttributeError, match=message):
            setattr(make(), name, 3)

    def test_attributes_that_are_no_options(self):
        class Mine(PGCLLoss):
            def __init__(self):
                super().__init__(DIM)
                self.note = "mine"

        for loss in (PGCLLoss(DIM), InfoNCE(), Mine()):
            loss._x, loss.z, loss.head = 3, torch.zeros(2), torch.nn.Linear(2, 2)
            assert (loss._x, loss.z.shape, loss.head.in_features) == (3, (2,), 2)
        loss.steps = 7
        assert (loss.note, loss.steps) == ("mine", 7)
        with pytest.raises(AttributeError, match="Mine has no option tau: did you mean temp"):
            loss.tau = 0.1


def test_a_subclass_may_have_an_argument_tau():
    class Mine(PGCLLoss):
        def __init__(self, tau, **options):
            super().__init__(DIM, temperature=tau, **options)

    assert pickle.loads(pickle.dumps(InfoNCE(temperature=0.3))).temperature == 0.3
    assert copy.deepcopy(Mine(tau=0.3)).temperature == 0.3


COUNTS = {1: [5], 2: [2, 4], 3: [3, 0, 4]}


def modules_over_ranks(rank, num_ranks):
    """Value and gradient of each module, against one process with the whole batch."""
    counts = COUNTS[num_ranks]
    whole_views = views_of(3, sum(counts)).requires_grad_()
    views = views_of(3, sum(counts)).requires_grad_()
    mine = [view.split(counts)[rank] for view in views]
    family = {"num_prototypes": (3, 4), "negative_ranks": (0, 2), "soft_clusters": True}
    cross = {"reduction": "sum", "negatives": "cross", "weighting": "sample"}
    for options in ({"reduction": "mean"}, cross, family):
        pgcl, whole = pgcl_of(**options), pgcl_of(**options, gather=False)
        assignments, expected = pgcl.prototypes(*mine), whole.prototypes(*whole_views)
        for ours, theirs in zip(assignments, expected, strict=True):
            for one, other in zip(ours[:3], theirs[:3], strict=True):
                torch.testing.assert_close(one, other.split(counts)[rank])
        clusters, of_all = ([a.clusters for a in some] for some in (assignments, expected))
        weight, whole_weight = pgcl.prototypes.weight, whole.prototypes.weight
        pairs = [
            (pgcl(*mine), whole(*whole_views)),
            (pgcl.consistency(*assignments), whole.consistency(*expected)),
            (
                pgcl.contrast(*mine, assignments=assignments, prototypes=weight),
                whole.contrast(*whole_views, assignments=expected, prototypes=whole_weight),
            ),
        ]
        if options is not family:
            by_numbers = pgcl.contrast(*mine, clusters=clusters, prototypes=weight)
            numbers_of_all = {"clusters": of_all, "prototypes": whole_weight}
            pairs.append((by_numbers, whole.contrast(*whole_views, **numbers_of_all)))
        for loss, other in pairs:
            torch.testing.assert_close(mean_over_ranks(loss), other.detach())
            options = {"retain_graph": True, "materialize_grads": True}
            ours = torch.autograd.grad(loss, [views, weight], **options)
            theirs = torch.autograd.grad(other, [whole_views, whole_weight], **options)
            torch.testing.assert_close([mean_over_ranks(one) for one in ours], list(theirs))


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_modules_over_ranks_are_those_of_one_process(num_ranks):
    on_ranks(modules_over_ranks, num_ranks)


class WithStrength(ConsistencyLoss):
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
    pgcl.consistency = WithStrength(rank)
    with pytest.raises(ValueError, match=r"consistency\.strength=0\n.*consistency\.strength=1"):
        pgcl(*views_of(2))
    with pytest.raises(
        ValueError, match=r"rank 0: contrast\.negatives=all\n.*1: contrast\.negatives=cross"
    ):
        pgcl_of(negatives=("all", "cross")[rank])(*views_of(2))
    alone = PrototypeReweightedNCE(temperature=0.1 + rank, weighting="uniform")
    with pytest.raises(ValueError, match=r"rank 0: temperature=0\.1\n  rank 1: temperature=1\.1"):
        alone(*views_of(2), clusters=torch.zeros(2, 6, dtype=torch.long))


def test_ranks_compare_every_option():
    on_ranks(different_strengths, 2)


def errors_on_one_rank(rank, num_ranks):
    """All ranks raise the error of one, without waiting for a timeout."""
    first = rank == 0
    pgcl = pgcl_of(memory_size=3)
    calls = {
        "SinkhornPrototypes.start_from_": lambda z: pgcl.prototypes.start_from_(z),
        "PGCLLoss.remember": lambda z: pgcl.remember(z),
        "InfoNCE.forward": lambda z: InfoNCE()(z, z),
    }
    for name, call in calls.items():
        text = rf"differ:\n  rank 0: call={name}\n  rank 1: call=PGCLLoss.forward$"
        with pytest.raises(ValueError, match=text):
            call(views_of(1)[0]) if first else pgcl(*views_of(2))
    assert (pgcl.terms(*views_of(2)).loss if first else pgcl(*views_of(2))).isfinite()  # one call
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
            PrototypeReweightedNCE()(*views, clusters=clusters, prototypes=given)
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


def test_an_error_on_one_rank_is_raised_on_all():
    on_ranks(errors_on_one_rank, 2)


def test_what_a_batch_lacks_is_an_error():
    units = torch.nn.functional.normalize(torch.randn(8, 3), dim=1)
    batch = Batch(Processes([(4,), (4,)]), units)
    clusters = torch.zeros(8, 1, dtype=torch.long)
    with pytest.raises(ValueError, match="the batch has no prototypes"):
        PrototypeReweightedNCE()(batch._replace(clusters=clusters, heads=(1,)))
    with pytest.raises(ValueError, match="the batch has no prototypes"):
        PrototypeReweightedNCE(weighting="uniform", soft_clusters=True)(
            batch._replace(clusters=clusters, heads=(1,))
        )
    with pytest.raises(TypeError, match="a batch has a memory of its own"):
        InfoNCE(memory_size=8, dim=3)(batch)
    one_view = SinkhornPrototypes(3, 2)(Batch(Processes([(8,)]), units))
    with pytest.raises(ValueError, match="the batch has 1 view"):
        ConsistencyLoss()(one_view)


def test_what_is_made_of_options_cannot_be_assigned():
    pgcl = PGCLLoss(3, 4)
    with pytest.raises(AttributeError, match="heads"):
        pgcl.prototypes.heads = (1, 3)
    with pytest.raises(TypeError, match="memory"):
        pgcl.memory = 3


def initialise(rank, num_ranks):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((UserWarning, RuntimeError)) as caught:
            SinkhornPrototypes(3, 6).start_from_(torch.ones(2, 3))
    return str(caught.value)


def test_an_error_of_kmeans_on_one_rank_is_one_on_all():
    first, second = on_ranks(initialise, 2)
    assert "1 different embeddings initialise 6 prototypes" in first
    assert "rank 0 could not compute the initial prototypes" in second
