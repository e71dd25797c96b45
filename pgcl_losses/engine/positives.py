"""Positives by position, by item and by index: means and sums over them, and their gradient."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.distributed import Processes
from pgcl_losses.engine.listed import Listed
from pgcl_losses.engine.pairs import Pairs, block_size, by_query, fill_by_index, spans
from pgcl_losses.forms import Mean, Term, fraction, largest_exponent, of_existing


class _Kept(NamedTuple):
    """What the gradient of a mean, or of log E, uses again."""

    term: Term
    offsets: Tensor  # [Q]
    totals: Tensor | float = 1.0  # [Q] of the weights of positives
    of_views: Sequence[Tensor] = ()  # slopes [N] or [2, N] of each pair of views
    listed: Any = None  # values and slopes [P] by index
    mean: Tensor | None = None  # [Q] which changes with the weights; None for log E


class Positives:
    """The positives of each query. With items, those of one follow each other in each set."""

    def __init__(self, pairs: Pairs, temperature: float | Tensor, processes: Processes) -> None:
        self.pairs, self.temperature, self.processes = pairs, temperature, processes
        self.z, num_views = pairs.embeddings, len(pairs.lengths)
        self.num_query_views = 1 if pairs.first_queries else num_views
        self.by_view, self.listed = pairs.items is None and pairs.positives is None, None
        if self.by_view:
            self.views = self.z.view(num_views, -1, self.z.shape[1])  # [V, N, D]
            self.view_pairs = list(self._view_pairs())
            self.products = [
                torch.linalg.vecdot(self.views[a], self.views[b]) for a, b, _ in self.view_pairs
            ]
        elif pairs.positives is not None and pairs.positive_weights is not None:
            self.by_query = by_query(pairs.positives)
            listed, self.weights = pairs.positives, pairs.positive_weights
            if pairs.items is None:
                listed, self.weights = _with_views(pairs, listed, self.weights)
            self.listed = Listed(self.z, listed)
            self.products_of_listed = self.listed.products()  # [P]

    def mean(self, term: Term, offsets: Tensor) -> Mean:
        """The weighted mean over the positives p of i of a term of offset_i - s_ip / tau."""
        kept, totals = _Kept(term, offsets), torch.zeros_like(offsets)
        if self.by_view:
            values, slopes, kept = self._over_views(kept)
        elif self.pairs.items is not None:
            values, slopes, totals = self._over_items(kept).unbind()
        else:
            values, slopes = torch.zeros_like(offsets), torch.zeros_like(offsets)
        if self.listed is not None:
            query, weights = self.listed.query, self.weights
            kept = kept._replace(listed=term(self._gaps(offsets[query], self.products_of_listed)))
            values = values.index_add(0, query, weights * kept.listed[0])
            slopes = slopes.index_add(0, query, weights * kept.listed[1])
            totals = totals.index_add(0, query, weights)
        if self.by_view and len(self.views) > 1:
            if kept.totals != 1:
                values, slopes = values / kept.totals, slopes / kept.totals
            return Mean(values, slopes, None, kept)
        exist = totals > 0
        totals = totals.masked_fill(~exist, 1.0)
        mean = of_existing(values / totals, slopes / totals, exist, offsets)
        return mean._replace(kept=kept._replace(totals=totals, mean=mean.values))

    def log_sum(self) -> Mean:
        """log E, E_i the weighted sum of e^{s_ip / tau}; 0 for queries without positives."""
        logs = self.z.new_full((self.pairs.num_queries(),), -torch.inf)
        if self.by_view:
            of_views = logs.view(self.num_query_views, -1)
            for (*_, rows), products in zip(self.view_pairs, self.products, strict=True):
                of_views[rows] = torch.logaddexp(of_views[rows], products / self.temperature)
        elif self.pairs.items is not None:
            for _, _, products, sides in self._item_blocks():
                for axis, side, others in sides:
                    logits = (products / self.temperature).masked_fill_(others, -torch.inf)
                    logs[side] = torch.logaddexp(logs[side], logits.logsumexp(axis))
            logs = self.processes.add_logs(logs)
        if self.listed is not None:
            logits = self.products_of_listed / self.temperature + self.weights.log()
            logs = torch.logaddexp(logs, self.listed.log_sums(logits, len(logs)))
        exist = logs > -torch.inf
        log_e = logs.masked_fill(~exist, 0.0)
        kept = _Kept(fraction, log_e)
        if self.by_view:
            kept = self._over_views(kept)[2]._replace(totals=1.0)
        if self.listed is not None:
            gaps = self._gaps(log_e[self.listed.query], self.products_of_listed)
            values = gaps.maximum(self.weights.log()).neg().clamp_max(largest_exponent(gaps)).exp()
            kept = kept._replace(listed=(values, -values))
        return Mean(log_e, log_e, None if self.by_view and len(self.views) > 1 else exist, kept)

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
            d_sums.append((mean.kept, d_sum))
        if self.pairs.items is not None:
            self._add_gradient_of_items(d_z, d_sums)
        elif self.by_view and self.processes.rank == 0:
            self._add_gradient_of_views(d_z, d_sums)
        return None if self.listed is None else self._add_gradient_of_listed(d_z, d_sums)

    def _gaps(self, offsets: Tensor, products: Tensor) -> Tensor:
        if isinstance(self.temperature, Tensor):
            return offsets - products / self.temperature
        return torch.sub(offsets, products, alpha=1 / self.temperature)

    # By position: row i of every view.

    def _view_pairs(self) -> Iterator[tuple[int, int, slice]]:
        """Two views, and those of them that have queries."""
        for a, b in itertools.combinations(range(len(self.pairs.lengths)), 2):
            if b < self.num_query_views:
                yield a, b, slice(a, b + 1, b - a)
            elif a < self.num_query_views:
                yield a, b, slice(a, a + 1)

    def _over_views(self, kept: _Kept) -> tuple[Tensor, Tensor, _Kept]:
        """Sums of a term and of its slopes."""
        num_views, num = self.views.shape[:2]
        of_queries = kept.offsets.view(-1, num)  # [V, N] or [1, N]
        each = [
            kept.term(self._gaps(of_queries[rows], products))
            for (*_, rows), products in zip(self.view_pairs, self.products, strict=True)
        ]
        if num_views == 2:
            values, slopes = each[0]
        else:
            values, slopes = torch.zeros_like(of_queries), torch.zeros_like(of_queries)
            for (*_, rows), (value, slope) in zip(self.view_pairs, each, strict=True):
                values[rows] += value
                slopes[rows] += slope
        of_views = [slope for _, slope in each]
        kept = kept._replace(totals=num_views - 1, of_views=of_views)
        return values.flatten(), slopes.flatten(), kept

    def _add_gradient_of_views(self, d_z: Tensor, d_sums: Sequence[tuple[_Kept, Any]]) -> None:
        d_views, num = d_z.view_as(self.views), self.views.shape[1]
        for n, (a, b, rows) in enumerate(self.view_pairs):
            for kept, d in d_sums:
                d_of_rows = d.view(-1, num)[rows] if isinstance(d, Tensor) else d
                d_scores = (kept.of_views[n] * d_of_rows).sum(0)
                d_products = d_scores.div_(-self.temperature).unsqueeze(1)
                d_views[a].addcmul_(d_products, self.views[b])
                d_views[b].addcmul_(d_products, self.views[a])

    # By item: in blocks [J, I] of queries I and, if J are others, also of queries J.

    def _over_items(self, kept: _Kept) -> Tensor:
        """Sums of a term and of its slopes, and of how many: ``[3, Q]``."""
        sums = kept.offsets.new_zeros(3, len(kept.offsets))
        for _, _, products, sides in self._item_blocks():
            for axis, side, others in sides:
                parts = kept.term(self._gaps(kept.offsets[side].unsqueeze(axis), products))
                for total, part in zip(sums, (*parts, torch.ones_like(products)), strict=True):
                    total[side] += part.masked_fill_(others, 0.0).sum(axis)
        return self.processes.add(sums, "sums over positives")

    def _add_gradient_of_items(self, d_z: Tensor, d_sums: Sequence[tuple[_Kept, Any]]) -> None:
        for i, j, products, sides in self._item_blocks():
            d_products = torch.zeros_like(products)
            for axis, side, others in sides:
                for kept, d in d_sums:
                    slopes = kept.term(self._gaps(kept.offsets[side].unsqueeze(axis), products))[1]
                    d_products -= slopes.mul_(d[side].unsqueeze(axis)).masked_fill_(others, 0.0)
            d_products /= self.temperature
            d_z[i].addmm_(d_products.T, self.z[j])
            d_z[j].addmm_(d_products, self.z[i])

    def _item_blocks(
        self,
    ) -> Iterator[tuple[slice, slice, Tensor, list[tuple[int, slice, Tensor]]]]:
        """This process's blocks: their products, and a mask of no positives for each side."""
        items, num_queries = self.pairs.items, self.pairs.num_queries()
        rank, num_ranks = self.processes.rank, self.processes.num_ranks()
        assert items is not None
        for i, j in itertools.islice(self._spans(items, num_ranks), rank, None, num_ranks):
            others = items[j].unsqueeze(1) != items[i]
            if i == j:
                others.fill_diagonal_(True)
            sides = []
            for axis, side in enumerate((i, j) if i != j and j.start < num_queries else (i,)):
                of_side = others
                if self.listed is not None:
                    of_side = fill_by_index(others, True, self.by_query, i, j, axis)
                sides.append((axis, side, of_side))
            yield i, j, self.z[j] @ self.z[i].T, sides

    def _spans(self, items: Tensor, num_ranks: int) -> Iterator[tuple[slice, slice]]:
        """Blocks with all pairs of one item and, where values can be read, with few others."""
        sets, size = self.pairs.sets(), block_size(items.device)
        items = items[: len(self.z)]
        if readable := can_be_read(items):
            most = torch.unique_consecutive(items, return_counts=True)[1].max()
            size = min(size, 128 + int(most))
        for (a, of_a), (b, of_b) in itertools.combinations_with_replacement(enumerate(sets), 2):
            if a >= self.num_query_views or (a == b and not self.pairs.are_compared_within_sets()):
                continue
            parts = spans(of_a.start, of_a.stop, size, num_ranks)
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

    def _add_gradient_of_listed(
        self, d_z: Tensor, d_sums: Sequence[tuple[_Kept, Any]]
    ) -> Tensor | None:
        assert self.listed is not None
        query = self.listed.query
        d_weights, d_scores = (torch.zeros_like(self.products_of_listed) for _ in range(2))
        for kept, d in d_sums:
            values, slopes = kept.listed
            d_weights += d[query] * (values if kept.mean is None else values - kept.mean[query])
            d_scores -= d[query] * slopes * self.weights
        ranks = self.processes.rank, self.processes.num_ranks()
        is_own = self.listed.add_gradient(d_z, d_scores / self.temperature, *ranks)
        assert self.pairs.positive_weights is not None
        return d_weights.where(is_own, 0.0)[: len(self.pairs.positive_weights)]


def _with_views(pairs: Pairs, listed: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Also row i of every other view, unless it is listed: ``[2, P + (V - 1) Q]``."""
    count, num = len(pairs.embeddings), pairs.lengths[0]
    query = torch.arange(pairs.num_queries(), device=listed.device)
    keys = [(query + view * num) % count for view in range(1, len(pairs.lengths))]
    if not keys:
        return listed, weights
    by_view = torch.stack([query.repeat(len(keys)), torch.cat(keys)])
    is_listed = torch.isin(by_view[0] * count + by_view[1], listed[0] * count + listed[1])
    return torch.cat([listed, by_view], 1), torch.cat([weights, (~is_listed).to(weights)])
