"""What rows are good for: telling classes apart by a linear probe, by k-means, by few labels."""

import numpy as np
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import normalize

STRENGTHS = 4.0 ** np.arange(7)  # C of the linear probe
FEW = (1, 5)  # labels of each class
NAMES = {
    "probe": "probe",
    "nmi": "k-means, NMI",
    "ari": "k-means, ARI",
    **{f"labels_{each}": f"{each} label{'s' * (each > 1)} a class" for each in FEW},
}


def linear(rows: np.ndarray, labels: np.ndarray, seed: int, splits: int = 10) -> float:
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
            LogisticRegression(C=strength, max_iter=500).fit(rows[train], labels[train])
            for strength in STRENGTHS
        ]
        best = max(fitted, key=lambda probe: probe.score(rows[valid], labels[valid]))
        accuracies.append(best.score(rows[test], labels[test]))
    return 100 * float(np.mean(accuracies))


def without_training(rows: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """What needs no probe to be trained, in per cent: k-means against the classes, few labels."""
    found = KMeans(len(np.unique(labels)), n_init=10, random_state=seed).fit_predict(
        normalize(rows)
    )
    return {
        "nmi": 100 * float(normalized_mutual_info_score(labels, found)),
        "ari": 100 * float(adjusted_rand_score(labels, found)),
        **{f"labels_{each}": few_labels(rows, labels, each, seed) for each in FEW},
    }


def few_labels(
    rows: np.ndarray, labels: np.ndarray, each: int, seed: int, draws: int = 50
) -> float:
    """Accuracy in per cent with ``each`` labelled rows of every class, mean over draws of them.

    A row goes to the class whose labelled rows have the nearest mean by cosine. Classes that have
    no row more than ``each`` are left out.
    """
    rows, random = normalize(rows), np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    members = [rows_of for rows_of in members if len(rows_of) > each]
    accuracies = []
    for _ in range(draws):
        orders = [random.permutation(rows_of) for rows_of in members]
        means = normalize(np.stack([rows[order[:each]].mean(0) for order in orders]))
        right = [
            (rows[order[each:]] @ means.T).argmax(1) == label for label, order in enumerate(orders)
        ]
        accuracies.append(np.concatenate(right).mean())
    return 100 * float(np.mean(accuracies))
