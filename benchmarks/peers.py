"""Losses of other libraries, and published code, as functions of two views.

To install all of them:

    pip install -e '.[pygcl]' pytorch-metric-learning==2.9.0 lightly==1.6.0 \\
        open_clip_torch==3.3.0 graphssl==0.2.0 sentence-transformers==6.2.0

lightly and open_clip need torchvision, of the same build as torch. For builds without CUDA add
`--extra-index-url https://download.pytorch.org/whl/cpu`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from tqdm import tqdm

CHUNK = 256  # queries

Loss = Callable[[Tensor, Tensor], Tensor]


def if_installed(name: str, make: Callable[[], Any]) -> Any:
    """Return ``make()``, or None if the library is not installed."""
    try:
        return make()
    except ImportError as error:
        tqdm.write(f"{name} is left out: {error}")
        return None


def chunked_info_nce(z1: Tensor, z2: Tensor, temperature: float = 0.2) -> Tensor:
    """InfoNCE by chunks of queries, with Inf-CL's gradient.

    Forward stores one log-sum a query; backward recomputes the logits. Inf-CL itself (inf-cl 1.2.1)
    has kernels for CUDA alone, and no mask for the diagonal.
    """
    z = F.normalize(torch.cat([z1, z2]))
    log_sums: Tensor = _ChunkedLogSums.apply(z, temperature)
    positives = (z * z.roll(len(z1), 0)).sum(1) / temperature
    return (log_sums - positives).mean()


class _ChunkedLogSums(torch.autograd.Function):
    """log of the sum over j other than i of e^{s_ij / tau}: ``[M, D] -> [M]``."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, temperature: float) -> Tensor:
        chunks = _ChunkedLogSums.logits(z, temperature)
        log_sums = torch.cat([logits.logsumexp(1) for _, logits in chunks])
        ctx.save_for_backward(z, log_sums)
        ctx.temperature = temperature
        return log_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_log_sums: Tensor) -> tuple[Tensor, None]:
        z, log_sums = ctx.saved_tensors
        d_z = torch.zeros_like(z)
        for chunk, logits in _ChunkedLogSums.logits(z, ctx.temperature):
            softmax = logits.sub_(log_sums[chunk].unsqueeze(1)).exp_()
            d_logits = softmax.mul_((d_log_sums[chunk] / ctx.temperature).unsqueeze(1))
            d_z[chunk].addmm_(d_logits, z)
            d_z.addmm_(d_logits.T, z[chunk])
        return d_z, None

    @staticmethod
    def logits(z: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
        """The logits of each chunk of queries, in one buffer."""
        scaled, buffer = z / temperature, z.new_empty(min(CHUNK, len(z)), len(z))
        for start in range(0, len(z), CHUNK):
            chunk = slice(start, min(start + CHUNK, len(z)))
            logits = torch.mm(scaled[chunk], z.T, out=buffer[: chunk.stop - start])
            logits[:, chunk].fill_diagonal_(-torch.inf)
            yield chunk, logits


def pygcl_info_nce(temperature: float = 0.2) -> Loss:
    """PyGCL's InfoNCE with intra-view negatives; PyGCL has to be compiled."""
    from GCL.losses import InfoNCE
    from GCL.models import DualBranchContrast

    model = DualBranchContrast(InfoNCE(tau=temperature), mode="G2G", intraview_negs=True)
    return lambda z1, z2: model(g1=z1, g2=z2)


def with_labels(loss: Loss, labels: Tensor | None) -> Loss:
    """A loss of pytorch-metric-learning for two views; without labels each graph has its own."""

    def of_views(z1: Tensor, z2: Tensor) -> Tensor:
        own = torch.arange(len(z1), device=z1.device) if labels is None else labels
        return loss(torch.cat([z1, z2]), own.repeat(2))

    return of_views


def nt_xent(temperature: float = 0.2, labels: Tensor | None = None) -> Loss:
    """pytorch-metric-learning's InfoNCE: for each positive all negatives, in one tensor."""
    from pytorch_metric_learning.losses import NTXentLoss

    return with_labels(NTXentLoss(temperature=temperature), labels)


def sup_con(temperature: float = 0.2, labels: Tensor | None = None) -> Loss:
    """pytorch-metric-learning's SupConLoss; with one positive for each query this is InfoNCE."""
    from pytorch_metric_learning.losses import SupConLoss

    return with_labels(SupConLoss(temperature=temperature), labels)


def lightly_nt_xent(temperature: float = 0.2, stored: Tensor | None = None) -> Loss:
    """lightly's InfoNCE of two views; with ``stored`` [B, D] in a memory bank."""
    from lightly.loss import NTXentLoss

    if stored is None:
        return NTXentLoss(temperature=temperature)
    loss = NTXentLoss(temperature=temperature, memory_bank_size=tuple(stored.shape))
    loss.memory_bank.bank = stored.clone()  # instead of random embeddings
    return loss


def lightly_dcl(temperature: float = 0.2) -> Loss:
    """lightly's decoupled contrastive loss: InfoNCE without the positive in the denominator."""
    from lightly.loss import DCLLoss

    return DCLLoss(temperature=temperature)


def clip(temperature: float = 0.2) -> Loss:
    """open_clip's loss of two modalities, which expects normalised embeddings."""
    from open_clip.loss import ClipLoss

    loss = ClipLoss()
    return lambda z1, z2: loss(F.normalize(z1), F.normalize(z2), 1 / temperature)


def linear_cross_entropy(temperature: float = 0.2, *, chunked: bool = False) -> Loss:
    """torch's matrix product and cross entropy in one, from 2.13 on: one call a direction."""
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None

    def loss(z1: Tensor, z2: Tensor) -> Tensor:
        z1, z2 = F.normalize(z1), F.normalize(z2)
        targets = torch.arange(len(z1), device=z1.device)
        one, other = (
            F.linear_cross_entropy(queries / temperature, keys, targets, options=options)
            for queries, keys in ((z1, z2), (z2, z1))
        )
        return (one + other) / 2

    return loss


def graphssl_nt_xent(temperature: float = 0.2) -> Loss:
    """graphssl's InfoNCE of two views, with checkpoints of 4,096 queries where it has more."""
    from graphssl.losses import NTXentLoss

    return NTXentLoss(temperature)


def multiple_negatives_ranking(temperature: float = 0.2) -> Loss:
    """sentence-transformers' loss of two sets, of embeddings instead of sentences."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(
        None,
        1 / temperature,
        directions=("query_to_doc", "doc_to_query"),
        partition_mode="per_direction",
    )
    return lambda z1, z2: loss.compute_loss_from_embeddings([z1, z2], None)


def double_loop_pgcl(
    z1: Tensor,
    z2: Tensor,
    clusters: tuple[Tensor, Tensor],
    prototypes: Tensor,
    temperature: float = 0.2,
) -> Tensor:
    """The reweighted contrast in a Python loop over all pairs, as in the published code.

    The formula is the paper's: the value is that of ``PrototypeReweightedNCE``.
    """
    z = F.normalize(torch.cat([z1, z2]))
    of_both = torch.cat(clusters)
    centers = F.normalize(prototypes)
    distances = 1 - centers @ centers.T
    fractions = torch.bincount(of_both, minlength=len(prototypes)) / len(of_both)
    deviations = distances - (distances @ fractions)[:, None]
    variance = deviations.square() @ fractions
    by_cluster = torch.exp(-deviations.square() / (2 * variance[:, None]))
    by_cluster /= (by_cluster @ fractions)[:, None]

    weights = torch.zeros(len(z), len(z), device=z.device)
    of_row = of_both.tolist()
    for i, own in enumerate(of_row):
        for j, other in enumerate(of_row):
            if own != other and (i - j) % len(z1) != 0:
                weights[i, j] = by_cluster[own, other]

    exponentials = torch.exp(z @ z.T / temperature)
    positives = exponentials.diagonal(len(z1))
    positives = torch.cat([positives, positives])
    return -torch.log(positives / (positives + (weights * exponentials).sum(dim=1))).mean()


def gemm_limit(z: Tensor, block: int) -> Callable[[], None]:
    """Z Z^T, P Z and P^T Z by blocks of rows, which share one buffer.

    A loss that stores all pairs needs these products for its value and gradient.
    """
    buffer = z.new_empty(min(block, len(z)), len(z))

    def products() -> None:
        gradient = torch.zeros_like(z)
        for start in range(0, len(z), block):
            some = z[start : start + block]
            p = torch.mm(some, z.T, out=buffer[: len(some)])
            gradient[start : start + block].addmm_(p, z)
            gradient.addmm_(p.T, some)

    return products


def three_products(z: Tensor) -> Callable[[], Tensor]:
    """The same products without buffers: each result is newly allocated."""

    def products() -> Tensor:
        p = z @ z.T
        return p @ z + p.T @ z

    return products
