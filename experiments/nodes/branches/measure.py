"""Measures of embeddings: few labels, also with label propagation, k-means, a linear probe."""

import warnings

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import normalized_mutual_info_score
from sklearn.neighbors import NearestNeighbors
from sklearn.preprocessing import normalize

from ..probe import STRENGTHS, linear

NAMES = {
    "one_shot": "1 label per class",
    "five_shot": "5 labels per class",
    "one_shot_clustered": "1 label, k-means afterwards",
    "one_shot_propagated": "1 label, label propagation",
    "nmi": "k-means, NMI",
    "probe": "linear probe",
}
DRAWS = 100
NEIGHBOURS, ALPHA, ROUNDS = 10, 0.9, 20  # of label propagation
CENTRES = 50  # of k-means afterwards


def measured(embeddings: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """All measures in per cent."""
    z = normalize(embeddings)
    labels = np.unique(labels, return_inverse=True)[1]
    clusters = KMeans(labels.max() + 1, n_init=5, random_state=seed).fit_predict(z)
    one, five = (drawn(labels, each, seed) for each in (1, 5))
    centres = KMeans(CENTRES, n_init=1, random_state=seed).fit(z)
    clustered = normalize(centres.cluster_centers_)[centres.labels_]
    values = {
        "one_shot": nearest_mean(z, labels, one),
        "five_shot": nearest_mean(z, labels, five),
        "one_shot_clustered": nearest_mean(clustered, labels, one),
        "one_shot_propagated": propagated(z, labels, one),
        "nmi": normalized_mutual_info_score(labels, clusters),
    }
    in_per_cent = {name: 100 * float(value) for name, value in values.items()}
    in_per_cent["probe"] = linear(embeddings, labels, seed, 5, STRENGTHS[1:6], 300)
    return {name: round(value, 3) for name, value in in_per_cent.items()}


def drawn(labels: np.ndarray, each: int, seed: int) -> np.ndarray:
    """Indices of ``each`` labelled nodes of every class ``[draws, C, each]``, by seed alone."""
    random = np.random.default_rng(seed)
    members = [np.flatnonzero(labels == label) for label in range(labels.max() + 1)]
    return np.stack(
        [
            [random.choice(of_class, each, replace=False) for of_class in members]
            for _ in range(DRAWS)
        ]
    )


def accuracy(predicted: np.ndarray, labels: np.ndarray, labelled: np.ndarray) -> float:
    """Of nodes without a label."""
    correct = predicted == labels
    return (correct.sum() - correct[labelled].sum()) / (len(labels) - labelled.size)


def nearest_mean(z: np.ndarray, labels: np.ndarray, draws: np.ndarray) -> float:
    """A node goes to the class whose labelled nodes have the nearest mean by cosine."""
    accuracies = []
    for labelled in draws:
        means = normalize(z[labelled].mean(1))
        accuracies.append(accuracy((z @ means.T).argmax(1), labels, labelled))
    return float(np.mean(accuracies))


def propagated(z: np.ndarray, labels: np.ndarray, draws: np.ndarray) -> float:
    """Label spreading (Zhou et al., NIPS 2003) over the ten nearest neighbours by cosine."""
    graph = NearestNeighbors(n_neighbors=NEIGHBOURS).fit(z).kneighbors_graph()
    graph = graph.maximum(graph.T)
    scale = sp.diags(1 / np.sqrt(graph.sum(1).A1))
    graph = (scale @ graph @ scale).tocsr()
    of_graph = [torch.from_numpy(part) for part in (graph.indptr, graph.indices, graph.data)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")
        matrix = torch.sparse_csr_tensor(
            *of_graph, graph.shape, dtype=torch.float32, check_invariants=False
        )
    accuracies = []
    for labelled in draws:  # one at a time: all scores of a draw fit into the processor's cache
        start = torch.zeros(len(z), len(labelled))
        for label, of_class in enumerate(labelled):
            start[of_class, label] = 1 - ALPHA
        scores = start
        for _ in range(ROUNDS):
            scores = torch.addmm(start, matrix, scores, alpha=ALPHA)
        accuracies.append(accuracy(scores.argmax(1).numpy(), labels, labelled))
    return float(np.mean(accuracies))
