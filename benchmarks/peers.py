"""Losses of other libraries, and published code, as functions of two views; mostly at `TAU`.

To install all of them, after PyGCL (docs/install.md):

    pip install -e . pytorch-metric-learning==2.9.0 lightly==1.6.0 \\
        open_clip_torch==3.3.0 graphssl==0.2.0 sentence-transformers==6.2.0

and memeff==0.3.1, siglip-kernel==0.1.2 and inf-cl==1.2.1 where there is a GPU.
lightly and open_clip need torchvision, of the same build as torch. For builds without CUDA add
`--extra-index-url https://download.pytorch.org/whl/cpu`.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

from .measure import Loss

TAU = 0.2


def if_installed(name: str, make: Callable[[], Any]) -> Any:
    """Return ``make()``, or None if the library is not installed."""
    try:
        return make()
    except ImportError as error:
        tqdm.write(f"{name} is left out: {error}")
        return None


def pygcl_info_nce(tau: float = TAU) -> Loss:
    """PyGCL's InfoNCE with intra-view negatives; PyGCL has to be compiled."""
    from GCL.losses import InfoNCE
    from GCL.models import DualBranchContrast

    model = DualBranchContrast(InfoNCE(tau=tau), mode="G2G", intraview_negs=True)
    return lambda z1, z2: model(g1=z1, g2=z2)


def metric_learning(name: str, labels: Tensor | None = None) -> Loss:
    """pytorch-metric-learning's loss of two views; without labels each graph has its own.

    NTXentLoss takes all negatives for each positive, in one tensor. With one positive for each
    query SupConLoss is InfoNCE.
    """
    from pytorch_metric_learning import losses

    loss = getattr(losses, name)(temperature=TAU)

    def of_views(z1: Tensor, z2: Tensor) -> Tensor:
        own = torch.arange(len(z1), device=z1.device) if labels is None else labels
        return loss(torch.cat([z1, z2]), own.repeat(2))

    return of_views


def lightly_nt_xent(stored: Tensor | None = None) -> Loss:
    """lightly's InfoNCE of two views; with ``stored`` [B, D] in a memory bank."""
    from lightly.loss import NTXentLoss

    if stored is None:
        return NTXentLoss(temperature=TAU)
    loss = NTXentLoss(temperature=TAU, memory_bank_size=tuple(stored.shape))
    loss.memory_bank.bank = stored.clone()  # instead of random embeddings
    return loss


def lightly_dcl() -> Loss:
    """lightly's decoupled contrastive loss: InfoNCE without the positive in the denominator."""
    from lightly.loss import DCLLoss

    return DCLLoss(temperature=TAU)


class SwAVLines(nn.Module):
    """A SwAV head as scripts have it, after novae's: its prototypes are normalised in place.

    ``columns``: the prototypes in use; None: all.
    """

    def __init__(self, dim: int, num: int, tau: float, columns: Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, dim))
        self.tau, self.columns = tau, columns

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.copy_(F.normalize(self.weight))
        scores = [F.normalize(z) @ self.weight.T for z in (z1, z2)]
        if self.columns is not None:
            scores = [x[:, self.columns] for x in scores]
        p1, p2 = (torch.log_softmax(x / self.tau, 1) for x in scores)
        q1, q2 = (self.balanced(x) for x in scores)
        return -((q1 * p2).sum(1).mean() + (q2 * p1).sum(1).mean()) / 2

    @torch.no_grad()
    def balanced(self, scores: Tensor, epsilon: float = 0.05, iterations: int = 3) -> Tensor:
        q = torch.exp(scores / epsilon)
        q /= q.sum()
        num, num_prototypes = q.shape
        for _ in range(iterations):
            q /= q.sum(0, keepdim=True)
            q /= num_prototypes
            q /= q.sum(1, keepdim=True)
            q /= num
        return q / q.sum(1, keepdim=True)


