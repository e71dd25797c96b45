"""What else treats false negatives, or has no negatives: losses of two views ``[N, D]`` each.

Written from their papers: in PyGCL 0.1.2 `DebiasedInfoNCE` and `HardnessInfoNCE` stop with an
IndexError, and lack the minus sign of a loss.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class DebiasedNCE(nn.Module):
    """InfoNCE less the share of negatives that are of the query's class (Chuang et al., 2020).

    With ``hardness`` above 0, negatives near the query count more (Robinson et al., 2021).

    Args:
        temperature: tau.
        class_share: how probable it is that two graphs are of one class, tau+ in the papers.
        hardness: beta in the second paper.
    """

    def __init__(self, temperature: float, class_share: float = 0.1, hardness: float = 0.0) -> None:
        super().__init__()
        self.temperature, self.class_share, self.hardness = temperature, class_share, hardness

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        rows = F.normalize(torch.cat([z1, z2]))  # [2N, D]
        count = len(z1)
        scores = rows @ rows.T / self.temperature
        own = torch.arange(2 * count) % count
        positive = scores[torch.arange(2 * count), (torch.arange(2 * count) + count) % (2 * count)]
        scores = scores.masked_fill(own[:, None] == own, -math.inf)
        # Mean over negatives of e^s, weighted by e^(beta s) scaled to mean 1.
        others = 2 * count - 2
        mean = scores.logsumexp(1) - math.log(others)
        if self.hardness > 0:
            harder = ((1 + self.hardness) * scores).logsumexp(1)
            mean = harder - (self.hardness * scores).logsumexp(1)
        unbiased = (mean.exp() - self.class_share * positive.exp()) / (1 - self.class_share)
        negatives = others * unbiased.clamp(min=math.exp(-1 / self.temperature))
        return F.softplus(negatives.log() - positive).mean()


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
