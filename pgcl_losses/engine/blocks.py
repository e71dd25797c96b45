"""Blocks of pairs: for batches of any size, without an M x M matrix in memory.

e^{s / tau} is symmetric, so a block of the pairs of queries I and J serves the sums of both; its
matrices are ``[J, I]``, with the sums of I along axis 0 and those of J along axis 1. Where J are no
queries, only axis 0 has sums. The gradient computes the blocks again, except for the past: its
embeddings have no gradient, so one pass gives the sums and, as in attention, their gradient.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.engine.pairs import LOG2_E, Factors, Pairs, Sums, Table

_BLOCK = 640  # embeddings of a block: on a CPU a block of pairs stays in the cache
_BLOCK_ELSEWHERE = 4096  # where launching an operation takes longer than small blocks
_KEPT_UP_TO = 1 << 20  # pairs: reading a kept block is faster than another product
# Up to here e^{s / tau} of millions of pairs adds up in float32 without subtracting a maximum.
_LARGEST_EXPONENT = 40.0
# A smaller fraction of a sum counts as e^-60, which is negligible.
_SMALLEST_FRACTION = -60.0 * LOG2_E


def spans(start: int, stop: int, size: int, num_ranks: int = 1) -> list[slice]:
    """Embeddings of each block, up to ``size``; several processes get a few blocks each."""
    fewest = math.isqrt(8 * num_ranks) if num_ranks > 1 else 1
    count = min(max(fewest, -(-(stop - start) // size)), stop - start)
    edges = [start + (stop - start) * n // max(1, count) for n in range(count + 1)]
    return [slice(*both) for both in itertools.pairwise(edges)]


def block_size(device: torch.device) -> int:
    """How many embeddings a block has."""
    return _BLOCK if device.type == "cpu" else _BLOCK_ELSEWHERE


class Blocks:
    """The sums over blocks of pairs, one block after the other."""

    def __init__(
        self, pairs: Pairs, temperature: float | Tensor, rank: int = 0, num_ranks: int = 1
    ) -> None:
        pairs.check_weights("blocks", Table, Factors)
        self.pairs, self.temperature = pairs, temperature
        self.embeddings = pairs.embeddings.detach()
        self.weights, self.pair_weight = pairs.weights, pairs.pair_weight
        self.scale = LOG2_E / temperature  # from cosines to exponents of 2
        self.logs = _may_overflow(temperature)  # whether a maximum is subtracted from exponents
        self.left_out = -math.inf if self.logs else 0.0
        self.scaled = [] if pairs.weights is None else pairs.weights.scaled(self.logs)
        self.numbers = pairs.pair_weight.numbers(self.scale) if pairs.pair_weight else ()
        self.sets, count = pairs.sets(), len(self.embeddings)
        self.num_queries, size = pairs.num_queries(), block_size(self.embeddings.device)
        keys: list[slice] = []
        first_keys: list[int] = []  # those of later sets
        joined = pairs.negatives != "cross" and not pairs.first_queries
        for of_set in [slice(0, count)] if joined else self.sets:
            keys += spans(of_set.start, of_set.stop, size, num_ranks)
            first_keys += [len(keys)] * (len(keys) - len(first_keys))
        num_spans = len(keys)
        # The totals of a pair weight also need the blocks without negatives.
        if pairs.negatives == "all" or self.pair_weight is not None:
            first_keys = list(range(num_spans))
        elif pairs.negatives == "memory":
            first_keys = [num_spans] * num_spans
        queries = [span for span in keys if span.start < self.num_queries]
        keys += spans(count, count + pairs.num_past(), size, num_ranks)
        partners = zip(queries, first_keys, strict=False)
        blocks = [(i, j) for i, first in partners for j in keys[first:]]
        self.blocks = blocks[rank::num_ranks]  # one process's portion
        self.scratch: dict[int, Tensor] = {}

    def log_sums(self, with_gradient: bool) -> Sums:
        queries = self.embeddings[: self.num_queries]
        sums = torch.zeros_like(queries[:, 0])  # [Q]
        peaks = torch.full_like(sums, -math.inf) if self.logs else sums  # exponents of 2
        totals = None if self.pair_weight is None else torch.zeros_like(sums)
        has_means = with_gradient and self.pairs.past is not None
        means = torch.zeros_like(queries) if has_means else None  # [Q, D]
        lowest = 1 + math.log2(torch.finfo(sums.dtype).tiny)
        keep = with_gradient and len(queries) * len(self.embeddings) <= _KEPT_UP_TO
        kept: list[Tensor] = []
        for i, j in self._each(kept if keep else None):
            for axis in (0,) if i == j or self.is_one_sided else (0, 1):
                mine = j if axis else i
                terms = self._terms(axis, None if totals is None else totals[mine])
                if not self.are_negatives:
                    continue
                if self.logs:
                    peak = torch.maximum(peaks[mine], terms.amax(axis))
                    finite = peak.masked_fill(peak == -math.inf, 0.0)
                    smaller = (peaks[mine] - finite).exp2_()
                    sums[mine] *= smaller
                    if means is not None:
                        means[mine] *= smaller.unsqueeze(1)
                    peaks[mine] = peak
                    terms = torch.sub(terms, finite.unsqueeze(axis), out=self._scratch(axis))
                    # Denormal numbers make exponentials and matrix products slow.
                    terms.clamp_min_(lowest).exp2_()
                    if self.is_past:
                        torch.threshold_(terms, 2.0**lowest, 0.0)
                sums[mine] += terms.sum(axis)
                if self.is_past and means is not None:
                    means[mine].addmm_(terms.T, self._keys(j))
        if means is not None:
            means /= sums.masked_fill(sums == 0, math.inf).unsqueeze(1)
        log_sums = sums.log()
        if self.logs:
            none = peaks == -math.inf
            log_sums = (log_sums + peaks / LOG2_E).masked_fill_(none, -math.inf)
        log_totals = None if totals is None else totals.log()
        return Sums(log_sums, log_totals, (means, log_sums, *kept))

    def gradient(
        self, log_s: Tensor, d_log_s: Tensor, kept: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor | None]:
        """Of the sum of d_log_s_i log S_i, by embeddings ``[M, D]`` and by a temperature ``[]``.

        ``log_s``: of all portions together, without the pair weight's scale.
        """
        means, log_sums, *exponents = kept
        none = log_s == -math.inf
        d_exponents = self.d = (d_log_s / self.temperature).masked_fill_(none, 0.0)
        if self.logs:
            self.log2_s = log_s.masked_fill(none, 0.0) * LOG2_E
        else:  # by S
            tiny = math.log(torch.finfo(log_s.dtype).tiny)
            self.d = d_exponents * log_s.clamp_min(tiny).neg_().exp_()
        embeddings, d_temperature = self.embeddings, None
        d_embeddings = torch.zeros_like(embeddings)
        for i, j in self._each(kept=iter(exponents)):
            d_pairs = self._d_pairs()
            d_embeddings[i].addmm_(d_pairs.T, embeddings[j])
            if i != j:
                d_embeddings[j].addmm_(d_pairs, embeddings[i])
        if isinstance(self.temperature, Tensor):
            # Sums depend on (z_i . z_j) / tau alone; both i and j have their part of the gradient.
            d_temperature = (embeddings * d_embeddings).sum() / (-2 * self.temperature)
        if means is not None and log_sums is not None:
            fractions = (log_sums - log_s).masked_fill_(none, 0.0).exp_()
            d_of_past = means * (d_exponents * fractions).unsqueeze(1)
            d_embeddings[: self.num_queries] += d_of_past
            if d_temperature is not None:
                d_of_pairs = embeddings[: self.num_queries] * d_of_past
                d_temperature -= d_of_pairs.sum() / self.temperature
        return d_embeddings, d_temperature

    def _each(
        self, keep: list[Tensor] | None = None, kept: Iterator[Tensor | None] | None = None
    ) -> Iterator[tuple[slice, slice]]:
        """Iterate over blocks of exponents s / tau, or e^{s / tau} where nothing is added to them.

        They are added to ``keep``, or taken from ``kept`` for blocks that have a gradient.
        """
        row: slice | None = None
        for i, j in self.blocks:
            self.i, self.j, self.is_past = i, j, j.start >= len(self.embeddings)
            self.is_one_sided = j.start >= self.num_queries
            self.are_negatives = self.is_past or self.pairs.negatives == "all"
            if self.pairs.negatives == "cross" and not self.is_past:
                self.are_negatives = self._set(i) != self._set(j)
            has_gradient = self.are_negatives and not self.is_past
            if kept is not None and not has_gradient:
                continue
            if i is not row:
                row, of_row = i, self.embeddings[i].T * self.scale  # [D, I]
                self.lines: dict[int, list[Tensor]] = {}
            exponents = next(kept, None) if kept is not None else None
            if exponents is None:
                out = None if keep is not None and has_gradient else self._scratch(4)
                exponents = torch.mm(self._keys(j), of_row, out=out)
                if self.pair_weight is None:
                    self._fill_left_out(exponents if self.logs else exponents.exp2_())
                if keep is not None and has_gradient:
                    keep.append(exponents)
            self.exponents = self.powers = exponents
            if self.pair_weight is not None and not self.logs and self.are_negatives:
                self.powers = torch.exp2(exponents, out=self._scratch(3))
                self._fill_left_out(self.powers)
            yield i, j

    def _scratch(self, number: int) -> Tensor:
        """One of a few matrices ``[J, I]``, whose memory all blocks share."""
        height, width = self.j.stop - self.j.start, self.i.stop - self.i.start
        memory = self.scratch.get(number)
        if memory is None or len(memory) < height * width:
            memory = self.scratch[number] = self.embeddings.new_empty(height * width)
        return memory[: height * width].view(height, width)

    def _keys(self, j: slice) -> Tensor:
        if self.pairs.past is None or not self.is_past:
            return self.embeddings[j]
        return self.pairs.past[j.start - len(self.embeddings) : j.stop - len(self.embeddings)]

    def _set(self, span: slice) -> int:
        return next(a for a, of_set in enumerate(self.sets) if span.start < of_set.stop)

    def _fill_left_out(self, matrix: Tensor) -> None:
        """Fill the pairs that are no negatives, in place."""
        i, j, items = self.i, self.j, self.pairs.items
        self._fill_absent(matrix, self.left_out)
        if items is not None:
            matrix.masked_fill_(items[j].unsqueeze(1) == items[i], self.left_out)
        if items is not None or self.is_past:
            return
        for a, b in itertools.product(self.sets, self.sets):
            # Pairs of one position lie on a diagonal.
            start_i, start_j = a.start - i.start, b.start - j.start
            first = max(0, -start_i, -start_j)
            last = min(i.stop - a.start, j.stop - b.start, a.stop - a.start, b.stop - b.start)
            if first < last:
                diagonal = matrix.diagonal(start_i - start_j)
                skipped = min(start_i, start_j)
                diagonal[first + skipped : last + skipped].fill_(self.left_out)

    def _fill_absent(self, matrix: Tensor, value: float) -> None:
        if self.is_past and self.pairs.present is not None:
            matrix.masked_fill_(~self.pairs.present[self.j].unsqueeze(1), value)

    def _terms(self, axis: int, totals: Tensor | None = None) -> Tensor:
        """W e^{s / tau} of the sums along an axis; log2 of it, if a maximum is to be subtracted.

        Adds to the totals of the pair weight.
        """
        terms = self.powers
        if self.pair_weight is not None:
            mine = self.j if axis else self.i
            numbers = [of_all[mine].unsqueeze(axis) for of_all in self.numbers]
            terms = self.pair_weight.formula(self.exponents, *numbers, out=self._scratch(axis))
            if totals is not None or not self.logs:
                weights = torch.exp2(terms, out=self._scratch(2) if self.logs else terms)
                if totals is not None:
                    self._fill_absent(weights, 0.0)
                    totals += weights.sum(axis)
            if self.logs:
                self._fill_left_out(terms.add_(self.exponents))
            else:
                terms.mul_(self.powers)
        if self.weights is not None:
            weights = self._weights(axis)
            combine = torch.add if self.logs else torch.mul
            terms = combine(terms, weights, out=self._scratch(axis))
        if self.pairs.listed is not None and not self.is_past:
            if terms is self.powers:  # of both axes
                terms = self._scratch(axis).copy_(terms)
            self._fill_listed(terms, axis, *self.pairs.listed)
        return terms

    def _fill_listed(self, terms: Tensor, axis: int, query: Tensor, key: Tensor) -> None:
        """Fill the pairs given by index whose queries are along the other axis, in place."""
        queries, keys = (self.j, self.i) if axis else (self.i, self.j)
        if can_be_read(query):
            first, last = torch.searchsorted(query, query.new_tensor([queries.start, queries.stop]))
            query, key = query[first:last], key[first:last]
        inside = (query >= queries.start) & (query < queries.stop)
        inside &= (key >= keys.start) & (key < keys.stop)
        query, key = query - queries.start, key - keys.start
        positions = query * terms.shape[1] + key if axis else key * terms.shape[1] + query
        # A boolean index would synchronise a GPU; terms are left_out at least.
        values = terms.new_full(query.shape, math.inf).masked_fill_(inside, self.left_out)
        terms.view(-1).scatter_reduce_(0, positions.where(inside, 0), values, "amin")

    def _weights(self, axis: int) -> Tensor:
        """Those of a table or factors."""
        assert self.weights is not None
        number = axis if self.pair_weight is None else 2
        if axis not in self.lines:
            self.lines[axis] = self.weights.lines(self.scaled, self.i, axis)
        return self.weights.fill(self.lines[axis], self.j, self.logs, self._scratch(number))

    def _d_pairs(self) -> Tensor:
        """Of the exponents: the sum over both embeddings of d_i W_ij e^{s / tau} / S_i."""
        if self.logs:
            return self._of_both(self._fractions)
        if self.pair_weight is not None or self.pairs.listed is not None:
            return self._of_both(self._terms)
        if self.weights is not None:
            return self._of_both(self._weights).mul_(self.powers)
        d_i = self.d[self.i]
        if not self.is_one_sided:
            d_i = torch.add(d_i, self.d[self.j, None], out=self._scratch(0))
        return torch.mul(self.powers, d_i, out=self._scratch(0))

    def _of_both(self, matrix: Callable[[int], Tensor]) -> Tensor:
        """d_i times the matrix of axis 0 and, if J are queries, d_j times that of axis 1."""
        total = matrix(0).mul_(self.d[self.i])
        return total if self.is_one_sided else total.addcmul_(matrix(1), self.d[self.j, None])

    def _fractions(self, axis: int) -> Tensor:
        """W e^{s / tau} / S of the sums along an axis."""
        log2_s = self.log2_s[self.j if axis else self.i].unsqueeze(axis)
        gaps = torch.sub(self._terms(axis), log2_s, out=self._scratch(axis))
        # log S is rounded, but no pair exceeds its sum.
        return gaps.clamp_(_SMALLEST_FRACTION, 0.0).exp2_()


def _may_overflow(temperature: float | Tensor) -> bool:
    """Whether sums of e^{s / tau} need a maximum subtracted, as far as Python can tell."""
    if isinstance(temperature, Tensor):
        temperature = temperature.detach()
        if temperature.device.type != "cpu":
            return True
    return 1 / float(temperature) > _LARGEST_EXPONENT