def lightly_swav(dim: int, num: int, tau: float) -> nn.Module:
    """lightly's prototypes and SwAV loss, of two views."""
    from lightly.loss import SwaVLoss
    from lightly.models.modules import SwaVPrototypes

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.prototypes, self.loss = SwaVPrototypes(dim, num), SwaVLoss(temperature=tau)

        def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
            self.prototypes.normalize()
            scores = [self.prototypes(F.normalize(z)) for z in (z1, z2)]
            value: Tensor = self.loss(scores, [])
            return value

    return Head()


def clip() -> Loss:
    """open_clip's loss of two modalities, which expects normalised embeddings."""
    from open_clip.loss import ClipLoss

    loss = ClipLoss()
    return lambda z1, z2: loss(F.normalize(z1), F.normalize(z2), 1 / TAU)


def linear_cross_entropy(*, chunked: bool = False) -> Loss:
    """torch's matrix product and cross entropy in one, from 2.13 on: one call a direction."""
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None

    def loss(z1: Tensor, z2: Tensor) -> Tensor:
        z1, z2 = F.normalize(z1), F.normalize(z2)
        targets = torch.arange(len(z1), device=z1.device)
        one, other = (
            F.linear_cross_entropy(queries / TAU, keys, targets, options=options)
            for queries, keys in ((z1, z2), (z2, z1))
        )
        return (one + other) / 2

    return loss


def memeff_clip() -> Loss:
    """memeff's CLIP loss, whose kernels multiply float32 with TF32."""
    from memeff import MemoryEfficientCLIPLoss

    return MemoryEfficientCLIPLoss(TAU, stable=False)  # stable=True scales the gradient


def inf_cl() -> Loss:
    """Inf-CL's cross entropy in both directions; its kernels multiply float32 with TF32."""
    from inf_cl import cal_flash_loss

    def loss(z1: Tensor, z2: Tensor) -> Tensor:
        z1, z2 = F.normalize(z1), F.normalize(z2)
        size = min(256, z1.shape[1])
        both = (cal_flash_loss(*z, scale=1 / TAU, head_dim=size) for z in ((z1, z2), (z2, z1)))
        return sum(x.mean() for x in both) / 2

    return loss


def siglip() -> Loss:
    """siglip-kernel's sigmoid loss, which is another loss of the same pairs, by its default way."""
    from siglip_kernel import fused_siglip_loss

    def loss(z1: Tensor, z2: Tensor) -> Tensor:
        log_temperature, bias = z1.new_tensor([-math.log(TAU), -10.0]).float()
        return fused_siglip_loss(F.normalize(z1), F.normalize(z2), log_temperature, bias)

    return loss


def graphssl_nt_xent() -> Loss:
    """graphssl's InfoNCE of two views, with checkpoints of 4,096 queries where it has more."""
    from graphssl.losses import NTXentLoss

    return NTXentLoss(TAU)


def grace_in_batches(z1: Tensor, z2: Tensor, size: int = 512, tau: float = TAU) -> Tensor:
    """GRACE's loss with a batch size; autograd keeps the matrices of all batches."""
    h1, h2 = F.normalize(z1), F.normalize(z2)

    def one_way(a: Tensor, b: Tensor) -> Tensor:
        losses = []
        for start in range(0, len(a), size):
            some = a[start : start + size]
            within, between = (torch.exp(some @ h.T / tau) for h in (a, b))  # [size, N]
            total = within.sum(1) + between.sum(1) - within.diagonal(start)
            losses.append(-torch.log(between.diagonal(start) / total))
        return torch.cat(losses)

    return ((one_way(h1, h2) + one_way(h2, h1)) / 2).mean()


def multiple_negatives_ranking() -> Loss:
    """sentence-transformers' loss of two sets, of embeddings instead of sentences."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(
        None,
        1 / TAU,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )
    return lambda z1, z2: loss.compute_loss_from_embeddings([z1, z2], None)
