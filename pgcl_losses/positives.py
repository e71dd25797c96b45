"""The positives of each query: embeddings of its item, in the sets that its own is compared with.

Where row i of every view is item i, positives are looked up. Where items are given, pairs are
computed in blocks, so that a few large items need no matrix of all pairs.
"""

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pgcl_losses._modes import can_be_read
from pgcl_losses.engine.contract import Pairs, Past

# log(1 + e^x) is x from here on, even for float64.
_LINEAR_FROM = 40.0
_BLOCK, _BLOCK_ELSEWHERE = 640, 4096  # queries; on a CPU a block of pairs stays in the cache


class ByPlace:
    """Row i of every view is item i."""

    exist: None = None  # each query has one

    def __init__(self, pairs: Pairs) -> None:
        self.num_views = len(pairs.lengths)
        views = pairs.embeddings.view(self.num_views, -1, pairs.embeddings.shape[1])
        if self.num_views == 2:
            self.cosines = [(views[:1] * views[1:]).sum(-1)]  # [1, N] of both
        else:
            self.cosines = [(views * views.roll(v, 0)).sum(-1) for v in range(1, self.num_views)]

    def losses(self, log_s: Tensor, temperature: float | Tensor) -> Tensor:
        """-log( e^{s_ip / tau} / (e^{s_ip / tau} + S_i) ), its mean over positives p: ``[Q]``."""
        log_s = log_s.view(self.num_views, -1)
        each = [_losses(log_s, cosines, temperature) for cosines in self.cosines]
        return (each[0] if len(each) == 1 else torch.stack(each).mean(0)).flatten()

    def log_means(self, temperature: float | Tensor) -> Tensor:
        """The logarithm of the mean of e^{s_ip / tau} over positives p: ``[Q]``."""
        logits = torch.stack(self.cosines).expand(-1, self.num_views, -1) / temperature
        return logits.logsumexp(0).flatten() - math.log(len(self.cosines))


class ByItem:
    """Queries in the order of their items, so that positives stand near each other."""

    def __init__(self, pairs: Pairs, items: Tensor) -> None:
        self.items, self.order = items.sort()
        self.embeddings = pairs.embeddings[self.order]
        within_sets = (0, 0) in pairs.compared
        self.counts = count_of_item(pairs, items) - int(within_sets)  # [Q]
        self.exist = self.counts > 0
        # No two of a group are positives of each other: an embedding itself, or those of a set.
        self.groups = self.order
        if not within_sets:
            lengths = enumerate(pairs.lengths)
            sets = [self.order.new_full((length,), number) for number, length in lengths]
            self.groups = torch.cat(sets)[self.order]

    def losses(self, log_s: Tensor, temperature: float | Tensor) -> Tensor:
        log_s = log_s[self.order]

        def of_block(i: slice, j: slice) -> Tensor:
            cosines = self.embeddings[i] @ self.embeddings[j].T
            each = _losses(log_s[i].unsqueeze(1), cosines, temperature)
            return each.masked_fill(~self._are_positives(i, j), 0.0).sum(1)

        return self._over_blocks(of_block, torch.add, 0.0) / self.counts.clamp_min(1)

    def log_means(self, temperature: float | Tensor) -> Tensor:
        none = torch.finfo(self.embeddings.dtype).min / 2  # finite, or its gradient would be NaN

        def of_block(i: slice, j: slice) -> Tensor:
            logits = self.embeddings[i] @ self.embeddings[j].T / temperature
            return logits.masked_fill(~self._are_positives(i, j), none).logsumexp(1)

        sums = self._over_blocks(of_block, torch.logaddexp, none)
        return sums - self.counts.clamp_min(1).log()

    def _are_positives(self, i: slice, j: slice) -> Tensor:
        same_item = self.items[i].unsqueeze(1) == self.items[j]
        return same_item & (self.groups[i].unsqueeze(1) != self.groups[j])

    def _over_blocks(
        self,
        of_block: Callable[[slice, slice], Tensor],
        add: Callable[[Tensor, Tensor], Tensor],
        start: float,
    ) -> Tensor:
        """What blocks of sorted queries ``[I]`` have with blocks of others, added up: ``[Q]``.

        Backward computes each block again, and no block is kept.
        """
        blocks, sums = list(self._blocks()), []
        for i, others in blocks:
            total = self.embeddings.new_full((i.stop - i.start,), start)
            for j in others:
                if len(blocks) == 1:
                    total = add(total, of_block(i, j))
                    continue
                part = checkpoint(of_block, i, j, use_reentrant=False, preserve_rng_state=False)
                total = add(total, part)
            sums.append(total)
        return torch.cat(sums).index_select(0, self.order.argsort())

    def _blocks(self) -> Iterator[tuple[slice, list[slice]]]:
        """Queries, and blocks of others that may be of their items."""
        count = len(self.items)
        size = _BLOCK if self.items.device.type == "cpu" else _BLOCK_ELSEWHERE
        for start in range(0, count, size):
            end, low, high = min(start + size, count), 0, count
            if can_be_read(self.items):
                low = int(torch.searchsorted(self.items, self.items[start]))
                high = int(torch.searchsorted(self.items, self.items[end - 1], right=True))
            firsts = range(low, high, size)
            yield slice(start, end), [slice(j, min(j + size, high)) for j in firsts]


def _losses(log_s: Tensor, cosines: Tensor, temperature: float | Tensor) -> Tensor:
    return F.softplus(log_s - cosines / temperature, threshold=_LINEAR_FROM)


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
    ends = torch.searchsorted(numbers, items, right=True)
    return ends - torch.searchsorted(numbers, items)


def log_count_negatives(pairs: Pairs, past: Past | None) -> Tensor:
    """The logarithm of the number of each query's negatives: ``[Q]``."""
    of_sets = []
    by_place = pairs.items is None  # then one of each set is of the query's item
    for number, length in enumerate(pairs.lengths):
        count = sum(pairs.lengths[partner] - by_place for partner in pairs.partners(number))
        of_sets.append(pairs.embeddings.new_full((length,), count))
    counts = torch.cat(of_sets)
    if past is not None:
        counts += len(past.embeddings) if past.present is None else past.present.sum()
    if pairs.items is not None:
        counts -= count_of_item(pairs, pairs.items)
        if past is not None and past.items is not None:
            counts -= _count_in([past.items], pairs.items)
    return counts.log_()
