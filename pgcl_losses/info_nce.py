"""InfoNCE between the embeddings of each item (Eq. 3), with a weight for each pair if wanted.

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086. The sums
over negatives are in `engine/`, and the positives in `positives.py`. Hard negatives: Robinson et
al., Contrastive Learning with Hard Negative Samples, ICLR 2021. Debiased negatives: Chuang et al.,
Debiased Contrastive Learning, NeurIPS 2020.
"""

import math
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgcl_losses import _checks as check
from pgcl_losses._module import Check
from pgcl_losses._normalize import full_precision
from pgcl_losses.batch import (
    NEGATIVES,
    REDUCTIONS,
    Batch,
    Items,
    Negatives,
    Reduction,
    batch_of,
    given_batch,
)
from pgcl_losses.engine.dispatch import (
    ENGINE_CHOICES,
    Engine,
    choose,
    log_weighted_sums,
)
from pgcl_losses.engine.pairs import Factors, Gaussian, Pairs, Table
from pgcl_losses.memory import LossWithMemory, Memory
from pgcl_losses.positives import ByItem, ByPosition, log_count_negatives


class InfoNCE(LossWithMemory):
    r"""InfoNCE (NT-Xent), at any batch size and exact on many processes.

    The mean over all queries i, and over the positives p of each, of

    .. math:: -\log \frac{e^{s_{ip} / \tau}}{e^{s_{ip} / \tau} + \sum_j e^{s_{ij} / \tau}}

    with s the cosine of two embeddings, and j over the negatives of i: embeddings of other items.
    Two views of N graphs have 2N queries, with one positive each.

    Args:
        temperature, negatives, reduction, engine, gather, process_group: as in :class:`PGCLLoss`.
        memory_size (int): how many embeddings of past batches are further negatives, see
            :meth:`remember`. With a memory, use activation checkpointing on the encoder alone.
        dim (int or None): embedding dimension, D; a memory needs it.
        hardness (float): beta of Robinson et al. (2021). A negative has the weight
            :math:`e^{\beta s_{ij} / \tau}`, constant for the gradient and scaled to a mean of 1.
        debias (float): tau+ of Chuang et al. (2020), the probability that a negative is of the
            query's class. The sum over negatives is corrected by what such negatives add.

    ``items`` say which embeddings are positives of each other: those of one item. There is one
    number for each embedding: ``items=(u, v)`` for two sets, which may differ in length, or one
    tensor for all. Without them, row i of every view is item i. A query without a positive has loss
    0 and is left out of the mean. An item's own embeddings in the memory are no negatives.

    Shape:
        - views: two or more, ``[N, D]`` each, or with items one or more sets of any lengths; norms
          of at most 1e18
        - items: ``[N]`` int64 for each set, or for all
        - output: scalar, or one loss for each embedding of each set for ``reduction="none"``

    Examples:
        >>> import torch
        >>> from pgcl_losses import InfoNCE
        >>> z1 = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
        >>> z2 = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
        >>> InfoNCE()(z1, z2)
        tensor(0.2133)
        >>> captions = torch.tensor([[1.0, 0.0], [0.6, 0.8], [0.0, 1.0]])
        >>> items = torch.tensor([0, 1]), torch.tensor([0, 1, 1])
        >>> InfoNCE(negatives="cross")(z1, captions, items=items)
        tensor(0.0944)

    """

    options: ClassVar[dict[str, Check]] = {
        "temperature": check.temperature,
        "negatives": partial(check.choice, choices=NEGATIVES),
        "memory_size": partial(check.count, minimum=0),
        "dim": check.optional_dim,
        "hardness": partial(check.number, expected="a number from 0 to 1e6", highest=1e6),
        "debias": check.debias,
        "reduction": partial(check.choice, choices=REDUCTIONS),
        "engine": partial(check.choice, choices=ENGINE_CHOICES),
    }
    fixed = frozenset({"memory_size", "dim"})

    temperature: float | Tensor
    negatives: Negatives
    memory_size: int
    dim: int | None
    hardness: float
    debias: float
    reduction: Reduction
    engine: Engine

    def __init__(
        self,
        *,
        temperature: float | Tensor = 0.2,
        negatives: Negatives = "all",
        memory_size: int = 0,
        dim: int | None = None,
        hardness: float = 0.0,
        debias: float = 0.0,
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._assign_options(locals())
        self.register_module("memory", None)
        if self.memory_size > 0:
            if dim is None:
                raise TypeError(
                    f"memory_size is {memory_size}, which needs the embedding dimension: "
                    f"{type(self).__name__}(memory_size={memory_size}, dim=...)"
                )
            self.memory = Memory(self.memory_size, dim)

    def forward(self, *views: Tensor | Batch, items: Items | None = None) -> Tensor:
        """The loss of two views or more, of sets with items, or of a batch."""
        return self.traceable(self._loss, views)(views, items)

    if TYPE_CHECKING:
        __call__ = forward

    def _loss(self, views: tuple[Any, ...], items: Items | None) -> Tensor:
        given = given_batch(views, items=items)
        if given is not None and self.memory is not None:
            raise TypeError("a batch has a memory of its own: call this InfoNCE with tensors")
        batch = self._batch(views, items) if given is None else given
        loss = weighted_info_nce(
            batch,
            self.temperature,
            self.negatives,
            self.engine,
            self.reduction,
            hardness=self.hardness,
            debias=self.debias,
        )
        if given is None and self.moves_state(batch.embeddings):
            self.remember_batch(batch)
        return loss

    def _batch(self, views: tuple[Any, ...], items: Items | None) -> Batch:
        checked, same = partial(self._check, views, items), partial(self.memory_facts, items)
        processes = self.agree("forward", checked, views, same)
        return batch_of(processes, views, items=items, past=self.past())

    def _check(self, views: tuple[Any, ...], items: Items | None, may_be_empty: bool) -> None:
        fewest = 2 if items is None or self.negatives == "cross" else 1  # two to compare
        check.loss_views(views, items, fewest, may_be_empty)
        check.temperature_value("temperature", self.temperature, views[0])
        if self.memory is not None:
            self.memory.check("z1", views[0])


def weighted_info_nce(
    batch: Batch,
    temperature: float | Tensor,
    negatives: Negatives,
    engine: Engine,
    reduction: Reduction,
    weights: Table | Factors | None = None,
    pair_weight: Gaussian | None = None,
    *,
    hardness: float = 0.0,
    debias: float = 0.0,
) -> Tensor:
    """InfoNCE of the sets of a batch, with weighted negatives.

    A query's loss is the mean over its positives, with one sum S of its negatives.
    """
    embeddings, processes = batch.embeddings, batch.processes
    with full_precision(embeddings.device):
        temperature = processes.temperature(temperature, embeddings.dtype)
        pairs = Pairs(
            embeddings,
            processes.lengths(),
            negatives == "all",
            batch.items,
            batch.past,
            batch.present,
            weights,
            pair_weight,
        )
        num = len(embeddings) + pairs.num_past()
        chosen = choose(engine, embeddings, temperature, num, processes.num_ranks())
        if batch.items is None:
            positives: ByPosition | ByItem = ByPosition(pairs)
        else:
            positives = ByItem(pairs, batch.items[: len(embeddings)], processes, chosen)
        sums = partial(log_weighted_sums, pairs, engine=chosen, processes=processes)
        if hardness > 0 or debias > 0:
            log_count = log_count_negatives(pairs)
        if hardness > 0:
            harder = sums(temperature=temperature / (1 + hardness))
            with torch.no_grad():  # and detached, also for forward mode
                log_weights = sums(temperature=temperature / hardness).detach()
            log_s = _scaled_to_mean_1(harder, log_weights, hardness, log_count)
        else:
            log_s = sums(temperature=temperature)
        if debias > 0:
            log_p = positives.log_means(temperature)
            log_s = _debiased(log_s, log_p, log_count, temperature, debias)
        losses = positives.losses(log_s, temperature)
        return batch.reduce(losses, positives.exist, reduction)


def _scaled_to_mean_1(
    harder: Tensor, log_weights: Tensor, hardness: float, log_count: Tensor
) -> Tensor:
    """log S with weights e^{beta s / tau} of mean 1.

    ``harder``: log of the sum of e^{(1 + beta) s / tau}; ``log_weights``: of e^{beta s / tau}. Of
    the exponent (1 + beta) s / tau, the term beta s / tau is the weight, which is constant.
    """
    constant = harder.detach() * (hardness / (1 + hardness))
    constant += log_count - log_weights.masked_fill(log_weights == -math.inf, 0.0)
    return harder / (1 + hardness) + constant


def _debiased(
    log_s: Tensor, log_p: Tensor, log_count: Tensor, temperature: float | Tensor, debias: float
) -> Tensor:
    """Log of N max((S / N - tau+ P) / (1 - tau+), e^{-1 / tau}), N the number of negatives.

    ``log_p``: log P, of the mean over positives of e^{s / tau}.
    """
    none = log_s == -math.inf
    log_mean = log_s.masked_fill(none, 0.0) - log_count.masked_fill(none, 0.0)
    gap = log_p + math.log(debias) - log_mean  # log of tau+ P over S / N
    lowest = gap.new_full((), -1.0) / temperature
    log_remainder = torch.log1p(-gap.clamp_max(-torch.finfo(gap.dtype).eps).exp())
    corrected = torch.maximum(log_mean + log_remainder - math.log1p(-debias), lowest)
    corrected = torch.where(gap < 0, corrected, lowest)
    return torch.where(none, log_s, corrected + log_count)
