"""The contrast by rows: a row is one query with all its keys, and rows are independent.

Three places decide what a row computes. `find_partners` decides which keys are positives, and how
much each counts. `add_log_weights` decides which keys are negatives, and how much each counts. A
`Form` makes the loss from both. `row_losses` puts them together in plain torch, for autograd,
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

# The label of an embedding that is stored in the memory without a label. We assume that no caller
# uses this number as a label.
NO_LABEL = torch.iinfo(torch.int64).min


class Listed(NamedTuple):
    """A list of pairs (query, key), sorted by query."""

    query: Tensor  # [P]
    key: Tensor  # [P]

    @classmethod
    def by_query(cls, query: Tensor, key: Tensor) -> tuple["Listed", Tensor]:
        """Sort pairs by query. Return them, and their order ``[P]`` in the given list."""
        query, order = query.sort(stable=True)
        return cls(query, key[order]), order

    def first_and_count(self, i: Tensor) -> tuple[Tensor, Tensor]:
        """Return the position of each query's first pair ``[I]``, and how many pairs it has."""
        first = torch.searchsorted(self.query, i)
        return first, torch.searchsorted(self.query, i, right=True) - first


class Pairs(NamedTuple):
    """Which pairs of embeddings count as positives and negatives, and how much.

    The M embeddings of a batch have the numbers 0 to M - 1, one set after the other. The B
    embeddings of a memory follow them, with the numbers M to M + B - 1. Everything in this class is
    constant; `Inputs` holds what has a gradient (embeddings, temperature and weights of positives).
    """

    lengths: tuple[int, ...]  # how many embeddings each set has; together M
    # Where the negatives of a query are: "all": in all sets and the memory; "cross": in the other
    # sets and the memory; "memory": in the memory only.
    negatives: str = "all"
    first_queries: bool = False  # whether only the embeddings of the first set are queries
    labels: Tensor | None = None  # [M + B] int64; None: embedding n of every set has label n
    positives: Listed | None = None  # with labels, further positives; else all positives
    negative_pairs: Listed | None = None  # if given, these are the only negatives
    memory: Tensor | None = None  # [B, D]
    filled: Tensor | None = None  # [M + B] bool, False for empty slots of the memory; None: all
    weights: Table | Factors | None = None  # of negatives, by clusters or targets
    pair_weight: Gaussian | None = None  # of negatives, by the cosine of the pair
    hardness: float = 0.0  # beta: weights e^(beta s / tau), whose mean over negatives is 1
    form: Form = Form()  # the loss of a query from its negatives and positives
    same_label: Listed | None = None  # query: sorted labels of the batch; key: their embeddings

    def num_embeddings(self) -> int:
        """M, the number of embeddings of the batch."""
        return sum(self.lengths)

    def keys(self, z: Tensor, numbers: Span) -> Tensor:
        """Pick embeddings by number: of the batch z ``[M, D]``, or of the memory."""
        if self.memory is None or numbers.stop <= len(z):
            return z[numbers.slice()]
        return self.memory[numbers.start - len(z) : numbers.stop - len(z)]

    def sets(self) -> list[Span]:
        """The numbers of the embeddings in each set."""
        ends = itertools.accumulate(self.lengths)
        return [Span(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def log_sum_terms(self) -> list[tuple[float, float]]:
        """Return the sign and scale of each term of log S.

        log S is the sum of sign * logsumexp(log W + scale * scores), usually of one term. The
        weights of hard negatives, e^(beta s / tau), also depend on the scores. To scale them to a
        mean of 1, their own log-sum-exp is subtracted.
        """
        beta = self.hardness
        return [(1.0, 1.0)] if beta == 0 else [(1.0, 1 + beta), (-1.0, beta)]


class Inputs(NamedTuple):
    """What has a gradient: embeddings, temperature and the weights of listed positives."""

    z: Tensor  # [M, D] embeddings
    temperature: Any  # a number or a Tensor []
    weights: Tensor | None  # [P] one for each of `Pairs.positives`

    def map(self, function: Callable[[Tensor], Tensor]) -> "Inputs":
        """Apply a function to each of the tensors."""
        weights = None if self.weights is None else function(self.weights)
        return Inputs(function(self.z), function(self.temperature), weights)


class Rows(NamedTuple):
    """A block of rows: I queries, and the K keys that they are compared with."""

    queries: Span  # I embeddings of the batch
    keys: list[Span]  # K embeddings, of the batch and then of the memory
    query_set: Span | None = None  # the set of the queries, if they are not compared with it
    has_query_set: bool = True  # whether the set of the queries is among the keys
    # Whether both views are queries, and the keys of each are the other view. `keys` is then the
    # second view, which is only right for the queries of the first view. So no weights may be
    # looked up by the numbers of keys.
    are_both_ways: bool = False

    def num_keys(self) -> list[int]:
        """How many keys each span has."""
        return [numbers.length() for numbers in self.keys]

    def num_pairs(self) -> int:
        """I * K, the number of entries of the matrix of these rows."""
        return self.queries.length() * sum(self.num_keys())

    def numbers(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The numbers of the queries ``[I]`` and of the keys ``[K]``."""
        i, *j = [torch.arange(x.start, x.stop, device=device) for x in (self.queries, *self.keys)]
        return i, j[0] if len(j) == 1 else torch.cat(j)

    def columns_of_views(self, lengths: tuple[int, ...], i: Tensor) -> Tensor:
        """The columns of all views of the same graph, for queries ``[I]``: ``[I, V]``.

        If the query's own view is among the keys, the query itself comes first; else there is no
        column for it, and the shape is ``[I, V - 1]``.
        """
        num, num_views = lengths[0], len(lengths)
        if self.has_query_set:
            views = torch.arange(num_views, device=i.device)
            return (i.unsqueeze(1) + num * views) % (num * num_views)
        views = torch.arange(num_views - 1, device=i.device)
        return i.unsqueeze(1) % num + num * views


class Partners(NamedTuple):
    """The keys that are not negatives of a query, and how much each counts as a positive.

    There are two layouts: P columns of each row, or a mask of all keys.
    """

    columns: Tensor | None  # [I, P]
    weights: Tensor | None  # [I, P], or [I, K] with a mask; 0: no positive; None: all are 1
    mask: Tensor | None = None  # [I, K]
    num_self: int = 0  # if weights is None: how many of the first columns are the query itself

    def scores(self, scores: Tensor) -> Tensor:
        """Pick the scores of positives ``[I, P]`` from the scores of all keys ``[I, K]``."""
        if self.columns is None:
            return scores
        return scores.gather(1, self.columns[:, self.num_self :])


def find_partners(pairs: Pairs, rows: Rows, like: Tensor, weights: Tensor | None) -> Partners:
    """Decide which keys are positives of some queries, and how much each counts.

    ``like``: any tensor with the dtype and device of the scores. ``weights``: the weights ``[P]``
    of `pairs.positives`.

    Queries have different numbers of positives. A query with fewer positives than others is padded
    by itself, with a weight of 0. If Python cannot read how many positives a query has, the result
    has a weight for each key in place of padded columns.
    """
    i, j = rows.numbers(like.device)
    if pairs.labels is None and pairs.positives is None:
        columns = rows.columns_of_views(pairs.lengths, i)
        if len(pairs.lengths) == 1:  # a single view: no positives
            return Partners(columns, like.new_zeros(columns.shape))
        return Partners(columns, None, num_self=int(rows.has_query_set))
    # From here on, all embeddings of the batch are keys. So the column of a key is its number.
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
        if pairs.labels is not None:  # the weight of a listed pair replaces the 1 of its label
            mask = torch.zeros(len(i), len(j), dtype=torch.bool).scatter_(1, listed, True)
            w = w.masked_fill(mask.gather(1, columns), 0.0)
        w = torch.cat([w, weights[number].where(is_listed, 0.0)], 1)  # inf * 0 would be NaN
        columns = torch.cat([columns, listed], 1)
    return Partners(columns, w)


def _padded(pairs: Listed, value: Tensor, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Collect the keys ``[I, P]`` of listed pairs for some queries ``i`` ``[I]``, padded by ``i``.

    ``value``: the `query` field of the pairs that belong to each query, ``[I]``. Also return the
    number of each pair in the list, and whether it is a pair and not padding.
    """
    first, count = pairs.first_and_count(value)
    places = torch.arange(int(count.max()) if len(count) else 0)
    number = (first.unsqueeze(1) + places).clamp_max_(max(0, len(pairs.key) - 1))
    is_pair = places < count.unsqueeze(1)
    return pairs.key[number].where(is_pair, i.unsqueeze(1)), number, is_pair


def _partners_by_mask(
    pairs: Pairs, i: Tensor, j: Tensor, rows: Rows, like: Tensor, weights: Tensor | None
) -> Partners:
    """Find partners with a weight for each key: no number of positives has to be read."""
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
        # A pair of a query outside of these rows becomes the pair of the first query with itself,
        # which is no positive anyway.
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
    """Add log W_ij to logits ``[I, K]``: how much key j counts as a negative of query i.

    The logit becomes -inf where a key is not a negative; no other function decides this.
    ``scores``: cosine / temperature ``[I, K]``, which a pair weight depends on. Logits may be
    changed in place.
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
        logits = logits.masked_fill(partners.mask, -math.inf)  # vmap cannot mask in place
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
    """The log of how many negatives each query has ``[I]``, or None if no formula needs it."""
    if pairs.form.debias == 0 and pairs.hardness == 0:
        return None
    return (log_weights != -math.inf).sum(1).to(log_weights.dtype).log()


def row_losses(pairs: Pairs, rows: Rows, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
    """Compute the losses ``[I]`` of some rows, and which queries have positives (None: all have).

    This is plain torch, and can be differentiated any number of times.
    """
    z, temperature, weights = inputs
    keys = torch.cat([pairs.keys(z, numbers) for numbers in rows.keys])
    scores = z[rows.queries.slice()] @ keys.T / temperature  # [I, K]
    partners = find_partners(pairs, rows, scores, weights)
    if pairs.negative_pairs is None:
        with torch.no_grad():  # the weights of negatives are constants
            log_w = add_log_weights(
                pairs, rows, torch.zeros_like(scores), partners, scores.detach(), temperature
            )
            log_count = log_count_of(pairs, log_w)
            none = (log_w == -math.inf).all(1)
        log_s: Any = log_count if pairs.hardness > 0 else 0.0
        for sign, scale in pairs.log_sum_terms():
            terms = scale * scores + log_w
            # In a row without negatives all terms are -inf, and the gradient would be NaN.
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
    """Compute log S and the log of the number of negatives from listed negatives, ``[M]`` each.

    ``query``: the queries of the listed pairs ``[P]``. ``logits``: their scores / temperature
    ``[P]``.
    """
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
    """Yield all queries with their keys, in chunks of about ``chunk`` pairs (None: no limit).

    ``own``: the queries of this process, in each set; None: all embeddings.
    """
    count, sets, within = pairs.num_embeddings(), pairs.sets(), pairs.negatives == "all"
    memory = [] if pairs.memory is None else [Span(count, count + len(pairs.memory))]
    # With views alone, the positives have known columns, whichever sets are keys. Labels and lists
    # need all sets as keys, since their pairs may lie in any set. So does a pair weight, which is
    # scaled to a mean of 1 over all embeddings.
    by_view = pairs.labels is None and pairs.positives is None and pairs.negative_pairs is None
    has_query_set = within or pairs.pair_weight is not None or not by_view or len(sets) == 1
    queries = (own or sets)[: 1 if pairs.first_queries else None]
    if within and own is None:
        queries = [Span(0, queries[-1].stop)]  # all sets are keys: no need to treat them apart
    is_clip = not has_query_set and len(sets) == len(queries) == 2 and own is None
    is_clip = is_clip and pairs.memory is None and pairs.weights is None
    if is_clip and count * sets[0].stop <= (chunk or 0):  # one matrix product serves both views
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
        if num_chunks == 1:  # no edges, on which a compiler would specialise
            yield rows
            continue
        num_chunks = min(num_chunks, num_queries)
        edges = [some.start + num_queries * n // num_chunks for n in range(num_chunks + 1)]
        for start, stop in itertools.pairwise(edges):
            yield rows._replace(queries=Span(start, stop))
