"""Measures of embeddings that train no probe: k-means against the classes, and few labels."""

import numpy as np
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.preprocessing import normalize

FEW = (1, 5)  # labels per class
NAMES = {
    "probe": "probe",
    "nmi": "k-means, NMI",
    "ari": "k-means, ARI",
    **{f"labels_{each}": f"{each} label{'s' * (each > 1)} per class" for each in FEW},
}


def without_training(embeddings: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """All measures but the probe, in per cent."""
    kmeans = KMeans(len(np.unique(labels)), n_init=10, random_state=seed)
    clusters = kmeans.fit_predict(normalize(embeddings))
    return {
        "nmi": 100 * float(normalized_mutual_info_score(labels, clusters)),
        "ari": 100 * float(adjusted_rand_score(labels, clusters)),
        **{f"labels_{each}": few_labels(embeddings, labels, each, seed) for each in FEW},
    }


def few_labels(
    embeddings: np.ndarray, labels: np.ndarray, each: int, seed: int, draws: int = 50
) -> float:
    """Accuracy in per cent of a nearest-mean classifier, mean over random draws of its labels.

    Each class has ``each`` labelled samples, whose mean is compared by cosine. Classes without a
    further sample are left out.
    """
    z, random = normalize(embeddings), np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    members = [of_class for of_class in members if len(of_class) > each]
    accuracies = []
    for _ in range(draws):
        orders = [random.permutation(of_class) for of_class in members]
        means = normalize(np.stack([z[order[:each]].mean(0) for order in orders]))
        correct = [
            (z[order[each:]] @ means.T).argmax(1) == label for label, order in enumerate(orders)
        ]
        accuracies.append(np.concatenate(correct).mean())
    return 100 * float(np.mean(accuracies))
