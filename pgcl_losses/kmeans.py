"""Initialisation of prototypes from embeddings: k-means by cosine, with greedy k-means++.

Arthur and Vassilvitskii, k-means++: the advantages of careful seeding, SODA 2007.
"""

import math

import torch
from torch import Tensor

from pgcl_losses._normalize import unit_vectors
from pgcl_losses._warnings import warn

_ROUNDS = 10  # Lloyd's; few embeddings change their centre after them
_SAME = 1e-11  # 1 - cosine of embeddings that float32 can hardly tell apart
_CHUNK = 1 << 14  # embeddings at a time: memory holds no matrix of all of them and all centres


def spherical_kmeans(embeddings: Tensor, initial: Tensor, draws: Tensor | None = None) -> Tensor:
    """Centres of embeddings ``[M, D]`` by their directions, unit vectors ``[K, D]``.

    ``initial``: ``[K, D]``. With fewer different directions than centres, its last ones stay.
    ``draws``: random numbers ``[K, L]``, of L candidates for each centre.

    Computed in float64, as embeddings of an untrained encoder may differ only in their last digits.
    """
    exact = torch.float32 if embeddings.device.type == "mps" else torch.float64  # Metal has no more
    embeddings, initial = unit_vectors(embeddings, exact), unit_vectors(initial, exact)
    if draws is None:  # as many candidates as in scikit-learn; not on the default device
        draws = torch.rand(len(initial), 2 + int(math.log(len(initial))), device="cpu")
    seeds = _seeds(embeddings, draws)
    if len(seeds) < len(initial):
        warn(
            f"PGCLLoss: {len(seeds)} different embeddings initialise {len(initial)} prototypes, so "
            f"{len(initial) - len(seeds)} prototypes stay as they were: use more embeddings or "
            "fewer prototypes"
        )
    moved = _moved(embeddings, seeds) if len(seeds) > 0 else seeds
    return torch.cat([moved, initial[len(seeds) :]])


def _seeds(embeddings: Tensor, draws: Tensor) -> Tensor:
    """Greedy k-means++: of candidates drawn by squared distance to the nearest seed, the best."""
    # 1 - cosine is 2 at most; a vector of zeros has no direction.
    distances = 2 * (embeddings.square().sum(1) > 0).to(embeddings.dtype)
    seeds: list[Tensor] = []
    for draws_of_seed in draws.double():
        running = distances.cpu().double().cumsum(0)  # a GPU's is nondeterministic
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
    """Lloyd's rounds: each centre moves to the mean direction of the embeddings nearest to it."""
    numbers = torch.arange(len(centers), device=embeddings.device)
    for _ in range(_ROUNDS):
        sums = torch.zeros_like(centers)
        for chunk in torch.split(embeddings, _CHUNK):
            nearest = (chunk @ centers.T).argmax(1, keepdim=True)
            # A product, as index_add is nondeterministic on a GPU.
            sums += (nearest == numbers).to(chunk.dtype).T @ chunk
        lengths = torch.linalg.vector_norm(sums, dim=1, keepdim=True)
        centers = torch.where(lengths > 0, sums / lengths, centers)
    return centers
