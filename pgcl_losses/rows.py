"""The contrast by rows: a row is one query with all its keys, and rows are independent.

What a row means is decided in three places. `find_partners` says which keys are positives, and
how much each counts; `add_log_weights` says which keys are negatives, and how much each counts; a
`Form` makes the loss of both. `row_losses` puts them together in plain torch, for autograd,
torch.func and torch.compile. `chunks` does the same for batches of any size.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.distributed import Span
from pgcl_losses.forms import Form
from pgcl_losses.weights import Factors, Gaussian, Table

# The label of an embedding in the memory that was stored without one. A caller's labels differ.
NO_LABEL = torch.iinfo(torch.int64).min


class Listed(NamedTuple):
    """Pairs that the caller lists, in the order of their queries."""

    query: Tensor  # [P]
    key: Tensor  # [P]

    @classmethod
    def by_query(cls, query: Tensor, key: Tensor) -> tuple["Listed", Tensor]:
        """The pairs in the order of their queries, and this order ``[P]``."""
        query, order = query.sort(stable=True)
        return cls(query, key[order]), order

    def first_and_count(self, i: Tensor) -> tuple[Tensor, Tensor]:
        """Of each query ``[I]`` where its pairs begin, and how many it has."""
        first = torch.searchsorted(self.query, i)
        return first, torch.searchsorted(self.query, i, right=True) - first


class Pairs(NamedTuple):
    """Which pairs of M embeddings, in sets one after the other, and of B in a memory, count.

    The memory lies behind the batch: its embeddings are numbers M to M + B - 1. All of this is
    constant; what has a gradient (embeddings, temperature, weights of positives) is given beside
    it.
    """

    lengths: tuple[int, ...]  # of each set; they add up to M
    # Where the negatives of a query are: in "all" sets and the memory, in the other sets and the
    # memory ("cross"), in the "memory" alone.
    negatives: str = "all"
    first_queries: bool = False  # whether only the embeddings of the first set are queries
    labels: Tensor | None = None  # [M + B] int64; None: embedding n of every set has label n
    positives: Listed | None = None  # further positives; without labels they are all
    negative_pairs: Listed | None = None  # in place of all other negatives
    memory: Tensor | None = None  # [B, D]
    filled: Tensor | None = None  # [M + B] bool, False for empty slots of the memory; None: all
    weights: Table | Factors | None = None  # of negatives, by what is known of both embeddings
    pair_weight: Gaussian | None = None  # of negatives, by the cosine of a pair
    hardness: float = 0.0  # beta: weights e^(beta s / tau) of a mean of 1 over the negatives
    form: Form = Form()  # the loss of a query, of its negatives and positives
    same_label: Listed | None = None  # the labels of the batch in order, and whose they are

    def num_embeddings(self) -> int:
        """M, how many embeddings the batch has."""
        return sum(self.lengths)

    def keys(self, z: Tensor, numbers: Span) -> Tensor:
        """Embeddings of the batch z ``[M, D]``, or of the memory."""
        if self.memory is None or numbers.stop <= len(z):
            return z[numbers.slice()]
        return self.memory[numbers.start - len(z) : numbers.stop - len(z)]

    def sets(self) -> list[Span]:
        """The embeddings of each set."""
        ends = itertools.accumulate(self.lengths)
        return [Span(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def log_sum_terms(self) -> list[tuple[float, float]]:
        """log S is a sum of log-sum-exps of log W + scale * scores: sign and scale of each.

        The weights of hard negatives, e^(beta s / tau), depend on the scores: their own
        log-sum-exp, which scales them to a mean of 1, is subtracted.
        """
        beta = self.hardness
        return [(1.0, 1.0)] if beta == 0 else [(1.0, 1 + beta), (-1.0, beta)]


class Inputs(NamedTuple):
    """What has a gradient."""

    z: Tensor  # [M, D] embeddings
    temperature: Any  # a number or a Tensor []
    weights: Tensor | None  # [P] of the listed positives

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        weights = None if self.weights is None else function(self.weights)
        return Inputs(function(self.z), function(self.temperature), weights)


class Rows(NamedTuple):
    """Some queries, and the keys that they are compared with."""

    queries: Span  # I embeddings of the batch
    keys: list[Span]  # K embeddings, of the batch and then of the memory
    query_set: Span | None = None  # the set of the queries, if its embeddings are not compared
    has_query_set: bool = True  # whether that set is among the keys nevertheless
    # Whether both views are queries, each with the keys of the other. `keys` is the second view
    # then, which is right for the queries of the first view: weights by number have no place here.
    are_both_ways: bool = False

    def num_keys(self) -> list[int]:
        return [numbers.length() for numbers in self.keys]

    def num_pairs(self) -> int:
        return self.queries.length() * sum(self.num_keys())

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers of the queries ``[I]`` and of the keys ``[K]``."""
        i, *j = [torch.arange(x.start, x.stop, device=device) for x in (self.queries, *self.keys)]
        return i, j[0] if len(j) == 1 else torch.cat(j)

    def columns_of_views(self, lengths: tuple[int, ...], i: Tensor) -> Tensor:
        """The columns of row n of every view, for queries ``[I]`` that are row n of their view.

        The query itself comes first, if it is among the keys: ``[I, V]``.
        """
        num, num_views = lengths[0], len(lengths)
        if self.has_query_set:
            views = torch.arange(num_views, device=i.device)
            return (i.unsqueeze(1) + num * views) % (num * num_views)
        views = torch.arange(num_views - 1, device=i.device)
        return i.unsqueeze(1) % num + num * views


