"""Modules of PGCLLoss: hooks, subclasses, options that change, and errors on all ranks."""

import copy
import pickle
from functools import partial

import pytest
import torch
from helpers.losses import of_seed
from helpers.ranks import on_ranks

from pgcl_losses import (
    ConsistencyLoss,
    InfoNCE,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
)
from pgcl_losses.base.options import Group, checked
from pgcl_losses.pairs.batch import Reduction

MODULES = ("prototypes", "contrast", "consistency")
DIM = 4
LEARNED = torch.nn.Parameter(torch.tensor(0.3))


class HalfConsistency(ConsistencyLoss):
    def forward(self, *assignments):
        return 0.5 * super().forward(*assignments)


class NextCluster(SinkhornPrototypes):
    """Each embedding is in the cluster after its own."""

    def forward(self, *views):
        batch = super().forward(*views)
        return batch._replace(clusters=(batch.clusters + 1) % self.num_prototypes)


class Mine(PGCLLoss):
    def __init__(self, tau):
        super().__init__(DIM, temperature=tau)
        self.note = "mine"


def views_of(num_views, num_graphs=6, seed=1):
    random = of_seed(seed)
    return torch.randn(num_views, num_graphs, DIM, dtype=torch.float64, generator=random)


def pgcl_of(**options):
    torch.manual_seed(0)
    return PGCLLoss(DIM, **{"num_prototypes": 3, **options}).double()


def hooks_and_subclasses(rank, num_ranks):
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
    torch.testing.assert_close(terms.loss, plain.contrast + 0.3 * plain.consistency / 2)

    replaced = NextCluster(DIM, 3).double()
    replaced.load_state_dict(pgcl.prototypes.state_dict())
    pgcl.prototypes = replaced
    for ours, before in zip(pgcl.terms(*views).assignments, plain.assignments, strict=True):
        assert torch.equal(ours.clusters, (before.clusters + 1) % 3)

    pgcl.consistency = torch.nn.Identity()  # it returns the batch that it is called with
    with pytest.raises(TypeError, match="Batch"):
        pgcl(*views)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_hooks_fire_and_subclasses_replace_modules(num_ranks):
    on_ranks(hooks_and_subclasses, num_ranks)


ASSIGNED = {
    "temperature": (0.5, ""),
    "epsilon": (0.1, "prototypes"),
    "iterations": (5, "prototypes"),
    "weighting": ("sample", "contrast"),
    "exclude_same_cluster": (False, "contrast"),
    "negatives": ("cross", "contrast"),
    "reduction": ("sum", "contrast consistency"),
    "engine": ("dense", "contrast"),
    "consistency_weight": (2.0, ""),
    "contrast_weight": (3.0, ""),
    "gather": (False, ""),
}


def test_what_a_module_of_ones_own_may_replace_in_a_batch():
    """The assignment. Views, labels and memory are what the loss was called with."""
    views = [z.detach() for z in views_of(2)]
    batch = PGCLLoss(DIM, 3).batch_of(tuple(views), labels=torch.arange(len(views[0])))
    for name in ("prototypes", "log_probs", "targets", "clusters", "heads"):
        new = getattr(batch, name)
        assert getattr(batch._replace(**{name: new}), name) is new
    assert batch.labels.tolist() == [*range(len(views[0]))] * 2
    assert batch.metadata is batch.memory is None
    for name in ("labels", "metadata", "memory"):
        with pytest.raises((ValueError, TypeError), match="unexpected field name"):
            batch._replace(**{name: None})


