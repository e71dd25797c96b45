"""Positives by position, by item and by index: the mean of a term over them, and its gradient."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.distributed import Processes
from pgcl_losses.engine.pairs import Pairs, block_size, by_query, fill_by_index, spans
from pgcl_losses.forms import Mean, Term

_CHUNK = 1 << 16  # pairs by index whose embeddings are gathered at once


class _Kept(NamedTuple):
    """What the gradient of a mean uses again."""

    term: Term
    offsets: Tensor  # [Q]
    totals: Tensor | float  # [Q] of the weights of positives
    of_views: list[Tensor]  # slopes [N] or [2, N] of each pair of views
    by_index: Any  # values and slopes [P], or None


class Positives:
    """The positives of each query. With items, those of one follow each other in each set."""

    def __init__(self, pairs: Pairs, temperature: float | Tensor, processes: Processes) -> None:
        self.pairs, self.temperature = pairs, temperature
        self.processes, self.num_ranks = processes, processes.num_ranks()
        self.z, num_views = pairs.embeddings, len(pairs.lengths)
        self.num_query_views = 1 if pairs.first_queries else num_views
        if pairs.items is None:
            self.views = self.z.view(num_views, -1, self.z.shape[1])  # [V, N, D]
            self.view_pairs = list(self._view_pairs())
            self.cosines = [
                torch.linalg.vecdot(self.views[a], self.views[b]) for a, b, _ in self.view_pairs
            ]
        if pairs.positives is not None:
            self.by_index = by_query(pairs.positives)
            chunks = torch.split(pairs.positives, _CHUNK, dim=1)
            of_chunks = [torch.linalg.vecdot(*self.z[chunk].unbind()) for chunk in chunks]
            self.cosines_by_index = torch.cat(of_chunks)  # [P]

    def mean(self, term: Term, offsets: Tensor) -> Mean:
        """The mean of a term of the gaps offset_i - s_ip / tau over the positives p of each i."""
        of_views: list[Tensor] = []
        by_index: tuple[Tensor, Tensor] | None = None
        totals: Tensor | float
        if self.pairs.items is None:
            values, slopes, totals, of_views = self._over_views(term, offsets)
        else:
            values, slopes, totals = self._over_items(term, offsets).unbind()
        if self.pairs.positives is not None and self.pairs.positive_weights is not None:
            query, weights = self.pairs.positives[0], self.pairs.positive_weights
            by_index = term(self._gaps(offsets[query], self.cosines_by_index))
            values = values.index_add(0, query, weights * by_index[0])
            slopes = slopes.index_add(0, query, weights * by_index[1])
            totals = torch.index_add(torch.as_tensor(totals), 0, query, weights)
        exist = None
        if isinstance(totals, Tensor):
            exist = totals > 0
            totals = totals.masked_fill(~exist, 1.0)
            alone = offsets.where(offsets.isnan(), 0.0)  # NaN in, NaN out
            values, slopes = values.where(exist, alone), slopes.masked_fill(~exist, 0.0)
        if isinstance(totals, Tensor) or totals != 1:
            values, slopes = values / totals, slopes / totals
        return Mean(values, slopes, exist, _Kept(term, offsets, totals, of_views, by_index))

    def add_gradient(
        self, d_z: Tensor, means: Sequence[tuple[Mean, Tensor | float]]
    ) -> Tensor | None:
        """Add that of a weighted sum of means by embeddings ``[M, D]``; return that by weights.

        Each process has its portion of both.
        """
        d_sums = []
        for mean, d_mean in means:
            d_sum = d_mean / mean.kept.totals
            if mean.exist is not None:
                d_sum = d_sum.masked_fill_(~mean.exist, 0.0)
            d_sums.append((mean, d_sum))
        if self.pairs.items is not None:
            self._add_gradient_of_items(d_z, d_sums)
        elif self.processes.rank == 0:
            self._add_gradient_of_views(d_z, d_sums)
        if self.pairs.positives is None:
            return None
        return self._add_gradient_by_index(d_z, d_sums)

    def _gaps(self, offsets: Tensor, cosines: Tensor) -> Tensor:
        if isinstance(self.temperature, Tensor):
            return offsets - cosines / self.temperature
        return torch.sub(offsets, cosines, alpha=1 / self.temperature)

    # By position: row i of every view.

    def _view_pairs(self) -> Iterator[tuple[int, int, slice]]:
        """Two views, and those of them that have queries."""
        for a, b in itertools.combinations(range(len(self.pairs.lengths)), 2):
            if b < self.num_query_views:
                yield a, b, slice(a, b + 1, b - a)
            elif a < self.num_query_views:
                yield a, b, slice(a, a + 1)

    def _over_views(
        self, term: Term, offsets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | float, list[Tensor]]:
        """Sums of a term and of its slopes, of how many; and the slopes of each pair of views."""
        num_views, num = self.views.shape[:2]
        of_queries = offsets.view(-1, num)  # [V, N] or [1, N]
        totals: Tensor | float = num_views - 1 if num_views > 1 else torch.zeros_like(offsets)
        if self.pairs.positives is not None:
            others = self._not_by_index()
            totals = (others.sum(1)[: len(of_queries)] - 1).to(offsets).flatten()
        each = []
        for (a, b, rows), cosines in zip(self.view_pairs, self.cosines, strict=True):
            of_pair = term(self._gaps(of_queries[rows], cosines))
            if self.pairs.positives is not None:
                is_by_index = ~torch.stack([others[a, b], others[b, a]])[: of_pair[0].shape[0]]
                of_pair = (
                    of_pair[0].masked_fill(is_by_index, 0.0),
                    of_pair[1].masked_fill(is_by_index, 0.0),
                )
            each.append(of_pair)
        if num_views == 2:
            values, slopes = each[0]
        else:
            values, slopes = torch.zeros_like(of_queries), torch.zeros_like(of_queries)
            for (*_, rows), (value, slope) in zip(self.view_pairs, each, strict=True):
                values[rows] += value
                slopes[rows] += slope
        return values.flatten(), slopes.flatten(), totals, [slope for _, slope in each]

    def _not_by_index(self) -> Tensor:
        """Whether row n of views a and b is not given by index, ``[V, V, N]``."""
        assert self.pairs.positives is not None
        num_views, num = self.views.shape[:2]
        query, key = self.pairs.positives
        positions = (query // num * num_views + key // num) * num + query % num
        size = num_views * num_views * num
        others = torch.ones(size + 1, dtype=torch.bool, device=query.device)
        others[positions.where(query % num == key % num, size)] = False
        return others[:-1].view(num_views, num_views, num)

    def _add_gradient_of_views(self, d_z: Tensor, d_sums: Sequence[tuple[Mean, Any]]) -> None:
        d_views, num = d_z.view_as(self.views), self.views.shape[1]
        for n, (a, b, rows) in enumerate(self.view_pairs):
            for mean, d in d_sums:
                d_of_rows = d.view(-1, num)[rows] if isinstance(d, Tensor) else d
                d_scores = (mean.kept.of_views[n] * d_of_rows).sum(0)
                d_cosines = d_scores.div_(-self.temperature).unsqueeze(1)
                d_views[a].addcmul_(d_cosines, self.views[b])
                d_views[b].addcmul_(d_cosines, self.views[a])

    # By item: in blocks [J, I] of queries I and, if J are others, also of queries J.

    def _over_items(self, term: Term, offsets: Tensor) -> Tensor:
        """Sums of a term and of its slopes, and of how many: ``[3, Q]``."""
        sums = offsets.new_zeros(3, len(offsets))
        for _, _, cosines, sides in self._item_blocks():
            for axis, side, others in sides:
                parts = term(self._gaps(offsets[side].unsqueeze(axis), cosines))
                for total, part in zip(sums, (*parts, torch.ones_like(cosines)), strict=True):
                    total[side] += part.masked_fill_(others, 0.0).sum(axis)
        return self.processes.add(sums, "sums over positives")

    def _add_gradient_of_items(self, d_z: Tensor, d_sums: Sequence[tuple[Mean, Any]]) -> None:
        for i, j, cosines, sides in self._item_blocks():
            d_cosines = torch.zeros_like(cosines)
            for axis, side, others in sides:
                for mean, d in d_sums:
                    term, offsets = mean.kept.term, mean.kept.offsets
                    slopes = term(self._gaps(offsets[side].unsqueeze(axis), cosines))[1]
                    d_cosines -= slopes.mul_(d[side].unsqueeze(axis)).masked_fill_(others, 0.0)
            d_cosines /= self.temperature
            d_z[i].addmm_(d_cosines.T, self.z[j])
            d_z[j].addmm_(d_cosines, self.z[i])

    def _item_blocks(
        self,
    ) -> Iterator[tuple[slice, slice, Tensor, list[tuple[int, slice, Tensor]]]]:
        """This process's blocks: their cosines, and a mask of no positives for each side."""
        items, num_queries = self.pairs.items, self.pairs.num_queries()
        assert items is not None
        for i, j in itertools.islice(self._spans(items), self.processes.rank, None, self.num_ranks):
            others = items[j].unsqueeze(1) != items[i]
            if i == j:
                others.fill_diagonal_(True)
            sides = []
            for axis, side in enumerate((i, j) if i != j and j.start < num_queries else (i,)):
                of_side = others
                if self.pairs.positives is not None:
                    of_side = fill_by_index(others, True, self.by_index, i, j, axis)
                sides.append((axis, side, of_side))
            yield i, j, self.z[j] @ self.z[i].T, sides

    def _spans(self, items: Tensor) -> Iterator[tuple[slice, slice]]:
        """Blocks with all pairs of one item and, where values can be read, with few others."""
        sets, size = self.pairs.sets(), block_size(items.device)
        items = items[: len(self.z)]
        if readable := can_be_read(items):
            most = torch.unique_consecutive(items, return_counts=True)[1].max()
            size = min(size, 128 + int(most))
        for (a, of_a), (b, of_b) in itertools.combinations_with_replacement(enumerate(sets), 2):
            if a >= self.num_query_views or (a == b and self.pairs.negatives != "all"):
                continue
            parts = spans(of_a.start, of_a.stop, size, self.num_ranks)
            ranges = [(of_b.start, of_b.stop)] * len(parts)
            if readable and parts:
                # Those of its items or, in later parts of one set, of its last item.
                last = [i.stop - 1 for i in parts]
                lowest, highest = items[
                    torch.tensor([last if a == b else [i.start for i in parts], last])
                ]
                start = torch.searchsorted(items[of_b], lowest) + of_b.start
                stop = torch.searchsorted(items[of_b], highest, right=True) + of_b.start
                ranges = list(zip(start.tolist(), stop.tolist(), strict=True))
            for i, (start, stop) in zip(parts, ranges, strict=True):
                if a == b:
                    yield i, i
                    i, start = slice(max(i.start, start), i.stop), i.stop
                for j in spans(start, stop, size):
                    yield i, j

    # By index: a list of pairs.

    def _add_gradient_by_index(self, d_z: Tensor, d_sums: Sequence[tuple[Mean, Any]]) -> Tensor:
        assert self.pairs.positives is not None
        query, key = self.pairs.positives
        d_weights, d_scores = (torch.zeros_like(self.cosines_by_index) for _ in range(2))
        for mean, d in d_sums:
            values, slopes = mean.kept.by_index
            d_weights += d[query] * (values - mean.values[query])
            d_scores -= d[query] * slopes * self.pairs.positive_weights
        d_cosines = (d_scores / self.temperature).unsqueeze(1)
        own = torch.zeros_like(d_weights)
        for start in range(self.processes.rank * _CHUNK, len(query), self.num_ranks * _CHUNK):
            chunk = slice(start, start + _CHUNK)
            i, j, d_chunk = query[chunk], key[chunk], d_cosines[chunk]
            d_z.index_add_(0, i, d_chunk * self.z[j]).index_add_(0, j, d_chunk * self.z[i])
            own[chunk] = d_weights[chunk]
        return own
