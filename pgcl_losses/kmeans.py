"""Where prototypes can start: k-means of rows by cosine, seeded by k-means++.

Arthur and Vassilvitskii, k-means++: the advantages of careful seeding, SODA 2007.
"""

import torch
from torch import Tensor

_ROUNDS = 10  # Lloyd's; hardly a row changes its centre after them
# Cosines carry a few rounding errors each; rows nearer than this many are the same.
_ROUNDING_ERRORS = 32
_CHUNK = 1 << 14  # rows: no matrix of all rows and all centres has to be in memory


def spherical_kmeans(rows: Tensor, start: Tensor, draws: Tensor) -> Tensor:
    """Centres of unit rows ``[M, D]``, as unit rows ``[K, D]``.

    ``start``: unit rows ``[K, D]``, of which the last ones stay where there are fewer different
    rows than centres. ``draws``: ``[K]`` from 0 to 1, what is random in the seeding.
    """
    seeds = _seeds(rows, draws)
    return torch.cat([_moved(rows, seeds), start[len(seeds) :]])


def _seeds(rows: Tensor, draws: Tensor) -> Tensor:
    """Rows, each drawn by its squared distance from the nearest drawn before: twice 1 - cosine."""
    # 2 is as far as can be; a row of zeros has no direction.
    distances = 2 * (rows.square().sum(1) > 0).to(rows.dtype)
    seeds: list[Tensor] = []
    for draw in draws.tolist():
        running = distances.cumsum(0, dtype=torch.float64)
        if running[-1] == 0:
            break
        place = torch.searchsorted(running, draw * running[-1:], right=True)
        seed = rows[place.clamp_max(len(rows) - 1)]  # [1, D]
        seeds.append(seed)
        distances = torch.minimum(distances, 1 - rows @ seed[0])
        distances[distances <= _ROUNDING_ERRORS * torch.finfo(rows.dtype).eps] = 0
    return torch.cat(seeds) if seeds else rows[:0]


def _moved(rows: Tensor, centers: Tensor) -> Tensor:
    """Lloyd's rounds: each centre to the direction of the mean of the rows nearest to it."""
    if len(centers) == 0:
        return centers
    for _ in range(_ROUNDS):
        sums = torch.zeros_like(centers)
        for chunk in torch.split(rows, _CHUNK):
            nearest = (chunk @ centers.T).argmax(1)
            # A product, as adding up by index gives a GPU other digits each time.
            members = torch.zeros_like(chunk[:, :1]).expand(-1, len(centers)).clone()
            sums += members.scatter_(1, nearest.unsqueeze(1), 1).T @ chunk
        lengths = torch.linalg.vector_norm(sums, dim=1, keepdim=True)
        centers = torch.where(lengths > 0, sums / lengths, centers)
    return centers
