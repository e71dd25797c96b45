"""The losses that people use instead, in the form in which they use them.

To install all of them:

    pip install -e '.[pygcl]' pytorch-metric-learning==2.9.0 lightly==1.6.0 \\
        open_clip_torch==3.3.0 graphssl==0.2.0 sentence-transformers==6.2.0

lightly and open_clip need torchvision, of the same build as torch. For builds without CUDA add
`--extra-index-url https://download.pytorch.org/whl/cpu`.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from tqdm import tqdm

CHUNK = 256  # rows

Loss = Callable[[Tensor, Tensor], Tensor]


def if_installed(name: str, make: Callable[[], Any]) -> Any:
    """What ``make`` returns; None if the library is not installed."""
    try:
        return make()
    except ImportError as error:
        tqdm.write(f"{name} is left out: {error}")
        return None


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


def chunked_info_nce(z1: Tensor, z2: Tensor, temperature: float = 0.2) -> Tensor:
    """InfoNCE where the matrix does not fit: by row chunks, with Inf-CL's gradient.

    Forward keeps one log-sum a row. Backward computes the logits again, and the softmax from them.
    Inf-CL itself (inf-cl 1.2.1) has kernels for CUDA alone, and no mask for a row's own column.
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
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        z, log_sums = ctx.saved_tensors
        d_z = torch.zeros_like(z)
        for chunk, logits in _ChunkedLogSums.logits(z, ctx.temperature):
            softmax = logits.sub_(log_sums[chunk].unsqueeze(1)).exp_()
            d_logits = softmax.mul_((slopes[chunk] / ctx.temperature).unsqueeze(1))
            d_z[chunk].addmm_(d_logits, z)
            d_z.addmm_(d_logits.T, z[chunk])
        return d_z, None

    @staticmethod
    def logits(z: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
        """Those of each chunk of rows, in one buffer."""
        scaled, buffer = z / temperature, z.new_empty(min(CHUNK, len(z)), len(z))
        for start in range(0, len(z), CHUNK):
            chunk = slice(start, min(start + CHUNK, len(z)))
            logits = torch.mm(scaled[chunk], z.T, out=buffer[: chunk.stop - start])
            logits[:, chunk].fill_diagonal_(-torch.inf)
            yield chunk, logits


def pygcl_info_nce(
    temperature: float | Tensor = 0.2,
    loss: str = "InfoNCE",
    intraview: bool = True,
    labels: Tensor | None = None,
) -> Loss:
    """PyGCL's InfoNCE itself, or another of its losses. Optional: it has to be compiled."""
    from GCL import losses
    from GCL.models import DualBranchContrast

    of_masks = getattr(losses, loss)(tau=temperature)
    model = DualBranchContrast(of_masks, mode="G2G", intraview_negs=intraview)
    positives = None
    if labels is not None:
        same = labels.unsqueeze(1) == labels
        within = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        positives = torch.cat([same, within], dim=1) if intraview else same
    return lambda z1, z2: model(g1=z1, g2=z2, extra_pos_mask=positives)


def metric_learning(loss: Any, labels: Tensor | None = None, miner: Any = None) -> Loss:
    """A loss of pytorch-metric-learning for two views: embeddings with one label are positives.

    Without labels each graph has its own, in each call a new one: CrossBatchMemory keeps them. On
    many processes the loss is in the library's wrapper for them.
    """
    from pytorch_metric_learning.utils.distributed import DistributedLossWrapper

    num_ranks, calls = 1, itertools.count()
    if distributed.is_initialized():
        loss, num_ranks = DistributedLossWrapper(loss), distributed.get_world_size()

    def of_views(z1: Tensor, z2: Tensor) -> Tensor:
        given, embeddings = labels, torch.cat([z1, z2])
        if given is None:
            rank = distributed.get_rank() if num_ranks > 1 else 0
            first = (next(calls) * num_ranks + rank) * len(z1)
            given = torch.arange(first, first + len(z1), device=z1.device)
        given = given.repeat(2)
        return loss(embeddings, given, miner and miner(embeddings, given))

    return of_views


def nt_xent(temperature: float | Tensor = 0.2, **given: Any) -> Loss:
    """pytorch-metric-learning's InfoNCE: for each positive all negatives, in one tensor."""
    from pytorch_metric_learning.losses import NTXentLoss

    return metric_learning(NTXentLoss(temperature=temperature), **given)


def sup_con(temperature: float | Tensor = 0.2, **given: Any) -> Loss:
    """pytorch-metric-learning's SupConLoss; with one positive for each query this is InfoNCE."""
    from pytorch_metric_learning.losses import SupConLoss

    return metric_learning(SupConLoss(temperature=temperature), **given)


def mined(temperature: float, strategies: tuple[str, str]) -> Loss:
    """``nt_xent`` with one negative for each query, by BatchEasyHardMiner."""
    from pytorch_metric_learning.distances import CosineSimilarity
    from pytorch_metric_learning.miners import BatchEasyHardMiner

    miner = BatchEasyHardMiner(*strategies, distance=CosineSimilarity())
    return nt_xent(temperature, miner=miner)


def nt_xent_across(temperature: float, items1: Tensor, items2: Tensor) -> Loss:
    """``nt_xent`` between two sets of any lengths: the mean over both directions."""
    from pytorch_metric_learning.losses import NTXentLoss

    loss = NTXentLoss(temperature=temperature)
    return lambda z1, z2: (
        loss(z1, items1, ref_emb=z2, ref_labels=items2)
        + loss(z2, items2, ref_emb=z1, ref_labels=items1)
    ).div(2)


def cross_batch_memory(stored: Tensor, batch: int, temperature: float = 0.2) -> Loss:
    """``nt_xent`` with a CrossBatchMemory that has ``stored`` [B, D]; keys get no gradient.

    It stores a batch of so many embeddings before it computes the loss. Its size is therefore B
    and a batch.
    """
    from pytorch_metric_learning.losses import CrossBatchMemory, NTXentLoss

    inner = NTXentLoss(temperature=temperature)
    memory = CrossBatchMemory(inner, stored.shape[1], len(stored) + batch).to(stored)
    memory.add_to_memory(stored, -1 - torch.arange(len(stored), device=stored.device), len(stored))
    return metric_learning(memory)


def lightly_nt_xent(temperature: float | Tensor = 0.2, stored: Tensor | None = None) -> Loss:
    """lightly's InfoNCE of two views, of all processes; with ``stored`` [B, D] in a memory bank."""
    from lightly.loss import NTXentLoss

    if stored is None:
        return NTXentLoss(temperature=temperature, gather_distributed=True)
    loss = NTXentLoss(temperature=temperature, memory_bank_size=tuple(stored.shape))
    loss.memory_bank.bank = stored.clone()  # by itself it starts with random embeddings
    return loss


def lightly_dcl(temperature: float = 0.2) -> Loss:
    """lightly's decoupled contrastive loss: InfoNCE without the positive in the denominator."""
    from lightly.loss import DCLLoss

    return DCLLoss(temperature=temperature, gather_distributed=True)


def clip(temperature: float | Tensor = 0.2) -> Loss:
    """open_clip's loss of two modalities, of all processes. It expects unit embeddings."""
    from open_clip.loss import ClipLoss

    options: dict[str, Any] = {}
    if distributed.is_initialized():
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        options = {"rank": rank, "world_size": num_ranks, "gather_with_grad": True}
    loss = ClipLoss(local_loss=True, **options)
    return lambda z1, z2: loss(F.normalize(z1), F.normalize(z2), 1 / temperature)


def linear_cross_entropy(
    temperature: float | Tensor = 0.2, *, chunked: bool = False, positives: Tensor | None = None
) -> Loss:
    """torch's product and cross entropy in one, from 2.13 on: InfoNCE of two sets in two calls.

    ``positives`` [N, M] are weights of pairs, which its chunks do not support.
    """
    options = torch.nn.LinearCrossEntropyOptions() if chunked else None

    def loss(z1: Tensor, z2: Tensor) -> Tensor:
        z1, z2 = F.normalize(z1), F.normalize(z2)
        targets = [torch.arange(len(z1), device=z1.device)] * 2
        if positives is not None:
            targets = [F.normalize(own.to(z1), p=1) for own in (positives, positives.T)]
        one, other = (
            F.linear_cross_entropy(queries / temperature, keys, own, options=options)
            for queries, keys, own in zip((z1, z2), (z2, z1), targets, strict=True)
        )
        return (one + other) / 2

    return loss


def graphssl_nt_xent(temperature: float | Tensor = 0.2) -> Loss:
    """graphssl's InfoNCE of two views, with checkpoints of 4,096 queries where it has more."""
    from graphssl.losses import NTXentLoss

    return NTXentLoss(temperature)


def multiple_negatives_ranking(temperature: float | Tensor = 0.2) -> Loss:
    """sentence-transformers' loss of two sets, of embeddings instead of sentences."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(
        None,
        1 / temperature,
        gather_across_devices=distributed.is_initialized(),
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
    """The reweighted contrast as published with the paper: a Python loop fills in pair by pair.

    The loop is what is kept; the formula is the paper's, so the value is that of
    ``PrototypeReweightedNCE``.
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
    """The products no dense value and gradient do without, Z Z^T, P Z and P^T Z, by row blocks.

    The blocks of the ``[M, M]`` matrix share one buffer.
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
    """The same products as one writes them down: every result is new memory."""

    def products() -> Tensor:
        p = z @ z.T
        return p @ z + p.T @ z

    return products
