"""The positives of each query: embeddings of its item, in the sets that its own is compared with.

Where row i of every view is item i, positives are looked up. Where items are given, pairs are
computed in blocks (with `dense`, in one matrix), so that a few large items need little memory.
Pairs given by index are further positives.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pgcl_losses._modes import can_be_read, is_transformed
from pgcl_losses._normalize import full_precision
from pgcl_losses.distributed import Processes
from pgcl_losses.engine.blocks import block_size, spans
from pgcl_losses.engine.dispatch import check_once
from pgcl_losses.engine.pairs import NO_ITEM, Pairs

# log(1 + e^x) is x from here on, even for float64.
_LINEAR_FROM = 40.0
_PAIRS = 1 << 16  # given by index, whose embeddings are gathered at once

# The loss of a positive by the gap log S_i - s_ip / tau: with the positive in the denominator, or
# without it. Of a gap without S, `exponential` is e^{s_ip / tau}.
Term = Callable[[Tensor], Tensor]
COUPLED = partial(F.softplus, threshold=_LINEAR_FROM)
DECOUPLED = partial(torch.nan_to_num, nan=math.nan, posinf=math.inf, neginf=0.0)  # no S, no loss


def exponential(gaps: Tensor) -> Tensor:
    return gaps.clamp_min(-_LINEAR_FROM).neg().exp()


class ByPosition:
    """Row i of every view is item i."""

    exist: Tensor | None = None  # each query has one

    def __init__(self, pairs: Pairs) -> None:
        num_views = len(pairs.lengths)
        self.num_queries = 1 if pairs.first_queries else num_views  # of an item
        self.counts = num_views - 1
        if num_views == 2:
            first, second = pairs.embeddings.split_with_sizes(pairs.lengths)
            self.cosines = [(first * second).sum(-1)]  # [N] of both
        else:
            views = pairs.embeddings.view(num_views, -1, pairs.embeddings.shape[1])
            queries, shifts = views[: self.num_queries], range(1, num_views)
            others = [views.roll(v, 0)[: self.num_queries] for v in shifts]
            self.cosines = [(queries * of_other).sum(-1) for of_other in others]

    def losses(self, log_s: Tensor, temperature: float | Tensor, term: Term) -> Tensor:
        """The mean of a term over the positives of each query: ``[Q]``."""
        if not self.cosines:  # of one set
            return torch.zeros_like(log_s)
        log_s = log_s.view(self.num_queries, -1)
        each = [term(_gaps(log_s, cosines, temperature)) for cosines in self.cosines]
        return (each[0] if len(each) == 1 else torch.stack(each).mean(0)).flatten()


class ByItem:
    """Embeddings of one item, in the sets that are compared."""

    def __init__(self, pairs: Pairs, processes: Processes, engine: str) -> None:
        assert pairs.items is not None
        self.embeddings, self.processes = pairs.embeddings, processes
        self.is_one = engine == "dense"
        self.items = items = pairs.items[: len(pairs.embeddings)]
        self.in_order, self.order = items.sort()
        # No two of a group are positives of each other: those of a set, or an embedding itself.
        alone = pairs.negatives == "all"
        self.groups = self.order if alone else pairs.set_numbers()  # each has its own group
        self.counts = (_count_of_item(pairs, items) - int(alone))[: pairs.num_queries()]  # [Q]
        self.exist = self.counts > 0

    def losses(self, log_s: Tensor, temperature: float | Tensor, term: Term) -> Tensor:
        # Where there is no positive, log S may be -inf, and its gradient NaN.
        offsets, z = log_s.masked_fill(~self.exist, 0.0), self.embeddings
        if self.is_one:  # in one matrix, differentiable any number of times
            i, j = (torch.arange(len(x), device=x.device) for x in (offsets, z))
            none = self.are_no_positives(i, j)
            sums = _over_block(z[i], z, offsets, temperature, term, none)
        else:
            offsets = F.pad(offsets, (0, len(z) - len(offsets)))
            sums = _OverPositives.apply(  # type: ignore[no-untyped-call]  # torch has no type there
                z, temperature, offsets, term, self
            )[: len(log_s)]
        return sums / self.counts.clamp_min(1)

    def each(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Positions I and J, both concatenated (I alone on the diagonal), and a mask ``[I, J]``."""
        items, order, number = self.in_order, self.order, itertools.count()
        end, size, num_ranks = len(items), block_size(items.device), self.processes.num_ranks()
        if can_be_read(items):
            most = int(self.counts.max())
            end, size = end if most > 0 else 0, min(size, 128 + most)
        for a in spans(0, end, size, num_ranks):
            first, last = a.start, end
            if can_be_read(items):  # in later blocks, positives of this one are of its last item
                item = items[a.stop - 1]
                first = max(first, int(torch.searchsorted(items, item)))
                last = int(torch.searchsorted(items, item, right=True))
            for b in [a, *spans(a.stop, last, size)]:
                if next(number) % num_ranks == self.processes.rank:
                    i, j = order[a if b is a else slice(first, a.stop)], order[b]
                    yield i, j, i if b is a else torch.cat([i, j]), self.are_no_positives(i, j)

    def are_no_positives(self, i: Tensor, j: Tensor) -> Tensor:
        other_item = self.items[i].unsqueeze(1) != self.items[j]
        return other_item | (self.groups[i].unsqueeze(1) == self.groups[j])


