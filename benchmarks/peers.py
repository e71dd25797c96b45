"""The losses that people use instead, in the form in which they use them.

To install all of them:

    pip install -e '.[pygcl]' pytorch-metric-learning==2.9.0 lightly==1.6.0 open_clip_torch==3.3.0

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
from torch.utils.checkpoint import checkpoint

CHUNK = 256  # rows

Loss = Callable[[Tensor, Tensor], Tensor]


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


def checkpointed_info_nce(z1: Tensor, z2: Tensor, temperature: float = 0.2) -> Tensor:
    """The same as people write it where the matrix does not fit: a cross-entropy by row chunks.

    Each chunk is under `torch.utils.checkpoint`, so that no logits are kept, and all of a chunk is
    computed again backward.
    """
    rows = F.normalize(torch.cat([z1, z2]))

    def of_chunk(start: int) -> Tensor:
        chunk = rows[start : start + CHUNK]
        numbers = torch.arange(len(chunk), device=rows.device)
        logits = chunk @ rows.T / temperature
        logits[numbers, start + numbers] = -torch.inf
        partners = (start + numbers + len(z1)) % len(rows)
        return F.cross_entropy(logits, partners, reduction="sum")

    chunks = range(0, len(rows), CHUNK)
    return sum(checkpoint(of_chunk, start, use_reentrant=False) for start in chunks) / len(rows)


def chunked_info_nce(z1: Tensor, z2: Tensor, temperature: float = 0.2) -> Tensor:
    """The same with Inf-CL's gradient, by row chunks.

    Forward keeps one log-sum a row. Backward computes the logits again, and the softmax from them.
    Inf-CL itself (inf-cl 1.2.1) has kernels for CUDA alone, and no mask for a row's own column.
    """
    rows = F.normalize(torch.cat([z1, z2]))
    log_sums: Tensor = _ChunkedLogSums.apply(rows, temperature)
    positives = (rows * rows.roll(len(z1), 0)).sum(1) / temperature
    return (log_sums - positives).mean()


class _ChunkedLogSums(torch.autograd.Function):
    """log of the sum over j other than i of e^{s_ij / tau}: ``[M, D] -> [M]``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, temperature: float) -> Tensor:
        chunks = _ChunkedLogSums.logits(rows, temperature)
        log_sums = torch.cat([logits.logsumexp(1) for _, logits in chunks])
        ctx.save_for_backward(rows, log_sums)
        ctx.temperature = temperature
        return log_sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slopes: Tensor) -> tuple[Tensor, None]:
        rows, log_sums = ctx.saved_tensors
        d_rows = torch.zeros_like(rows)
        for chunk, logits in _ChunkedLogSums.logits(rows, ctx.temperature):
            softmax = logits.sub_(log_sums[chunk].unsqueeze(1)).exp_()
            d_logits = softmax.mul_((slopes[chunk] / ctx.temperature).unsqueeze(1))
            d_rows[chunk].addmm_(d_logits, rows)
            d_rows.addmm_(d_logits.T, rows[chunk])
        return d_rows, None

    @staticmethod
    def logits(rows: Tensor, temperature: float) -> Iterator[tuple[slice, Tensor]]:
        """Each chunk's, in one buffer."""
        scaled, buffer = rows / temperature, rows.new_empty(min(CHUNK, len(rows)), len(rows))
        for start in range(0, len(rows), CHUNK):
            chunk = slice(start, min(start + CHUNK, len(rows)))
            logits = torch.mm(scaled[chunk], rows.T, out=buffer[: chunk.stop - start])
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


def cross_batch_memory(
    stored: Tensor, batch: int, temperature: float = 0.2, loss: str = "SupConLoss"
) -> Loss:
    """pytorch-metric-learning's CrossBatchMemory, filled with ``stored`` [B, D].

    It stores a batch of so many embeddings before it computes the loss. Its size is therefore B
    and a batch.
    """
    from pytorch_metric_learning import losses

    inner = getattr(losses, loss)(temperature=temperature)
    memory = losses.CrossBatchMemory(inner, stored.shape[1], len(stored) + batch).to(stored)
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


