"""How much graph embeddings know of the classes: an RBF support vector machine, ten-fold."""

import numpy as np
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV, StratifiedKFold
from sklearn.svm import SVC

PENALTIES = 10.0 ** np.arange(-3, 4)  # C


def accuracy(embeddings: np.ndarray, labels: np.ndarray, seed: int, inner: int = 5) -> float:
    """Mean accuracy in per cent over stratified folds, C chosen inside each training fold.

    One kernel matrix serves all folds and all C: its width is scikit-learn's ``gamma="scale"``,
    taken from all embeddings, which looks at no label.
    """
    embeddings = embeddings.astype(np.float64)
    scale = embeddings.shape[1] * embeddings.var()
    return of_kernel(rbf_kernel(embeddings, gamma=1 / scale if scale else 1), labels, seed, inner)


def of_kernel(kernel: np.ndarray, labels: np.ndarray, seed: int, inner: int = 5) -> float:
    folds = StratifiedKFold(10, shuffle=True, random_state=seed).split(kernel, labels)
    scores = []
    for train, test in folds:
        svm = GridSearchCV(SVC(kernel="precomputed", cache_size=1000), {"C": PENALTIES}, cv=inner)
        svm.fit(kernel[np.ix_(train, train)], labels[train])
        scores.append(svm.score(kernel[np.ix_(test, train)], labels[test]))
    return 100 * float(np.mean(scores))
