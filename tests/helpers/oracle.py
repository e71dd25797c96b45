"""The paper's equations as literal float64 loops; shares no code with the package, and is slow.

Rows are lists of floats or ``[N, D]`` arrays. What is a constant for the gradient (weights,
clusters, targets) is computed by functions of its own, so that a test can hold it fixed while it
takes differences of the loss.
"""

import math

import numpy as np
from hypothesis import assume


def unit(rows):
    rows = np.asarray(rows, dtype=np.float64)
    out = []
    for row in rows.tolist():
        length = math.sqrt(sum(x * x for x in row))
        out.append([x / length if length > 1e-12 else 0.0 for x in row])
    return np.array(out).reshape(rows.shape)


def cosine(a, b):
    """Of unit vectors."""
    return float(sum(x * y for x, y in zip(a, b, strict=True)))


def cosines(rows, others):
    """Of every pair of unit vectors."""
    others = others.tolist()  # Python adds its own floats several times as fast
    return [[cosine(a, b) for b in others] for a in rows.tolist()]


def log_sum_exp(values):
    peak = max(values)
    if peak == -math.inf:
        return -math.inf
    return peak + math.log(sum(math.exp(v - peak) for v in values))


def sinkhorn(scores, epsilon, iterations):
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


def targets(z, prototypes, epsilon, iterations):
    return sinkhorn(cosines(unit(z), unit(prototypes)), epsilon, iterations)


def ranking(q, z, prototypes, epsilon=0.05):
    """What orders the clusters of each embedding: log q, and among equal ones the cosine."""
    scores = np.array(cosines(unit(z), unit(prototypes)))
    return epsilon * np.log(np.maximum(q, 1e-300)) + 1e-4 * scores


def log_predictions(z, prototypes, temperature):
    logits = np.array(cosines(unit(z), unit(prototypes))) / temperature
    return [[logit - log_sum_exp(of_query) for logit in of_query] for of_query in logits.tolist()]


def consistency(log_p, q):
    """Per embedding, view 1 first: the mean cross-entropy with the targets of the other views."""
    q, views = [np.asarray(of_view).tolist() for of_view in q], range(len(q))
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


def gaussian_weights(distances, fractions):
    """M w of one query, from distances that each hold for a fraction of all samples."""
    mu = sum(f * d for f, d in zip(fractions, distances, strict=True))
    variance = sum(f * (d - mu) ** 2 for f, d in zip(fractions, distances, strict=True))
    weights = [1.0] * len(distances)
    if variance > 1e-24:
        weights = [math.exp(-((d - mu) ** 2) / (2 * variance)) for d in distances]
    total = sum(f * w for f, w in zip(fractions, weights, strict=True))
    return [w / total for w in weights]


def pair_weights(z, clusters, prototypes, weighting):
    """M_i w_ij for all pairs of the 2N embeddings."""
    count = len(z)
    if weighting == "uniform":
        return np.ones((count, count))
    vectors = unit(z) if weighting == "sample" else unit(prototypes)[np.asarray(clusters)]
    return np.array(
        [
            gaussian_weights([1 - s for s in of_query], [1 / count] * count)
            for of_query in cosines(vectors, vectors)
        ]
    )


def cluster_weights(prototypes, fractions, weighting):
    """M_k w_kl for two clusters, with the fraction of the samples in each cluster."""
    if weighting != "prototype":
        return np.ones((len(prototypes), len(prototypes)))
    prototypes = unit(prototypes)
    return np.array(
        [
            gaussian_weights([1 - s for s in of_cluster], fractions)
            for of_cluster in cosines(prototypes, prototypes)
        ]
    )


def positions_of(q):
    """The position of each cluster in an assignment, best first."""
    return [
        sum(q[other] > q[k] or (q[other] == q[k] and other < k) for other in range(len(q)))
        for k in range(len(q))
    ]


