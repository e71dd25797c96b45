"""What has no negatives: a loss of two views ``[N, D]``, written from its paper."""

from torch import Tensor, nn


class BarlowTwins(nn.Module):
    """Columns of two views agree, and no two columns say the same (Zbontar et al., 2021).

    The weight of the second part is 1 / D, as in its version for graphs (Bielak et al., 2022).
    """

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        one, other = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (z1, z2))
        correlation = one.T @ other / len(one)  # [D, D]
        diagonal = correlation.diagonal()
        off = correlation.square().sum() - diagonal.square().sum()
        return (1 - diagonal).square().sum() + off / len(correlation)
