"""How the labels are split, and what embeddings are worth: with few labels, and with all."""

from collections.abc import Callable

import numpy as np
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import normalized_mutual_info_score
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize


def halves(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the development and of the held-out half of the labels."""
    development, held_out = train_test_split(
        np.arange(len(labels)), test_size=0.5, stratify=labels, random_state=0
    )
    return development, held_out


def few_labels(
    embeddings: np.ndarray, labels: np.ndarray, each: int, seed: int, draws: int = 100
) -> float:
    """Accuracy in per cent of a nearest-mean classifier, mean over random draws of its labels.

    Each class has ``each`` labelled samples, whose mean is compared by cosine.
    """
    z, random = normalize(embeddings), np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in np.unique(labels)]
    accuracies = []
    for _ in range(draws):
        orders = [random.permutation(of_class) for of_class in members]
        means = normalize(np.stack([z[order[:each]].mean(0) for order in orders]))
        correct = [
            (z[order[each:]] @ means.T).argmax(1) == label for label, order in enumerate(orders)
        ]
        accuracies.append(np.concatenate(correct).mean())
    return 100 * float(np.mean(accuracies))


def all_labels(embeddings: np.ndarray, labels: np.ndarray) -> float:
    """Accuracy in per cent of a logistic regression in five folds."""
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    return 100 * float(cross_val_score(probe, embeddings, labels, cv=5).mean())


def nmi(embeddings: np.ndarray, labels: np.ndarray, seed: int) -> float:
    """Agreement in per cent of the classes with as many clusters by k-means with cosines."""
    kmeans = KMeans(len(np.unique(labels)), n_init=10, random_state=seed)
    return 100 * normalized_mutual_info_score(labels, kmeans.fit_predict(normalize(embeddings)))


NAMES = {
    "labels_1": "1 label per class",
    "labels_5": "5 labels per class",
    "nmi": "k-means NMI",
    "all": "all labels",
}
MEASURES: dict[str, Callable[[np.ndarray, np.ndarray, int], float]] = {
    "labels_1": lambda z, labels, seed: few_labels(z, labels, 1, seed),
    "labels_5": lambda z, labels, seed: few_labels(z, labels, 5, seed),
    "nmi": nmi,
    "all": lambda z, labels, seed: all_labels(z, labels),
}


def measured(
    embeddings: np.ndarray, labels: np.ndarray, seed: int, *names: str
) -> dict[str, float]:
    """These of the `MEASURES`, in per cent."""
    return {name: round(float(MEASURES[name](embeddings, labels, seed)), 3) for name in names}
