"""The paper's equations, query by query, in float64; shares no code with the package, and is slow.

Sets are tensors ``[N, D]``. Clusters, targets and weights are constants; autograd differentiates
the losses.
"""

import math
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import assume
from torch import Tensor


def unit(z):
    z = z.double()
    lengths = z.norm(dim=1, keepdim=True)
    return z / lengths.where(lengths > 1e-12, math.inf)


def cosines(z, others):
    return unit(z) @ unit(others).T


def sinkhorn(scores, epsilon, iterations):
    log_q, (n, k) = scores.double() / epsilon, scores.shape
    for _ in range(iterations):
        log_q = log_q - log_q.logsumexp(0) - math.log(k)
        log_q = log_q - log_q.logsumexp(1, keepdim=True) - math.log(n)
    return log_q.softmax(1)


def targets(z, prototypes, epsilon=0.05, iterations=3):
    return sinkhorn(cosines(z, prototypes).detach(), epsilon, iterations)


def ranking(q, z, prototypes, epsilon=0.05):
    """What orders the clusters of each embedding: log q, and among equal ones the cosine."""
    return epsilon * q.clamp_min(1e-300).log() + 1e-4 * cosines(z, prototypes).detach()


def log_predictions(z, prototypes, temperature, balance_predictions=False):
    scores = cosines(z, prototypes) / temperature
    if balance_predictions:  # first every prototype's total becomes 1, then every embedding's
        p = [column / column.sum() for column in (scores - scores.max()).exp().T]
        return torch.stack([row / row.sum() for row in torch.stack(p, 1)]).log()
    return scores.log_softmax(1)


def consistency(log_p, q):
    """Per embedding, view 1 first: the mean cross-entropy with the targets of the other views."""
    losses = []
    for v, of_view in enumerate(log_p):
        entropies = [-(q[u] * of_view).sum(1) for u in range(len(q)) if u != v]
        losses.append(sum(entropies) / len(entropies))
    return torch.cat(losses)


def gaussian_weights(distances, fractions):
    """M w of each query, from distances that each hold for a fraction of all samples."""
    rows = []
    for d in distances:
        mu = fractions @ d
        variance = fractions @ (d - mu) ** 2
        w = torch.exp(-((d - mu) ** 2) / (2 * variance)) if variance > 1e-24 else d * 0 + 1
        rows.append(w / (fractions @ w))
    return torch.stack(rows)


def pair_weights(z, clusters, prototypes, weighting):
    """M_i w_ij for all pairs of the 2N embeddings."""
    if weighting == "uniform":
        return torch.ones(len(z), len(z), dtype=torch.float64)
    vectors = (z if weighting == "sample" else prototypes[clusters]).detach()
    distances = 1 - cosines(vectors, vectors)
    return gaussian_weights(distances, torch.full_like(distances[0], 1 / len(vectors)))


def family_weights(
    z,
    q_of_heads,
    prototypes_of_heads,
    weighting="prototype",
    exclude_same_cluster=True,
):
    """The mean over heads of M_i w_ij for all pairs of embeddings, 0 for what is no negative."""
    of_heads = []
    for q, prototypes in zip(q_of_heads, prototypes_of_heads, strict=True):
        clusters, num = ranking(q, z, prototypes).argmax(1), len(prototypes)
        table = torch.ones(num, num, dtype=torch.float64)
        if weighting == "prototype":
            fractions = F.one_hot(clusters, num).double().mean(0)
            table = gaussian_weights(1 - cosines(prototypes, prototypes).detach(), fractions)
        if exclude_same_cluster:
            table = table - table.diag().diag()
        of_heads.append(table[clusters[:, None], clusters])
    by_sample = pair_weights(z, None, None, "sample" if weighting == "sample" else "uniform")
    return sum(of_heads) / len(of_heads) * by_sample


def partners(labels, memory_labels, negatives, listed, negative_pairs):
    """The positives, with their weights, and the negatives of each query, set 1 first.

    The memory follows the sets. Listed are a query, a key and the weight of each pair.
    """
    each = [(number, label) for number, of_set in enumerate(labels) for label in of_set]
    for i, (mine, label) in enumerate(each):
        positives = [(b, weight) for a, b, weight in listed if a == i]
        of_query, others = {b for b, _ in positives}, []
        for j, (number, other) in enumerate(each):
            compared = j != i if negatives == "all" else number != mine
            if compared and other == label and j not in of_query:
                positives.append((j, 1.0))
            elif compared and other != label and j not in of_query and negatives != "memory":
                others.append(j)
        others += [len(each) + j for j, other in enumerate(memory_labels) if other != label]
        if negative_pairs is not None:
            others = [b for a, b in negative_pairs if a == i]
        yield positives, others


