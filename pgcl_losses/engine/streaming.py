"""The engine for batches of any size: blocks of pairs, and nothing of size M x M in memory.

e^{s / tau} is symmetric, so a block of the pairs of embeddings I and embeddings J serves the sums
of both. The gradient is computed from the embeddings again, block by block, and no block is kept:
two thirds of the arithmetic of a dense loss. Which blocks there are: `blocks.py`.
"""

import math
from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from pgcl_losses.engine.blocks import Block, Layout, layout
from pgcl_losses.engine.contract import (
    ALL_PAIRS,
    LOG2_E,
    Factors,
    Pairs,
    Portion,
    Sums,
    Table,
    check_kind,
    may_overflow,
)
from pgcl_losses.engine.lookup import BlockWeights

# A pair that adds less than e^-60 of a sum counts as that, which is nothing beside the others:
# denormal numbers make matrix products slow.
_SMALLEST_FRACTION = -60.0


def log_sums(pairs: Pairs, temperature: float | Tensor, portion: Portion = ALL_PAIRS) -> Sums:
    """See `Sums`."""
    check_kind("streaming", pairs.by_cluster, Table, Factors)
    laid = layout(pairs, portion)
    sums = _kind(temperature)(pairs, temperature, laid)
    embeddings = laid.sort(pairs.embeddings.detach())
    for block, exponents, scratch in _exponents(embeddings, temperature, laid.blocks):
        sums.add(block, exponents, scratch)
    log_totals = None if pairs.by_cosine is None else laid.unsort(sums.totals.log())
    return Sums(laid.unsort(sums.logs()), log_totals, laid)


def gradient(
    pairs: Pairs,
    temperature: float | Tensor,
    log_s: Tensor,
    d_log_s: Tensor,
    portion: Portion,
    laid: object = None,
) -> Tensor:
    """Gradient ``[M, D]`` of the sum of d_log_s_i log S_i, as far as this portion's pairs go.

    ``log_s``: of all portions together, without the pair weight's scale; ``laid``: the layout of
    the forward pass, if it was kept.
    """
    laid = layout(pairs, portion) if laid is None else cast(Layout, laid)
    sums = _kind(temperature)(pairs, temperature, laid)
    sums.start_gradient(laid.sort(log_s), laid.sort(d_log_s / temperature))
    embeddings = laid.sort(pairs.embeddings.detach())
    d_embeddings = torch.zeros_like(embeddings)
    blocks = [block for block in laid.blocks if block.negatives]
    for block, exponents, scratch in _exponents(embeddings, temperature, blocks):
        i, j = block.i.span, block.j.span
        d_pairs = sums.d_pairs(block, exponents, scratch)  # [J, I]
        d_embeddings[i].addmm_(d_pairs.T, embeddings[j])
        if i != j:
            d_embeddings[j].addmm_(d_pairs, embeddings[i])
    return laid.unsort(d_embeddings)


def _exponents(
    embeddings: Tensor, temperature: float | Tensor, blocks: list[Block]
) -> Iterator[tuple[Block, Tensor, list[Tensor]]]:
    """Blocks of sorted embeddings with their exponents s / tau, of 2, and scratch.

    Their memory is the next block's as well.
    """
    most = max([0, *(block.i.size() * block.j.size() for block in blocks)])
    buffer = embeddings.new_empty(4, most)
    scaled = embeddings * (LOG2_E / temperature)
    for block in blocks:
        shape = block.j.size(), block.i.size()
        exponents, *scratch = buffer[:, : shape[0] * shape[1]].view(-1, *shape).unbind()
        torch.mm(embeddings[block.j.span], scaled[block.i.span].T, out=exponents)
        yield block, exponents, scratch


class _Sums:
    """The sums of all embeddings, to which blocks are added, each along its two axes."""

    logarithms: bool

    def __init__(self, pairs: Pairs, temperature: float | Tensor, laid: Layout) -> None:
        self.laid, self.pair_weight = laid, pairs.by_cosine
        self.weights: BlockWeights | None = None
        if pairs.by_cluster is not None:
            self.weights = BlockWeights(
                pairs.by_cluster, logarithms=self.logarithms, sort=laid.sort, sorted_head=laid.head
            )
        self.numbers: list[Tensor] = []
        if self.pair_weight is not None:
            self.numbers = list(map(laid.sort, self.pair_weight.numbers(LOG2_E / temperature)))
        self.sums = torch.zeros_like(pairs.embeddings[:, 0])  # [M]
        self.totals = torch.zeros_like(self.sums)  # of the pair weight

    def by_cosine(self, block: Block, exponents: Tensor, axis: int, out: Tensor) -> Tensor:
        """Log2 of the pair weight."""
        assert self.pair_weight is not None
        span = block.run(axis).span
        numbers = [of_all[span].unsqueeze(axis) for of_all in self.numbers]
        return self.pair_weight.formula(exponents, *numbers, out=out)


