"""A linear probe of node embeddings, over random splits."""

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import normalize

STRENGTHS = 4.0 ** np.arange(7)  # C of the linear probe


def linear(
    embeddings: np.ndarray,
    labels: np.ndarray,
    seed: int,
    splits: int = 10,
    strengths: np.ndarray = STRENGTHS,
    rounds: int = 500,
) -> float:
    """Accuracy in per cent of a logistic regression on unit embeddings, mean over splits.

    Of each class 10 per cent are to train, 10 to choose C, and 80 to test.
    """
    z, accuracies = normalize(embeddings), []
    for split in range(splits):
        state = 1000 * seed + split
        labelled, test = train_test_split(
            np.arange(len(z)), train_size=0.2, stratify=labels, random_state=state
        )
        train, valid = train_test_split(
            labelled, train_size=0.5, stratify=labels[labelled], random_state=state
        )
        fitted = [
            LogisticRegression(C=strength, max_iter=rounds).fit(z[train], labels[train])
            for strength in strengths
        ]
        best = max(fitted, key=lambda probe: probe.score(z[valid], labels[valid]))
        accuracies.append(best.score(z[test], labels[test]))
    return 100 * float(np.mean(accuracies))