def info_nce(
    sets,
    labels=None,
    memory=None,
    memory_labels=None,
    *,
    temperature=1.0,
    negatives="all",
    hardness=0.0,
    debias=0.0,
    weights=None,
    queries="all",
    decoupled=False,
    over_positives="mean",
    similarity="cosine",
    listed=None,
    negative_pairs=None,
    score_mod=None,
    metadata=None,
    shift=None,
    seen=None,
):
    """The loss of each query, set 1 first, ``[Q]``, and whether it has a positive.

    Without labels and listed positives, row i of every set has label i. A memory label of None is
    that of no query. Weights ``[M, M + B]`` are those of negatives, 0 for what is none. Listed are
    a query, a key and the weight of each pair given by index. A shift ``[Q, M + B]`` is added to
    the scores / temperature of negatives, and each negative of a query to the list ``seen``.
    """
    if labels is None:
        labels = [range(len(z)) for z in sets]
        if listed is not None:  # they take the place of row i of every set
            labels = [[(n, i) for i in of_set] for n, of_set in enumerate(labels)]
    listed = () if listed is None else listed
    memory = sets[0][:0] if memory is None else memory
    memory_labels = [None] * len(memory) if memory_labels is None else memory_labels
    num_queries = len(sets[0]) if queries == "first" else sum(map(len, sets))
    z = torch.cat([x.double() for x in (*sets, memory)])
    z = unit(z) if similarity == "cosine" else z
    log_weights = torch.zeros(num_queries, len(z)).double() if weights is None else weights.log()
    pairs = list(partners(labels, memory_labels, negatives, listed, negative_pairs))[:num_queries]
    losses, exist = [], []
    for i, (positives, others) in enumerate(pairs):
        x, log_w = z[i] @ z.T / temperature, log_weights[i]
        others = [j for j in others if log_w[j] > -math.inf]
        total = sum(weight for _, weight in positives)
        exist.append(bool(total > 0))
        if not exist[-1]:
            losses.append(0 * x.sum())
            continue
        of_negatives = x if shift is None else x + shift[i]
        if hardness > 0 and others:  # N_i w_ij / sum_j w_ij
            log_w = log_w + hardness * of_negatives
            log_w = log_w - log_w[others].logsumexp(0) + math.log(len(others))
        if score_mod is not None:
            of_negatives = modified(of_negatives, i, others, temperature, score_mod, metadata)
            others = [j for j in others if of_negatives[j] > -math.inf]
        if seen is not None:
            seen += [(i, j) for j in others]
        log_s = (log_w + of_negatives)[others].logsumexp(0)
        if debias > 0 and others:
            of_positives = sum(w * x[p].exp() for p, w in positives) / total
            mean = (log_s.exp() / len(others) - debias * of_positives) / (1 - debias)
            lowest = torch.as_tensor(-1 / temperature, dtype=torch.float64).exp()
            log_s = math.log(len(others)) + mean.maximum(lowest).log()
        peak = max(x[p].detach() for p, w in positives if w > 0)
        log_e = peak + sum(w * (x[p] - peak).exp() for p, w in positives).log()
        mean_x = sum(w * x[p] for p, w in positives) / total

        def term(of_positives, log_s=log_s, others=others):
            if decoupled:
                return log_s - of_positives if others else 0 * of_positives
            return F.softplus(log_s - of_positives, threshold=700)  # precise for large gaps too

        if over_positives == "supcon":
            losses.append((torch.logaddexp(log_s, log_e) if others else log_e) - mean_x)
        elif over_positives == "sum":
            losses.append(term(log_e))
        else:
            losses.append(sum(w * term(x[p]) for p, w in positives) / total)
    return torch.stack(losses), exist


def modified(x, i, others, temperature, score_mod, metadata):
    """The user's function of one query's scores, of which those of negatives have a gradient."""
    taus = torch.as_tensor(temperature, dtype=x.dtype).expand_as(x)
    seen, tau = (
        torch.stack([v if j in others else v.detach() for j, v in enumerate(values)])[None]
        for values in (x, taus)
    )
    pair = SimpleNamespace(
        is_negative=torch.tensor([[j in others for j in range(len(x))]]),
        temperature=tau,
        query=None if metadata is None else metadata[i][None, None],
        key=None if metadata is None else metadata[None],
    )
    return score_mod(seen, pair)[0].double()


def mean_of_queries(losses, exist):
    """Over the queries that have a positive."""
    return losses.sum() / max(1, sum(exist))


