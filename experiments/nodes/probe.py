"""Measures of node embeddings: few labels, k-means against the classes, a linear probe."""

import warnings

import numpy as np
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import normalize

from experiments.common.probes import measured

SPLITS = 5
STRENGTHS = 4.0 ** np.arange(1, 6)  # C of the linear probe


def measured_nodes(embeddings: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """All measures in per cent, on embeddings of unit length."""
    z, labels = normalize(embeddings), np.unique(labels, return_inverse=True)[1]
    values = measured(z, labels, seed, "labels_1", "labels_5", "nmi")
    return {**values, "probe": round(linear(z, labels, seed), 3)}


def linear(z: np.ndarray, labels: np.ndarray, seed: int) -> float:
    """Accuracy in per cent of a logistic regression, mean over random splits.

    Of each class 10 per cent are to train, 10 to choose C, and 80 to test.
    """
    accuracies = []
    for split in range(SPLITS):
        state, nodes = 1000 * seed + split, np.arange(len(z))
        labelled, test = train_test_split(
            nodes, train_size=0.2, stratify=labels, random_state=state
        )
        train, valid = train_test_split(
            labelled, train_size=0.5, stratify=labels[labelled], random_state=state
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)  # the largest C may need longer
            fitted = [
                LogisticRegression(C=strength, max_iter=300).fit(z[train], labels[train])
                for strength in STRENGTHS
            ]
        best = max(fitted, key=lambda probe: probe.score(z[valid], labels[valid]))
        accuracies.append(best.score(z[test], labels[test]))
    return 100 * float(np.mean(accuracies))
