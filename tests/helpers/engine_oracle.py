"""The contrast word by word: in float64, query by query, with loops over pairs and autograd."""

import math

import torch

from pgcl_losses.engine.pair_weights import Factors, Table


def losses(
    pairs,
    embeddings,
    temperature,
    positive_weights,
    over_positives="mean",
    decoupled=False,
    debias=0.0,
):
    """The losses ``[Q]``, differentiable, and whether each query has a positive."""
    keys = embeddings if pairs.memory is None else torch.cat([embeddings, pairs.memory])
    cosines, log_weights = embeddings @ keys.T, log_of_weights(pairs)
    each, exist = [], []
    for i, (negatives, positives) in enumerate(of_queries(pairs, positive_weights)):
        negatives = [j for j in negatives if log_weights[i, j] > -math.inf]
        scores = cosines[i] / temperature
        log_w = log_weights[i] + log_of_pair_weight(pairs, i, cosines[i].detach())
        if pairs.hardness > 0 and negatives:
            harder = pairs.hardness * scores
            log_w = (
                log_w + harder - (log_w + harder)[negatives].logsumexp(0) + math.log(len(negatives))
            )
        log_s = (log_w + scores)[negatives].logsumexp(0)
        total = sum(weight for _, weight in positives)
        exist.append(bool(total > 0))
        if not exist[-1]:
            each.append(scores.new_zeros(()))
            continue
        if debias > 0 and negatives:
            of_positives = sum(w * scores[p].exp() for p, w in positives) / total
            mean = (log_s.exp() / len(negatives) - debias * of_positives) / (1 - debias)
            mean = torch.maximum(mean, (-1 / torch.as_tensor(temperature)).exp())
            log_s = mean.log() + math.log(len(negatives))
        peak = max(scores[p].detach() for p, w in positives if w > 0)
        log_e = sum(w * (scores[p] - peak).exp() for p, w in positives).log() + peak
        mean_score = sum(w * scores[p] for p, w in positives) / total
        if not negatives:
            each.append(log_e - mean_score if over_positives == "supcon" else 0.0 * log_e)
        elif over_positives == "supcon":
            each.append(torch.logaddexp(log_s, log_e) - mean_score)
        elif over_positives == "sum":
            each.append(term(log_s, log_e, decoupled))
        else:
            each.append(sum(w * term(log_s, scores[p], decoupled) for p, w in positives) / total)
    return torch.stack(each), torch.tensor(exist)


def term(log_s, x, decoupled):
    return log_s - x if decoupled else torch.logaddexp(log_s, x) - x


def are_filled(pairs):
    """Which embeddings of the batch and of the memory take part: ``[M + B]``."""
    if pairs.filled is None:
        return [True] * (len(pairs.embeddings) + pairs.size_of_memory())
    return pairs.filled.tolist()


def of_queries(pairs, positive_weights):
    """The negatives of each query, and its positives with their weights."""
    count, num_memory = len(pairs.embeddings), pairs.size_of_memory()
    sets = [a for a, length in enumerate(pairs.lengths) for _ in range(length)]
    items = [place for length in pairs.lengths for place in range(length)] + [None] * num_memory
    if pairs.items is not None:
        items = pairs.items.tolist()
    by_index = [] if pairs.positives is None else pairs.positives.T.tolist()
    listed = [] if pairs.negative_pairs is None else pairs.negative_pairs.T.tolist()
    filled = are_filled(pairs)
    for i in range(pairs.num_queries()):
        negatives = list(range(count, count + num_memory))
        positives = [(j, positive_weights[n]) for n, (q, j) in enumerate(by_index) if q == i]
        given = {j for j, _ in positives}
        for j in range(count):
            compared = j != i if pairs.negatives in ("all", "given") else sets[i] != sets[j]
            if compared and items[i] == items[j] and j not in given:
                positives.append((j, 1.0))
            elif compared and pairs.negatives != "memory":
                negatives.append(j)
        negatives = [j for j in negatives if filled[j] and items[j] != items[i] and j not in given]
        if pairs.negatives == "given":
            negatives = [j for q, j in listed if q == i]
        yield negatives, positives


def log_of_pair_weight(pairs, i, cosines):
    """Of one query, scaled to a mean of 1 over all embeddings: ``[M + B]``."""
    if pairs.pair_weight is None:
        return torch.zeros_like(cosines)
    numbers = [of_each[i] for of_each in pairs.pair_weight.numbers(1.0)]
    by_cosine = pairs.pair_weight.formula(cosines, *numbers) * math.log(2)
    filled = torch.tensor(are_filled(pairs))
    return by_cosine - by_cosine[filled].logsumexp(0) + math.log(filled.sum())


def log_of_weights(pairs):
    """Of a table or factors, ``[Q, M + B]``."""
    weights, count = pairs.weights, pairs.num_queries()
    if isinstance(weights, Table):
        of_heads = [
            log_table[clusters[:count].unsqueeze(1), clusters]
            for log_table, clusters in zip(
                weights.log_weights, weights.clusters.unbind(1), strict=True
            )
        ]
        return torch.stack(of_heads).logsumexp(0) - math.log(len(of_heads))
    if isinstance(weights, Factors):
        return (weights.left[:count] @ weights.right.T).log()
    return pairs.embeddings.new_zeros(count, len(pairs.keys()))
