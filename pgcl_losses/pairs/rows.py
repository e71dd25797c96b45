"""The contrast by rows: a row is one query with all its keys, and rows are independent.

Three files decide what counts. This one has what is known of the pairs (`Pairs`), and decides with
which keys a query is compared (`all_rows`). `partners` decides which keys are positives of a query,
and `negatives` which keys are negatives, and how much each counts.
"""

import itertools
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.base.distributed import Span
from pgcl_losses.base.modes import can_be_read, remembered
from pgcl_losses.base.normalize import unit_vectors
from pgcl_losses.pairs.forms import Form
from pgcl_losses.pairs.score_mod import ScoreMod
from pgcl_losses.pairs.weights import Gaussian, Table

# The label of an embedding that is stored in the memory without a label. We assume that no caller
# uses this number as a label.
NO_LABEL = torch.iinfo(torch.int64).min
# The keys of each label may be padded to the largest class, to so many times as many numbers.
_LARGEST_PADDING = 3


class Listed(NamedTuple):
    """A list of pairs (query, key), sorted by query."""

    query: Tensor  # [P]
    key: Tensor  # [P]

    @classmethod
    def by_query(cls, query: Tensor, key: Tensor) -> tuple["Listed", Tensor]:
        """Sort pairs by query. Return them, and their order ``[P]`` in the given list."""
        query, order = query.sort(stable=True)
        return cls(query, key[order]), order

    def of_queries(self, queries: Span) -> slice:
        """Where the pairs of consecutive queries are in the list. Their numbers are read."""
        return slice(*torch.searchsorted(self.query, self.query.new_tensor(queries)).tolist())