def pgcl_contrast(views, prototypes_of_heads, labels=None, memory=None, memory_labels=None, **mode):
    """As ``info_nce``, reweighted. The memory is balanced by itself, as a view is."""
    balanced = [*views] if memory is None or len(memory) == 0 else [*views, memory]
    q_of_heads = [torch.cat([targets(z, c) for z in balanced]) for c in prototypes_of_heads]
    options = ("weighting", "exclude_same_cluster")
    of_weights = {name: mode.pop(name) for name in options if name in mode}
    weights = family_weights(torch.cat(balanced), q_of_heads, prototypes_of_heads, **of_weights)
    mode = {"temperature": 0.5, **mode}
    return info_nce(views, labels, memory, memory_labels, weights=weights, **mode)


class Terms(NamedTuple):
    loss: Tensor
    contrast: Tensor
    consistency: Tensor
    targets: list[Tensor]  # of each view, [N, K], heads side by side


def pgcl(
    views,
    prototypes_of_heads,
    *,
    contrast_weight=1.0,
    consistency_weight=0.3,
    reduction="mean",
    temperature=0.5,
    balance_predictions=False,
    **mode,
):
    """The loss and its terms; the mode and the memory are those of ``pgcl_contrast``."""
    q_of_heads, of_heads = [], []
    for prototypes in prototypes_of_heads:
        q = [targets(z, prototypes) for z in views]
        log_p = [log_predictions(z, prototypes, temperature, balance_predictions) for z in views]
        q_of_heads.append(q)
        of_heads.append(consistency(log_p, q))
    swapped = torch.stack(of_heads).mean(0)
    contrast, exist = pgcl_contrast(views, prototypes_of_heads, temperature=temperature, **mode)
    if reduction == "mean":
        contrast, swapped = mean_of_queries(contrast, exist), swapped.mean()
    elif reduction == "sum":
        contrast, swapped = contrast.sum(), swapped.sum()
    loss = contrast_weight * contrast + consistency_weight * swapped
    of_views = [torch.cat(q, dim=1) for q in zip(*q_of_heads, strict=True)]
    return Terms(loss, contrast, swapped, of_views)


def assume_clear_clusters(sets, prototypes_of_heads, gap):
    """Rounding must not decide about clusters: two are alike, or further apart than the gap."""
    for prototypes in prototypes_of_heads:
        for z in sets:
            ranks = ranking(targets(z, prototypes), z, prototypes)
            gaps = ranks.sort().values.diff()
            assume(((gaps == 0) | (gaps > gap)).all())


class Memory:
    """The last embeddings and their labels, oldest first; None is the label of no query."""

    def __init__(self, size):
        self.size, self.embeddings, self.labels = size, None, []

    def store(self, sets, labels=None):
        labels = [[None] * len(z) for z in sets] if labels is None else labels
        past = [] if self.embeddings is None else [self.embeddings]
        embeddings = torch.cat([*past, *(z.detach().double() for z in sets)])
        first = max(0, len(embeddings) - self.size)
        self.embeddings = embeddings[first:]
        self.labels = [*self.labels, *(label for of_set in labels for label in of_set)][first:]


def kmeans(z, start, draws, rounds):
    """Centres of unit vectors: greedy k-means++ with the draws from 0 to 1, and Lloyd's rounds."""

    def distances_to(seeds):
        nearest = min_of([1 - z @ seed for seed in seeds]) if seeds else torch.ones(len(z)).double()
        return nearest.where(z.any(1) & (nearest > 1e-11), 0.0)

    def min_of(distances):
        return torch.stack(distances).min(0).values

    seeds = []
    for draws_of_seed in draws:
        weights = distances_to(seeds)
        if weights.sum() == 0:
            break
        ends = weights.cumsum(0)
        candidates = [z[(ends > draw * ends[-1]).nonzero()[0, 0]] for draw in draws_of_seed]
        totals = [float(distances_to([*seeds, candidate]).sum()) for candidate in candidates]
        best = candidates[totals.index(min(totals))]
        for candidate, total in zip(candidates, totals, strict=True):
            # Rounding decides between candidates that are equally good.
            assume(torch.equal(candidate, best) or total > min(totals) + 1e-9)
        seeds.append(best)
    if not seeds:
        return start
    centers = torch.stack(seeds)
    for _ in range(rounds):
        nearest = (z @ centers.T).argmax(1)
        sums = torch.stack([z[nearest == k].sum(0) for k in range(len(centers))])
        lengths = sums.norm(dim=1, keepdim=True)
        centers = (sums / lengths).where(lengths > 0, centers)
    return torch.cat([centers, start[len(centers) :]])
