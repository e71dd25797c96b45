"""Which keys are positives of a query, and how much each counts.

Partners of a query are the keys that its graph, its label or a list takes out of the negatives: its
positives and, as positives of weight 0, the query itself and past embeddings with its label. They
lie in one of three layouts:

=====================  ================  ==========================================================
what makes positives   layout            what it holds
=====================  ================  ==========================================================
views                  `Columns`         the same number of columns for each row; all weights are 1
labels, listed pairs   `Places`          places in the matrix of scores and their weights: as many
                                         for each row, padded to the largest class, if that is
                                         little padding, and else a list
the same, if Python    `AllKeys`         a weight for each key of each row, which is 0 for keys that
cannot read them                         are no positives: nothing has to be counted
=====================  ================  ==========================================================

Of two views at once, which `two_views` computes, partners lie on diagonals (`diagonals`).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.base.modes import can_be_read, is_transformed
from pgcl_losses.pairs.forms import Positives
from pgcl_losses.pairs.rows import Pairs, Rows


def lowest(dtype: torch.dtype) -> float:
    """The logit of a key that is no negative: so low that e^x is 0, and a score may be added."""
    return torch.finfo(dtype).min / 2


class Columns(NamedTuple):
    """Views: the same number of partners in each row, of which the last P are its positives."""

    positives: Positives
    partner_columns: Tensor  # [I, C]
    positive_columns: Tensor  # [I, P]

    def scores(self, scores: Tensor) -> Tensor:
        """Copy the scores of positives from the scores of all keys ``[I, K]``."""
        return scores.gather(1, self.positive_columns)

    def add_back(self, d_scores: Tensor, d_x: Tensor) -> None:
        """Add the derivatives by the scores of positives to those by all scores, in place."""
        d_scores.scatter_add_(1, self.positive_columns, d_x)

    def fill(self, values: Tensor, value: float) -> Tensor:
        """Set the values ``[I, K]`` of partners; maybe in place."""
        scatter = values.scatter if is_transformed(values) else values.scatter_  # for vmap
        return scatter(1, self.partner_columns, value)

    def leave_out(self, logits: Tensor) -> Tensor:
        """Make the logits ``[I, K]`` of partners so low that they do not count; maybe in place.

        They stay finite, and each row has one: a row of nothing but -inf has no softmax.
        """
        return self.fill(logits, lowest(logits.dtype))


class Places(NamedTuple):
    """Labels and listed pairs: the places row * K + column of partners in the matrix ``[I, K]``."""

    positives: Positives
    places: Tensor  # [I, P], or a list [p]

    def scores(self, scores: Tensor) -> Tensor:
        """Copy the scores of partners from the scores of all keys ``[I, K]``."""
        return scores.view(-1).index_select(0, self.places.view(-1)).view_as(self.places)

    def add_back(self, d_scores: Tensor, d_x: Tensor) -> None:
        """Add the derivatives by the scores of partners to those by all scores, in place."""
        d_scores.view(-1).scatter_add_(0, self.places.view(-1), d_x.reshape(-1))

    def fill(self, values: Tensor, value: float) -> Tensor:
        """Set the values ``[I, K]`` of partners, in place."""
        return values.view(-1).index_fill_(0, self.places.view(-1), value).view_as(values)

    def leave_out(self, logits: Tensor) -> Tensor:
        """Make the logits ``[I, K]`` of partners so low that they do not count, in place."""
        logits = self.fill(logits, lowest(logits.dtype))
        # In a list a query may have no partner, and a row of nothing but -inf has no softmax.
        is_list = self.positives.row is not None
        return logits.clamp_min_(lowest(logits.dtype)) if is_list else logits


class AllKeys(NamedTuple):
    """Labels and listed pairs that Python cannot read: each key has a weight in each row."""

    positives: Positives
    mask: Tensor  # [I, K] 1 for partners, and 0 for others

    def scores(self, scores: Tensor) -> Tensor:
        """Copy the scores of all keys ``[I, K]``."""
        return scores.clone()

    def add_back(self, d_scores: Tensor, d_x: Tensor) -> None:
        """Add the derivatives by the copied scores, in place."""
        d_scores += d_x

    def fill(self, values: Tensor, value: float) -> Tensor:
        """Set the values ``[I, K]`` of partners."""
        return values.masked_fill(self.mask == 1, value)

    def leave_out(self, logits: Tensor) -> Tensor:
        """Make the logits ``[I, K]`` of partners so low that they do not count; maybe in place."""
        # Added, as masked_fill takes ten times as long on a CPU.
        low, add = lowest(logits.dtype), logits.add if is_transformed(logits) else logits.add_
        return add(self.mask, alpha=low).clamp_min_(low)


Partners = Columns | Places | AllKeys


def find_partners(pairs: Pairs, rows: Rows, z: Tensor, weights: Tensor | None) -> Partners:
    """Decide which keys are positives of some queries, and how much each counts.

    ``z``: only its dtype and device are used. ``weights``: the weights ``[P]`` of
    `pairs.positives`.
    """
    if pairs.are_views():
        return _views(pairs, rows, z)
    if not can_be_read(z):
        return _weighted(pairs, rows, z, weights)
    padded = _padded(pairs, rows, z) if pairs.positives is None else None
    return _listed(pairs, rows, z, weights) if padded is None else padded


def num_listed(pairs: Pairs, rows: Rows) -> int:
    """How many partners labels and listed pairs give to some queries, which has to be read."""
    number = 0
    if rows.by_label is not None and pairs.labels is not None:
        number += int(rows.by_label.first_and_size(pairs.labels[slice(*rows.queries)])[1].sum())
    if pairs.positives is not None:
        here = pairs.positives.of_queries(rows.queries)
        number += here.stop - here.start
    return number


def _views(pairs: Pairs, rows: Rows, z: Tensor) -> Columns:
    """Find the columns of the same graph in all sets of keys; the query itself comes first."""
    num, num_rows, start = pairs.lengths[0], rows.shape()[0], rows.queries.start
    num_sets = (rows.shape()[1] - pairs.num_past()) // num  # with keys
    # Query i has i + num * v in column v, modulo the number of keys in the batch. A sum of i and
    # num * v would take more operations.
    i = torch.arange(start, start + num_rows + num * (num_sets - 1), device=z.device)
    partners = (i % (num * num_sets)).as_strided((num_rows, num_sets), (1, num))
    if len(pairs.lengths) == 1:  # no positives, but a column of weight 0
        return Columns(Positives(num_rows, z.new_zeros(partners.shape)), partners, partners)
    columns = partners[:, 1:] if rows.left_out is None else partners
    return Columns(Positives(num_rows, None), partners, columns)


Strides = tuple[tuple[int, ...], tuple[int, ...], int]  # the size, stride and offset of a view


def diagonals(num: int, num_rows: int, num_keys: int, start: int) -> tuple[Strides, Strides]:
    """Find the partners, and the positives among them, of all queries of one or both of two views.

    The matrix ``[I, K]`` has a block ``[N, N]`` for each view of queries and each view of keys, and
    partners lie in the diagonals of blocks. ``start``: the position of the first query.
    """
    next_queries, next_keys, along = num * num_keys, num, num_keys + 1  # the steps between places
    by_queries, by_keys = num_rows // num, num_keys // num
    partners = (by_queries, by_keys, num), (next_queries, next_keys, along), 0
    if by_keys == 1:
        return partners, ((by_queries, num), (next_queries, along), 0)
    # The queries of the first view have their positives in the second block of keys, and the
    # queries of the second view, one block of keys before, in the first block.
    first = next_keys if start == 0 else 0
    return partners, ((by_queries, num), (next_queries - next_keys, along), first)


def strided(matrix: Tensor, strides: Strides) -> Tensor:
    """View some places of a contiguous matrix, which may be part of a larger storage."""
    size, stride, start = strides
    return matrix.as_strided(size, stride, matrix.storage_offset() + start)


def _padded(pairs: Pairs, rows: Rows, z: Tensor) -> Places | None:
    """Find partners by label, as many in each row; None if too many of them would be padding."""
    (start, stop), num_keys, by_label = rows.queries, rows.shape()[1], rows.by_label
    if by_label is None or by_label.padded is None or pairs.labels is None:
        return None
    labels = pairs.labels[start:stop]
    number = by_label.find(labels)
    excluded = rows.excluded_set()
    if excluded is not None and not torch.equal(by_label.labels[number], labels):
        return None  # a query that has no partner cannot be padded by one
    columns, is_positive = by_label.padded
    columns, w = columns.index_select(0, number), is_positive.to(z.dtype).index_select(0, number)
    if excluded is None:  # the query itself is among them
        itself = torch.arange(start, stop, device=z.device)
        w.masked_fill_(columns == itself.unsqueeze(1), 0.0)
    first = torch.arange(0, (stop - start) * num_keys, num_keys, device=z.device)
    columns += first.unsqueeze(1)
    return Places(Positives(stop - start, w), columns)


def _listed(pairs: Pairs, rows: Rows, z: Tensor, weights: Tensor | None) -> Places:
    """List the partners of each query.

    The query itself is a partner with weight 0, and so are past embeddings with its label.
    """
    (start, stop), (num_rows, num_keys) = rows.queries, rows.shape()
    is_among_keys = rows.excluded_set() is None
    row = torch.arange(num_rows if is_among_keys else 0, device=z.device)
    places, w = row * (num_keys + 1) + start, z.new_zeros(len(row))
    if rows.by_label is not None and pairs.labels is not None:
        first, count = rows.by_label.first_and_size(pairs.labels[start:stop])
        row = torch.repeat_interleave(count)
        # The number of a partner among the keys by label: from that of the first of its row on.
        first = first - count.cumsum(0) + count
        number = torch.arange(len(row), device=z.device) + first.index_select(0, row)
        column = rows.by_label.columns.index_select(0, number)
        is_positive = column < num_keys - pairs.num_past()
        if is_among_keys:
            is_positive &= column != row + start
        places, w = row * num_keys + column, is_positive.to(z.dtype)
    if pairs.positives is not None and weights is not None:
        here = pairs.positives.of_queries(rows.queries)
        query, key, listed_w = pairs.positives.query[here], pairs.positives.key[here], weights[here]
        column, may_be = _columns(pairs, rows, key)
        if may_be is not None:
            query, column, listed_w = query[may_be], column[may_be], listed_w[may_be]
        listed = (query - start) * num_keys + column
        if rows.by_label is not None:  # the weight of a listed pair replaces the 1 of its label
            w = w.masked_fill(torch.isin(places, listed), 0.0)
        row, places = torch.cat([row, query - start]), torch.cat([places, listed])
        w = torch.cat([w, listed_w])
    return Places(Positives(num_rows, w, row), places)


def _weighted(pairs: Pairs, rows: Rows, z: Tensor, weights: Tensor | None) -> AllKeys:
    """Give each key a weight: nothing has to be read."""
    (start, stop), (num_rows, num_keys) = rows.queries, rows.shape()
    if pairs.labels is None:
        mask = z.new_zeros(num_rows, num_keys)
    else:
        of_queries, of_keys = rows.pick(pairs.labels)
        mask = (of_queries.unsqueeze(1) == of_keys).to(z.dtype)
    w = mask.clone()
    w[:, num_keys - pairs.num_past() :] = 0.0  # past embeddings are no positives
    if rows.excluded_set() is None:  # nor is the query itself, which is no negative either
        columns = torch.arange(num_keys, device=z.device)
        itself = columns == columns[start:stop].unsqueeze(1)
        w.masked_fill_(itself, 0.0)
        mask.masked_fill_(itself, 1.0)
    elif rows.masked is not None:
        w[:, slice(*rows.masked)] = 0.0
    if pairs.positives is not None and weights is not None:
        query, key = pairs.positives
        column, may_be = _columns(pairs, rows, key)
        is_here = (query >= start) & (query < stop)
        is_here = is_here if may_be is None else is_here & may_be
        # Other pairs are moved to a further column, which is then cut off.
        at = (query - start).where(is_here, 0), column.where(is_here, num_keys)
        mask, w = F.pad(mask, (0, 1)), F.pad(w, (0, 1))
        mask = mask.index_put(at, mask.new_ones(()))[:, :-1]
        w = w.index_put(at, w.new_zeros(()))  # the weight of a listed pair replaces the 1
        w = w.index_put(at, weights.where(is_here, 0.0).to(w.dtype), accumulate=True)[:, :-1]
    return AllKeys(Positives(num_rows, w), mask)


def _columns(pairs: Pairs, rows: Rows, key: Tensor) -> tuple[Tensor, Tensor | None]:
    """The columns of keys of listed positives, and which of them may be positives (None: all).

    With ``negatives="cross"`` none may be in the set of the query. Where Python can read the
    positions, such a pair is an error, unless its weight is 0. The column is then any number.
    """
    excluded = rows.excluded_set()
    if excluded is None or pairs.negatives == "memory":
        return key, None
    return rows.column(key), (key < excluded.start) | (key >= excluded.stop)
