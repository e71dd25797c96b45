"""Positives by position, by item and by index: means and sums over them, and their gradient."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.distributed import Processes
from pgcl_losses.engine.listed import Listed
from pgcl_losses.engine.pairs import Pairs, block_size, blocks_of, by_query, fill_by_index
from pgcl_losses.forms import Mean, Term, fraction, largest_exponent, of_existing


class _Kept(NamedTuple):
    """What the gradient of a mean, or of log E, uses again."""

    term: Term
    offsets: Tensor  # [Q]
    totals: Tensor | float = 1.0  # [Q] of the weights of positives
    of_views: Any = None  # grads of queries by each view, [V, V, N] or, of two views, [V, 1, N]
    listed: Any = None  # values and grads [P] by index
    mean: Tensor | None = None  # [Q] which changes with the weights; None for log E


class Positives:
    """The positives of each query. With items, those of one follow each other in each set."""

    def __init__(self, pairs: Pairs, temperature: float | Tensor, processes: Processes) -> None:
        self.pairs, self.temperature, self.processes = pairs, temperature, processes
        self.z = z = pairs.embeddings
        self.listed: Listed | None = None
        self.products: Tensor | None = None  # of queries with each view, [V, V, N] or [1, 1, N]
        listed, weights, num_views = pairs.positives, pairs.positive_weights, len(pairs.lengths)
        if pairs.items is None and listed is None and num_views > 1:
            self.views = z.view(num_views, -1, z.shape[1])  # [V, N, D]
            self.own: Tensor | None = None  # [V, V, 1] the view of a query
            if num_views == 2:
                self.products = torch.linalg.vecdot(*self.views).view(1, 1, -1)
            else:
                num_query_views = 1 if pairs.first_queries else num_views
                products = z.new_zeros(num_views, *self.views.shape[:2])
                for a, b in itertools.combinations(range(num_views), 2):
                    of_pair = torch.linalg.vecdot(self.views[a], self.views[b])
                    products[a, b] = products[b, a] = of_pair
                self.products = products[:num_query_views]
                own = torch.eye(num_query_views, num_views, dtype=torch.bool, device=z.device)
                self.own = own.unsqueeze(2)
        elif pairs.items is None:
            listed, weights = _with_views(pairs)
        if listed is not None and weights is not None:
            self.by_query, self.weights = by_query(listed), weights  # [P]
            self.listed = Listed(z, *listed)
            self.products_of_listed = self.listed.products()  # [P]

    def mean(self, term: Term, offsets: Tensor) -> Mean:
        """The weighted mean over the positives p of i of a term of offset_i - s_ip / tau."""
        if self.products is not None:
            of_queries = offsets.view(-1, 1, self.products.shape[2])
            values, grads = term(self._gaps(of_queries, self.products))
            if self.own is not None:
                values, grads = (x.masked_fill(self.own, 0.0) for x in (values, grads))
            kept = _Kept(term, offsets, len(self.views) - 1, of_views=grads)
            values, grads = (x.sum(1).flatten() / kept.totals for x in (values, grads))
            return Mean(values, grads, None, kept)
        values, grads, totals = self._over_items(term, offsets).unbind()
        kept = _Kept(term, offsets)
        if self.listed is not None:
            query, weights = self.listed.query, self.weights
            kept = kept._replace(listed=term(self._gaps(offsets[query], self.products_of_listed)))
            values = values.index_add(0, query, weights * kept.listed[0])
            grads = grads.index_add(0, query, weights * kept.listed[1])
            totals = totals.index_add(0, query, weights)
        exist = totals > 0
        totals = totals.masked_fill(~exist, 1.0)
        mean = of_existing(values / totals, grads / totals, exist, offsets)
        return mean._replace(kept=kept._replace(totals=totals, mean=mean.values))

    def log_sum(self) -> Mean:
        """log E, E_i the weighted sum of e^{s_ip / tau}; 0 for queries without positives."""
        num_queries = self.pairs.num_queries()
        if self.products is not None:
            logits = self.products / self.temperature
            if self.own is not None:
                logits = logits.masked_fill_(self.own, -torch.inf)
            log_e = logits.logsumexp(1).flatten()
            log_e = log_e.repeat(num_queries // len(log_e))
            kept = self.mean(fraction, log_e).kept._replace(totals=1.0)
            return Mean(log_e, log_e, None, kept)
        logs = self.z.new_full((num_queries,), -torch.inf)
        for _, _, products, sides in self._item_blocks():
            for axis, side, others in sides:
                logits = (products / self.temperature).masked_fill_(others, -torch.inf)
                logs[side] = torch.logaddexp(logs[side], logits.logsumexp(axis))
        logs = self.processes.add_logs(logs)
        if self.listed is not None:
            logits = self.products_of_listed / self.temperature + self.weights.log()
            logs = torch.logaddexp(logs, self.listed.log_sums(logits, num_queries))
        exist = logs > -torch.inf
        log_e = logs.masked_fill(~exist, 0.0)
        kept = _Kept(fraction, log_e)
        if self.listed is not None:
            gaps = self._gaps(log_e[self.listed.query], self.products_of_listed)
            values = gaps.maximum(self.weights.log()).neg().clamp_max(largest_exponent(gaps)).exp()
            kept = kept._replace(listed=(values, -values))
        return Mean(log_e, log_e, exist, kept)

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
        elif self.products is not None and self.processes.rank == 0:
            self._add_gradient_of_views(d_z, d_sums)
        return None if self.listed is None else self._add_gradient_of_listed(d_z, d_sums)

    def _gaps(self, offsets: Tensor, products: Tensor) -> Tensor:
        if isinstance(self.temperature, Tensor):
            return offsets - products / self.temperature
        return torch.sub(offsets, products, alpha=1 / self.temperature)

    def _add_gradient_of_views(self, d_z: Tensor, d_sums: Sequence[tuple[_Kept, Any]]) -> None:
        """Row i of all views."""
        d_views, views = d_z.view_as(self.views), self.views
        for kept, d in d_sums:
            d_queries = d.view(-1, 1, views.shape[1]) if isinstance(d, Tensor) else d
            d_products = kept.of_views * d_queries / -self.temperature  # as products
            if self.own is None:
                d_views.addcmul_(d_products.sum(0).unsqueeze(2), views.flip(0))
                continue
            d_pairs = views.new_zeros(len(views), *d_products.shape[1:])  # [V, V, N]
            d_pairs[: len(d_products)] = d_products
            d_pairs += d_pairs.transpose(0, 1).clone()  # both views of a pair have a gradient
            for d_pair, of_view in zip(d_pairs, views, strict=True):
                d_views.addcmul_(d_pair.unsqueeze(2), of_view)

    # By item: in blocks [J, I] of queries I and, if J are others, also of queries J.

    def _over_items(self, term: Term, offsets: Tensor) -> Tensor:
        """Sums of a term and of its derivatives, and of how many: ``[3, Q]``."""
        sums = offsets.new_zeros(3, len(offsets))
        if self.pairs.items is None:
            return sums
        for _, _, products, sides in self._item_blocks():
            for axis, side, others in sides:
                parts = term(self._gaps(offsets[side].unsqueeze(axis), products))
                for total, part in zip(sums, (*parts, torch.ones_like(products)), strict=True):
                    total[side] += part.masked_fill_(others, 0.0).sum(axis)
        return self.processes.add(sums, "sums over positives")

    def _add_gradient_of_items(self, d_z: Tensor, d_sums: Sequence[tuple[_Kept, Any]]) -> None:
        for i, j, products, sides in self._item_blocks():
            d_products = torch.zeros_like(products)
            for axis, side, others in sides:
                for kept, d in d_sums:
                    grads = kept.term(self._gaps(kept.offsets[side].unsqueeze(axis), products))[1]
                    d_products -= grads.mul_(d[side].unsqueeze(axis)).masked_fill_(others, 0.0)
            d_products /= self.temperature
            d_z[i].addmm_(d_products.T, self.z[j])
            d_z[j].addmm_(d_products, self.z[i])

    def _item_blocks(
        self,
    ) -> Iterator[tuple[slice, slice, Tensor, list[tuple[int, slice, Tensor]]]]:
        """This process's blocks: their products, and a mask of no positives for each side."""
        items, size = self.pairs.items, block_size(self.z.device)
        if items is None:
            return
        if can_be_read(items):  # smaller ones have fewer pairs of other items
            of_each = torch.unique_consecutive(items[: len(self.z)], return_counts=True)[1]
            size = min(size, 128 + int(of_each.max()))
        rank, num_ranks = self.processes.rank, self.processes.num_ranks()
        blocks = [
            block
            for block in blocks_of(self.pairs, size, num_ranks)
            if block.may_share_items() and block.are_compared and not block.is_memory
        ]
        for block in blocks[rank::num_ranks]:
            i, j = block.i, block.j
            if i != j and block.shared is not None:
                i, j = (_part_between(items, of, *block.shared) for of in (i, j))
            others = items[j].unsqueeze(1) != items[i]
            if i == j:
                others.fill_diagonal_(True)
            of_sides = []
            for axis, side in enumerate((i, j)[: len(block.sides)] if i != j else (i,)):
                of_side = others
                if self.listed is not None:
                    of_side = fill_by_index(others, True, self.by_query, i, j, axis)
                of_sides.append((axis, side, of_side))
            yield i, j, self.z[j] @ self.z[i].T, of_sides

    # By index: a list of pairs.

    def _add_gradient_of_listed(
        self, d_z: Tensor, d_sums: Sequence[tuple[_Kept, Any]]
    ) -> Tensor | None:
        assert self.listed is not None
        query, key = self.listed.query, self.listed.key
        d_weights, d_scores = (torch.zeros_like(self.products_of_listed) for _ in range(2))
        for kept, d in d_sums:
            values, grads = kept.listed
            d_weights += d[query] * (values if kept.mean is None else values - kept.mean[query])
            d_scores -= d[query] * grads * self.weights
        own = slice(self.processes.rank, None, self.processes.num_ranks())
        Listed(self.z, query[own], key[own]).add_gradient(d_z, d_scores[own] / self.temperature)
        if self.pairs.positive_weights is None:
            return None
        d_own = torch.zeros_like(d_weights)
        d_own[own] = d_weights[own]
        return d_own[: len(self.pairs.positive_weights)]


def _part_between(items: Tensor, of: slice, lowest: int, highest: int) -> slice:
    """Where sorted items lie between two of them."""
    first = torch.searchsorted(items[of], lowest)
    end = torch.searchsorted(items[of], highest, right=True)
    return slice(of.start + int(first), of.start + int(end))


def _with_views(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The listed pairs, and row i of every other view unless it is listed: ``[2, P]``, ``[P]``."""
    count, num = len(pairs.embeddings), pairs.lengths[0]
    query = torch.arange(pairs.num_queries(), device=pairs.embeddings.device)
    keys = [(query + view * num) % count for view in range(1, len(pairs.lengths))]
    by_view = torch.stack([query.repeat(len(keys)), torch.cat([query[:0], *keys])])
    weights = pairs.embeddings.new_ones(by_view.shape[1])
    if pairs.positives is None or pairs.positive_weights is None:
        return by_view, weights
    codes = [listed[0] * count + listed[1] for listed in (by_view, pairs.positives)]
    weights = weights.masked_fill_(torch.isin(*codes), 0.0)
    return torch.cat([pairs.positives, by_view], 1), torch.cat([pairs.positive_weights, weights])