class TestOptions:
    def test_an_assigned_option_is_as_one_of_the_constructor(self):
        pgcl, views, given = pgcl_of(), views_of(2), {}
        for name, (value, modules) in ASSIGNED.items():
            for module in [getattr(pgcl, module) for module in modules.split()] or [pgcl]:
                setattr(module, name, value)
                assert getattr(module, name) == value
            given[name] = value
            assert f"{name}={value!r}" in repr(pgcl)
            torch.testing.assert_close(pgcl(*views), pgcl_of(**given)(*views))
        assert (pgcl.prototypes.temperature, pgcl.contrast.temperature) == (0.5, 0.5)
        with pytest.raises(ValueError, match="temperature must be"):
            pgcl.temperature = -1
        assert pgcl.temperature == 0.5

    def test_what_is_shown_differs_from_the_defaults(self):
        assert repr(InfoNCE()) == "InfoNCE(temperature=1.0)"
        learned = torch.nn.Parameter(torch.tensor(0.3))
        shown = "InfoNCE(temperature=Parameter, negatives='cross', gather=False)"
        assert repr(InfoNCE(temperature=learned, negatives="cross", gather=False)) == shown
        assert "SinkhornPrototypes(dim=4, num_prototypes=(2, 3), " in repr(PGCLLoss(4, (2, 3)))

    def test_a_module_may_have_a_temperature_of_its_own(self):
        pgcl = pgcl_of()
        pgcl.contrast.temperature = 0.5
        assert hasattr(pgcl, "temperature")
        pgcl.temperature = 0.3
        assert pgcl.temperature == pgcl.contrast.temperature == pgcl.prototypes.temperature == 0.3
        pgcl.contrast = torch.nn.Identity()
        assert not hasattr(pgcl, "temperature")

    def test_a_subclass_has_arguments_and_attributes_of_its_own(self):
        mine = copy.deepcopy(Mine(tau=0.3))
        mine.steps, mine._x, mine.head = 7, 3, torch.nn.Linear(2, 2)
        restored = pickle.loads(pickle.dumps(mine))
        assert (restored.temperature, restored.note, restored.steps) == (0.3, "mine", 7)
        loss = InfoNCE()
        loss._x, loss.z = 3, torch.zeros(2)
        assert (loss._x, loss.z.shape) == (3, (2,))

    def test_what_may_be_assigned_before_our_constructor_is_as_in_torch(self):
        class Early(InfoNCE):
            def __init__(self, value):
                self.early = value
                super().__init__(temperature=0.5)

        assert (Early("a number").early, Early(3).temperature) == ("a number", 0.5)
        for value, kind in ((torch.nn.Linear(2, 2), "module"), (LEARNED, "parameters")):
            with pytest.raises(
                AttributeError, match=f"cannot assign {kind} before Module.__init__"
            ):
                Early(value)


class WithStrength(ConsistencyLoss):
    """Has an option that its repr does not show."""

    @checked
    def __init__(
        self,
        *,
        strength: int = 0,
        reduction: Reduction = "mean",
        gather: bool = True,
        process_group: Group = None,
    ) -> None:
        super().__init__()
        self.set_options(locals())

    def extra_repr(self):
        return ""


class Broken(SinkhornPrototypes):
    def check(self, views):
        raise OSError("no check today")


def of_modules(**modules):
    pgcl = pgcl_of()
    for name, module in modules.items():
        setattr(pgcl, name, module)
    return pgcl


def calls_that_differ():
    """The function and arguments of rank 0 and of rank 1, and how the error tells them apart."""
    views, clusters = views_of(2), torch.zeros(2, 6, dtype=torch.long)
    pgcl, info_nce, consistency = pgcl_of(memory_size=3), InfoNCE(), ConsistencyLoss()
    forward, call = (pgcl, views), "call=PGCLLoss.forward$"
    no_tensor = "TypeError: prototypes must be a Tensor"
    by_strength = [of_modules(consistency=WithStrength(strength=i)) for i in (0, 1)]
    few, many, heads, other_heads = (
        SinkhornPrototypes(DIM, sizes, gather=False).double()(*views)
        for sizes in (3, 4, (4, 6), (6, 4))
    )
    broken = of_modules(prototypes=Broken(DIM, 3).double())

    def contrast_with(prototypes):
        loss = PrototypeReweightedNCE(weighting="uniform")
        return loss(*views, clusters=clusters, prototypes=prototypes)

    return [
        ((pgcl.remember, views[:1]), forward, "call=PGCLLoss.remember", call),
        ((info_nce, views), forward, "call=InfoNCE.forward", call),
        ((partial(pgcl, itms=1), views), forward, "TypeError: a call of PGCLLoss has.*", "ready"),
        (*((pgcl, views) for pgcl in by_strength), *(f"consistency.strength={i}" for i in (0, 1))),
        ((consistency, few), (consistency, many), "dimension=3", "dimension=4"),
        ((consistency, heads), (consistency, other_heads), r"heads=\(4, 6\)", r"heads=\(6, 4\)"),
        ((contrast_with, views[:1]), (contrast_with, ([[1.0]],)), "ready", no_tensor),
        (forward, (broken, views), "ready", "OSError: no check today"),
        ((pgcl.remember, views[:1]), (partial(pgcl.remember, z=1), ()), "ready", "TypeError: .*"),
    ]


def errors_on_all_ranks(rank, num_ranks):
    """Without waiting for a timeout."""
    for *calls, first, second in calls_that_differ():
        function, given = calls[rank]
        with pytest.raises(ValueError, match=rf"rank 0: {first}\n  rank 1: {second}"):
            function(*given)
    pgcl, views = pgcl_of(), views_of(2)
    assert (pgcl.terms(*views).loss if rank else pgcl(*views)).isfinite()  # one call


def test_calls_that_differ_are_an_error_on_all_ranks():
    on_ranks(errors_on_all_ranks, 2)
