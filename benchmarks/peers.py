"""What people use instead, in the form they use it."""

import torch
import torch.nn.functional as F
from torch import Tensor


def division_loop(scores: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    """Sinkhorn-Knopp as SwAV and its followers write it: the matrix is divided in place."""
    q = torch.exp(scores / epsilon).T
    num_prototypes, num_samples = q.shape
    q /= q.sum()
    for _ in range(iterations):
        q /= q.sum(dim=1, keepdim=True)
        q /= num_prototypes
        q /= q.sum(dim=0, keepdim=True)
        q /= num_samples
    q *= num_samples
    return q.T


def shortest_division_loop(scores: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    """The same without the divisions that cancel: as lean as that loop gets."""
    q = torch.exp(scores / epsilon)
    for _ in range(iterations):
        q /= q.sum(dim=0)
        q /= q.sum(dim=1, keepdim=True)
    return q


def log_domain_loop(scores: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
    """The usual remedy against overflow: logarithms throughout."""
    log_q = scores / epsilon
    for _ in range(iterations):
        log_q = log_q - torch.logsumexp(log_q, dim=0, keepdim=True)
        log_q = log_q - torch.logsumexp(log_q, dim=1, keepdim=True)
    return log_q.exp()


def masked_info_nce(z1: Tensor, z2: Tensor, temperature: float = 0.2) -> Tensor:
    """InfoNCE with intra-view negatives in PyGCL's form: 0/1 masks multiplied into exponentials."""

    def one_way(anchor: Tensor, other: Tensor) -> Tensor:
        same = torch.eye(len(anchor), dtype=anchor.dtype, device=anchor.device)
        sample = torch.cat([other, anchor])
        positive = torch.cat([same, torch.zeros_like(same)], dim=1)
        negative = torch.cat([1 - same, torch.ones_like(same) - same], dim=1)
        similarity = F.normalize(anchor) @ F.normalize(sample).T / temperature
        exponentials = torch.exp(similarity) * (positive + negative)
        log_prob = similarity - torch.log(exponentials.sum(dim=1, keepdim=True))
        return -((log_prob * positive).sum(dim=1) / positive.sum(dim=1)).mean()

    return (one_way(z1, z2) + one_way(z2, z1)) / 2