class Listed(NamedTuple):
    """Pairs given by index, those of a query together; a weight of 0 leaves a pair out."""

    query: Tensor  # [P] positions among all M embeddings
    key: Tensor  # [P]
    weights: Tensor  # [P]
    first: Tensor  # [P] whether no earlier pair is the same


def listed_pairs(
    processes: Processes, pairs: Tensor | None, weights: Tensor | None, like: Tensor
) -> Listed | None:
    """Pairs of all processes, from positions ``[2, P]`` among this process's embeddings."""
    if pairs is None:
        return None
    weights = like.new_ones(pairs.shape[1]) if weights is None else weights.to(like.dtype)
    if processes.num_ranks() > 1:
        of_all = torch.arange(sum(processes.lengths()), device=pairs.device)
        pairs = processes.own(of_all)[pairs]
        processes = processes.of_sets([len(weights)], pairs.device)
        pairs, weights = processes.gather(pairs.T).T, processes.gather(weights)
    order = (pairs[0] * len(like) + pairs[1]).argsort()
    pairs = pairs[:, order]
    first = F.pad((pairs[:, 1:] != pairs[:, :-1]).any(0), (1, 0), value=True)[: len(order)]
    return Listed(pairs[0], pairs[1], weights[order], first)


def _cosines(units: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return (units[query] * units[key]).sum(-1)


class ByIndex:
    """Pairs given by index, beside the positives of each query's item, if it has any."""

    def __init__(self, pairs: Pairs, listed: Listed, of_items: ByPosition | ByItem) -> None:
        query, key, weights, first = listed
        # A pair that is given counts by its weight, and not by the 1 of its item.
        items, sets = pairs.left_out().items, pairs.set_numbers()
        of_item = first & (items[query] == items[key])
        if pairs.negatives != "all":
            of_item &= sets[query] != sets[key]
        if can_be_read(weights) and not (weights.requires_grad or is_transformed(weights)):
            counting = of_item | (weights != 0)
            query, key, weights, of_item = (x[counting] for x in (query, key, weights, of_item))
        self.query, self.weights, self.of_items = query, weights, of_items
        z, n = pairs.embeddings, max(_PAIRS, len(pairs.embeddings))
        cosines: Any = _cosines
        if len(query) > n and not is_transformed(z):  # recomputed in the backward, to save memory
            cosines = partial(checkpoint, _cosines, use_reentrant=False, preserve_rng_state=False)
        chunks = zip(torch.split(query, n), torch.split(key, n), strict=True)
        self.cosines = torch.cat([cosines(z, *chunk) for chunk in chunks])  # [P]
        # How many positives are of a query's item [Q], and how many of these are not given.
        self.counts, self.given = z.new_zeros(pairs.num_queries()) + of_items.counts, of_item.to(z)
        self.others = self.counts.index_add(0, query, self.given, alpha=-1)
        self.totals = self.others.index_add(0, query, weights)
        self.exist = self.totals > 0

    def losses(self, log_s: Tensor, temperature: float | Tensor, term: Term) -> Tensor:
        each = term(_gaps(log_s[self.query], self.cosines, temperature))
        sums = self.of_items.losses(log_s, temperature, term) * self.counts
        sums = sums.index_add(0, self.query, self.given * each, alpha=-1)
        sums = sums.masked_fill(self.others == 0, 0.0)  # exactly, without rounding errors
        sums = sums.index_add(0, self.query, self.weights * each)
        losses = sums / self.totals.masked_fill(~self.exist, 1.0)
        return losses.masked_fill(~self.exist, 0.0)


def _over_block(
    z_i: Tensor, z_j: Tensor, offsets: Tensor, temperature: float | Tensor, term: Term, none: Tensor
) -> Tensor:
    """Sums of a term over the positives J of queries I, and, if they have offsets, over I of J."""
    cosines, sums = z_i @ z_j.T, []
    for axis, of_queries in ((1, offsets[: len(z_i)]), (0, offsets[len(z_i) :])):
        if len(of_queries) > 0:
            terms = term(_gaps(of_queries.unsqueeze(axis), cosines, temperature))
            sums.append(terms.masked_fill(none, 0.0).sum(axis))
    return torch.cat(sums)


class _OverPositives(torch.autograd.Function):
    """Sums of a term over the positives of each query ``[M]``; no block is kept."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        temperature: float | Tensor,
        offsets: Tensor,
        term: Term,
        pairs: ByItem,
    ) -> Tensor:
        sums, z = torch.zeros_like(offsets), embeddings
        for i, j, both, none in pairs.each():
            of_both = _over_block(z[i], z[j], offsets[both], temperature, term, none)
            sums.index_add_(0, both, of_both)
        ctx.save_for_backward(embeddings, offsets)
        ctx.temperature, ctx.term, ctx.pairs = temperature, term, pairs
        return pairs.processes.add(sums, "the sums over positives")

    @staticmethod
    def backward(ctx: Any, d_sums: Tensor) -> tuple[Tensor | None, ...]:
        check_once()
        z, offsets = ctx.saved_tensors
        d_sums = ctx.pairs.processes.add(d_sums, "the gradient of sums over positives")
        d_z, d_offsets = torch.zeros_like(z), torch.zeros_like(offsets)
        for i, j, both, none in ctx.pairs.each():
            z_i, z_j, of_both = (part.requires_grad_() for part in (z[i], z[j], offsets[both]))
            with torch.enable_grad(), full_precision(z.device):
                sums = _over_block(z_i, z_j, of_both, ctx.temperature, ctx.term, none)
                d_z_i, d_z_j, d_each = torch.autograd.grad(sums, (z_i, z_j, of_both), d_sums[both])
            d_z.index_add_(0, i, d_z_i).index_add_(0, j, d_z_j)
            d_offsets.index_add_(0, both, d_each)
        d_temperature = None
        if ctx.needs_input_grad[1]:  # sums depend on (z_i . z_j) / tau and offsets alone
            d_temperature = (z * d_z).sum() / (-2 * ctx.temperature)
        return d_z, d_temperature, d_offsets, None, None


def _gaps(log_s: Tensor, cosines: Tensor, temperature: float | Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return log_s - cosines / temperature
    return torch.sub(log_s, cosines, alpha=1 / temperature)


def _count_of_item(pairs: Pairs, items: Tensor) -> Tensor:
    """How many embeddings of the sets compared with its own are of an embedding's item: ``[M]``."""
    counts = _count_in(items, items)
    if pairs.negatives == "all":
        return counts
    of_sets = items.split_with_sizes(pairs.lengths)
    return counts - torch.cat([_count_in(of_set, of_set) for of_set in of_sets])


def _count_in(others: Tensor, items: Tensor) -> Tensor:
    """How often each item ``[I]`` is among the others."""
    numbers = others.sort().values
    above = torch.searchsorted(numbers, items, right=True)
    return above - torch.searchsorted(numbers, items)


def log_count_negatives(
    pairs: Pairs, of_items: ByPosition | ByItem, listed: Listed | None
) -> Tensor:
    """The logarithm of the number of each query's negatives: ``[Q]``."""
    count, num_queries = len(pairs.embeddings), pairs.num_queries()
    counts = (pairs.num_samples() - count).expand(num_queries)
    if pairs.negatives != "memory":  # of those that a query is compared with
        sets = pairs.set_numbers()
        own = 1 if pairs.negatives == "all" else _count_in(sets, sets[:num_queries])
        counts = counts + (count - own - of_items.counts)
    if pairs.items is not None and pairs.num_past() > 0:
        of_past = pairs.items[count:]
        if pairs.present is not None:
            of_past = of_past.where(pairs.present[count:], NO_ITEM)
        counts = counts - _count_in(of_past, pairs.items[:num_queries])
    if listed is not None:
        fewer = listed.first & ~pairs.left_out().mask(listed.query, listed.key)
        counts = counts.index_add(0, listed.query, fewer.to(counts), alpha=-1)
    return counts.log()
