"""The paper's equations as literal float64 loops; shares no code with the package, and is slow.

Rows are lists of floats or ``[N, D]`` arrays. What is a constant for the gradient (weights,
clusters, targets) is computed by functions of its own, so that a test can hold it fixed while it
takes differences of the loss.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np

Rows = np.ndarray


def unit(rows: Rows) -> Rows:
    out = np.array(rows, dtype=np.float64)
    for i in range(len(out)):
        length = math.sqrt(sum(x * x for x in out[i]))
        out[i] = out[i] / length if length > 1e-12 else 0.0
    return out


def cosine(a: Rows, b: Rows) -> float:
    """Of rows that are unit already."""
    return float(sum(x * y for x, y in zip(a, b, strict=True)))


def log_sum_exp(values: list[float]) -> float:
    peak = max(values)
    if peak == -math.inf:
        return -math.inf
    return peak + math.log(sum(math.exp(v - peak) for v in values))


def sinkhorn(scores: Rows, epsilon: float, iterations: int) -> Rows:
    n, k = len(scores), len(scores[0])
    log_q = [[float(scores[i][j]) / epsilon for j in range(k)] for i in range(n)]
    for _ in range(iterations):
        for j in range(k):
            mass = log_sum_exp([log_q[i][j] for i in range(n)])
            for i in range(n):
                log_q[i][j] += -math.log(k) - mass
        for i in range(n):
            mass = log_sum_exp(log_q[i])
            for j in range(k):
                log_q[i][j] += -math.log(n) - mass
    return np.array([[math.exp(x - log_sum_exp(row)) for x in row] for row in log_q])


def log_softmax(values: list[float]) -> list[float]:
    total = log_sum_exp(values)
    return [v - total for v in values]


def targets(z: Rows, prototypes: Rows, epsilon: float, iterations: int) -> Rows:
    z, prototypes = unit(z), unit(prototypes)
    return sinkhorn([[cosine(a, c) for c in prototypes] for a in z], epsilon, iterations)


def log_predictions(z: Rows, prototypes: Rows, temperature: float) -> list[list[float]]:
    z, prototypes = unit(z), unit(prototypes)
    return [log_softmax([cosine(a, c) / temperature for c in prototypes]) for a in z]


def consistency(log_p: list[list[list[float]]], q: list[Rows]) -> list[float]:
    """Per row, view 1 first: the mean cross-entropy with the targets of the other views."""
    views = range(len(q))
    losses = []
    for v in views:
        for i in range(len(q[v])):
            entropies = [
                -sum(q[u][i][k] * log_p[v][i][k] for k in range(len(q[u][i])))
                for u in views
                if u != v
            ]
            losses.append(sum(entropies) / len(entropies))
    return losses


def pair_weights(
    z: Rows, clusters: list[int] | None, prototypes: Rows | None, weighting: str
) -> Rows:
    """M_i w_ij for all pairs of the 2N rows."""
    total = len(z)
    z = unit(z)
    weights = np.ones((total, total))
    if weighting == "uniform":
        return weights
    if weighting == "prototype":
        prototypes = unit(prototypes)
    for i in range(total):
        if weighting == "prototype":
            mine = prototypes[clusters[i]]
            distance = [1 - cosine(mine, prototypes[clusters[j]]) for j in range(total)]
        else:
            distance = [1 - cosine(z[i], z[j]) for j in range(total)]
        mu = sum(distance) / total
        sigma = math.sqrt(sum((d - mu) ** 2 for d in distance) / total)
        if sigma > 1e-12:
            for j in range(total):
                weights[i][j] = math.exp(-((distance[j] - mu) ** 2) / (2 * sigma**2))
        scale = total / sum(weights[i])
        for j in range(total):
            weights[i][j] *= scale
    return weights


def contrast(
    views: Sequence[Rows],
    weights: Rows,
    clusters: list[int] | None,
    temperature: float,
    exclude_same_cluster: bool,
    negatives: str,
) -> list[float]:
    """Each query's loss, view 1 first: the mean over its positives, one in each other view."""
    n = len(views[0])
    z = unit(np.concatenate(views))
    losses = []
    for i in range(len(z)):
        negative = 0.0
        for j in range(len(z)):
            if j % n == i % n:
                continue
            if exclude_same_cluster and clusters[i] == clusters[j]:
                continue
            if negatives == "cross" and i // n == j // n:
                continue
            negative += weights[i][j] * math.exp(cosine(z[i], z[j]) / temperature)
        of_positives = []
        for p in range(len(z)):
            if p != i and p % n == i % n:
                positive = math.exp(cosine(z[i], z[p]) / temperature)
                of_positives.append(-math.log(positive / (positive + negative)))
        losses.append(mean(of_positives))
    return losses


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def gradient(value: Callable[[Rows], float], at: Rows, step: float = 1e-6) -> Rows:
    """Central differences."""
    out = np.zeros_like(at)
    for place in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[place] += step
        down[place] -= step
        out[place] = (value(up) - value(down)) / (2 * step)
    return out
