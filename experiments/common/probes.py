"""What rows are good for without a probe: telling classes apart by k-means, by few labels."""

import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.preprocessing import normalize

FEW = (1, 5)  # labels of each class
NAMES = {
    "probe": "probe",
    "nmi": "k-means, NMI",
    "ari": "k-means, ARI",
    **{f"labels_{each}": f"{each} label{'s' * (each > 1)} per class" for each in FEW},
}


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
