"""Weights by prototypes, and the moments of cosines that weights by samples need."""

import numpy as np
import torch
from helpers import oracle
from helpers.cases import cases
from hypothesis import given

from pgcl_losses._normalize import unit_vectors
from pgcl_losses.weights import cluster_counts, cosine_moments, prototype_log_weights


@given(case=cases())
def test_the_table_of_prototypes_has_the_weight_of_every_pair(case):
    prototypes = unit_vectors(torch.tensor(case.prototypes), torch.float64)
    clusters = torch.tensor(case.clusters)
    counts = cluster_counts(clusters, len(prototypes))
    table = prototype_log_weights(prototypes, counts.double() / len(clusters))
    expected = oracle.pair_weights(
        np.concatenate([case.z1, case.z2]), case.clusters, case.prototypes, "prototype"
    )
    np.testing.assert_allclose(table.exp()[clusters][:, clusters], expected, rtol=1e-9)


@given(case=cases())
def test_cosine_moments_are_the_moments_of_the_cosines(case):
    z = oracle.unit(np.concatenate([case.z1, case.z2]))
    cosines = np.array([[oracle.cosine(a, b) for b in z] for a in z])
    mean, variance = cosine_moments(torch.tensor(z))
    np.testing.assert_allclose(mean, cosines.mean(1), atol=1e-12)
    flat = cosines.std(1) < 1e-14
    np.testing.assert_allclose(variance[~flat], cosines.var(1)[~flat], rtol=1e-9)
    assert variance[torch.tensor(flat)].isinf().all()


def test_cluster_counts_include_empty_clusters():
    counts = cluster_counts(torch.tensor([2, 0, 2]), 4)
    assert counts.tolist() == [1, 0, 2, 0]
