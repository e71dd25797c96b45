"""The reweighted contrast of given views, clusters and prototypes."""

import functools

import pytest
import torch
from helpers import oracle
from helpers.losses import of_seed
from helpers.marks import NEGATIVES, examples, few_graphs, negatives_of
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import PGCLLoss, PrototypeReweightedNCE
from pgcl_losses.contrast import WEIGHTINGS


@few_graphs
@examples(150)
@given(
    length=st.integers(1, 5),
    dim=st.integers(1, 4),
    num=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    views=st.sampled_from(["unrelated", "similar", "identical", "opposed"]),
    with_zero=st.booleans(),
    pattern=st.sampled_from(["random", "one", "spread"]),
    mode=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.05, 0.2, 1.0]),
            "weighting": st.sampled_from(WEIGHTINGS),
            "exclude_same_cluster": st.booleans(),
            "negatives": st.sampled_from(NEGATIVES),
        }
    ),
)
def test_values_agree_with_the_oracle(length, dim, num, seed, views, with_zero, pattern, mode):
    """In float32 as well, and for embeddings of any length. Prototypes are constants."""
    random = functools.partial(torch.randn, generator=of_seed(seed), dtype=torch.float64)
    z1, other, noise = (random(length, dim) * 10 ** random(length, 1) for _ in range(3))
    z2 = {"unrelated": other, "similar": z1 + 0.1 * noise, "identical": z1, "opposed": -z1}[views]
    if with_zero:
        z1[-1] = 0.0
    clusters = {
        "random": torch.randint(num, (2 * length,), generator=of_seed(seed)),
        "one": torch.full((2 * length,), num // 2),
        "spread": torch.arange(2 * length) % num,
    }[pattern]
    prototypes = random(num, dim).requires_grad_()
    weights = oracle.pair_weights(torch.cat([z1, z2]), clusters, prototypes, mode["weighting"])
    if mode["exclude_same_cluster"]:
        weights = weights * (clusters[:, None] != clusters)
    options = {name: mode[name] for name in ("temperature", "negatives")}
    expected, _ = oracle.info_nce([z1, z2], weights=weights, **options)
    reduced = {"none": expected, "sum": expected.sum(), "mean": expected.mean()}
    loss = PrototypeReweightedNCE(**mode)
    for dtype, close in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        given = {"clusters": clusters.chunk(2), "prototypes": prototypes.to(dtype)}
        at = [z.to(dtype).requires_grad_() for z in (z1, z2)]
        for loss.reduction, value in reduced.items():
            # No case has a spread of distances that float32 takes for rounding and float64 does not
            ours = loss(*at, **given)
            torch.testing.assert_close(ours, value.to(dtype), rtol=close, atol=close)
        ours.backward()
    assert prototypes.grad is None


@pytest.mark.parametrize("num_graphs", [1, 6])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@negatives_of
def test_one_graph_or_one_cluster_has_no_negatives(engine, num_graphs, weighting, negatives):
    """The loss is exactly 0, with a gradient of 0."""
    options = {"weighting": weighting, "negatives": negatives, "engine": engine}
    views = torch.randn(2, num_graphs, 4, requires_grad=True)
    given = {"clusters": torch.ones(2, num_graphs).long(), "prototypes": torch.randn(3, 4)}
    loss = PrototypeReweightedNCE(**options)(*views, **given)
    assert loss == 0
    assert not torch.autograd.grad(loss, views)[0].any()


def test_a_spread_at_rounding_level_gives_equal_weights():
    z1, z2 = torch.randn(2, 8, 5)
    clusters = (torch.arange(8) % 3,) * 2
    prototypes = torch.randn(1, 5) * torch.tensor([[0.3], [1.0], [7.0]])  # one direction
    plain = PrototypeReweightedNCE(weighting="uniform")(z1, z2, clusters=clusters)
    ours = PrototypeReweightedNCE()(z1, z2, clusters=clusters, prototypes=prototypes)
    torch.testing.assert_close(ours, plain)

    same = torch.randn(1, 5) * torch.rand(8, 1)  # embeddings of one direction
    plain = PrototypeReweightedNCE(weighting="uniform")(same, same, clusters=clusters)
    ours = PrototypeReweightedNCE(weighting="sample")(same, same, clusters=clusters)
    torch.testing.assert_close(ours, plain)


@pytest.mark.parametrize("weighting", ["uniform", "sample"])
def test_inputs_that_the_weighting_does_not_need_are_optional(weighting):
    """The loss without them equals the loss with them, which the oracle checks above."""
    views, clusters = torch.randn(2, 4, 3), torch.tensor([[0, 1, 2, 0]] * 2)
    given = {"clusters": clusters, "prototypes": torch.randn(3, 3)}
    loss = PrototypeReweightedNCE(weighting=weighting)
    assert loss(*views, clusters=clusters) == loss(*views, **given) > 0
    loss.exclude_same_cluster = False
    assert loss(*views) == loss(*views, **given) > 0


def test_weights_below_the_numbers_of_float32_count_in_a_decoupled_loss(engine):
    """The only negative of each graph is far from the mean distance."""
    z = 0.01 * torch.randn(2, 200, 4) + torch.eye(4)[0]
    z[:, 7] *= -1
    alone, options = (torch.arange(200) == 7).long(), {"decoupled": True, "engine": engine}
    by_cluster = {"clusters": (alone, alone), "prototypes": torch.eye(2, 4)}
    losses = [(PrototypeReweightedNCE(**options), by_cluster)]
    options |= {"weighting": "sample", "exclude_same_cluster": False, "consistency_weight": 0.0}
    losses += [(PGCLLoss(4, 3, **options), {"labels": alone})]
    for loss_of, inputs in losses:
        loss, exact = loss_of(*z, **inputs), loss_of.double()(*z.double(), **inputs)
        assert exact < -80
        torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=0)
