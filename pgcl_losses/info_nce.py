"""InfoNCE between the embeddings of each item (Eq. 3), with a weight for each pair if wanted.

The paper: Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086. The sums
over negatives are in `engine/`, and the positives in `positives.py`. Hard negatives: Robinson et
al., Contrastive Learning with Hard Negative Samples, ICLR 2021. Debiased negatives: Chuang et al.,
Debiased Contrastive Learning, NeurIPS 2020.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, get_args

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from pgcl_losses import _checks as check
from pgcl_losses._module import Check
from pgcl_losses._normalize import full_precision
from pgcl_losses.batch import (
    REDUCTIONS,
    AnyBatch,
    Items,
    Negatives,
    Reduction,
    Sets,
    given_batch,
    sets_of,
    unit_sets,
)
from pgcl_losses.engine.contract import (
    Factors,
    Gaussian,
    Pairs,
    Past,
    Table,
    compared_sets,
    of_first,
)
from pgcl_losses.engine.dispatch import (
    ENGINE_CHOICES,
    Engine,
    check_engine,
    choice_facts,
    log_weighted_sums,
)
from pgcl_losses.memory import LossWithMemory, Memory
from pgcl_losses.positives import ByItem, ByPosition, log_count_negatives

NEGATIVES = get_args(Negatives)


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
        "hardness": partial(check.number, expected="a number from 0 to 1e6", highest=1e6),
        "debias": check.debias,
        "reduction": partial(check.choice, choices=REDUCTIONS),
        "engine": partial(check.choice, choices=ENGINE_CHOICES),
    }
    fixed = frozenset({"memory_size"})

    temperature: float | Tensor
    negatives: Negatives
    memory_size: int
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
        hardness: float = 0.0,
        debias: float = 0.0,
        reduction: Reduction = "mean",
        engine: Engine = "auto",
        gather: bool = True,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        self._assign_options(locals())
        self.memory = Memory(self.memory_size) if self.memory_size > 0 else None

    def forward(self, *views: Tensor | AnyBatch, items: Items | None = None) -> Tensor:
        """The loss of two views or more, of sets with items, or of a batch."""
        return self.untraced(self._loss)(views, items)

    if TYPE_CHECKING:
        __call__ = forward

    def _loss(self, views: tuple[Tensor | AnyBatch, ...], items: Items | None) -> Tensor:
        batch = given_batch(views, items)
        sets = self._sets(views, items) if batch is None else sets_of(batch)
        if self.memory is not None:
            sets = sets._replace(memory=self.memory.contents(sets.embeddings))
        loss = weighted_info_nce(
            sets,
            self.temperature,
            self.negatives,
            self.engine,
            self.reduction,
            hardness=self.hardness,
            debias=self.debias,
        )
        if self.memory is not None and self.training and torch.is_grad_enabled():
            self.memory.follow(sets.embeddings, sets.items)
        return loss

    def _sets(self, views: tuple[Any, ...], items: Items | None) -> Sets:
        fewest = 2 if items is None or self.negatives == "cross" else 1  # two to compare
        given = views, items, self.engine, [self.temperature], self.memory, fewest
        ranks = self.agree(
            "forward",
            partial(check_loss_views, *given),
            views,
            lambda: self.memory_facts(items) | choice_facts(self.engine, views[0]),
        )
        return unit_sets(ranks, views, items)


def check_loss_views(
    views: Sequence[Any],
    items: Items | None,
    engine: str,
    temperatures: Sequence[float | Tensor],
    memory: Memory | None,
    fewest: int,
    may_be_empty: bool,
) -> None:
    """Views of the same graphs, or sets with items, that a loss with these options can take."""
    if len(views) < fewest:
        listed = len(views) == 1 and isinstance(views[0], Sequence)
        raise TypeError(
            f"views must be {('one', 'two')[fewest - 1]} or more Tensors of shape [N, D], but got "
            f"{len(views)}" + (", a list: unpack it, *views" if listed else "")
        )
    for v, z in enumerate(views[2:], 3):
        if isinstance(z, Tensor) and z.dim() == 1 and not z.is_floating_point():
            raise TypeError(
                f"z{v} is a Tensor of {z.dtype} and shape [N], but a view is [N, D]: give labels "
                "as items="
            )
    rule = "row i of every view must be graph i (InfoNCE takes sets of other lengths with items=)"
    if items is not None:
        rule = "all sets must have the same dimension D"
    named = [(f"z{v}", z) for v, z in enumerate(views, 1)]
    check.views(named, may_be_empty=may_be_empty, rule=rule, lengths_may_differ=items is not None)
    if items is not None:
        check.items(items, views)
    for temperature in temperatures:
        check.temperature_value("temperature", temperature, views[0])
    check_engine(engine, views[0])
    if memory is not None:
        memory.check("z1", views[0])


def weighted_info_nce(
    sets: Sets,
    temperature: float | Tensor,
    negatives: Negatives,
    engine: Engine,
    reduction: Reduction,
    by_cluster: Table | Factors | None = None,
    by_cosine: Gaussian | None = None,
    *,
    hardness: float = 0.0,
    debias: float = 0.0,
) -> Tensor:
    """InfoNCE of sets of embeddings with weighted negatives.

    A query's loss is the mean over its positives, with one sum S of its negatives.
    """
    with full_precision(sets.embeddings.device):
        ranks = sets.ranks[0]
        temperature = ranks.temperature(temperature, sets.embeddings.dtype)
        lengths = tuple([sum(of_set.counts) for of_set in sets.ranks])
        compared = compared_sets(len(lengths), negatives)
        pairs = Pairs(sets.embeddings, lengths, compared, sets.items, by_cluster, by_cosine)
        past = sets.memory and Past(*sets.memory[:3], by_cluster)
        if past is not None:
            count = len(sets.embeddings)
            weights = of_first(by_cluster, count), of_first(by_cosine, count)
            pairs = Pairs(*pairs[:4], *weights)
        positives = ByPosition(pairs) if sets.items is None else ByItem(pairs, sets.items, ranks)
        sums = partial(log_weighted_sums, engine=engine, ranks=ranks, past=past)
        if hardness > 0 or debias > 0:
            log_count = log_count_negatives(pairs, past)
        if hardness > 0:
            harder = sums(pairs, temperature / (1 + hardness))
            with torch.no_grad():  # and detached, also for forward mode
                log_weights = sums(pairs, temperature / hardness).detach()
            log_s = _scaled_to_mean_1(harder, log_weights, hardness, log_count)
        else:
            log_s = sums(pairs, temperature)
        if debias > 0:
            log_p = positives.log_means(temperature)
            log_s = _debiased(log_s, log_p, log_count, temperature, debias)
        losses = positives.losses(log_s, temperature)
        return sets.reduce(losses, positives.exist, reduction)


def _scaled_to_mean_1(
    harder: Tensor, log_weights: Tensor, hardness: float, log_count: Tensor
) -> Tensor:
    """Log S with weights e^{beta s / tau} of mean 1.

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
