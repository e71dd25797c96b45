"""Initialisation of prototypes from embeddings: k-means with cosines and greedy k-means++.

Arthur and Vassilvitskii, k-means++: the advantages of careful seeding, SODA 2007.
"""

import math

import torch
from torch import Tensor

from pgcl_losses.base.normalize import unit_vectors
from pgcl_losses.base.warnings import warn

_ROUNDS = 10  # rounds of Lloyd's algorithm; after these, few embeddings change their centre
_SAME = 1e-11  # if 1 - cosine is below this, float32 can hardly tell two embeddings apart
_CHUNK = 1 << 14  # embeddings at a time: no matrix of all embeddings and centres exists


def spherical_kmeans(embeddings: Tensor, initial: Tensor, draws: Tensor | None = None) -> Tensor:
    """Cluster embeddings ``[M, D]`` by direction; return the centres, unit vectors ``[K, D]``.

    ``initial``: centres ``[K, D]``. If the embeddings have fewer different directions than K, the
    last initial centres are returned unchanged. ``draws``: random numbers from 0 to 1 ``[K, L]``,
    which draw L candidates for each centre; by default L grows with log K.

    The computation is in float64, since the embeddings of an untrained encoder may differ only in
    their last digits.
    """
    exact = torch.float32 if embeddings.device.type == "mps" else torch.float64  # no float64 on MPS
    embeddings, initial = unit_vectors(embeddings, exact), unit_vectors(initial, exact)
    if draws is None:  # as many as in scikit-learn; drawn on the CPU, for the same result
        draws = torch.rand(len(initial), 2 + int(math.log(len(initial))), device="cpu")
    seeds = _seeds(embeddings, draws)
    if len(seeds) < len(initial):
        warn(
            f"{len(seeds)} different embeddings initialise {len(initial)} "
            f"prototypes, so {len(initial) - len(seeds)} prototypes stay as they were: use more "
            "embeddings or fewer prototypes"
        )
    moved = _moved(embeddings, seeds) if len(seeds) > 0 else seeds
    return torch.cat([moved, initial[len(seeds) :]])


def _seeds(embeddings: Tensor, draws: Tensor) -> Tensor:
    """Greedy k-means++: draw candidates with probabilities by their distance to the nearest seed.

    Of the candidates for a seed, the one that leaves the smallest total distance becomes the seed.
    """
    # 1 - cosine is at most 2. A vector of zeros has no direction, and is never drawn.
    distances = 2 * (embeddings.square().sum(1) > 0).to(embeddings.dtype)
    seeds: list[Tensor] = []
    for draws_of_seed in draws.double():
        running = distances.cpu().double().cumsum(0)  # on a GPU, cumsum is nondeterministic
        if running[-1] == 0:
            break
        drawn = torch.searchsorted(running, draws_of_seed * running[-1], right=True)
        drawn = drawn.clamp_(max=len(embeddings) - 1).to(embeddings.device)
        candidates = embeddings[drawn]  # [L, D]
        left = torch.minimum(distances, 1 - candidates @ embeddings.T)  # [L, M]
        left.masked_fill_(left <= _SAME, 0)
        best = left.sum(1).argmin()
        seeds.append(candidates[best])
        distances = left[best]
    return torch.stack(seeds) if seeds else embeddings[:0]


def _moved(embeddings: Tensor, centers: Tensor) -> Tensor:
    """Lloyd's algorithm: each round moves each centre to the mean direction of its embeddings."""
    numbers = torch.arange(len(centers), device=embeddings.device)
    for _ in range(_ROUNDS):
        sums = torch.zeros_like(centers)
        for chunk in torch.split(embeddings, _CHUNK):
            nearest = (chunk @ centers.T).argmax(1, keepdim=True)
            # A matrix product, since index_add is nondeterministic on a GPU.
            sums += (nearest == numbers).to(chunk.dtype).T @ chunk
        lengths = torch.linalg.vector_norm(sums, dim=1, keepdim=True)
        centers = torch.where(lengths > 0, sums / lengths, centers)
    return centers