class Partners(NamedTuple):
    """The keys that are no negatives of a query, and how much each counts as a positive.

    In one of two layouts: P columns of the row, or a mask of all keys.
    """

    columns: Tensor | None  # [I, P]
    weights: Tensor | None  # [I, P], or [I, K] beside a mask; 0: no positive; None: see num_self
    mask: Tensor | None = None  # [I, K]
    num_self: int = 0  # without weights: how many of the first columns are the query itself

    def scores(self, scores: Tensor) -> Tensor:
        """The scores of positives ``[I, P]``, of those of all keys ``[I, K]``."""
        if self.columns is None:
            return scores
        return scores.gather(1, self.columns[:, self.num_self :])


def find_partners(pairs: Pairs, rows: Rows, like: Tensor, weights: Tensor | None) -> Partners:
    """Decide which keys are positives of some queries, and how much each counts.

    ``like``: any tensor with the dtype and device of the scores. ``weights``: of `pairs.positives`.

    Queries have different numbers of positives: those with fewer are padded by themselves, with a
    weight of 0. Where Python cannot read how many there are, there is a weight for each key.
    """
    i, j = rows.numbers(like.device)
    if pairs.labels is None and pairs.positives is None:
        columns = rows.columns_of_views(pairs.lengths, i)
        if len(pairs.lengths) == 1:  # one view: its embeddings have no positives
            return Partners(columns, like.new_zeros(columns.shape))
        return Partners(columns, None, num_self=int(rows.has_query_set))
    # From here on all embeddings of the batch are keys: the column of a key is its number.
    if not can_be_read(like):
        return _partners_by_mask(pairs, i, j, rows, like, weights)
    columns, w = i.unsqueeze(1), like.new_zeros(len(i), 1)
    if pairs.same_label is not None and pairs.labels is not None:
        columns, number, is_same = _padded(pairs.same_label, pairs.labels[i], i)
        is_positive = is_same & (columns != i.unsqueeze(1))
        if rows.query_set is not None:
            is_positive &= (columns < rows.query_set.start) | (columns >= rows.query_set.stop)
        w = is_positive.to(like.dtype)
    if pairs.positives is not None and weights is not None:
        listed, number, is_listed = _padded(pairs.positives, i, i)
        if pairs.labels is not None:  # a listed pair counts by its own weight alone
            mask = torch.zeros(len(i), len(j), dtype=torch.bool).scatter_(1, listed, True)
            w = w.masked_fill(mask.gather(1, columns), 0.0)
        w = torch.cat([w, weights[number].where(is_listed, 0.0)], 1)  # inf * 0 would be NaN
        columns = torch.cat([columns, listed], 1)
    return Partners(columns, w)


