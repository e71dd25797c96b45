"""The positives of each query: embeddings of its item, in the sets that its own is compared with.

Where row i of every view is item i, positives are looked up. Where items are given, pairs are
computed in blocks (with `dense`, in one matrix), so that a few large items need little memory.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.distributed import Processes
from pgcl_losses.engine.blocks import block_size, pairs_of_spans, spans
from pgcl_losses.engine.dispatch import check_once
from pgcl_losses.engine.pairs import NO_ITEM, Pairs, Portion

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
        """Of -log( e^{s_ip / tau} / (e^{s_ip / tau} + S_i) ) the mean over positives p: ``[M]``."""
        log_s = log_s.view(self.num_views, -1)
        each = [_losses(log_s, cosines, temperature) for cosines in self.cosines]
        return (each[0] if len(each) == 1 else torch.stack(each).mean(0)).flatten()

    def log_means(self, temperature: float | Tensor) -> Tensor:
        """The logarithm of the mean of e^{s_ip / tau} over positives p: ``[M]``."""
        each = [cosines.expand(self.num_views, -1) / temperature for cosines in self.cosines]
        return torch.stack(each).logsumexp(0).flatten() - math.log(len(each))


class ByItem:
    """Queries in the order of their items, so that positives are near each other."""

    def __init__(self, pairs: Pairs, items: Tensor, processes: Processes, engine: str) -> None:
        in_order, self.order = items.sort()
        self.embeddings = pairs.embeddings[self.order]
        self.counts = _count_of_item(pairs, items) - int(pairs.within_sets)  # [M]
        self.exist = self.counts > 0
        # No two of a group are positives of each other: an embedding itself, or those of a set.
        groups = self.order
        if not pairs.within_sets:
            sets = [self.order.new_full((n,), a) for a, n in enumerate(pairs.lengths)]
            groups = torch.cat(sets)[self.order]
        self.blocks = _Blocks(in_order, groups, processes)
        self.is_one = engine == "dense"

    def losses(self, log_s: Tensor, temperature: float | Tensor) -> Tensor:
        # Where there is no positive, log S may be -inf, and its gradient NaN.
        offsets = log_s.masked_fill(~self.exist, 0.0)[self.order]
        sums = self._sums(offsets, temperature, _LOSS)
        return sums[self.order.argsort()] / self.counts.clamp_min(1)

    def log_means(self, temperature: float | Tensor) -> Tensor:
        with torch.no_grad():
            peaks = self.blocks.largest_cosines(self.embeddings.detach()) / temperature
        sums = self._sums(peaks, temperature, _EXPONENTIAL)
        logs = sums.clamp_min(torch.finfo(sums.dtype).tiny).log() + peaks
        return logs[self.order.argsort()] - self.counts.clamp_min(1).to(sums.dtype).log()

    def _sums(self, offsets: Tensor, temperature: float | Tensor, term: "_Term") -> Tensor:
        if self.is_one:  # in one matrix, differentiable any number of times
            gaps = offsets.unsqueeze(1) - self.embeddings @ self.embeddings.T / temperature
            everything = slice(0, len(offsets))
            no_positives = self.blocks.are_no_positives(everything, everything)
            return term.value(gaps).masked_fill(no_positives, 0.0).sum(1)
        sums: Tensor = _OverPositives.apply(  # type: ignore[no-untyped-call]  # torch has no type there
            self.embeddings, temperature, offsets, term, self.blocks
        )
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

    items: Tensor  # [M]
    groups: Tensor  # [M]
    processes: Processes

    def each(self) -> Iterator[tuple[slice, slice]]:
        portion = Portion(self.processes.rank, self.processes.num_ranks())
        size = block_size(self.items.device)
        of_all = spans(0, len(self.items), size, portion.num_ranks)
        for i, j in pairs_of_spans(of_all, portion):
            if i != j and can_be_read(self.items):  # what has items of both
                first, last = self.items[j.start], self.items[i.stop - 1]
                low = int(torch.searchsorted(self.items, first))
                high = int(torch.searchsorted(self.items, last, right=True))
                i, j = slice(max(low, i.start), i.stop), slice(j.start, min(high, j.stop))
            if i.start < i.stop and j.start < j.stop:
                yield i, j

    def are_no_positives(self, i: slice, j: slice) -> Tensor:
        other_item = self.items[i].unsqueeze(1) != self.items[j]
        return other_item | (self.groups[i].unsqueeze(1) == self.groups[j])

    def largest_cosines(self, embeddings: Tensor) -> Tensor:
        """With a positive: ``[M]``, -1 without one."""
        largest = torch.full_like(embeddings[:, 0], -1.0)
        for i, j in self.each():
            cosines = embeddings[i] @ embeddings[j].T
            cosines.masked_fill_(self.are_no_positives(i, j), -1.0)
            largest[i] = torch.maximum(largest[i], cosines.amax(1))
            largest[j] = torch.maximum(largest[j], cosines.amax(0))
        return self.processes.largest(largest, "the largest cosines")


class _OverPositives(torch.autograd.Function):
    """Sums of a term over the positives of each query ``[M]``; no block is kept."""

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
        for i, j in blocks.each():
            logits = embeddings[i] @ embeddings[j].T / temperature  # [I, J]
            none = blocks.are_no_positives(i, j)
            sums[i] += term.value(offsets[i].unsqueeze(1) - logits).masked_fill_(none, 0.0).sum(1)
            if i != j:
                sums[j] += term.value(offsets[j] - logits).masked_fill_(none, 0.0).sum(0)
        ctx.save_for_backward(embeddings, offsets)
        ctx.temperature, ctx.term, ctx.blocks = temperature, term, blocks
        return blocks.processes.add(sums, "the sums over positives")

    @staticmethod
    def backward(ctx: Any, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        check_once()
        embeddings, offsets = ctx.saved_tensors
        temperature, term, blocks = ctx.temperature, ctx.term, ctx.blocks
        d_sums = blocks.processes.add(d_sums, "the gradient of sums over positives")
        d_embeddings, d_offsets = torch.zeros_like(embeddings), torch.zeros_like(offsets)
        for i, j in blocks.each():
            logits = embeddings[i] @ embeddings[j].T / temperature
            none = blocks.are_no_positives(i, j)
            d_gaps = term.derivative(offsets[i].unsqueeze(1) - logits) * d_sums[i].unsqueeze(1)
            d_offsets[i] += d_gaps.masked_fill_(none, 0.0).sum(1)
            d_gaps_j = term.derivative(offsets[j] - logits) * d_sums[j]
            d_gaps_j.masked_fill_(none, 0.0)
            if i != j:
                d_offsets[j] += d_gaps_j.sum(0)
            d_cosines = d_gaps.add_(d_gaps_j).div_(-temperature)  # of both, as queries
            d_embeddings[i].addmm_(d_cosines, embeddings[j])
            if i != j:
                d_embeddings[j].addmm_(d_cosines.T, embeddings[i])
        d_temperature = None
        if ctx.needs_input_grad[1]:  # sums depend on (z_i . z_j) / tau and offsets alone
            d_temperature = (embeddings * d_embeddings).sum() / (-2 * temperature)
        return d_embeddings, d_temperature, d_offsets, None, None


def _losses(log_s: Tensor, cosines: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        gaps = log_s - cosines / temperature
    else:
        gaps = torch.sub(log_s, cosines, alpha=1 / temperature)
    return F.softplus(gaps, threshold=_LINEAR_FROM)


def _count_of_item(pairs: Pairs, items: Tensor) -> Tensor:
    """How many embeddings are of an embedding's item, itself among them: ``[M]``.

    In the sets with which its own is compared.
    """
    counts = _count_in(items, items)
    if pairs.within_sets:
        return counts
    of_sets = items.split_with_sizes(pairs.lengths)
    return counts - torch.cat([_count_in(of_set, of_set) for of_set in of_sets])


def _count_in(others: Tensor, items: Tensor) -> Tensor:
    """How often each item ``[I]`` is among the others."""
    numbers = others.sort().values
    above = torch.searchsorted(numbers, items, right=True)
    return above - torch.searchsorted(numbers, items)


def log_count_negatives(pairs: Pairs) -> Tensor:
    """The logarithm of the number of each query's negatives: ``[M]``."""
    count, num_sets = len(pairs.embeddings), len(pairs.lengths)
    own_set = [pairs.embeddings.new_full((n,), n) for n in pairs.lengths]
    counts = pairs.num_samples() - (0 if pairs.within_sets else torch.cat(own_set))
    counts = counts.expand(count).clone()
    if pairs.items is None:  # one embedding of each compared set is of a query's item
        return counts.sub_(num_sets if pairs.within_sets else num_sets - 1).log_()
    items, of_past = pairs.items[:count], pairs.items[count:]
    counts -= _count_of_item(pairs, items)
    if len(of_past) > 0:
        if pairs.present is not None:
            of_past = of_past.where(pairs.present[count:], NO_ITEM)
        counts -= _count_in(of_past, items)
    return counts.log_()
