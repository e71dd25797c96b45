"""The contrast by rows: a row is one query with all its keys, and rows are independent.

This file decides what counts. `find_partners` decides which keys are positives of a query, and how
much each counts. `add_log_weights` decides which keys are negatives, and how much each counts.
`all_rows` decides with which keys a query is compared. `sums` adds up the negatives of a query, a
form in `forms` makes the loss from both, and `chunks` puts the rows of a batch together.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.base.distributed import Span
from pgcl_losses.base.modes import can_be_read, is_transformed
from pgcl_losses.pairs.forms import Form
from pgcl_losses.pairs.score_mod import Pair, ScoreMod, modified
from pgcl_losses.pairs.weights import Gaussian, Table

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

    The M embeddings of a batch have the positions 0 to M - 1, one set after the other. The B
    embeddings of a memory follow them, with the positions M to M + B - 1. Everything in this class
    is constant; `Inputs` holds what has a gradient (embeddings, temperature and weights of
    positives).
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
    weights: Table | None = None  # of negatives, by clusters
    pair_weight: Gaussian | None = None  # of negatives, by the cosine of the pair
    hardness: float = 0.0  # beta: weights e^(beta s / tau), whose mean over negatives is 1
    score_mod: ScoreMod | None = None  # the user's own function of the scores of negatives
    metadata: Tensor | None = None  # [M, ...] what that function may know of each embedding
    form: Form = Form()  # the loss of a query from its negatives and positives
    same_label: Listed | None = None  # query: sorted labels of the batch; key: their embeddings
    learns: bool = True  # whether gradients are enabled where the loss is called

    def num_embeddings(self) -> int:
        """M, the number of embeddings of the batch."""
        return sum(self.lengths)

    def sets(self) -> list[Span]:
        """The positions of the embeddings in each set."""
        ends = itertools.accumulate(self.lengths)
        return [Span(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def log_sum_terms(self) -> list[tuple[float, float]]:
        """List the log-sum-exps in log S: how often each of them adds the scores to the logits.

        Usually there is one, of the logits log W + s / tau as they are. Hard negatives have weights
        e^(beta s / tau), so beta times the scores are added to the logits. To scale these weights
        to a mean of 1, the log-sum-exp of log W + beta s / tau is subtracted. The second number of
        a term is the factor of its softmax in the derivative of log S by scores.
        """
        beta = self.hardness
        return [(0.0, 1.0)] if beta == 0 else [(beta, 1 + beta), (beta - 1, -beta)]


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
    """Some queries, and the K keys that they are compared with: a matrix with a row for each query.

    If both views are queries, and the keys of each are the other view, one product of matrices
    serves both: ``queries`` is the first view, ``keys`` the second view, and with ``and_back`` the
    rows of the transposed matrix follow, in which the keys are the queries.
    """

    queries: Span
    keys: list[Span]  # embeddings of the batch, and then of the memory
    query_set: Span | None = None  # the set of the queries, if they are not compared with it
    has_query_set: bool = True  # whether the set of the queries is among the keys
    and_back: bool = False

    def shape(self) -> tuple[int, int]:
        """I and K, the numbers of rows and of keys."""
        (start, stop), num_keys = self.queries, sum([stop - start for start, stop in self.keys])
        return stop - start + (num_keys if self.and_back else 0), num_keys

    def embeddings(self, pairs: Pairs, z: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Pick the embeddings of the queries, and those of the keys: one matrix for each span."""
        (start, stop), count, past = self.queries, len(z), pairs.memory
        return z[start:stop], [
            z[first:end] if past is None or end <= count else past[first - count : end - count]
            for first, end in self.keys
        ]

    def pick(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Pick the values of the queries and of the keys from ``[M + B, ...]``."""
        (start, stop), parts = self.queries, [values[first:end] for first, end in self.keys]
        return values[start:stop], parts[0] if len(parts) == 1 else torch.cat(parts)

    def columns_of_views(self, lengths: tuple[int, ...], device: torch.device) -> Tensor:
        """The columns of all views of the same graph, for each query: ``[I, V]``.

        If the query's own view is among the keys, the query itself comes first; else there is no
        column for it, and the shape is ``[I, V - 1]``.
        """
        num, num_columns = lengths[0], len(lengths) - (not self.has_query_set)
        start, (num_rows, _) = self.queries.start, self.shape()
        # Query i has i + num * v in column v, modulo the number of keys in the batch.
        i = torch.arange(start, start + num_rows + num * (num_columns - 1), device=device)
        return (i % (num * num_columns)).as_strided((num_rows, num_columns), (1, num))


class Partners(NamedTuple):
    """The keys that are not negatives of a query, and how much each counts as a positive.

    There are two layouts: columns of each row, or a mask of all keys.
    """

    columns: Any  # Tensor of all partners' columns
    positives: Tensor | None  # [I, P] columns of the positives
    weights: Tensor | None  # [I, P], or [I, K] with a mask; 0: no positive; None: all are 1
    mask: Tensor | None = None  # [I, K]

    def scores(self, scores: Tensor) -> Tensor:
        """Copy the scores of positives ``[I, P]`` from the scores of all keys ``[I, K]``."""
        return scores.clone() if self.positives is None else scores.gather(1, self.positives)

    def set(self, values: Tensor, value: float) -> Tensor:
        """Set the values ``[I, K]`` of partners, which are no negatives; maybe in place."""
        if self.mask is not None:
            return values.masked_fill(self.mask, value)  # vmap cannot mask in place
        scatter = values.scatter if is_transformed(values) else values.scatter_  # nor scatter
        return scatter(1, self.columns, value)


def find_partners(pairs: Pairs, rows: Rows, scores: Tensor, weights: Tensor | None) -> Partners:
    """Decide which keys are positives of some queries, and how much each counts.

    ``scores``: only its dtype and device are used. ``weights``: the weights ``[P]`` of
    `pairs.positives`.

    Queries have different numbers of positives. A query with fewer positives than others is padded
    by itself, with a weight of 0. If Python cannot read how many positives a query has, the result
    has a weight for each key in place of padded columns.
    """
    if pairs.labels is None and pairs.positives is None:
        columns = rows.columns_of_views(pairs.lengths, scores.device)
        if len(pairs.lengths) == 1:  # a single view: no positives
            return Partners(columns, columns, scores.new_zeros(columns.shape))
        return Partners(columns, columns[:, 1:] if rows.has_query_set else columns, None)
    # From here on, all embeddings of the batch are keys. So the column of a key is its number.
    count = pairs.num_embeddings() + (0 if pairs.memory is None else len(pairs.memory))
    i, j = rows.pick(torch.arange(count, device=scores.device))  # [I] and [K]
    if not can_be_read(scores):
        return _partners_by_mask(pairs, i, j, rows, scores, weights)
    columns, w = i.unsqueeze(1), scores.new_zeros(len(i), 1)
    if pairs.same_label is not None and pairs.labels is not None:
        columns, number, is_same = _padded(pairs.same_label, pairs.labels[i], i)
        is_positive = is_same & (columns != i.unsqueeze(1))
        if rows.query_set is not None:
            is_positive &= (columns < rows.query_set.start) | (columns >= rows.query_set.stop)
        w = is_positive.to(scores.dtype)
    if pairs.positives is not None and weights is not None:
        listed, number, is_listed = _padded(pairs.positives, i, i)
        if pairs.labels is not None:  # the weight of a listed pair replaces the 1 of its label
            mask = torch.zeros(len(i), len(j), dtype=torch.bool, device=i.device)
            mask.scatter_(1, listed, True)
            w = w.masked_fill(mask.gather(1, columns), 0.0)
        w = torch.cat([w, weights[number].where(is_listed, 0.0)], 1)  # inf * 0 would be NaN
        columns = torch.cat([columns, listed], 1)
    return Partners(columns, columns, w)


def _padded(pairs: Listed, value: Tensor, i: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Collect the keys ``[I, P]`` of listed pairs for some queries ``i`` ``[I]``, padded by ``i``.

    ``value``: the `query` field of the pairs that belong to each query, ``[I]``. Also return the
    number of each pair in the list, and whether it is a pair and not padding.
    """
    first, count = pairs.first_and_count(value)
    places = torch.arange(int(count.max()) if len(count) else 0, device=count.device)
    number = (first.unsqueeze(1) + places).clamp_max_(max(0, len(pairs.key) - 1))
    is_pair = places < count.unsqueeze(1)
    return pairs.key[number].where(is_pair, i.unsqueeze(1)), number, is_pair


def _partners_by_mask(
    pairs: Pairs, i: Tensor, j: Tensor, rows: Rows, scores: Tensor, weights: Tensor | None
) -> Partners:
    """Find partners with a weight for each key: no number of positives has to be read."""
    mask = i.unsqueeze(1) == j  # [I, K]
    w = torch.zeros_like(mask, dtype=scores.dtype)
    if pairs.labels is not None:
        same = pairs.labels[i].unsqueeze(1) == pairs.labels[j]
        w = (same & ~mask & (j < pairs.num_embeddings())).to(scores.dtype)
        mask = mask | same
        if rows.query_set is not None:
            in_set = (j >= rows.query_set.start) & (j < rows.query_set.stop)
            w = w.masked_fill(in_set, 0.0)
    if pairs.positives is not None and weights is not None:
        query, key = pairs.positives
        # Pairs of other rows are moved to a place that is masked anyway: the first query with
        # itself.
        is_here = (query >= rows.queries.start) & (query < rows.queries.stop)
        row = (query - rows.queries.start).where(is_here, 0)
        key = key.where(is_here, rows.queries.start)
        mask = mask.index_put((row, key), torch.ones_like(mask[0, 0]))
        w = w.index_put((row, key), w.new_zeros(()))
        w = w.index_put((row, key), weights.where(is_here, 0.0).to(w.dtype), accumulate=True)
    return Partners(None, None, w, mask)


def num_entries(pairs: Pairs, rows: Rows) -> int:
    """Return how many numbers the rows take: one for each key; with a list, for each partner."""
    num_rows, num_keys = rows.shape()
    lists = [listed for listed in (pairs.same_label, pairs.positives) if listed is not None]
    if pairs.negative_pairs is None or not all(can_be_read(listed.query) for listed in lists):
        return num_rows * num_keys
    counts = [torch.unique_consecutive(x.query, return_counts=True)[1].tolist() for x in lists]
    return num_rows * max(len(pairs.lengths), 1 + sum(max(each, default=0) for each in counts))


def add_log_weights(
    pairs: Pairs, rows: Rows, logits: Tensor, partners: Partners, temperature: float | Tensor
) -> Tensor:
    """Add log W_ij to logits ``[I, K]``: how much key j counts as a negative of query i.

    The logits are scores / temperature, and become -inf where a key is not a negative. No other
    function decides this, except that partners are left out afterwards. Logits are changed in
    place, so what depends on the scores comes first: the weights of pairs by their cosine, and the
    user's `score_mod`.
    """
    log_weights = []  # [I, K] each
    if pairs.pair_weight is not None:  # a constant for the gradient
        filled = None if pairs.filled is None else rows.pick(pairs.filled)[1]
        tau = temperature.detach() if isinstance(temperature, Tensor) else temperature
        weight = pairs.pair_weight.rows(rows.pick, logits.detach(), tau, filled)
        log_weights.append(weight)
    if pairs.weights is not None:
        log_weights.append(pairs.weights.rows(rows.pick))
    if pairs.score_mod is not None:
        is_negative = set_others(rows, partners, torch.ones_like(logits, dtype=torch.bool), False)
        for log_w in log_weights:
            is_negative &= log_w != -math.inf
        tau = temperature
        if not isinstance(tau, Tensor):
            tau = logits.new_full((), tau)
        metadata = None if pairs.metadata is None else rows.pick(pairs.metadata)
        logits = modified(pairs.score_mod, logits, Pair(is_negative, tau, metadata))
        if log_weights:  # inf - inf would be NaN
            return sum(log_weights, logits).where(is_negative, -math.inf)
        return set_others(rows, partners, logits.clone(), -math.inf)
    for log_w in log_weights:
        logits += log_w
    # -inf is added and not assigned, because NaN must stay NaN.
    if pairs.memory is not None:
        size, past = len(pairs.memory), logits[:, -len(pairs.memory) :]
        if pairs.labels is not None and partners.mask is None:
            labels = pairs.labels[slice(*rows.queries)]
            past.masked_fill_(labels.unsqueeze(1) == pairs.labels[-size:], -math.inf)
        if pairs.filled is not None:
            zeros = past.new_zeros(size)
            past += zeros.masked_fill_(~pairs.filled[-size:], -math.inf)
        if pairs.negatives == "memory":
            logits[:, :-size].add_(-math.inf)
    if rows.query_set is not None and rows.has_query_set:
        logits[:, slice(*rows.query_set)].add_(-math.inf)
    return logits


def set_others(rows: Rows, partners: Partners, values: Tensor, value: float) -> Tensor:
    """Set the values ``[I, K]`` of keys that are no negatives, whatever their weights."""
    if rows.query_set is not None and rows.has_query_set:
        values[:, slice(*rows.query_set)] = value
    return partners.set(values, value)


def all_rows(pairs: Pairs, chunk: int | None, own: list[Span] | None = None) -> Iterator[Rows]:
    """Yield all queries with their keys, in chunks of about ``chunk`` pairs (None: no limit).

    ``own``: the queries of this process, in each set; None: all embeddings.
    """
    count, sets, within = sum(pairs.lengths), pairs.sets(), pairs.negatives == "all"
    memory = [] if pairs.memory is None else [Span(count, count + len(pairs.memory))]
    # With views alone, the positives have known columns, whichever sets are keys. Labels and lists
    # need all sets as keys, since their pairs may lie in any set. So does a pair weight, which is
    # scaled to a mean of 1 over all embeddings.
    by_view = pairs.labels is None and pairs.positives is None and pairs.negative_pairs is None
    has_query_set = within or pairs.pair_weight is not None or not by_view or len(sets) == 1
    queries = (own or sets)[: 1 if pairs.first_queries else None]
    if within and own is None:
        queries = [Span(0, queries[-1].stop)]  # all sets are keys: no need to treat them apart
    is_plain = pairs.memory is None and pairs.weights is None and pairs.score_mod is None
    is_whole = own is None and chunk is None
    if is_plain and is_whole and not has_query_set and len(sets) == len(queries) == 2:
        yield Rows(sets[0], [sets[1]], None, False, and_back=True)
        return
    for a, some in enumerate(queries):
        num_queries = some.stop - some.start
        if num_queries == 0:
            continue
        keys = [Span(0, count)] if has_query_set else [x for b, x in enumerate(sets) if b != a]
        rows = Rows(some, [*keys, *memory], None if within else sets[a], has_query_set)
        if chunk is None:  # no edges, on which a compiler would specialise
            yield rows
            continue
        num_chunks = max(1, min(-(-num_entries(pairs, rows) // chunk), num_queries))
        edges = [some.start + num_queries * n // num_chunks for n in range(num_chunks + 1)]
        for start, stop in itertools.pairwise(edges):
            yield rows._replace(queries=Span(start, stop))