def family_weights(
    z,
    q_of_heads,
    prototypes_of_heads,
    weighting,
    exclude_same_cluster,
    negative_ranks,
    soft_clusters,
):
    """The mean over heads of M_i w_ij for all pairs of embeddings, 0 for what is no negative."""
    count = len(z)
    weights = np.zeros((count, count))
    by_sample = pair_weights(z, None, None, "sample" if weighting == "sample" else "uniform")
    for q, prototypes in zip(q_of_heads, prototypes_of_heads, strict=True):
        q, clusters = np.asarray(q).tolist(), range(len(prototypes))
        positions = [positions_of(of_query) for of_query in ranking(q, z, prototypes).tolist()]
        if not soft_clusters:  # all of an embedding is in its best cluster
            q = [[float(position == 0) for position in of_query] for of_query in positions]
        fractions = [sum(of_query[k] for of_query in q) / count for k in clusters]
        table = cluster_weights(prototypes, fractions, weighting)
        first, end = negative_ranks or (0, len(prototypes))
        for i in range(count):
            of_clusters = [
                sum(q[i][k] * table[k][m] for k in clusters if k != m or not exclude_same_cluster)
                if first <= positions[i][m] < end
                else 0.0
                for m in clusters
            ]
            for j in range(count):
                value = sum(w * q_jm for w, q_jm in zip(of_clusters, q[j], strict=True))
                weights[i][j] += value * by_sample[i][j] / len(q_of_heads)
    return weights


def contrast(views, weights, clusters, temperature, exclude_same_cluster, negatives):
    """Each query's loss, view 1 first: the mean over its positives, one in each other view."""
    if exclude_same_cluster:
        weights = np.where(np.equal.outer(clusters, clusters), 0.0, weights)
    return info_nce(views, temperature=temperature, negatives=negatives, weights=weights)[0]


def partners(items, memory_items, negatives, listed=(), negative_pairs=()):
    """The positives, with their weights, and the negatives of each query, set 1 first.

    The memory follows the sets. Listed are a query, a key and the weight of each pair.
    """
    within = negatives in ("all", "given")
    each = [(number, item) for number, of_set in enumerate(items) for item in of_set]
    pairs = []
    for i, (mine, item) in enumerate(each):
        of_query = {b for a, b, _ in listed if a == i}
        compared = [j for j in range(len(each)) if within or each[j][0] != mine]
        positives = [
            (j, 1.0) for j in compared if j != i and each[j][1] == item and j not in of_query
        ]
        positives += [(b, weight) for a, b, weight in listed if a == i and weight > 0]
        others = [j for j in compared if each[j][1] != item and j not in of_query]
        if negatives == "memory":
            others = []
        if negatives == "given":
            others = [b for a, b in negative_pairs if a == i]
        past = [len(each) + j for j, other in enumerate(memory_items) if other != item]
        pairs.append((positives, others + past))
    return pairs


def hard_weights(scores, pairs, sharpness):
    """N_i w_ij / sum_j w_ij with w_ij = e^(sharpness s_ij), for the N_i negatives of i."""
    weights = [[0.0] * len(of_query) for of_query in scores]
    for i, (_, others) in enumerate(pairs):
        total = log_sum_exp([-math.inf, *(sharpness * scores[i][j] for j in others)])
        for j in others:
            weights[i][j] = len(others) * math.exp(sharpness * scores[i][j] - total)
    return weights


