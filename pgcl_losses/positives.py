"""The positives of each query: embeddings of its item, in the sets that its own is compared with.

Where row i of every view is item i, positives are looked up. Where items are given, pairs are
computed in blocks, so that a few large items need no matrix of all pairs.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.engine.blocks import in_blocks
from pgcl_losses.engine.contract import Pairs, Past, Portion, check_once, d_temperature
from pgcl_losses.engine.dispatch import traceable
from pgcl_losses.ranks import Ranks

# log(1 + e^x) is x from here on, even for float64.
_LINEAR_FROM = 40.0


class ByPosition:
    """Row i of every view is item i."""

    exist: None = None  # each query has one

    def __init__(self, pairs: Pairs) -> None:
        self.num_views = len(pairs.lengths)
        if self.num_views == 2:
            first, second = pairs.embeddings.split_with_sizes(pairs.lengths)
            self.cosines = [(first * second).sum(-1)]  # [N] of both
        else:
            views = pairs.embeddings.view(self.num_views, -1, pairs.embeddings.shape[1])
            self.cosines = [(views * views.roll(v, 0)).sum(-1) for v in range(1, self.num_views)]

    def losses(self, log_s: Tensor, temperature: float | Tensor) -> Tensor:
        """Of -log( e^{s_ip / tau} / (e^{s_ip / tau} + S_i) ) the mean over positives p."""
        log_s = log_s.view(self.num_views, -1)
        each = [_losses(log_s, cosines, temperature) for cosines in self.cosines]
        return each[0] if len(each) == 1 else torch.stack(each).mean(0)

    def log_means(self, temperature: float | Tensor) -> Tensor:
        """The logarithm of the mean of e^{s_ip / tau} over positives p: ``[Q]``."""
        each = [cosines.expand(self.num_views, -1) / temperature for cosines in self.cosines]
        return torch.stack(each).logsumexp(0).flatten() - math.log(len(each))


class ByItem:
    """Queries in the order of their items, so that positives are near each other."""

    def __init__(self, pairs: Pairs, items: Tensor, ranks: Ranks) -> None:
        items_in_order, self.order = items.sort()
        self.embeddings = pairs.embeddings[self.order]
        within_sets = (0, 0) in pairs.compared
        self.counts = count_of_item(pairs, items) - int(within_sets)  # [Q]
        self.exist = self.counts > 0
        # No two of a group are positives of each other: an embedding itself, or those of a set.
        groups = self.order
        if not within_sets:
            lengths = enumerate(pairs.lengths)
            sets = [self.order.new_full((length,), number) for number, length in lengths]
            groups = torch.cat(sets)[self.order]
        self.blocks = _Blocks(items_in_order, groups, ranks)

    def losses(self, log_s: Tensor, temperature: float | Tensor) -> Tensor:
        sums = self._sums(log_s[self.order], temperature, _LOSS)
        return sums[self.order.argsort()] / self.counts.clamp_min(1)

    def log_means(self, temperature: float | Tensor) -> Tensor:
        with torch.no_grad():
            peaks = self.blocks.largest_cosines(self.embeddings.detach()) / temperature
        sums = self._sums(peaks, temperature, _EXPONENTIAL)
        logs = sums.clamp_min(torch.finfo(sums.dtype).tiny).log() + peaks
        return logs[self.order.argsort()] - self.counts.clamp_min(1).to(sums.dtype).log()

    def _sums(self, offsets: Tensor, temperature: float | Tensor, term: "_Term") -> Tensor:
        if self.blocks.is_one():
            return self.blocks.plain_sums(self.embeddings, offsets, temperature, term)
        function = traceable(_OverPositives.apply)
        sums: Tensor = function(self.embeddings, temperature, offsets, term, self.blocks)
        return sums


class _Term(NamedTuple):
    """What a pair of positives adds, as a function of offset_i - s_ij / tau, and its derivative."""

    value: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


def _exponential(gaps: Tensor) -> Tensor:
    return gaps.clamp_min(-1.0).neg().exp()  # offsets are maxima: only other pairs are below 0


_LOSS = _Term(partial(F.softplus, threshold=_LINEAR_FROM), torch.sigmoid)
_EXPONENTIAL = _Term(_exponential, lambda gaps: -_exponential(gaps))


class _Blocks(NamedTuple):
    """Blocks of pairs of sorted queries that may be of one item. Each process has a portion."""

    items: Tensor  # [Q]
    groups: Tensor  # [Q]
    ranks: Ranks

    def is_one(self) -> bool:
        of_all = in_blocks(slice(0, len(self.items)), self.items.device)
        return len(of_all) == 1 and len(self.ranks.counts) == 1

    def __iter__(self) -> Iterator[tuple[slice, slice]]:  # type: ignore[override]  # of blocks
        low, high = 0, len(self.items)
        device, portion = self.items.device, Portion(self.ranks.rank, len(self.ranks.counts))
        for i in in_blocks(portion.of(high), device):
            if can_be_read(self.items):
                low = int(torch.searchsorted(self.items, self.items[i.start]))
                high = int(torch.searchsorted(self.items, self.items[i.stop - 1], right=True))
            yield from ((i, j) for j in in_blocks(slice(low, high), device))

    def are_no_positives(self, i: slice, j: slice) -> Tensor:
        other_item = self.items[i].unsqueeze(1) != self.items[j]
        return other_item | (self.groups[i].unsqueeze(1) == self.groups[j])

    def largest_cosines(self, embeddings: Tensor) -> Tensor:
        """With a positive: ``[Q]``, -1 without one."""
        largest = torch.zeros_like(embeddings[:, 0])
        for i, j in self:
            cosines = (embeddings[i] @ embeddings[j].T).masked_fill_(
                self.are_no_positives(i, j), -1
            )
            largest[i] = torch.maximum(largest[i], cosines.amax(1) + 1)
        return self.ranks.add(largest, "the largest cosines") - 1

    def plain_sums(
        self, embeddings: Tensor, offsets: Tensor, temperature: float | Tensor, term: _Term
    ) -> Tensor:
        """In one matrix, differentiable any number of times."""
        gaps = offsets.unsqueeze(1) - embeddings @ embeddings.T / temperature
        all_queries = slice(0, len(offsets))
        no_positives = self.are_no_positives(all_queries, all_queries)
        return term.value(gaps).masked_fill(no_positives, 0.0).sum(1)


class _OverPositives(torch.autograd.Function):
    """Sums of a term over the positives of each query ``[Q]``; no block is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        temperature: float | Tensor,
        offsets: Tensor,
        term: _Term,
        blocks: _Blocks,
    ) -> Tensor:
        sums = torch.zeros_like(offsets)
        for i, j in blocks:
            gaps = offsets[i].unsqueeze(1) - embeddings[i] @ embeddings[j].T / temperature
            sums[i] += term.value(gaps).masked_fill_(blocks.are_no_positives(i, j), 0.0).sum(1)
        ctx.save_for_backward(embeddings, offsets)
        ctx.temperature, ctx.term, ctx.blocks = temperature, term, blocks
        return blocks.ranks.add(sums, "the sums over positives")

    @staticmethod
    def backward(ctx: Any, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        embeddings, offsets = ctx.saved_tensors
        temperature, term, blocks = ctx.temperature, ctx.term, ctx.blocks
        if torch.is_grad_enabled():  # it is to be differentiated again
            check_once(len(blocks.ranks.counts) == 1)
            sums = blocks.plain_sums(embeddings, offsets, temperature, term)
            inputs = [embeddings, offsets, *[temperature] * ctx.needs_input_grad[1]]
            again = torch.autograd.grad(sums, inputs, d_sums, create_graph=True, allow_unused=True)
            return again[0], again[2] if ctx.needs_input_grad[1] else None, again[1], None, None
        d_sums = blocks.ranks.add(d_sums, "the gradient of sums over positives")
        d_embeddings, d_offsets = torch.zeros_like(embeddings), torch.zeros_like(offsets)
        for i, j in blocks:
            gaps = offsets[i].unsqueeze(1) - embeddings[i] @ embeddings[j].T / temperature
            d_pairs = term.derivative(gaps).masked_fill_(blocks.are_no_positives(i, j), 0.0)
            d_pairs *= d_sums[i].unsqueeze(1)
            d_offsets[i] += d_pairs.sum(1)
            d_pairs /= -temperature
            d_embeddings[i].addmm_(d_pairs, embeddings[j])
            d_embeddings[j].addmm_(d_pairs.T, embeddings[i])
        d_tau = None
        if ctx.needs_input_grad[1]:
            d_tau = d_temperature(embeddings, d_embeddings, temperature)
        return d_embeddings, d_tau, d_offsets, None, None


def _losses(log_s: Tensor, cosines: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        gaps = log_s - cosines / temperature
    else:
        gaps = torch.sub(log_s, cosines, alpha=1 / temperature)
    return F.softplus(gaps, threshold=_LINEAR_FROM)


def count_of_item(pairs: Pairs, items: Tensor) -> Tensor:
    """How many embeddings are of an embedding's item, itself among them: ``[Q]``.

    In the sets with which its own is compared.
    """
    sets, of_sets = pairs.sets(), []
    for number, members in enumerate(sets):
        others = [items[sets[partner]] for partner in pairs.partners(number)]
        of_sets.append(_count_in(others, items[members]))
    return torch.cat(of_sets)


def _count_in(others: list[Tensor], items: Tensor) -> Tensor:
    """How often each item ``[I]`` is among the others."""
    numbers = torch.cat([*others, items[:0]]).sort().values
    above = torch.searchsorted(numbers, items, right=True)
    return above - torch.searchsorted(numbers, items)


def log_count_negatives(pairs: Pairs, past: Past | None) -> Tensor:
    """The logarithm of the number of each query's negatives: ``[Q]``."""
    of_sets = []
    by_position = pairs.items is None  # then one of each set is of its item
    for number, length in enumerate(pairs.lengths):
        count = sum(pairs.lengths[partner] - by_position for partner in pairs.partners(number))
        of_sets.append(pairs.embeddings.new_full((length,), count))
    counts = torch.cat(of_sets)
    if past is not None:
        counts += past.num_present()
    if pairs.items is not None:
        counts -= count_of_item(pairs, pairs.items)
        if past is not None and past.items is not None:
            counts -= _count_in([past.items], pairs.items)
    return counts.log_()
