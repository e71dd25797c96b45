"""The table of losses: how each is made and what it is called with, on one process or many."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from helpers.score_mods import by_distance, far, hardest, random_metadata, with_a_mean_of_one
from pgcl_losses import InfoNCE, PGCLLoss

DIM = 4


class Apart(nn.Module):
    """The modules of PGCLLoss, each called by itself, with all that the first returns or parts."""

    def __init__(self, by="assignments", **options):
        super().__init__()
        self.by, self.pgcl = by, PGCLLoss(DIM, **options)
        self.contrast = self.pgcl.contrast

    def forward(self, *views):
        prototypes, contrast, consistency = self.pgcl.children()
        a = prototypes(*views)
        if self.by == "assignments":
            return contrast(*views, a) + consistency(a)
        if self.by == "assignments alone":
            return contrast(a) + consistency(a)
        clusters = [view.clusters for view in a]
        return contrast(*views, clusters=clusters, prototypes=prototypes.weight) + consistency(*a)


def learned_temperature(loss, **options):
    return loss(temperature=nn.Parameter(torch.tensor(0.3)), **options)


info_nce = partial(InfoNCE, dim=DIM)
pgcl = partial(PGCLLoss, DIM, num_prototypes=3)

# How a loss is made, and what it is called with: sets of any lengths or views, labels, positives.
LOSSES = {
    "InfoNCE": (InfoNCE, ""),
    "sets with labels": (partial(InfoNCE, negatives="cross", reduction="sum"), "sets labels"),
    "hard": (partial(InfoNCE, hardness=1.0), "labels"),
    "hard and debiased": (partial(InfoNCE, hardness=0.5, debias=0.1), "sets labels"),
    "memory": (partial(info_nce, memory_size=7, reduction="none"), "sets labels"),
    "learned temperature": (partial(learned_temperature, InfoNCE, hardness=1.0, debias=0.5), ""),
    "positives": (partial(InfoNCE, decoupled=True), "positives"),
    "positives and labels": (
        partial(InfoNCE, queries="first", debias=0.1, reduction="none"),
        "sets labels positives",
    ),
    "SupCon": (partial(InfoNCE, over_positives="supcon"), "sets labels"),
    "sum of positives": (partial(InfoNCE, over_positives="sum", decoupled=True), "sets positives"),
    "dot products": (partial(info_nce, similarity="dot", memory_size=7), "labels remember"),
    "given negatives": (
        partial(InfoNCE, hardness=0.5, over_positives="supcon"),
        "sets labels negatives",
    ),
    "score_mod": (partial(InfoNCE, score_mod=by_distance), "sets labels metadata"),
    "score_mod of a learned temperature": (
        partial(learned_temperature, InfoNCE, score_mod=far, queries="first"),
        "sets labels positives",
    ),
    "score_mod of all negatives": (
        partial(InfoNCE, score_mod=hardest, negatives="cross", reduction="none"),
        "",
    ),
    "PGCL": (pgcl, ""),
    "PGCL with a score_mod": (partial(pgcl, score_mod=by_distance, decoupled=True), "metadata"),
    "heads with a score_mod": (partial(pgcl, num_prototypes=(3, 4), score_mod=far), "labels"),
    "reduction": (partial(pgcl, reduction="none", negatives="cross"), ""),
    "queue and memory": (partial(pgcl, queue_size=20, memory_size=7), "labels remember"),
    "weighted by samples": (partial(pgcl, weighting="sample", memory_size=7, queue_size=3), ""),
    "frozen prototypes": (partial(pgcl, freeze_steps=2, reduction="sum"), ""),
    "heads": (partial(pgcl, num_prototypes=(3, 5), queue_size=5), ""),
    "balanced predictions": (
        partial(pgcl, num_prototypes=(3, 5), balance_predictions=True, memory_size=7, queue_size=5),
        "",
    ),
    "heads with a memory": (partial(pgcl, num_prototypes=(3, 4), memory_size=9), "labels"),
    "PGCL with positives": (partial(pgcl, queries="first"), "positives"),
    "PGCL as SupCon": (partial(pgcl, over_positives="supcon", memory_size=7), "labels"),
    "PGCL that learns its temperature": (partial(learned_temperature, pgcl), ""),
    "contrast alone": (partial(pgcl, consistency_weight=0.0), ""),
    "consistency alone": (partial(pgcl, contrast_weight=0.0, queue_size=4), ""),
    "modules apart": (partial(Apart, weighting="sample", negatives="cross", queue_size=5), ""),
    "modules with a score_mod": (
        partial(Apart, weighting="sample", score_mod=with_a_mean_of_one),
        "",
    ),
    "modules with heads": (partial(Apart, num_prototypes=(3, 4), reduction="none"), ""),
    "modules with assignments alone": (partial(Apart, "assignments alone"), ""),
}
# Of one batch of two views, with a temperature that is given: what has other arithmetic.
ARITHMETIC = [
    *("InfoNCE", "hard and debiased", "memory", "positives", "positives and labels", "SupCon"),
    *("sum of positives", "dot products", "given negatives", "contrast alone"),
    *("weighted by samples", "heads with a memory", "score_mod"),
]


class Model(nn.Module):
    """An encoder with its loss."""

    def __init__(self, loss, encoder=None):
        super().__init__()
        self.encoder, self.loss = encoder or nn.Linear(3, DIM), loss

    def forward(self, *sets, **given):
        return self.loss(*map(self.encoder, sets), **given)


def model_of(make, seed=0, **options):
    """A model in float64, alike for the same seed."""
    torch.manual_seed(seed)
    return Model(make(**options)).double()


def loss_of(name, views, **options):
    """The value of a new loss of the table, of views ``[2, N, DIM]``."""
    return function_of(name, len(views[0]), **options)(views)


def function_of(name, length, **options):
    """A new loss of the table, as a function of two views. Its memory is half full."""
    make, inputs = LOSSES[name]
    torch.manual_seed(0)
    loss, first = make(**options), length // 4 if "sets" in inputs else 0
    given = portions_of([[length], [length - first]], inputs)[0].given
    if "positive_weights" in given:
        given["positive_weights"] = given["positive_weights"].float()
    if "remember" in inputs:
        loss.remember(torch.randn(3, DIM))
    return lambda views: loss(views[0], views[1][first:], **given)


def of_seed(seed):
    return torch.Generator().manual_seed(seed)


class Portion(NamedTuple):
    sets: tuple[torch.Tensor, ...]  # [N, 3] each
    given: dict[str, Any]  # to the loss besides
    positions: torch.Tensor  # of its vectors in the sets of all ranks, one after the other


def portions_of(counts, inputs="", seed=0):
    """The whole batch, and the portion of each rank; ``counts`` are those of each set and rank."""
    random = of_seed(seed)
    total, num_ranks = sum(map(sum, counts)), len(counts[0])
    vectors = torch.randn(total, 3, dtype=torch.float64, generator=random)
    labels = torch.randint(3, (total,), generator=random)
    metadata = random_metadata(total, random)

    def portion(positions, lengths, pairs, weights):
        given = {"labels": labels[positions].split(lengths)} if "labels" in inputs else {}
        if "metadata" in inputs:
            given["metadata"] = metadata[positions].split(lengths)
        if "positives" in inputs:
            given |= {"positives": pairs, "positive_weights": weights}
        if "negatives" in inputs:
            given["negative_pairs"] = pairs
        return Portion(vectors[positions].split(lengths), given, positions)

    parts = torch.arange(total).split([count for of_set in counts for count in of_set])
    of_ranks, all_pairs, all_weights = [], [], []
    for rank in range(num_ranks):
        positions, lengths = torch.cat(parts[rank::num_ranks]), [of_set[rank] for of_set in counts]
        num_pairs = max(7, lengths[0])
        pairs, weights = random_pairs(len(positions), lengths[0], num_pairs, 10 * seed + rank)
        of_ranks.append(portion(positions, lengths, pairs, weights))
        all_pairs.append(positions[pairs])
        all_weights.append(weights)
    lengths, of_pairs = [sum(of_set) for of_set in counts], torch.cat(all_pairs, dim=1)
    return portion(torch.arange(total), lengths, of_pairs, torch.cat(all_weights)), *of_ranks


def random_pairs(count, num_queries, num_pairs, seed=0):
    """Pairs of different positions, the first of a query, and weights, some of them 0."""
    random, num = of_seed(seed), num_pairs if count > 1 and num_queries > 0 else 0
    query = torch.randint(max(1, num_queries), (num,), generator=random)
    key = (query + torch.randint(1, max(2, count), (num,), generator=random)) % max(1, count)
    weights = torch.rand(num, dtype=torch.float64, generator=random)
    return torch.stack([query, key]), weights * (weights > 0.3)


def gradients(loss, inputs, **options):
    return torch.autograd.grad(loss, inputs, materialize_grads=True, **options)


def gradients_of(model):
    return [parameter.grad for parameter in model.parameters()]


def mean_over_ranks(value):
    total = value.detach().clone()
    distributed.all_reduce(total)
    return total / distributed.get_world_size()