def info_nce(
    sets,
    items=None,
    memory=(),
    memory_items=None,
    *,
    temperature=0.2,
    negatives="all",
    hardness=0.0,
    debias=0.0,
    weights=None,
    queries="all",
    decoupled=False,
    over_positives="mean",
    similarity="cosine",
    listed=(),
    negative_pairs=(),
):
    """Each query's loss, set 1 first, and whether it has a positive.

    Without items row i of every set is item i, if all have one length. A memory item of None is
    that of no query. Weights ``[M, M + B]`` of the negatives, 0 for what is none, are those of
    ``hardness`` if not given. Listed are a query, a key and the weight of each pair given by index.
    """
    if items is None:
        items = [range(len(of_set)) for of_set in sets]
        if len({len(of_set) for of_set in sets}) > 1:
            items = [[(n, i) for i in of_set] for n, of_set in enumerate(items)]
    if memory_items is None:
        memory_items = [None] * len(memory)
    pairs = partners(items, memory_items, negatives, listed, negative_pairs)
    num_queries = len(sets[0]) if queries == "first" else len(pairs)
    pairs = pairs[:num_queries]
    z = np.concatenate([np.asarray(x) for x in [*sets, memory] if len(x)])
    z = unit(z) if similarity == "cosine" else z
    scores = cosines(z[:num_queries], z)
    if weights is None:
        weights = hard_weights(scores, pairs, hardness / temperature)
    losses = []
    for of_query, weights_of_query, (positives, others) in zip(
        scores, np.asarray(weights).tolist(), pairs, strict=False
    ):
        logits = [score / temperature for score in of_query]
        others = [j for j in others if weights_of_query[j] > 0]
        log_s = log_sum_exp(
            [-math.inf, *(math.log(weights_of_query[j]) + logits[j] for j in others)]
        )
        if debias > 0 and positives and others:
            of_positives = weighted_mean([(math.exp(logits[p]), w) for p, w in positives])
            average = math.exp(log_s) / len(others)
            corrected = (average - debias * of_positives) / (1 - debias)
            log_s = math.log(len(others) * max(corrected, math.exp(-1 / temperature)))
        terms = []
        for p, weight in positives:
            gap = log_s - logits[p]
            term = log_sum_exp([0.0, gap])
            if decoupled:
                term = gap if others else 0.0
            terms.append((term, weight))
        if positives and over_positives != "mean":
            log_e = log_sum_exp([logits[p] + math.log(weight) for p, weight in positives])
            score = weighted_mean([(logits[p], weight) for p, weight in positives])
            gap = log_s - log_e
            terms = [(log_sum_exp([0.0, gap]), 1.0)]
            if decoupled:
                terms = [(gap if others else 0.0, 1.0)]
            if over_positives == "supcon":
                terms = [(log_sum_exp([log_s, log_e]) - score, 1.0)]
        losses.append(weighted_mean(terms) if terms else 0.0)
    return losses, [len(positives) > 0 for positives, _ in pairs]


def mean_of_queries(losses, have_positives):
    """Over the queries that have a positive."""
    return sum(losses) / max(1, sum(have_positives))


class Memory:
    """The last embeddings and their items, oldest first; None is the item of no query."""

    def __init__(self, size):
        self.size = size
        self.clear()

    def clear(self):
        self.embeddings = []
        self.items = []

    def store(self, sets, items=None):
        if items is None:
            items = [[None] * len(of_set) for of_set in sets]
        self.embeddings += [embedding for of_set in sets for embedding in of_set]
        self.items += [item for of_set in items for item in of_set]
        self.embeddings = self.embeddings[-self.size :]
        self.items = self.items[-self.size :]


def pgcl_contrast(
    views,
    prototypes_of_heads,
    items=None,
    memory=(),
    memory_items=None,
    *,
    temperature=0.2,
    negatives="all",
    weighting="prototype",
    exclude_same_cluster=True,
    negative_ranks=None,
    soft_clusters=False,
    **pairs,
):
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
    return info_nce(views, items, memory, memory_items, **mode, **pairs)[0]


def weighted_mean(values):
    return sum(value * weight for value, weight in values) / sum(weight for _, weight in values)


def mean(values):
    return sum(values) / len(values)


def gradient(value, at, step=1e-6):
    """Central differences."""
    out = np.zeros_like(at)
    for position in np.ndindex(at.shape):
        up, down = at.copy(), at.copy()
        up[position] += step
        down[position] -= step
        out[position] = (value(up) - value(down)) / (2 * step)
    return out


def kmeans(rows, start, draws, rounds):
    """Centres of unit vectors: greedy k-means++ with the draws from 0 to 1, and Lloyd's rounds."""

    def distances_to(seeds):
        nearest = [min([1 - cosine(row, seed) for seed in seeds], default=1.0) for row in rows]
        return [
            distance if any(row) and distance > 1e-11 else 0.0
            for row, distance in zip(rows, nearest, strict=True)
        ]

    seeds = []
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