class KeysByLabel(NamedTuple):
    """The keys of some rows by their labels, of which C are different."""

    labels: Tensor  # [C] sorted
    first: Tensor  # [C] where in `columns` the keys of a label begin
    size: Tensor  # [C] how many keys have the label
    columns: Tensor  # [K] the columns of keys, sorted by label
    # [C, P] the columns of the keys of each label, and which of them may be positives. A shorter
    # row repeats its last column. None if most of it would be padding.
    padded: tuple[Tensor, Tensor] | None

    @classmethod
    def sort(cls, labels: Tensor, columns: Tensor, num_batch: int) -> "KeysByLabel":
        """Sort keys with some labels ``[K]`` and columns ``[K]``.

        Columns from ``num_batch`` on are past embeddings, which are no positives.
        """
        labels, order = labels.sort(stable=True)
        labels, size = torch.unique_consecutive(labels, return_counts=True)
        first, columns, padded = size.cumsum(0) - size, columns[order], None
        most = int(size.max())
        if most * len(size) <= _LARGEST_PADDING * len(columns):
            number, size_of = torch.arange(most, device=labels.device), size.unsqueeze(1)
            table = columns[first.unsqueeze(1) + number.minimum(size_of - 1)]
            padded = table, (number < size_of) & (table < num_batch)
        return cls(labels, first, size, columns, padded)

    def find(self, labels: Tensor) -> Tensor:
        """Find the numbers 0 to C - 1 of labels ``[I]``; some number for a label of no key."""
        return torch.searchsorted(self.labels, labels).clamp_max_(len(self.labels) - 1)

    def first_and_size(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Where in `columns` the keys of labels ``[I]`` begin, and how many there are."""
        number = self.find(labels)
        return self.first[number], self.size[number] * (self.labels[number] == labels)


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
    cluster_weights: Table | None = None  # of negatives, by clusters
    cosine_weights: Gaussian | None = None  # of negatives, by the cosine of the pair
    hardness: float = 0.0  # beta: weights e^(beta s / tau), whose mean over negatives is 1
    score_mod: ScoreMod | None = None  # the user's own function of the scores of negatives
    metadata: Tensor | None = None  # [M, ...] what that function may know of each embedding
    form: Form = Form()  # the loss of a query from its negatives and positives
    learns: bool = True  # whether gradients are enabled where the loss is called
    normalize: bool = False  # whether scores are cosines of embeddings that have any length

    def num_embeddings(self) -> int:
        """M, the number of embeddings of the batch."""
        return sum(self.lengths)

    def num_past(self) -> int:
        """B, the number of past embeddings in the memory."""
        return 0 if self.memory is None else len(self.memory)

    def are_views(self) -> bool:
        """Whether the positives of an embedding are row n of all other sets."""
        return self.labels is None and self.positives is None

    def are_plain(self) -> bool:
        """Whether pairs are views, and log S is the log-sum-exp of scores with constant weights.

        All fields but `_OF_PLAIN` have their defaults then, so that what computes plain pairs alone
        does not compute a field that is added later, and that it does not know.
        """
        is_default = _not_of_plain(self) == _DEFAULTS
        return is_default and self.form.debias == 0 and len(self.lengths) > 1

    def are_two_views(self) -> bool:
        """Whether pairs are plain, and each query has one positive."""
        # With a weight by the cosine of a pair, all embeddings are keys of each query.
        by_pair = self.cosine_weights is not None and self.negatives == "cross"
        return len(self.lengths) == 2 and not by_pair and self.are_plain()

    def can_be_fused(self) -> bool:
        """Whether kernels know which keys are negatives, and how much they count."""
        has_one_table = self.cluster_weights is None or len(self.cluster_weights.log_weights) == 1
        return has_one_table and self.cosine_weights is None and self.are_plain()

    def logsumexp_terms(self) -> list[tuple[float, float]]:
        """List the log-sum-exps in log S: how often each of them adds the scores to the logits.

        Usually there is one, of the logits log W + s / tau as they are. Hard negatives have weights
        e^(beta s / tau), so beta times the scores are added to the logits. To scale these weights
        to a mean of 1, the log-sum-exp of log W + beta s / tau is subtracted. The second number of
        a term is the factor of its softmax in the derivative of log S by scores.
        """
        beta = self.hardness
        return [(0.0, 1.0)] if beta == 0 else [(beta, 1 + beta), (beta - 1, -beta)]


# What may differ between plain pairs: `two_views` and kernels know it.
_OF_PLAIN = {"lengths", "negatives", "first_queries", "cluster_weights", "cosine_weights"}
_OF_PLAIN |= {"metadata", "form", "learns", "normalize"}
_NOT_OF_PLAIN = [name for name in Pairs._fields if name not in _OF_PLAIN]
_not_of_plain = attrgetter(*_NOT_OF_PLAIN)
_DEFAULTS = tuple([Pairs._field_defaults[name] for name in _NOT_OF_PLAIN])


class Inputs(NamedTuple):
    """What has a gradient: embeddings, temperature and the weights of listed positives."""

    z: Tensor  # [M, D] embeddings
    temperature: Any  # a number or a Tensor []
    positive_weights: Tensor | None  # [P] one for each of `Pairs.positives`

    def normalized(self, pairs: Pairs) -> "Inputs":
        """Normalise the embeddings, if the batch holds them as they came."""
        return self._replace(z=unit_vectors(self.z, self.z.dtype)) if pairs.normalize else self

    def as_tensors(self) -> "Inputs":
        """Make a temperature that is a number a tensor."""
        if isinstance(self.temperature, Tensor):
            return self
        return self._replace(temperature=self.z.new_full((), self.temperature))


def number_of(temperature: float | Tensor) -> float:
    """The temperature as a number; 0 if Python may not read it."""
    if not isinstance(temperature, Tensor):
        return temperature
    return temperature.item() if can_be_read(temperature) else 0.0


class Rows(NamedTuple):
    """Some queries, and the K keys that they are compared with: a matrix with a row for each query.

    The columns of the matrix are the keys in the order of their positions, and past embeddings come
    last. There are three layouts: `with_all`, `with_own_set_masked` and `with_other_sets`.
    """

    queries: Span
    keys: tuple[Span, ...]  # embeddings of the batch, and then of the memory
    masked: Span | None = None  # the queries' set, if it is among the keys and does not count
    left_out: Span | None = None  # the queries' set, if it is not among the keys
    by_label: KeysByLabel | None = None  # the keys that count, if Python may read their labels

    @classmethod
    def with_all(cls, queries: Span, every: tuple[Span, ...]) -> "Rows":
        """Compare queries with all embeddings, here the queries of set 2.

        .. code-block:: text

            key of   set 1   set 2   set 3   memory
            counts     x       x       x       x
        """
        return cls(queries, every)

    @classmethod
    def with_own_set_masked(cls, queries: Span, every: tuple[Span, ...], own_set: Span) -> "Rows":
        """Compare queries with all embeddings; the queries' own set does not count.

        .. code-block:: text

            key of   set 1   set 2   set 3   memory
            counts     x               x       x
        """
        return cls(queries, every, masked=own_set)

    @classmethod
    def with_other_sets(cls, queries: Span, every: tuple[Span, ...], own_set: Span) -> "Rows":
        """Compare queries with the other sets alone, whose columns close up.

        .. code-block:: text

            key of   set 1   set 3   memory
            counts     x       x       x
        """
        (first, end), *memory = every
        others = Span(first, own_set.start), Span(own_set.stop, end)
        keys = (*[some for some in others if some.start < some.stop], *memory)
        return cls(queries, keys, left_out=own_set)

    def excluded_set(self) -> Span | None:
        """The set of the queries, if its keys do not count; None if they do."""
        return self.masked or self.left_out

    def column(self, position: Tensor) -> Tensor:
        """The columns of keys at some positions; any numbers for keys that are left out."""
        if self.left_out is None:
            return position
        start, stop = self.left_out
        return position - (stop - start) * (position >= stop)

    def shape(self) -> tuple[int, int]:
        """I and K, the numbers of rows and of keys."""
        (start, stop), num_keys = self.queries, sum([stop - start for start, stop in self.keys])
        return stop - start, num_keys

    def embeddings(self, pairs: Pairs, z: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Pick the embeddings of the queries, and those of the keys: one matrix for each span."""
        count, past = len(z), pairs.memory
        return part_of(z, self.queries), [
            part_of(z, Span(first, end))
            if past is None or end <= count
            else part_of(past, Span(first - count, end - count))
            for first, end in self.keys
        ]

    def pick(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Pick the values of the queries and of the keys from ``[M + B, ...]``."""
        (start, stop), parts = self.queries, [values[first:end] for first, end in self.keys]
        return values[start:stop], parts[0] if len(parts) == 1 else torch.cat(parts)


def part_of(values: Tensor, span: Span) -> Tensor:
    """Pick the values of a span; all of them without an operation, as slicing takes its time."""
    start, stop = span
    return values if stop - start == values.shape[0] else values[start:stop]


def all_rows(pairs: Pairs, own: Sequence[Span] | None = None) -> Sequence[Rows]:
    """List the queries with their keys: the sets that their positives and negatives lie in.

    With ``negatives="all"`` all embeddings are keys of all queries. Otherwise the queries of each
    set are compared with the other sets.

    ``own``: the queries of this process, in each set; None: all embeddings.
    """
    # A pair weight has a mean of 1 over all embeddings, of a list no matrix is made, and with
    # negatives="memory" listed positives may be in the set of the queries.
    keeps_columns = pairs.cosine_weights is not None or pairs.negative_pairs is not None
    keeps_columns |= pairs.negatives == "memory" and pairs.positives is not None
    sets = pairs.lengths
    num_past = None if pairs.memory is None else len(pairs.memory)
    own = own if own is None else tuple(own)
    rows = _rows_of_sets(sets, num_past, pairs.negatives, keeps_columns, pairs.first_queries, own)
    if pairs.labels is None or not can_be_read(pairs.labels):
        return rows
    layouts = {(some.keys, some.masked): some for some in rows}
    by_label = {x: _keys_by_label(pairs, pairs.labels, some) for x, some in layouts.items()}
    return [some._replace(by_label=by_label[some.keys, some.masked]) for some in rows]


@remembered
def _rows_of_sets(
    lengths: tuple[int, ...],
    num_past: int | None,
    negatives: str,
    keeps_columns: bool,
    first_queries: bool,
    own: Sequence[Span] | None,
) -> tuple[Rows, ...]:
    """List the rows of sets of embeddings, and of past embeddings; None: there is no memory."""
    count = sum(lengths)
    ends = itertools.accumulate(lengths)
    sets = [Span(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    memory = () if num_past is None else (Span(count, count + num_past),)
    every = (Span(0, count), *memory)
    queries = (own or sets)[: 1 if first_queries else None]
    if negatives == "all":
        together = [Span(0, queries[-1].stop)] if own is None else queries
        rows = [Rows.with_all(some, every) for some in together]
    else:  # "cross" and "memory"
        keeps_columns |= count in lengths  # no other set has an embedding
        layout = Rows.with_own_set_masked if keeps_columns else Rows.with_other_sets
        rows = [layout(some, every, own_set) for some, own_set in zip(queries, sets, strict=False)]
    return tuple([some for some in rows if some.queries.start < some.queries.stop])


def _keys_by_label(pairs: Pairs, labels: Tensor, rows: Rows) -> KeysByLabel | None:
    """Sort the keys by label, without those of a masked set; None if there are no others."""
    _, of_keys = rows.pick(labels)
    columns = torch.arange(len(of_keys), device=labels.device)
    num_batch = len(columns) - pairs.num_past()
    if rows.masked is not None:
        start, stop = rows.masked
        columns = torch.cat([columns[:start], columns[stop:]])
        of_keys = of_keys[columns]
    return KeysByLabel.sort(of_keys, columns, num_batch) if len(columns) else None
