"""How the labels are split, and accuracy of embeddings where labels are few."""

import numpy as np
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import normalize


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
