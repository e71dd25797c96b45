"""A loss of two views ``[N, D]`` without negatives, written from its paper."""

from torch import Tensor, nn


class BarlowTwins(nn.Module):
    """Cross-correlation of two views close to the identity (Zbontar et al., 2021).

    Off-diagonal entries weigh 1 / D, as in the version for graphs (Bielak et al., 2022).
    """

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        one, other = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (z1, z2))
        correlation = one.T @ other / len(one)  # [D, D]
        diagonal = correlation.diagonal()
        off = correlation.square().sum() - diagonal.square().sum()
        return (1 - diagonal).square().sum() + off / len(correlation)
