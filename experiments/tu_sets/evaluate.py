"""One run: an encoder trained without labels, its embeddings in an SVM and with few labels."""

import time
from pathlib import Path

import numpy as np
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.preprocessing import scale
from sklearn.svm import SVC

from experiments.common.graphs import embed, trained
from experiments.common.probes import measured
from experiments.common.results import Config, Run
from experiments.common.tu import FOLDS, load

PENALTIES = 10.0 ** np.arange(-3, 4)  # C
MANY = 1000  # graphs: from here on two inner folds choose C, as five would take hours
MEASURES = {"svm": "all labels", "labels_5": "5 labels per class", "labels_1": "1 label per class"}


def run(config: Config, folder: Path) -> Run:
    started = time.perf_counter()
    graphs = load(folder)
    z = embed(trained(config, graphs).encoder.encoder, graphs)
    labels = np.array([int(graph.y) for graph in graphs])
    values = of_embeddings(z, labels, config["seed"])
    return {"config": config, **values, "seconds": round(time.perf_counter() - started, 1)}


def of_embeddings(embeddings: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """All measures in per cent, of standardised features.

    Unscaled, a feature that is almost always 0 in training becomes so large in batch normalisation
    that it alone sets the width of the kernel.
    """
    z = scale(embeddings.astype(np.float64))
    svm = of_kernel(rbf_kernel(z, gamma=1 / z.shape[1]), labels, seed)
    return {"svm": round(svm, 3), **measured(z, labels, seed, "labels_5", "labels_1")}


def of_kernel(kernel: np.ndarray, labels: np.ndarray, seed: int) -> float:
    """Mean accuracy in per cent over stratified folds, inside which inner folds choose C.

    All folds and all C share the kernel ``[N, N]``.
    """
    folds = StratifiedKFold(FOLDS, shuffle=True, random_state=seed).split(kernel, labels)
    # Not a single split: where its classes are of equal size and those of the training fold are
    # not, the smallest C may win, and then predict one class for all.
    inner = 5 if len(labels) < MANY else 2
    scores = []
    for train, test in folds:
        svm = GridSearchCV(SVC(kernel="precomputed", cache_size=1000), {"C": PENALTIES}, cv=inner)
        svm.fit(kernel[np.ix_(train, train)], labels[train])
        scores.append(svm.score(kernel[np.ix_(test, train)], labels[test]))
    return 100 * float(np.mean(scores))
