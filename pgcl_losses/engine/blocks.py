"""Which pairs of embeddings are computed together, and by which process.

Where Python can read clusters, embeddings are sorted by them. A block then meets few clusters, and
a cluster is not compared with itself if such pairs are no negatives.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.engine.contract import Factors, Pairs, Portion, Table, couples

_BLOCK = 640  # embeddings of a block: on a CPU a block of pairs stays in the cache
_BLOCK_ELSEWHERE = 4096  # where starting an operation takes longer than so many pairs do


class Run(NamedTuple):
    """Embeddings next to each other once sorted, and the clusters that they may have."""

    span: slice
    clusters: range  # of the head by which they are sorted; empty if they are not

    def size(self) -> int:
        return _length(self.span)


class Block(NamedTuple):
    """The pairs of embeddings I with embeddings J; its matrices are ``[J, I]``."""

    i: Run
    j: Run
    negatives: bool  # whether there are any

    def run(self, axis: int) -> Run:
        """Those whose sums run along this axis."""
        return self.j if axis else self.i

    def axes(self) -> tuple[int, ...]:
        """Of embeddings with themselves, one axis has all sums."""
        return (0,) if self.i.span == self.j.span else (0, 1)


class Layout(NamedTuple):
    """The blocks of a portion. Each pair of embeddings is in one block of one portion."""

    pairs: Pairs
    order: Tensor | None  # [M] the embedding at each position; None if not sorted
    head: int  # by whose clusters they are
    positions: Any  # [M, sets] of the embeddings of the same item, -1 for none; if sorted
    blocks: list[Block]

    def sort(self, values: Tensor) -> Tensor:
        return values if self.order is None else values.index_select(0, self.order)

    def unsort(self, sorted_values: Tensor) -> Tensor:
        if self.order is None:
            return sorted_values
        return torch.empty_like(sorted_values).index_copy_(0, self.order, sorted_values)

    def fill_items(self, block: Block, matrix: Tensor, value: float) -> None:
        """Fill the pairs of one item in a matrix of the block, in place."""
        i, j = block.i.span, block.j.span
        if self.positions is None:
            self.pairs.fill_items(matrix, j, i, value)
            return
        lines = self.positions[i] - j.start  # [I, sets]
        inside = lines.view(numpy.uint64) < block.j.size()  # a negative one is too large
        columns, _ = inside.nonzero()
        flat = lines[inside] * block.i.size() + columns
        matrix.view(-1).index_fill_(0, torch.from_numpy(flat), value)


def layout(pairs: Pairs, portion: Portion) -> Layout:
    """Blocks without negatives are left out, but not for a pair weight: its totals need all."""
    all_pairs = pairs.by_cosine is not None
    parents = [slice(0, pairs.embeddings.shape[0])] if pairs.compares_all() else pairs.sets()
    cut = [
        (span, parent)
        for parent, embeddings in enumerate(parents)
        for span in _cut(embeddings, portion.num_ranks)
    ]
    compared = frozenset(couples(1) if pairs.compares_all() else pairs.compared)
    clusters, head = _readable_clusters(pairs)
    if clusters is None:
        order, positions = None, None
        device = pairs.embeddings.device
        runs = [[Run(block, range(0)) for block in in_blocks(span, device)] for span, _ in cut]
    else:
        orders = [clusters[span].argsort(kind="stable") + span.start for span, _ in cut]
        runs = [list(_by_cluster(span.start, numpy.bincount(clusters[span]))) for span, _ in cut]
        by_position = numpy.concatenate(orders)
        order = torch.from_numpy(by_position)
        positions = _positions(pairs, by_position) if pairs.items is None else None
        if pairs.items is not None:
            pairs = pairs._replace(items=pairs.items.index_select(0, order))
    without_weight = _without_weight(None if order is None else pairs.by_cluster)
    blocks = []
    wanted = [
        (a, b) for a, b in couples(len(cut)) if all_pairs or (cut[a][1], cut[b][1]) in compared
    ]
    # Runs do not depend on clusters: in a close call two processes might see different ones.
    for a, b in _of_portion(cut, wanted, portion):
        are_compared = (cut[a][1], cut[b][1]) in compared
        for n, i in enumerate(runs[a]):
            for j in runs[b][n if a == b else 0 :]:
                negatives = are_compared and not without_weight(i, j)
                if negatives or all_pairs:
                    blocks.append(Block(i, j, negatives))
    return Layout(pairs, order, head, positions, blocks)


def _length(span: slice) -> int:
    return int(span.stop - span.start)


def in_blocks(span: slice, device: torch.device) -> list[slice]:
    """Blocks of embeddings for a device, as equal as can be."""
    size = _BLOCK if device.type == "cpu" else _BLOCK_ELSEWHERE
    return _cut(span, max(1, -(-_length(span) // size)))


def _cut(span: slice, count: int) -> list[slice]:
    """As equal as can be; none of them empty."""
    bounds = [span.start + _length(span) * number // count for number in range(count + 1)]
    return [slice(*both) for both in itertools.pairwise(bounds) if both[0] < both[1]]


def _readable_clusters(pairs: Pairs) -> tuple[Any, int]:
    """Those of all embeddings as an array, if Python can look at them; of the head with most."""
    table = pairs.by_cluster
    if not isinstance(table, Table):
        return None, 0
    if not all(map(can_be_read, (table.clusters, *table.log_weights, pairs.embeddings.detach()))):
        return None, 0
    of_heads = table.clusters.numpy()  # [M, H]
    head = int(numpy.ptp(of_heads, axis=0).argmax())
    return of_heads[:, head], head


def _by_cluster(start: int, counts: Any) -> Iterator[Run]:
    """Embeddings of one cluster, or of several small ones, for each block."""
    first, held = 0, 0  # clusters first.. have so many embeddings that wait for a block
    for cluster, count in enumerate(counts.tolist()):
        if held + count > _BLOCK and held > 0:
            yield Run(slice(start, start + held), range(first, cluster))
            start, held = start + held, 0
        if held == 0:
            first = cluster
        if count > _BLOCK:
            for span in _cut(slice(start, start + count), -(-count // _BLOCK)):
                yield Run(span, range(cluster, cluster + 1))
            start += count
        else:
            held += count
    if held > 0:
        yield Run(slice(start, start + held), range(first, len(counts)))


def _positions(pairs: Pairs, order: Any) -> Any:
    """The position of each set's embedding of the same item: ``[M, sets]``."""
    position = numpy.empty_like(order)
    position[order] = numpy.arange(len(order))
    item = numpy.concatenate([numpy.arange(length) for length in pairs.lengths])[order]
    of_item = numpy.full((len(order), len(pairs.lengths)), -1)
    for number, members in enumerate(pairs.sets()):
        there = item < pairs.lengths[number]
        of_item[there, number] = position[members][item[there]]
    return of_item


def _of_portion(
    cut: list[tuple[slice, int]], wanted: list[tuple[int, int]], portion: Portion
) -> Any:
    """The pairs of runs that a process has: the largest are dealt out first, back and forth."""

    def area(both: tuple[int, int]) -> int:
        a, b = both
        return _length(cut[a][0]) * _length(cut[b][0]) * (1 if a == b else 2)

    if portion.num_ranks == 1:  # compilers cannot sort
        return wanted
    dealt = enumerate(sorted(wanted, key=area, reverse=True))
    there, back = portion.rank, 2 * portion.num_ranks - 1 - portion.rank
    return [both for k, both in dealt if k % (2 * portion.num_ranks) in (there, back)]


def _without_weight(table: Table | Factors | None) -> Callable[[Run, Run], bool]:
    """Whether sorted embeddings I and J have no weight for each other."""
    if not isinstance(table, Table) or len(table.log_weights) > 1:
        return lambda i, j: False
    none = (table.log_weights[0] == -torch.inf).numpy()

    def without_weight(i: Run, j: Run) -> bool:
        a, b = (slice(run.clusters.start, run.clusters.stop) for run in (i, j))
        return bool(none[a, b].all() and none[b, a].all())

    return without_weight
