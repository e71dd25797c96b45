"""Differences between the paper and the code published with it. Ours follows the paper.

That the queue balances no empty slots, also an epoch later, is in test_prototypes.
"""

import math
import re

import pytest
import torch
from helpers import oracle
from helpers.marks import NEGATIVES
from helpers.scripts import ROOT

from pgcl_losses import Assignment, ConsistencyLoss, PrototypeReweightedNCE
from pgcl_losses.base.normalize import unit_vectors
from pgcl_losses.contrast import WEIGHTINGS
from pgcl_losses.pairs.weights import prototype_log_weights

PAGE = ROOT / "docs" / "published_code.md"


def test_the_gaussian_has_a_negative_exponent_and_mu_and_sigma_of_the_query():
    # Published: exp(+(d - mu)^2 / (2 sigma^2)), which favours the nearest and the farthest; mu and
    # sigma are broadcast along the wrong axis, so that they belong to the negative.
    prototypes = unit_vectors(torch.randn(6, 4), torch.float32)
    fractions = torch.tensor([0.3, 0.1, 0.2, 0.05, 0.25, 0.1])
    weights = prototype_log_weights(prototypes, fractions).exp()
    distances = 1 - prototypes @ prototypes.T
    squares = (distances - (distances @ fractions)[:, None]) ** 2
    w = torch.exp(-squares / (2 * squares @ fractions)[:, None])
    torch.testing.assert_close(weights, w / (w @ fractions)[:, None])
    assert not torch.allclose(fractions @ weights, torch.ones(6), atol=1e-2)


def test_each_query_has_a_denominator_of_its_own():
    # Published: the masked similarities are flattened, so that all queries share one sum over the
    # batch. A rotation of the other graphs about query 0 changes the loss of these graphs alone.
    loss = PrototypeReweightedNCE(reduction="none")
    z1, z2 = torch.randn(2, 5, 3, dtype=torch.float64)
    z1[0] = z2[0] = torch.tensor([1.0, 0.0, 0.0])
    angle = torch.rand(2, 5, dtype=torch.float64) * 2 * math.pi
    rotated = torch.stack([z1, z2])
    y, z = rotated[..., 1].clone(), rotated[..., 2].clone()
    rotated[..., 1] = angle.cos() * y - angle.sin() * z
    rotated[..., 2] = angle.sin() * y + angle.cos() * z
    given = {"clusters": (torch.tensor([0, 1, 1, 2, 2]),) * 2, "prototypes": torch.randn(3, 3)}
    before, after = loss(z1, z2, **given), loss(*rotated, **given)
    torch.testing.assert_close(before[[0, 5]], after[[0, 5]])
    assert not torch.isclose(before[1:5], after[1:5]).any()


def test_both_directions_of_the_swapped_prediction_count():
    # Published: a loop overwrites the first direction by the second.
    log_p = torch.randn(2, 4, 3, dtype=torch.float64).log_softmax(-1)
    q = torch.randn(2, 4, 3, dtype=torch.float64).softmax(-1)
    views = [Assignment(*of_view, of_view[1].argmax(1)) for of_view in zip(log_p, q, strict=True)]
    one_way = -(q.flip(0) * log_p).sum(2).mean(1)
    torch.testing.assert_close(ConsistencyLoss()(*views), one_way.mean())


@pytest.mark.parametrize("negatives", NEGATIVES)
@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_negatives_from_some_clusters_only(weighting, negatives):
    """The lines of the page, against the published window as a loop over queries and negatives."""
    (code,), names = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL), {}
    exec(code, names)
    pgcl, views = names["pgcl"].double(), [names["z1"].double(), names["z2"].double()]
    pgcl.contrast.weighting, pgcl.contrast.negatives = weighting, negatives
    z, prototypes = torch.cat(views), pgcl.prototypes.weight
    q = torch.cat([oracle.targets(view, prototypes) for view in views])
    clusters = oracle.ranking(q, z, prototypes).argmax(1)
    weights = oracle.pair_weights(z, clusters, prototypes, weighting)
    for i, best_first in enumerate(q.argsort(descending=True, stable=True)[:, 2:8].tolist()):
        for j, cluster in enumerate(clusters.tolist()):
            weights[i, j] *= cluster in best_first and cluster != clusters[i]
    losses, _ = oracle.info_nce(views, weights=weights, negatives=negatives, temperature=0.5)
    ours = pgcl.terms(*views, metadata=names["metadata"]).contrast
    torch.testing.assert_close(ours, losses.mean(), rtol=1e-12, atol=1e-12)