def _padded(pairs: Listed, value: Tensor, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The keys of the pairs of each value, padded by the query: ``[I, P]``.

    Beside them the number of each pair in the list, and whether it is one and no padding.
    """
    first, count = pairs.first_and_count(value)
    places = torch.arange(int(count.max()) if len(count) else 0)
    number = (first.unsqueeze(1) + places).clamp_max_(max(0, len(pairs.key) - 1))
    is_pair = places < count.unsqueeze(1)
    return pairs.key[number].where(is_pair, i.unsqueeze(1)), number, is_pair


def _partners_by_mask(
    pairs: Pairs, i: Tensor, j: Tensor, rows: Rows, like: Tensor, weights: Tensor | None
) -> Partners:
    """A weight for each key, without reading how many positives a query has."""
    mask = i.unsqueeze(1) == j  # [I, K]
    w = torch.zeros_like(mask, dtype=like.dtype)
    if pairs.labels is not None:
        same = pairs.labels[i].unsqueeze(1) == pairs.labels[j]
        w = (same & ~mask & (j < pairs.num_embeddings())).to(like.dtype)
        mask = mask | same
        if rows.query_set is not None:
            in_set = (j >= rows.query_set.start) & (j < rows.query_set.stop)
            w = w.masked_fill(in_set, 0.0)
    if pairs.positives is not None and weights is not None:
        query, key = pairs.positives
        # A pair of another query becomes the first query with itself, which is no positive anyway.
        is_here = (query >= rows.queries.start) & (query < rows.queries.stop)
        row = (query - rows.queries.start).where(is_here, 0)
        key = key.where(is_here, rows.queries.start)
        mask = mask.index_put((row, key), torch.ones_like(mask[0, 0]))
        w = w.index_put((row, key), w.new_zeros(()))
        w = w.index_put((row, key), weights.where(is_here, 0.0).to(w.dtype), accumulate=True)
    return Partners(None, w, mask)


def add_log_weights(
    pairs: Pairs,
    rows: Rows,
    logits: Tensor,
    partners: Partners,
    scores: Tensor,
    temperature: float | Tensor,
) -> Tensor:
    """Add log W_ij to logits ``[I, K]`` in place: how much a key counts as a negative of a query.

    It becomes -inf where a key is no negative, which nothing else decides. ``scores``: cosines /
    temperature, of which a pair weight is a function.
    """
    count = pairs.num_embeddings()
    if pairs.weights is not None or pairs.pair_weight is not None:
        i, j = rows.numbers(logits.device)
        if pairs.pair_weight is not None:
            filled = None if pairs.filled is None else pairs.filled[j]
            logits += pairs.pair_weight.rows(i, scores, temperature, filled)
        if pairs.weights is not None:
            logits += pairs.weights.rows(i, j)
    if partners.columns is not None:
        logits.scatter_(1, partners.columns, -math.inf)
    elif partners.mask is not None:
        logits = logits.masked_fill(partners.mask, -math.inf)  # vmap has no mask in place
    if pairs.memory is not None:
        past = logits[:, -len(pairs.memory) :]
        if pairs.labels is not None and partners.columns is not None:
            same = pairs.labels[rows.queries.slice()].unsqueeze(1) == pairs.labels[count:]
            past.masked_fill_(same, -math.inf)
        if pairs.filled is not None:
            zeros = past.new_zeros(len(pairs.memory))
            past += zeros.masked_fill_(~pairs.filled[count:], -math.inf)
        if pairs.negatives == "memory":
            logits[:, : -len(pairs.memory)] = -math.inf
    if rows.query_set is not None and rows.has_query_set:
        logits[:, rows.query_set.slice()] = -math.inf
    return logits


def log_count_of(pairs: Pairs, log_weights: Tensor) -> Tensor | None:
    """Log of how many negatives each query has ``[I]``, where a formula needs it."""
    if pairs.form.debias == 0 and pairs.hardness == 0:
        return None
    return (log_weights != -math.inf).sum(1).to(log_weights.dtype).log()


def row_losses(pairs: Pairs, rows: Rows, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """The losses of some queries ``[I]``, and which have positives (None: all), in plain torch."""
    z, temperature, weights = inputs
    keys = torch.cat([pairs.keys(z, numbers) for numbers in rows.keys])
    scores = z[rows.queries.slice()] @ keys.T / temperature  # [I, K]
    partners = find_partners(pairs, rows, scores, weights)
    if pairs.negative_pairs is None:
        with torch.no_grad():  # weights of negatives are constants
            log_w = add_log_weights(
                pairs, rows, torch.zeros_like(scores), partners, scores.detach(), temperature
            )
            log_count = log_count_of(pairs, log_w)
            none = (log_w == -math.inf).all(1)
        log_s: Any = log_count if pairs.hardness > 0 else 0.0
        for sign, scale in pairs.log_sum_terms():
            terms = scale * scores + log_w
            # The gradient of a log-sum-exp of nothing but -inf is NaN.
            log_s = log_s + sign * terms.masked_fill(none.unsqueeze(1), 0.0).logsumexp(1)
        log_s = log_s.masked_fill(none, -math.inf)
    else:
        query, key = pairs.negative_pairs
        logits = (z[query] * z[key]).sum(1) / temperature
        log_s, log_count = (x[rows.queries.slice()] for x in log_sums_of_list(pairs, query, logits))
    return pairs.form.losses(
        log_s, partners.scores(scores), partners.weights, temperature, log_count
    )


def log_sums_of_list(pairs: Pairs, query: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """log S and the log of how many negatives are listed, of each embedding: ``[M]`` each."""
    zeros = logits.new_zeros(pairs.num_embeddings())
    count = zeros.index_add(0, query, torch.ones_like(logits))
    none, log_count = count == 0, count.log()
    log_s = zeros if pairs.hardness == 0 else log_count.masked_fill(none, 0.0)
    for sign, scale in pairs.log_sum_terms():
        peaks = (zeros - math.inf).scatter_reduce(0, query, scale * logits.detach(), "amax")
        peaks = peaks.masked_fill(none, 0.0)
        powers = (scale * logits - peaks[query]).exp()
        total = zeros.index_add(0, query, powers)
        log_s = log_s + sign * (total.masked_fill(none, 1.0).log() + peaks)
    return log_s.masked_fill(none, -math.inf), log_count


def all_rows(pairs: Pairs, chunk: int | None, own: list[Span] | None = None) -> Iterator[Rows]:
    """All queries with their keys, in chunks of about so many pairs (None: any number).

    ``own``: the queries of this process, in each set; None: all.
    """
    count, sets, within = pairs.num_embeddings(), pairs.sets(), pairs.negatives == "all"
    memory = [] if pairs.memory is None else [Span(count, count + len(pairs.memory))]
    # Views find the other views' embeddings by their columns, whichever sets are keys. Labels and
    # lists need all sets as keys, since their pairs may lie in any set, and so does a pair weight,
    # which has a mean over all embeddings.
    by_view = pairs.labels is None and pairs.positives is None and pairs.negative_pairs is None
    has_query_set = within or pairs.pair_weight is not None or not by_view or len(sets) == 1
    queries = (own or sets)[: 1 if pairs.first_queries else None]
    if within and own is None:
        queries = [Span(0, queries[-1].stop)]  # sets make no difference
    is_clip = not has_query_set and len(sets) == len(queries) == 2 and own is None
    is_clip = is_clip and pairs.memory is None and pairs.weights is None
    if is_clip and count * sets[0].stop <= (chunk or 0):  # one product serves both directions
        yield Rows(Span(0, count), [sets[1]], None, False, True)
        return
    for a, some in enumerate(queries):
        if some.length() == 0:
            continue
        keys = [Span(0, count)]
        if not has_query_set:
            keys = [x for b, x in enumerate(sets) if b != a]
        keys += memory
        rows = Rows(some, keys, None if within else sets[a], has_query_set)
        num_queries = some.length()
        num_chunks = 1 if chunk is None else -(-rows.num_pairs() // chunk)
        if num_chunks == 1:  # a compiler must not specialise on the edges
            yield rows
            continue
        num_chunks = min(num_chunks, num_queries)
        edges = [some.start + num_queries * n // num_chunks for n in range(num_chunks + 1)]
        for start, stop in itertools.pairwise(edges):
            yield rows._replace(queries=Span(start, stop))