def double_loop_pgcl(
    z1: Tensor,
    z2: Tensor,
    clusters1: Tensor,
    clusters2: Tensor,
    prototypes: Tensor,
    temperature: float = 0.2,
) -> Tensor:
    """The reweighted contrast as published with the paper: a Python loop fills in pair by pair.

    The loop is what is kept; the formula is the paper's, so the value is that of
    ``PrototypeReweightedNCE``.
    """
    rows = F.normalize(torch.cat([z1, z2]))
    clusters = torch.cat([clusters1, clusters2])
    centers = F.normalize(prototypes)
    distances = 1 - centers @ centers.T
    shares = torch.bincount(clusters, minlength=len(prototypes)) / len(clusters)
    deviations = distances - (distances @ shares)[:, None]
    variance = deviations.square() @ shares
    by_cluster = torch.exp(-deviations.square() / (2 * variance[:, None]))
    by_cluster /= (by_cluster @ shares)[:, None]

    weights = torch.zeros(len(rows), len(rows), device=rows.device)
    of_row = clusters.tolist()
    for i, own in enumerate(of_row):
        for j, other in enumerate(of_row):
            if own != other and (i - j) % len(z1) != 0:
                weights[i, j] = by_cluster[own, other]

    exponentials = torch.exp(rows @ rows.T / temperature)
    positives = exponentials.diagonal(len(z1))
    positives = torch.cat([positives, positives])
    return -torch.log(positives / (positives + (weights * exponentials).sum(dim=1))).mean()


def flex_attention_pgcl(
    rows: Tensor, clusters: Tensor, table: Tensor, temperature: float = 0.2
) -> Callable[[], Tensor]:
    """The reweighted contrast by flex_attention, forward alone, of unit rows in bfloat16.

    ``table``: logarithms of weights ``[K, K]``. PyTorch compiles it for CUDA alone.
    """
    from torch.nn.attention.flex_attention import flex_attention

    num = len(rows) // 2
    half = rows[None, None].bfloat16()  # [1, 1, M, D]
    positives = (rows[:num] * rows[num:]).sum(1).repeat(2) / temperature
    attention: Callable[..., Any] = torch.compile(flex_attention)

    def weighted(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        is_positive = (i - j).abs() == num
        return torch.where(is_positive, score, score + table[clusters[i], clusters[j]])

    def forward() -> Tensor:
        _, log_sums = attention(half, half, half, weighted, scale=1 / temperature, return_lse=True)
        return (log_sums.flatten() - positives).mean()

    return forward


def gemm_limit(rows: Tensor, block: int) -> Callable[[], None]:
    """The products no dense value and gradient do without, Z Z^T, P Z and P^T Z, by row blocks.

    The blocks of the ``[M, M]`` matrix share one buffer.
    """
    buffer = rows.new_empty(min(block, len(rows)), len(rows))

    def products() -> None:
        gradient = torch.zeros_like(rows)
        for start in range(0, len(rows), block):
            some = rows[start : start + block]
            p = torch.mm(some, rows.T, out=buffer[: len(some)])
            gradient[start : start + block].addmm_(p, rows)
            gradient.addmm_(p.T, some)

    return products


def memory_products(
    queries: Tensor, memory: Tensor, logits: int, block: int = 4096
) -> Callable[[], None]:
    """The products of queries [M, D] with a memory [B, D] for value and gradient, Q K^T and P K.

    By blocks of the memory, which share one buffer. ``logits``: how often Q K^T is computed. Two
    times is what a loss needs that does not keep the logits for the gradient.
    """
    buffer = queries.new_empty(len(queries), min(block, len(memory)))

    def products() -> None:
        gradient = torch.zeros_like(queries)
        for keys in memory.split(block):
            p = buffer[:, : len(keys)]
            for _ in range(logits):
                torch.mm(queries, keys.T, out=p)
            gradient.addmm_(p, keys)

    return products


def three_products(rows: Tensor) -> Callable[[], Tensor]:
    """The same products as one writes them down: every result is new memory."""

    def products() -> Tensor:
        p = rows @ rows.T
        return p @ rows + p.T @ rows

    return products
