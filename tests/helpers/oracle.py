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
    weights = np.array(weights)
    for i in range(len(weights) if exclude_same_cluster else 0):
        for j in range(len(weights)):
            if clusters[i] == clusters[j]:
                weights[i][j] = 0.0
    return info_nce(views, temperature=temperature, negatives=negatives, weights=weights)[0]


def partners(
    items: Sequence[Sequence[int]], memory_items: Sequence[int | None], negatives: str
) -> list[tuple[list[int], list[int]]]:
    """The positives and the negatives of each query, set 1 first; the memory follows the sets."""
    each = [(number, item) for number, of_set in enumerate(items) for item in of_set]
    pairs = []
    for i, (mine, item) in enumerate(each):
        compared = [j for j in range(len(each)) if negatives == "all" or each[j][0] != mine]
        positives = [j for j in compared if j != i and each[j][1] == item]
        others = [j for j in compared if each[j][1] != item]
        past = [len(each) + j for j, other in enumerate(memory_items) if other != item]
        pairs.append((positives, others + past))
    return pairs


def hard_weights(
    sets: Sequence[Rows],
    items: Sequence[Sequence[int]] | None = None,
    memory: Sequence[Rows] = (),
    memory_items: Sequence[int | None] | None = None,
    *,
    temperature: float = 0.2,
    negatives: str = "all",
    hardness: float = 0.0,
) -> Rows:
    """N_i w_ij / sum_j w_ij with w_ij = e^(hardness s_ij / tau), for the N_i negatives of i."""
    z, pairs = _embeddings_and_partners(sets, items, memory, memory_items, negatives)
    weights = np.zeros((len(pairs), len(z)))
    for i, (_, others) in enumerate(pairs):
        logs = [hardness * cosine(z[i], z[j]) / temperature for j in others]
        total = log_sum_exp([-math.inf, *logs])
        for j, log in zip(others, logs, strict=True):
            weights[i][j] = len(others) * math.exp(log - total)
    return weights


def info_nce(
    sets: Sequence[Rows],
    items: Sequence[Sequence[int]] | None = None,
    memory: Sequence[Rows] = (),
    memory_items: Sequence[int | None] | None = None,
    *,
    temperature: float = 0.2,
    negatives: str = "all",
    hardness: float = 0.0,
    debias: float = 0.0,
    weights: Rows | None = None,
) -> tuple[list[float], list[bool]]:
    """Each query's loss, set 1 first, and whether it has a positive.

    Without items row i of every set is item i. A memory item of None is that of no query. Weights
    ``[M, M + B]`` of the negatives, 0 for what is none, are those of ``hardness`` if not given.
    """
    z, pairs = _embeddings_and_partners(sets, items, memory, memory_items, negatives)
    if weights is None:
        mode = {"temperature": temperature, "negatives": negatives, "hardness": hardness}
        weights = hard_weights(sets, items, memory, memory_items, **mode)
    losses = []
    for i, (positives, others) in enumerate(pairs):
        logits = [cosine(z[i], other) / temperature for other in z]
        others = [j for j in others if weights[i][j] > 0]
        log_s = log_sum_exp([-math.inf, *(math.log(weights[i][j]) + logits[j] for j in others)])
        if debias > 0 and positives and others:
            of_positives = mean([math.exp(logits[p]) for p in positives])
            average = math.exp(log_s) / len(others)
            corrected = (average - debias * of_positives) / (1 - debias)
            log_s = math.log(len(others) * max(corrected, math.exp(-1 / temperature)))
        losses.append(mean([log_sum_exp([0.0, log_s - logits[p]]) for p in positives] or [0.0]))
    return losses, [len(positives) > 0 for positives, _ in pairs]


def _embeddings_and_partners(
    sets: Sequence[Rows],
    items: Sequence[Sequence[int]] | None,
    memory: Sequence[Rows],
    memory_items: Sequence[int | None] | None,
    negatives: str,
) -> tuple[Rows, list[tuple[list[int], list[int]]]]:
    if items is None:
        items = [range(len(of_set)) for of_set in sets]
    if memory_items is None:
        memory_items = [None] * len(memory)
    together = [embedding for of_set in [*sets, memory] for embedding in of_set]
    return unit(together), partners(items, memory_items, negatives)


def mean_of_queries(losses: list[float], have_positives: list[bool]) -> float:
    """Over the queries that have a positive."""
    return sum(losses) / max(1, sum(have_positives))


class Memory:
    """The last embeddings and their items, oldest first; None is the item of no query."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.clear()

    def clear(self) -> None:
        self.embeddings: list[Rows] = []
        self.items: list[int | None] = []

    def store(self, sets: Sequence[Rows], items: Sequence[Sequence[int]] | None = None) -> None:
        if items is None:
            items = [[None] * len(of_set) for of_set in sets]
        self.embeddings += [embedding for of_set in sets for embedding in of_set]
        self.items += [item for of_set in items for item in of_set]
        self.embeddings = self.embeddings[-self.size :]
        self.items = self.items[-self.size :]


def pgcl_contrast(
    views: Sequence[Rows],
    prototypes_of_heads: Sequence[Rows],
    items: Sequence[Sequence[int]] | None = None,
    memory: Sequence[Rows] = (),
    memory_items: Sequence[int | None] | None = None,
    *,
    temperature: float = 0.2,
    negatives: str = "all",
    weighting: str = "prototype",
    exclude_same_cluster: bool = True,
    negative_ranks: tuple[int, int] | None = None,
    soft_clusters: bool = False,
) -> list[float]:
    """Each query's reweighted contrast. The memory is balanced by itself, as a view is."""
    balanced = [*views, np.array(memory)] if len(memory) else [*views]
    q_of_heads = [
        np.concatenate([targets(z, prototypes, 0.05, 3) for z in balanced])
        for prototypes in prototypes_of_heads
    ]
    weights = family_weights(
        np.concatenate(balanced),
        q_of_heads,
        [*prototypes_of_heads],
        weighting,
        exclude_same_cluster,
        negative_ranks,
        soft_clusters,
    )
    mode = {"temperature": temperature, "negatives": negatives, "weights": weights}
    return info_nce(views, items, memory, memory_items, **mode)[0]


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