class _Plain(_Sums):
    """Sums as they are: for temperatures at which nothing overflows."""

    logarithms = False

    def values(self, block: Block, exponents: Tensor, out: Tensor) -> Tensor:
        """e^{s / tau}; 0 for pairs of one item."""
        values = torch.exp2(exponents, out=out)
        self.laid.fill_items(block, values, 0.0)
        return values

    def add(self, block: Block, exponents: Tensor, scratch: list[Tensor]) -> None:
        values = exponents if self.pair_weight is None else scratch[1]
        if block.negatives:
            self.values(block, exponents, values)
        for axis in block.axes():
            mine, weighted = block.run(axis).span, values
            if self.pair_weight is not None:
                weighted = self.by_cosine(block, exponents, axis, scratch[2]).exp2_()
                self.totals[mine] += weighted.sum(axis)
                if not block.negatives:
                    continue
                weighted.mul_(values)
            weights: Tensor | float = 1.0
            if self.weights is not None:
                weights = self.weights.of(block.i, block.j, axis, scratch[0])
                if weights.shape == weighted.shape:
                    weighted, weights = weights.mul_(weighted), 1.0
            self.sums[mine] += (weighted.sum(axis, keepdim=True) * weights).flatten()

    def logs(self) -> Tensor:
        return self.sums.log()

    def start_gradient(self, log_s: Tensor, d_log_s: Tensor) -> None:
        smallest = math.log(torch.finfo(log_s.dtype).tiny)
        d_sums = d_log_s * log_s.clamp_min(smallest).neg_().exp_()
        # A sum without negatives has no gradient.
        self.d_sums = d_sums.masked_fill_(log_s == -torch.inf, 0.0)  # [M]

    def d_pairs(self, block: Block, exponents: Tensor, scratch: list[Tensor]) -> Tensor:
        """e^{s / tau} (d_i W_ij + d_j W_ji), with d the gradient of the sums."""
        of_axes = [self.d_sums[block.run(axis).span].unsqueeze(axis) for axis in (0, 1)]
        if self.pair_weight is None:
            values = self.values(block, exponents, exponents)
            if self.weights is None:
                return values.mul_(torch.add(*of_axes, out=scratch[0]))
            of_i = self.weights.of(block.i, block.j, 0, scratch[0]).mul_(of_axes[0])
            of_j = self.weights.of(block.i, block.j, 1, scratch[1])
            return values.mul_(torch.addcmul(of_i, of_j, of_axes[1], out=scratch[0]))
        values = scratch[1].zero_()
        for axis, d_sums in enumerate(of_axes):
            if self.weights is not None:
                d_sums = self.weights.of(block.i, block.j, axis, scratch[0]).mul_(d_sums)
            weighted = self.by_cosine(block, exponents, axis, scratch[2]).add_(exponents).exp2_()
            values.addcmul_(weighted, d_sums)
        self.laid.fill_items(block, values, 0.0)
        return values


class _Logarithms(_Sums):
    """Sums with a running maximum subtracted: for any temperature."""

    logarithms = True

    def __init__(self, pairs: Pairs, temperature: float | Tensor, laid: Layout) -> None:
        super().__init__(pairs, temperature, laid)
        self.peaks = torch.full_like(self.sums, -torch.inf)
        self.lowest = 1 + math.log2(torch.finfo(self.sums.dtype).tiny)

    def logits(self, block: Block, axis: int, exponents: Tensor, scratch: list[Tensor]) -> Tensor:
        """Log2 of W e^{s / tau}, -inf for what is no negative.

        The pair weight alone stays in the last matrix of scratch.
        """
        logits = scratch[axis]
        if self.weights is None:
            logits.copy_(exponents)
        else:
            weights = self.weights.of(block.i, block.j, axis, logits)
            torch.add(exponents, weights, out=logits)
        if self.pair_weight is not None:
            logits += self.by_cosine(block, exponents, axis, scratch[2])
        self.laid.fill_items(block, logits, -torch.inf)
        return logits

    def add(self, block: Block, exponents: Tensor, scratch: list[Tensor]) -> None:
        for axis in block.axes():
            mine = block.run(axis).span
            logits = self.logits(block, axis, exponents, scratch)
            if self.pair_weight is not None:
                self.totals[mine] += scratch[2].exp2_().sum(axis)
            if not block.negatives:
                continue
            peaks = torch.maximum(self.peaks[mine], logits.amax(axis))
            finite = peaks.masked_fill(peaks == -torch.inf, 0.0)
            logits.sub_(finite.unsqueeze(axis)).clamp_min_(self.lowest)
            added = logits.exp2_().sum(axis).masked_fill_(peaks == -torch.inf, 0.0)
            self.sums[mine] = self.sums[mine] * (self.peaks[mine] - finite).exp2_() + added
            self.peaks[mine] = peaks

    def logs(self) -> Tensor:
        finite = self.peaks.masked_fill(self.peaks == -torch.inf, 0.0)
        return self.sums.log() + finite / LOG2_E

    def start_gradient(self, log_s: Tensor, d_log_s: Tensor) -> None:
        # A sum without negatives has no gradient.
        self.d_log_s = d_log_s.masked_fill(log_s == -torch.inf, 0.0)
        self.log_s = log_s.masked_fill(log_s == -torch.inf, 0.0) * LOG2_E

    def d_pairs(self, block: Block, exponents: Tensor, scratch: list[Tensor]) -> Tensor:
        of_i, of_j = (
            self.logits(block, axis, exponents, scratch)
            .sub_(self.log_s[block.run(axis).span].unsqueeze(axis))
            # Log S is rounded, but no pair is more than its sum.
            .clamp_(_SMALLEST_FRACTION * LOG2_E, 0.0)
            .exp2_()
            for axis in (0, 1)
        )
        of_j.mul_(self.d_log_s[block.j.span].unsqueeze(1))
        return of_j.addcmul_(of_i, self.d_log_s[block.i.span])


def _kind(temperature: float | Tensor) -> type[_Plain | _Logarithms]:
    return _Logarithms if may_overflow(temperature) else _Plain
