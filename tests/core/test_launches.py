"""A small step on a GPU takes as long as its operations take to start: how many there are."""

import copy

import pytest
import torch
from helpers.launches import Launches, elsewhere

from pgcl_losses import PGCLLoss, PrototypeReweightedNCE, SinkhornPrototypes

pytestmark = pytest.mark.slow

# Of a step with the paper's defaults, by part; the last line is what autograd does backward.
MOST = {
    "unit rows": 4,
    "prototypes": 16,
    "contrast": 27,
    "consistency": 4,
    "total": 1,
    "backward": 26,
}


@pytest.fixture
def launches():
    """By part, counted on a CPU that is taken for a GPU."""
    torch.manual_seed(0)
    pgcl = PGCLLoss(dim=96, num_prototypes=10, engine="dense")
    views = [torch.randn(128, 96, requires_grad=True) for _ in range(2)]
    pgcl(*views).backward()  # the first one has warnings to prepare, and gradients to lay out
    views = [view.detach().requires_grad_() for view in views]
    pgcl.zero_grad()
    counted = {}
    with elsewhere(), Launches() as launches:

        def since_the_last(part):
            counted[part] = len(launches.names) - sum(counted.values())

        pgcl.prototypes.register_forward_pre_hook(lambda *_: since_the_last("unit rows"))
        for part in ("prototypes", "contrast", "consistency"):
            module = getattr(pgcl, part)
            module.register_forward_hook(lambda *_, part=part: since_the_last(part))
        loss = pgcl(*views)
        since_the_last("total")
        loss.backward()
        since_the_last("backward")
    return counted


def test_a_step_starts_few_operations(launches):
    more = {part: number for part, number in launches.items() if number > MOST[part]}
    assert not more


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"queue_size": 20},
        {"num_prototypes": (3, 5), "queue_size": 20},
        {"num_prototypes": 4, "iterations": 7, "epsilon": 1e-3},
        {"negatives": "cross"},
        {"soft_clusters": True, "lead_steps": 1},
    ],
)
def test_a_gpu_takes_other_ways_to_the_same_state_and_gradients(options):
    results = []
    for away in (False, True):
        torch.manual_seed(0)
        pgcl = PGCLLoss(8, **{"num_prototypes": 3, "engine": "dense"} | options).double()
        for _ in range(3):
            views = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
            with elsewhere(away):
                pgcl(*views).backward()
        results.append((views.grad, pgcl.prototypes.weight.grad, *pgcl.state_dict().values()))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("checks", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
class TestGradients:
    def test_of_the_prediction(self, checks):
        prototypes = SinkhornPrototypes(3, 4).double()
        z = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        with elsewhere():
            assert checks(lambda z, _: prototypes(z)[0].log_probs, (z, prototypes.weight))

    def test_of_the_prediction_from_frozen_prototypes(self, checks):
        prototypes = SinkhornPrototypes(3, 4).double().requires_grad_(False)
        z = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        with elsewhere():
            assert checks(lambda z: prototypes(z)[0].log_probs, (z,))

    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_of_the_contrast(self, checks, reduction):
        contrast = PrototypeReweightedNCE(engine="dense", reduction=reduction)
        z1, z2 = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True).unbind()
        clusters = torch.tensor([0, 1, 2, 0, 1])
        prototypes = torch.randn(3, 3, dtype=torch.float64)
        with elsewhere():
            assert checks(
                lambda z1, z2: contrast(z1, z2, clusters, clusters.flip(0), prototypes), (z1, z2)
            )


# torch.compile itself uses what is deprecated, and finds Python 3.13.0 slow.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
def test_the_ways_of_a_gpu_compile_as_one_graph():
    torch.compiler.reset()
    eager = PGCLLoss(4, 3, engine="dense", queue_size=20)
    twin = copy.deepcopy(eager)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    results = []
    with elsewhere():
        for loss in (eager, compiled):
            torch.manual_seed(0)
            views = [torch.randn(6, 4, requires_grad=True) for _ in range(2)]
            value = loss(*views)
            value.backward()
            results.append((value, *(view.grad for view in views)))
    torch.compiler.reset()
    torch.testing.assert_close(*results)
    torch.testing.assert_close(eager.prototypes.weight.grad, twin.prototypes.weight.grad)
