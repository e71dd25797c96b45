"""Which pairs of embeddings are negatives and which are positives: of all, and of a block."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.engine.pair_weights import Factors, Gaussian, Table, reordered

# The item of an embedding in the memory that was stored without one. A caller's items differ.
NO_ITEM = torch.iinfo(torch.int64).min

_BLOCK = 640  # embeddings of a block: on a CPU a block of pairs stays in the cache
_BLOCK_ELSEWHERE = 4096  # where launching an operation takes longer than small blocks


class Pairs(NamedTuple):
    """The embeddings of a batch and of a memory, and what decides which pairs count.

    Embeddings lie in sets, one after the other: views, or sets of any lengths. All of them are
    queries, or those of the first set. Those of the memory are negatives of every query, and have
    no gradient. Tensors of ``[M + B]`` hold the memory behind the batch. Weights multiply, and are
    constants for the gradient. Positives by index count by their weights alone, whatever their
    items; they are no negatives, unless these are listed as well.
    """

    embeddings: Tensor  # [M, D]
    lengths: tuple[int, ...]  # of each set
    # "cross": of other sets and the memory; "memory": of the memory; "given": as listed
    negatives: str = "all"
    items: Tensor | None = None  # [M + B] int64; None: an embedding's position in its set
    memory: Tensor | None = None  # [B, D]
    filled: Tensor | None = None  # [M + B] bool, False for empty slots of the memory; None: all
    weights: Table | Factors | None = None
    pair_weight: Gaussian | None = None
    hardness: float = 0.0  # beta: weights e^(beta s / tau), of a mean of 1 over the negatives
    is_unit: bool = True  # whether embeddings and memory are of unit length
    first_queries: bool = False  # whether only the first set has queries
    positives: Tensor | None = None  # [2, P] queries and keys
    positive_weights: Tensor | None = None  # [P]
    negative_pairs: Tensor | None = None  # [2, P] queries and keys, for "given"

    def sets(self) -> list[slice]:
        """The embeddings of each set."""
        ends = list(itertools.accumulate(self.lengths))
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def num_queries(self) -> int:
        return self.lengths[0] if self.first_queries else self.embeddings.shape[0]

    def size_of_memory(self) -> int:
        return 0 if self.memory is None else self.memory.shape[0]

    def num_samples(self) -> Tensor:
        """How many embeddings there are, without empty slots: ``[]``."""
        if self.filled is not None:
            return self.filled.sum().to(self.embeddings)
        # A tensor: a number would recompile graphs for each batch size.
        return self.embeddings.new_full((), self.embeddings.shape[0] + self.size_of_memory())

    def keys(self) -> Tensor:
        """All embeddings, ``[M + B, D]``."""
        return self.embeddings if self.memory is None else torch.cat([self.embeddings, self.memory])

    def are_compared_within_sets(self) -> bool:
        return self.negatives in ("all", "given")

    def compared_sets(self) -> list[slice]:
        """The sets, or one of all embeddings where sets make no difference."""
        if self.are_compared_within_sets() and not self.first_queries:
            return [slice(0, len(self.embeddings))]
        return self.sets()

    def masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """How often pairs are negatives, which are positives, and their weights: ``[M + B, Q]``."""
        count, num_queries = self.embeddings.shape[0], self.num_queries()
        j = torch.arange(count + self.size_of_memory(), device=self.embeddings.device)
        of_memory = torch.full_like(j[count:], NO_ITEM)
        items, numbers = self.items, j  # pairs of one number are not compared
        if items is None:
            positions = [torch.arange(n, device=j.device) for n in self.lengths]
            items = torch.cat([*positions, of_memory])
        if not self.are_compared_within_sets():
            of_sets = [torch.full_like(j[of], a) for a, of in enumerate(self.sets())]
            numbers = torch.cat([*of_sets, of_memory])
        same_item = items.unsqueeze(1) == items[:num_queries]
        compared = numbers.unsqueeze(1) != numbers[:num_queries]
        is_memory = (j >= count).unsqueeze(1)
        negatives = compared & ~same_item
        if self.negatives == "memory":
            negatives = negatives & is_memory
        if self.filled is not None:
            negatives = negatives & self.filled.unsqueeze(1)
        positives = compared & same_item & ~is_memory
        counts, weights = negatives.to(self.embeddings), positives.to(self.embeddings)
        if self.positives is not None and self.positive_weights is not None:
            pairs, zero = self.positives.flip(0).unbind(), counts.new_zeros(())
            counts, weights = counts.index_put(pairs, zero), weights.index_put(pairs, zero)
            weights = weights.index_put(pairs, self.positive_weights, accumulate=True)
            positives = positives.index_put(pairs, torch.ones_like(positives[0, 0]))
        if self.negative_pairs is not None:
            pairs, one = self.negative_pairs.flip(0).unbind(), counts.new_ones(())
            counts = torch.zeros_like(counts).index_put(pairs, one, accumulate=True)
        return counts, positives, weights

    def sorted_by_item(self) -> tuple["Pairs", Tensor | None]:
        """The same pairs with the items of each set in order, and the order ``[M]``.

        Then those of one item follow each other, and items of one embedding are the last. Items are
        numbered anew. If sets make no difference, all are one set.
        """
        if self.items is None:
            return self, None
        count, sets = len(self.embeddings), self.compared_sets()
        own = torch.arange(len(self.items), device=self.items.device)
        sorted_items = self.items.sort().values
        first = torch.searchsorted(sorted_items, self.items)
        is_shared = torch.searchsorted(sorted_items, self.items, right=True) - first > 1
        items = first.where(is_shared, len(own) + own)
        order = torch.cat([items[of].argsort() + of.start for of in sets])
        with_memory = torch.cat([order, own[count:]])
        inverse = torch.empty_like(order).scatter_(0, order, own[:count])
        ordered = self._replace(
            embeddings=self.embeddings[order],
            lengths=tuple([of.stop - of.start for of in sets]),
            items=items[with_memory],
            weights=reordered(self.weights, with_memory),
            pair_weight=reordered(self.pair_weight, with_memory),
            positives=None if self.positives is None else inverse[self.positives],
            negative_pairs=None if self.negative_pairs is None else inverse[self.negative_pairs],
        )
        return ordered, order


class Block(NamedTuple):
    """Pairs of queries I and embeddings J."""

    number: int
    i: slice
    j: slice
    sides: tuple[slice, ...]  # the queries of axis 0 and, if J are queries, of axis 1
    are_compared: bool = True  # whether they may be positives or negatives
    is_memory: bool = False
    shared: tuple[int, int] | None = None  # lowest and highest item of both; None: any

    def may_share_items(self) -> bool:
        return self.shared is None or self.shared[0] <= self.shared[1]

    def shape(self) -> torch.Size:
        return torch.Size((self.j.stop - self.j.start, self.i.stop - self.i.start))


def block_size(device: torch.device) -> int:
    """How many embeddings a block has."""
    return _BLOCK if device.type == "cpu" else _BLOCK_ELSEWHERE


def blocks_of(pairs: Pairs, size: int, num_ranks: int) -> Iterator[Block]:
    """Blocks of up to ``size`` embeddings, of all pairs with a query. Items are in order."""
    count, num_queries = pairs.embeddings.shape[0], pairs.num_queries()
    total, within = count + pairs.size_of_memory(), pairs.are_compared_within_sets()
    sets = enumerate(pairs.compared_sets())
    of_sets = [(i, a) for a, of in sets for i in _parts(of, size, num_ranks)]
    lowest: list[int] = []  # item of each part, if items can be read
    if pairs.items is not None and can_be_read(pairs.items):
        ends = torch.tensor([(part.start, part.stop - 1) for part, _ in of_sets])
        lowest, highest = pairs.items[ends.T].tolist()
    of_memory = _parts(slice(count, total), size, num_ranks)
    numbers = itertools.count()
    for n, (i, a) in enumerate(of_sets):
        if i.start >= num_queries:
            break
        for m, (j, b) in enumerate(of_sets[n:], n):
            sides = (i, j) if j.start < num_queries else (i,)
            shared = None
            if lowest:
                shared = max(lowest[n], lowest[m]), min(highest[n], highest[m])
            yield Block(next(numbers), i, j, sides, within or a != b, False, shared)
        for j in of_memory:
            yield Block(next(numbers), i, j, (i,), is_memory=True)


def _parts(of: slice, size: int, num_ranks: int) -> list[slice]:
    """Embeddings of each block; several processes get a few blocks each."""
    length = of.stop - of.start
    fewest = math.isqrt(8 * num_ranks) if num_ranks > 1 else 1
    count = min(max(fewest, -(-length // size)), length)
    edges = [of.start + length * n // max(1, count) for n in range(count + 1)]
    return [slice(*both) for both in itertools.pairwise(edges)]


def exclude(matrix: Tensor, value: float, pairs: Pairs, block: Block) -> None:
    """Fill the pairs that are no negatives in place, except for those by index."""
    i, j, items = block.i, block.j, pairs.items
    exclude_empty(matrix, value, pairs, block)
    if block.may_share_items() and items is not None:
        matrix.masked_fill_(items[j].unsqueeze(1) == items[i], value)
    elif items is None and not block.is_memory:  # pairs of one position lie on diagonals
        num_views, num = len(pairs.lengths), pairs.lengths[0]
        for shift in range(1 - num_views, num_views):
            offset = j.start - i.start + shift * num
            if -matrix.shape[0] < offset < matrix.shape[1]:
                matrix.diagonal(offset).fill_(value)


def exclude_empty(matrix: Tensor, value: float, pairs: Pairs, block: Block) -> None:
    if block.is_memory and pairs.filled is not None:
        matrix.masked_fill_(~pairs.filled[block.j].unsqueeze(1), value)


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
