"""A linear probe of nodes, on random parts of the graph."""

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import normalize

STRENGTHS = 4.0 ** np.arange(7)  # C of the linear probe


def linear(
    rows: np.ndarray,
    labels: np.ndarray,
    seed: int,
    splits: int = 10,
    strengths: np.ndarray = STRENGTHS,
    rounds: int = 500,
) -> float:
    """Accuracy in per cent of a logistic regression on unit rows, mean over random splits.

    Of each class 10 per cent are to learn from, 10 to choose C, and 80 to test.
    """
    rows, accuracies = normalize(rows), []
    for split in range(splits):
        state = 1000 * seed + split
        known, test = train_test_split(
            np.arange(len(rows)), train_size=0.2, stratify=labels, random_state=state
        )
        train, valid = train_test_split(
            known, train_size=0.5, stratify=labels[known], random_state=state
        )
        fitted = [
            LogisticRegression(C=strength, max_iter=rounds).fit(rows[train], labels[train])
            for strength in strengths
        ]
        best = max(fitted, key=lambda probe: probe.score(rows[valid], labels[valid]))
        accuracies.append(best.score(rows[test], labels[test]))
    return 100 * float(np.mean(accuracies))
