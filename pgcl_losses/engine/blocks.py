"""Sums over negatives, block by block: for batches of any size, without an M x M matrix in memory.

e^{s / tau} is symmetric, so a block of the pairs of queries I and J serves the sums of both; its
matrices are ``[J, I]``, with the sums of I along axis 0 and those of J along axis 1. Where J are no
queries, only axis 0 has sums. The gradient computes the blocks again unless all of them are small,
except for the memory: its embeddings have no gradient, so one pass gives the sums and, as in
attention, their gradient.
"""

import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.engine.pairs import LOG2_E, Pairs

_BLOCK = 640  # embeddings of a block: on a CPU a block of pairs stays in the cache
_BLOCK_ELSEWHERE = 4096  # where launching an operation takes longer than small blocks
_KEPT_UP_TO = 1 << 20  # pairs: reading a kept block is faster than another product
# Up to here e^{s / tau} of millions of pairs adds up in float32 without subtracting a maximum.
_LARGEST_EXPONENT = 40.0
# A smaller fraction of a sum counts as e^-60, which is negligible.
_SMALLEST_FRACTION = -60.0 * LOG2_E


def spans(start: int, stop: int, size: int, num_ranks: int = 1) -> list[slice]:
    """Embeddings of each block, up to ``size``; several processes get a few blocks each."""
    if stop - start <= size and num_ranks == 1:
        return [slice(start, stop)] if stop > start else []
    fewest = math.isqrt(8 * num_ranks) if num_ranks > 1 else 1
    count = min(max(fewest, -(-(stop - start) // size)), stop - start)
    edges = [start + (stop - start) * n // max(1, count) for n in range(count + 1)]
    return [slice(*both) for both in itertools.pairwise(edges)]


def block_size(device: torch.device) -> int:
    """How many embeddings a block has."""
    return _BLOCK if device.type == "cpu" else _BLOCK_ELSEWHERE


class _Shared(threading.local):
    """Memory of blocks on a CPU: the pages of new memory cost a quarter of a small step."""

    def __init__(self) -> None:
        self.scratch: dict[tuple[int, torch.dtype], Tensor] = {}


_shared = _Shared()


class Block(NamedTuple):
    """Pairs of queries I and embeddings J."""

    number: int
    i: slice
    j: slice
    sides: tuple[slice, ...]  # the queries of axis 0 and, if J are queries, of axis 1
    are_negatives: bool = True  # else only a pair weight counts them
    is_memory: bool = False
    may_share_items: bool = True


class Sums(NamedTuple):
    """The sums of one process's portion of the pairs; over all portions e^log_s add up to S."""

    log_s: Tensor  # [Q] of the queries, -inf where one has no negatives
    log_totals: Tensor | None  # [Q] of the pair weight over all embeddings
    counts: Tensor | None  # [Q] of negatives


class Blocks:
    """log S_i of all queries, S_i the sum of W_ij e^{s_ij / tau} over negatives, and its gradient.

    Of several processes, each computes every n-th block.
    """

    def __init__(
        self,
        pairs: Pairs,
        temperature: float | Tensor,
        rank: int = 0,
        num_ranks: int = 1,
        share_memory: bool = False,
    ) -> None:
        self.pairs, self.temperature = pairs, temperature
        self.z = pairs.keys()  # [M + B, D]
        self.scale = LOG2_E / temperature  # from cosines to exponents of 2
        self.logs = _may_overflow(temperature)  # whether a maximum is subtracted from exponents
        self.excluded = -math.inf if self.logs else 0.0
        self.prepared = [] if pairs.weights is None else pairs.weights.prepared(self.logs)
        self.numbers = pairs.pair_weight.numbers(self.scale) if pairs.pair_weight else ()
        self.by_index = None if pairs.positives is None else by_query(pairs.positives)
        self.num_queries = pairs.num_queries()
        self.blocks = list(self._plan(num_ranks))[rank::num_ranks]
        self.row, self.columns = -1, dict[int, list[Tensor]]()  # of weights, for blocks of one I
        # Blocks of one step may use the memory of the step before.
        share_memory = share_memory and can_be_read(self.z)
        self.scratch = _shared.scratch if share_memory else dict[tuple[int, torch.dtype], Tensor]()
        self.kept: dict[int, list[Tensor]] = {}  # the terms of a block, by its number
        self.of_memory: tuple[Tensor, Tensor] | None = None

    def _plan(self, num_ranks: int) -> Iterator[Block]:
        pairs, count, total = self.pairs, self.pairs.embeddings.shape[0], self.z.shape[0]
        cut = partial(spans, size=block_size(self.z.device), num_ranks=num_ranks)
        sets = [slice(0, count)] if pairs.are_one_set() else pairs.sets()
        of_sets = [(i, a) for a, of in enumerate(sets) for i in cut(of.start, of.stop)]
        ranges = None if pairs.items is None else _item_ranges(pairs.items, [i for i, _ in of_sets])
        of_memory = cut(count, total) if total > count else []
        numbers = itertools.count()
        for n, (i, a) in enumerate(of_sets):
            if i.start >= self.num_queries:
                break
            for m, (j, b) in enumerate(of_sets[n:], n):
                are_negatives = pairs.negatives == "all" or (pairs.negatives == "cross" and a != b)
                if are_negatives or pairs.pair_weight is not None:
                    sides = (i, j) if j.start < self.num_queries else (i,)
                    share = ranges is None or _overlap(ranges[n], ranges[m])
                    yield Block(next(numbers), i, j, sides, are_negatives, False, share)
            for j in of_memory:
                yield Block(next(numbers), i, j, (i,), is_memory=True)

    def log_sums(self, with_gradient: bool = False, count: bool = False) -> Sums:
        queries = self.z[: self.num_queries]
        sums = torch.zeros_like(queries[:, 0])  # [Q]
        peaks = torch.full_like(sums, -math.inf) if self.logs else sums  # exponents of 2
        totals = None if self.pairs.pair_weight is None else torch.zeros_like(sums)
        counts = torch.zeros_like(sums) if count else None
        has_means = with_gradient and self.pairs.memory is not None
        means = torch.zeros_like(queries) if has_means else None  # [Q, D] of the memory
        lowest = 1 + math.log2(torch.finfo(sums.dtype).tiny)
        keep = with_gradient and self.num_queries * self.pairs.embeddings.shape[0] <= _KEPT_UP_TO
        for block in self.blocks:
            of_sides = self._terms(block, keep and not block.is_memory, True, totals)
            if not block.are_negatives:
                continue
            sides = (
                block.sides[:1] if block.i == block.j else block.sides
            )  # both have the same sums
            for axis, side in enumerate(sides):
                terms = of_sides[axis]
                if counts is not None:
                    out = self._scratch(2, terms.shape)  # a sum of bools is slower
                    counts[side].add_(torch.ne(terms, self.excluded, out=out).sum(axis))
                if self.logs:
                    peak = torch.maximum(peaks[side], terms.amax(axis))
                    finite = peak.masked_fill(peak == -math.inf, 0.0)
                    smaller = (peaks[side] - finite).exp2_()
                    sums[side] *= smaller
                    if means is not None:
                        means[side] *= smaller.unsqueeze(1)
                    peaks[side] = peak
                    out = self._scratch(axis, terms.shape)
                    terms = torch.sub(terms, finite.unsqueeze(axis), out=out)
                    # Denormal numbers make exponentials and matrix products slow.
                    terms.clamp_min_(lowest).exp2_()
                    if block.is_memory:
                        torch.threshold_(terms, 2.0**lowest, 0.0)
                sums[side].add_(terms.sum(axis))
                if block.is_memory and means is not None:
                    means[side].addmm_(terms.T, self.z[block.j])
        log_s = sums.log()
        if self.logs:
            log_s = (log_s + peaks / LOG2_E).masked_fill_(peaks == -math.inf, -math.inf)
        if means is not None:
            self.of_memory = means.div_(sums.masked_fill(sums == 0, math.inf).unsqueeze(1)), log_s
        return Sums(log_s, None if totals is None else totals.log(), counts)

    def gradient(self, log_s: Tensor, d_log_s: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the sum of d_log_s_i log S_i, by embeddings: of the batch's pairs, of the memory's.

        Both are ``[M, D]``. ``log_s``: of all portions together, without a pair weight's total.
        """
        none = log_s == -math.inf
        d_exponents = d = (d_log_s / self.temperature).masked_fill_(none, 0.0)
        log_s = log_s.masked_fill(none, 0.0)
        log2_s = log_s * LOG2_E if self.logs else log_s
        if not self.logs:  # by S
            d = d * log_s.neg().exp_()
        z = self.pairs.embeddings
        d_z = torch.zeros_like(z)
        for block in self.blocks:
            if block.is_memory or not block.are_negatives:
                continue
            i, j, of_sides = block.i, block.j, self._terms(block)
            shape = of_sides[0].shape
            if self.logs:  # W e^{s / tau} / S; log S is rounded, but no pair exceeds its sum
                of_sides = [
                    torch.sub(terms, log2_s[side].unsqueeze(axis), out=self._scratch(axis, shape))
                    .clamp_(_SMALLEST_FRACTION, 0.0)
                    .exp2_()
                    for axis, (side, terms) in enumerate(zip(block.sides, of_sides, strict=True))
                ]
            first, d_i = of_sides[0], d[i]
            if len(of_sides) > 1 and of_sides[1] is first:  # the same for both sides
                d_i = torch.add(d_i, d[j].unsqueeze(1), out=self._scratch(0, shape))
            d_pairs = torch.mul(first, d_i, out=self._scratch(0, shape))
            if len(of_sides) > 1 and of_sides[1] is not first:
                d_pairs.addcmul_(of_sides[1], d[j].unsqueeze(1))
            d_z[i].addmm_(d_pairs.T, z[j])
            if i != j:
                d_z[j].addmm_(d_pairs, z[i])
        if self.of_memory is None:
            return d_z, None
        means, log_sums = self.of_memory
        fractions = (log_sums - log_s).masked_fill_(none, 0.0).exp_()
        return d_z, means * (d_exponents * fractions).unsqueeze(1)

    def _terms(
        self,
        block: Block,
        keep: bool = False,
        for_sums: bool = False,
        totals: Tensor | None = None,
    ) -> list[Tensor]:
        """W e^{s / tau} ``[J, I]`` of each side, 0 for pairs that are no negatives.

        log2 of it, if a maximum is to be subtracted. ``keep``: for the gradient. ``for_sums``: of
        one side, if both have the same sums. Adds to the totals of the pair weight.
        """
        if block.number in self.kept:
            return self.kept[block.number]
        pairs, z, logs = self.pairs, self.z, self.logs
        shape = torch.Size((block.j.stop - block.j.start, block.i.stop - block.i.start))
        kept = 10 + 3 * block.number if keep else 0  # numbers of scratch that stay
        out = self._scratch(kept + 2 if keep else 4, shape)
        powers = exponents = torch.mm(z[block.j], z[block.i].T * self.scale, out=out)
        if pairs.pair_weight is None:
            self._exclude(exponents if logs else exponents.exp2_(), block)
        elif not logs:
            powers = torch.exp2(exponents, out=self._scratch(3, shape))
            self._exclude(powers, block)
        of_sides = []
        one_side = for_sums and not keep and block.i == block.j
        for axis, side in enumerate(block.sides[:1] if one_side else block.sides):
            terms, out = powers, self._scratch(kept + axis, shape)
            if pairs.pair_weight is not None:
                numbers = [of_all[side].unsqueeze(axis) for of_all in self.numbers]
                terms = pairs.pair_weight.formula(exponents, *numbers, out=out)
                if totals is not None or not logs:
                    weights = torch.exp2(terms, out=self._scratch(2, shape) if logs else terms)
                    if totals is not None and not (axis == 1 and block.i == block.j):
                        self._exclude_empty(weights, block, 0.0)
                        totals[side].add_(weights.sum(axis))
                if logs:
                    self._exclude(terms.add_(exponents), block)
                else:
                    terms.mul_(powers)
            if pairs.weights is not None:
                weights = self._weights(block, axis, out if terms is powers else None)
                combine = torch.add if logs else torch.mul
                terms = combine(terms, weights, out=weights)
            if self.by_index is not None and not block.is_memory:
                given = self.by_index, block.i, block.j, axis
                terms = fill_by_index(terms, self.excluded, *given)
            of_sides.append(terms)
        if keep:
            self.kept[block.number] = of_sides
        return of_sides

    def _weights(self, block: Block, axis: int, out: Tensor | None) -> Tensor:
        """Those of a table or factors, ``[J, I]``."""
        assert self.pairs.weights is not None
        if self.row != block.i.start:
            self.row, self.columns = block.i.start, {}
        if axis not in self.columns:
            self.columns[axis] = self.pairs.weights.columns(self.prepared, block.i, axis)
        return self.pairs.weights.block(self.columns[axis], block.j, self.logs, out)

    def _exclude(self, matrix: Tensor, block: Block) -> None:
        """Fill the pairs that are no negatives in place, except for those by index."""
        i, j, items = block.i, block.j, self.pairs.items
        if block.is_memory:
            self._exclude_empty(matrix, block, self.excluded)
        if block.may_share_items and items is not None:
            matrix.masked_fill_(items[j].unsqueeze(1) == items[i], self.excluded)
        elif items is None and not block.is_memory:  # pairs of one position lie on diagonals
            num_views, num = len(self.pairs.lengths), self.pairs.lengths[0]
            for shift in range(1 - num_views, num_views):
                offset = j.start - i.start + shift * num
                if -matrix.shape[0] < offset < matrix.shape[1]:
                    matrix.diagonal(offset).fill_(self.excluded)

    def _exclude_empty(self, matrix: Tensor, block: Block, value: float) -> None:
        if block.is_memory and self.pairs.filled is not None:
            matrix.masked_fill_(~self.pairs.filled[block.j].unsqueeze(1), value)

    def _scratch(self, number: int, shape: torch.Size) -> Tensor:
        """One of a few matrices, whose memory all blocks share."""
        size, key = shape.numel(), (number, self.z.dtype)
        memory = self.scratch.get(key)
        if memory is None or memory.shape[0] < size:
            with torch.inference_mode(False):  # such a tensor could not be used outside of it
                memory = torch.empty(size, dtype=self.z.dtype, device=self.z.device)
            self.scratch[key] = memory
        return memory[:size].view(shape)


def _item_ranges(items: Tensor, parts: Sequence[slice]) -> list[tuple[int, int]] | None:
    """The first and the last item of each span of sorted ones; None if they cannot be read."""
    if not can_be_read(items):
        return None
    edges = [(part.start, part.stop - 1) for part in parts]
    return [(low, high) for low, high in items[torch.tensor(edges)].tolist()]


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] <= other[1] and other[0] <= one[1]


def by_query(pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Queries in order, and their keys."""
    query, order = pairs[0].sort()
    return query, pairs[1][order]


def fill_by_index(
    matrix: Tensor, value: float, by_index: tuple[Tensor, Tensor], i: slice, j: slice, axis: int
) -> Tensor:
    """A block ``[J, I]``, with a value for the pairs by index of queries I (of J for axis 1)."""
    query, key = by_index
    queries, keys = (j, i) if axis else (i, j)
    if can_be_read(query):
        ends = torch.searchsorted(query, query.new_tensor([queries.start, queries.stop]))
        first, last = ends.tolist()
        if first == last:
            return matrix
        query, key = query[first:last], key[first:last]
    inside = (query >= queries.start) & (query < queries.stop)
    inside &= (key >= keys.start) & (key < keys.stop)
    of_j, of_i = (query, key) if axis else (key, query)
    positions = (of_j - j.start) * matrix.shape[1] + (of_i - i.start)
    # One number more, for pairs of other blocks: to leave them out would wait for a GPU.
    filled = matrix.new_empty(matrix.numel() + 1)
    filled[:-1].view_as(matrix).copy_(matrix)
    filled.index_fill_(0, positions.where(inside, matrix.numel()), value)
    return filled[:-1].view_as(matrix)


def _may_overflow(temperature: float | Tensor) -> bool:
    """Whether sums of e^{s / tau} need a maximum subtracted, as far as Python can tell."""
    if isinstance(temperature, Tensor):
        temperature = temperature.detach()
        if temperature.device.type != "cpu":
            return True
    return 1 / float(temperature) > _LARGEST_EXPONENT
