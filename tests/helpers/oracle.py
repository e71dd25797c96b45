"""The paper's equations as literal float64 loops; shares no code with the package, and is slow.

Rows are lists of floats or ``[N, D]`` arrays. What is a constant for the gradient (weights,
clusters, targets) is computed by functions of its own, so that a test can hold it fixed while it
takes differences of the loss.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from hypothesis import assume

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


def ranks_of(q: Sequence[float]) -> list[int]:
    """At which place each cluster stands in a row's assignment, best first."""
    return [
        sum(q[other] > q[k] or (q[other] == q[k] and other < k) for other in range(len(q)))
        for k in range(len(q))
    ]


def cluster_table(prototypes: Rows, shares: list[float]) -> Rows:
    """M_k w_kl for two clusters, with each cluster's share of the samples."""
    prototypes = unit(prototypes)
    size = len(prototypes)
    table = np.ones((size, size))
    for k in range(size):
        distance = [1 - cosine(prototypes[k], prototypes[m]) for m in range(size)]
        mu = sum(shares[m] * distance[m] for m in range(size))
        sigma = math.sqrt(sum(shares[m] * (distance[m] - mu) ** 2 for m in range(size)))
        if sigma > 1e-12:
            for m in range(size):
                table[k][m] = math.exp(-((distance[m] - mu) ** 2) / (2 * sigma**2))
        scale = sum(shares[m] * table[k][m] for m in range(size))
        for m in range(size):
            table[k][m] /= scale
    return table


def family_weights(
    z: Rows,
    q_of_heads: list[Rows],
    prototypes_of_heads: list[Rows],
    weighting: str,
    exclude_same_cluster: bool,
    negative_ranks: tuple[int, int] | None,
    soft_clusters: bool,
) -> Rows:
    """The mean over heads of M_i w_ij for all pairs of rows, 0 for what is no negative."""
    total, heads = len(z), range(len(q_of_heads))
    weights = np.zeros((total, total))
    for h in heads:
        q, prototypes = q_of_heads[h], prototypes_of_heads[h]
        size = len(prototypes)
        clusters = [max(range(size), key=lambda k, i=i: q[i][k]) for i in range(total)]
        if soft_clusters:
            shares = [sum(q[j][k] for j in range(total)) / total for k in range(size)]
            table = np.ones((size, size))
            if weighting == "prototype":
                table = cluster_table(prototypes, shares)
        hard = pair_weights(z, clusters, prototypes, weighting)
        by_rows = pair_weights(z, None, None, weighting if weighting == "sample" else "uniform")
        for i in range(total):
            places = ranks_of(q[i])
            first, end = negative_ranks or (0, size)
            for j in range(total):
                value = 0.0
                if soft_clusters:
                    for k in range(size):
                        for m in range(size):
                            left_out = exclude_same_cluster and k == m
                            if first <= places[m] < end and not left_out:
                                value += q[i][k] * table[k][m] * q[j][m] * by_rows[i][j]
                elif first <= places[clusters[j]] < end:
                    left_out = exclude_same_cluster and clusters[i] == clusters[j]
                    value = 0.0 if left_out else hard[i][j]
                weights[i][j] += value / len(heads)
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


def kmeans(rows: Rows, start: Rows, draws: Sequence[Sequence[float]], rounds: int) -> Rows:
    """Centres of unit rows: greedy k-means++ with those draws from 0 to 1, and Lloyd's rounds."""

    def distances_to(seeds: list[Rows]) -> list[float]:
        nearest = [min([1 - cosine(row, seed) for seed in seeds], default=1.0) for row in rows]
        return [
            distance if any(row) and distance > 1e-11 else 0.0
            for row, distance in zip(rows, nearest, strict=True)
        ]

    seeds: list[Rows] = []
    for draws_of_seed in draws:
        weights = distances_to(seeds)
        if sum(weights) == 0:
            break
        candidates = []
        for draw in draws_of_seed:
            left = draw * sum(weights)
            for row, weight in zip(rows, weights, strict=True):
                left -= weight
                if left < 0:
                    candidates.append(row)
                    break
        totals = [sum(distances_to([*seeds, row])) for row in candidates]
        best = candidates[totals.index(min(totals))]
        for row, total in zip(candidates, totals, strict=True):
            # Rounding decides between candidates that are equally good.
            assume((row == best).all() or total > min(totals) + 1e-9)
        seeds.append(best)
    centers = list(seeds)
    for _ in range(rounds if seeds else 0):
        sums = [np.zeros(rows.shape[1]) for _ in centers]
        for row in rows:
            scores = [cosine(row, center) for center in centers]
            sums[scores.index(max(scores))] += row
        centers = [
            total / math.sqrt(cosine(total, total)) if cosine(total, total) > 0 else center
            for total, center in zip(sums, centers, strict=True)
        ]
    return np.array([*centers, *start[len(centers) :]])
