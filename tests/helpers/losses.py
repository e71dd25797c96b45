"""Losses of two views, of every kind, each a function of views ``[2, N, DIM]`` and options."""

from functools import partial

import torch

from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE

DIM = 4


def numbers(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).sin().view(shape)


def of_views(views, **options):
    return InfoNCE(**options)(*views)


def of_items(views, **options):
    """Sets of different lengths."""
    z1, z2 = views[0], views[1][len(views[0]) // 4 :]
    items = [torch.arange(len(z), device=z.device) // 2 % 50 for z in (z1, z2)]
    return InfoNCE(**options)(z1, z2, items=items)


def by_index(views, **options):
    """Positives, some of them with a weight of 0."""
    n, i = len(views[0]), torch.arange(40, device=views[0].device)
    pairs = torch.stack([i % n, n + i * i % n])
    loss = InfoNCE(queries="first", decoupled=True, **options)
    return loss(*views, positives=pairs, positive_weights=i % 3 / 2.0)


def given_negatives(views, **options):
    """Listed, one of them twice, beside two positives of each query."""
    n, i = len(views[0]), torch.arange(40, device=views[0].device)
    pairs = torch.stack([i % n, n + (i + 1 + i % 2) % n])
    loss = InfoNCE(negatives="given", over_positives="supcon", **options)
    items = torch.arange(n, device=views[0].device) // 2
    return loss(*views, items=items, negative_pairs=pairs)


def with_memory(views, **options):
    """It is half full."""
    with views[0].device:
        loss = InfoNCE(memory_size=40, dim=DIM, **options)
    loss.remember(numbers(20, DIM).to(loss.memory.embeddings))
    return loss(*views)


def contrast(views, **options):
    """Of given clusters and prototypes."""
    i, prototypes = torch.arange(len(views[0]), device=views[0].device), numbers(3, DIM)
    given = {"clusters": [i % 3, i // 2 % 3], "prototypes": prototypes.to(views[0])}
    return PrototypeReweightedNCE(**options)(*views, **given)


def pgcl(views, num_prototypes=3, **options):
    torch.manual_seed(0)
    with views[0].device:
        loss = PGCLLoss(DIM, num_prototypes, **options)
    return loss(*views)


LOSSES = {
    "InfoNCE": of_views,
    "hard and debiased": partial(of_views, hardness=0.5, debias=0.2),
    "of items": partial(of_items, debias=0.2, negatives="cross"),
    "by index": by_index,
    "SupCon by items": partial(of_items, over_positives="supcon"),
    "sum by index": partial(by_index, over_positives="sum"),
    "dot products": partial(of_views, similarity="dot", hardness=0.5),
    "given negatives": given_negatives,
    "with a memory": with_memory,
    "by prototypes": contrast,
    "by samples": partial(contrast, weighting="sample", negatives="cross"),
    "uniform": partial(contrast, weighting="uniform", exclude_same_cluster=False),
    "PGCL": partial(pgcl, num_prototypes=(3, 4), soft_clusters=True),
}
