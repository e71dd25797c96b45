"""Numbers to log."""

import math

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.cases import Case, cases
from hypothesis import given

from pgcl_losses import Assignment, PGCLLoss, diagnostics


def assignments_of(case: Case) -> list[Assignment]:
    k = len(case.prototypes)
    return [
        Assignment(torch.zeros(len(view), k), torch.eye(k)[view], view)
        for view in torch.tensor(case.clusters).chunk(2)
    ]


@given(case=cases())
def test_agrees_with_counting(case):
    n, k, clusters = len(case.z1), len(case.prototypes), case.clusters
    weights = oracle.pair_weights(
        np.concatenate([case.z1, case.z2]), clusters, case.prototypes, "prototype"
    )
    negatives = [(i, j) for i in range(2 * n) for j in range(2 * n) if i % n != j % n]
    remaining = [pair for pair in negatives if clusters[pair[0]] != clusters[pair[1]]]
    fractions = [float(np.mean(clusters == c)) for c in range(k)]

    numbers = diagnostics(assignments_of(case), torch.tensor(case.prototypes))
    assert numbers["largest_cluster"] == pytest.approx(max(fractions))
    assert numbers["dead_prototypes"] == fractions.count(0)
    assert numbers["entropy"] == pytest.approx(-sum(p * math.log(p) for p in fractions if p))
    agreement = np.mean([clusters[i] == clusters[i + n] for i in range(n)])
    assert numbers["agreement"] == pytest.approx(agreement)
    if negatives:
        masked = 1 - len(remaining) / len(negatives)
        assert numbers["masked_negatives"] == pytest.approx(masked, abs=1e-12)
    else:
        assert math.isnan(numbers["masked_negatives"])
    if remaining:
        mean_weight = np.mean([weights[pair] for pair in remaining])
        assert numbers["mean_weight"] == pytest.approx(mean_weight)
    else:
        assert math.isnan(numbers["mean_weight"])


def test_diagnostics_of_terms_include_the_losses():
    pgcl = PGCLLoss(4, 3)
    terms = pgcl.terms(*torch.randn(2, 6, 4))
    numbers = diagnostics(terms, pgcl.prototypes.weight)
    assert numbers["loss"] == pytest.approx(numbers["contrast"] + 6 * numbers["consistency"])
    assert set(numbers) == {
        "loss",
        "contrast",
        "consistency",
        "consistency_ratio",
        "mean_cosine",
        "largest_cluster",
        "entropy",
        "dead_prototypes",
        "agreement",
        "masked_negatives",
        "mean_weight",
    }
    for name, value in numbers.items():
        assert type(value) is (int if name == "dead_prototypes" else float)


def assignment_of(clusters):
    return Assignment(torch.zeros(len(clusters), 3), torch.eye(3)[clusters], torch.tensor(clusters))


def test_agreement_is_the_mean_over_pairs_of_views():
    views = [assignment_of(clusters) for clusters in ([0, 1, 2, 2], [0, 1, 2, 1], [0, 2, 2, 0])]
    # First and second agree on three of four graphs, first and third on two, the others on two.
    assert diagnostics(views)["agreement"] == pytest.approx(7 / 12)
    assert math.isnan(diagnostics(views[:1])["agreement"])


@pytest.mark.parametrize(
    ("source", "prototypes", "error", "message"),
    [
        ([], None, TypeError, "source must be PGCLTerms or a sequence of Assignments"),
        (torch.randn(3), None, TypeError, "source must be PGCLTerms or a sequence of Assignments"),
        (3, None, TypeError, "source must be PGCLTerms or a sequence of Assignments, but got int"),
        (
            [assignment_of([0, 1, 2]), assignment_of([0, 1])],
            None,
            ValueError,
            r"assignments\[1\].targets has shape \(2, 3\) but assignments\[0\]",
        ),
        (
            [assignment_of([0, 1, 2])._replace(clusters=torch.tensor([0, 1, 3]))],
            None,
            ValueError,
            r"assignments\[0\].clusters must lie in 0..2",
        ),
        ("views", torch.randn(5, 4), ValueError, "prototypes are 5 but .* 3"),
        ("views", torch.randn(3), ValueError, r"prototypes must have shape \[K, D\]"),
    ],
)
def test_wrong_inputs_are_errors(source, prototypes, error, message):
    if source == "views":
        source = PGCLLoss(4, 3).terms(*torch.randn(2, 6, 4)).assignments
    with pytest.raises(error, match=message):
        diagnostics(source, prototypes)
