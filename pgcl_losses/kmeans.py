"""Initialisation of prototypes from embeddings: k-means by cosine, with greedy k-means++.

Arthur and Vassilvitskii, k-means++: the advantages of careful seeding, SODA 2007.
"""

import math

import torch
from torch import Tensor

from pgcl_losses._normalize import unit_vectors
from pgcl_losses._warnings import warn

_ROUNDS = 10  # Lloyd's; hardly a row changes its centre after them
_SAME = 1e-11  # 1 - cosine of rows that float32 can hardly tell apart
_CHUNK = 1 << 14  # rows at a time, so that memory holds no matrix of all rows and all centres


def draw(num_centers: int, generator: torch.Generator | None = None) -> Tensor:
    """Random numbers for the seeds of so many centres: a row for each, with one per candidate."""
    # As many candidates as in scikit-learn; device, for another one may be the default.
    shape = num_centers, 2 + int(math.log(num_centers))
    return torch.rand(shape, generator=generator, device="cpu")


def spherical_kmeans(rows: Tensor, start: Tensor, draws: Tensor) -> Tensor:
    """Centres of rows ``[M, D]`` by their directions, as unit rows ``[K, D]``.

    ``start``: ``[K, D]``. If there are fewer different directions than centres, its last rows stay.
    ``draws``: what :func:`draw` returns for K.

    Computed in float64, as rows of an untrained encoder may differ only in their last digits.
    """
    exact = torch.float32 if rows.device.type == "mps" else torch.float64  # Metal has no more
    rows, start = unit_vectors(rows, exact), unit_vectors(start, exact)
    seeds = _seeds(rows, draws)
    if len(seeds) < len(start):
        warn(
            f"PGCLLoss: {len(seeds)} different embeddings initialise {len(start)} prototypes, so "
            f"{len(start) - len(seeds)} prototypes stay as they were: use more embeddings or fewer "
            "prototypes"
        )
    return torch.cat([_moved(rows, seeds), start[len(seeds) :]])


def _seeds(rows: Tensor, draws: Tensor) -> Tensor:
    """Greedy k-means++: of candidates drawn by squared distance to the nearest seed, the best."""
    # The squared distance is 2 as far as can be; a row of zeros has no direction.
    distances = 2 * (rows.square().sum(1) > 0).to(rows.dtype)
    seeds: list[Tensor] = []
    for draws_of_seed in draws.double():
        running = distances.cpu().double().cumsum(0)  # a GPU's has other digits each time
        if running[-1] == 0:
            break
        drawn = torch.searchsorted(running, draws_of_seed * running[-1], right=True)
        candidates = rows[drawn.clamp_(max=len(rows) - 1).to(rows.device)]  # [L, D]
        left = torch.minimum(distances, 1 - candidates @ rows.T)  # [L, M]
        left.masked_fill_(left <= _SAME, 0)
        best = left.sum(1).argmin()
        seeds.append(candidates[best])
        distances = left[best]
    return torch.stack(seeds) if seeds else rows[:0]


def _moved(rows: Tensor, centers: Tensor) -> Tensor:
    """Lloyd's rounds: each centre moves to the direction of the mean of the rows nearest to it."""
    if len(centers) == 0:
        return centers
    numbers = torch.arange(len(centers), device=rows.device)
    for _ in range(_ROUNDS):
        sums = torch.zeros_like(centers)
        for chunk in torch.split(rows, _CHUNK):
            nearest = (chunk @ centers.T).argmax(1, keepdim=True)
            # A product, as adding up by index gives a GPU other digits each time.
            sums += (nearest == numbers).to(rows.dtype).T @ chunk
        lengths = torch.linalg.vector_norm(sums, dim=1, keepdim=True)
        centers = torch.where(lengths > 0, sums / lengths, centers)
    return centers
