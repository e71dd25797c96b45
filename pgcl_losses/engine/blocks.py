"""Which pairs of rows are computed together, and by which rank.

Where Python can read clusters, rows are sorted by them. A block of rows then meets few clusters,
and a cluster is not compared with itself if such pairs are no negatives.
"""

import functools
import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from pgcl_losses.engine.pairs import Factors, Gaussian, Pairs, Share, weight_of
from pgcl_losses._modes import can_be_read

_BLOCK = 640  # rows of a block: on a CPU a block of pairs stays in the cache
_BLOCK_ELSEWHERE = 4096  # where starting an operation takes longer than so many pairs do


class Rows(NamedTuple):
    """Rows that stand next to each other once sorted, and the clusters that they may have."""

    place: slice
    clusters: range

    def size(self) -> int:
        return _length(self.place)


class Block(NamedTuple):
    """The pairs of rows I with rows J; its matrices are ``[J, I]``."""

    i: Rows
    j: Rows
    negatives: bool  # whether there are any
    one_graph: Tensor | None  # where the flat matrix has pairs of one graph; None if not sorted

    def rows(self, end: int) -> Rows:
        """Those whose sums go along this axis of the matrix."""
        return self.j if end else self.i

    def ends(self) -> tuple[int, ...]:
        """Of rows with themselves, one end has all."""
        return (0,) if self.i.place == self.j.place else (0, 1)


class Layout(NamedTuple):
    """The blocks of a share. Each pair of rows stands in one block of one share."""

    order: Tensor | None  # [M] the row that stands at each place; None if they are not sorted
    head: int  # by whose clusters they are
    blocks: list[Block]

    def sort(self, of_rows: Tensor) -> Tensor:
        return of_rows if self.order is None else of_rows.index_select(0, self.order)

    def unsort(self, of_places: Tensor) -> Tensor:
        if self.order is None:
            return of_places
        return torch.empty_like(of_places).index_copy_(0, self.order, of_places)


def layout(pairs: Pairs, share: Share, *, forward: bool) -> Layout:
    """Blocks without negatives are left out, except forward for a Gaussian: its mass needs all."""
    factors = weight_of(Factors, pairs.weights)
    all_pairs = forward and weight_of(Gaussian, pairs.weights) is not None
    runs = [run for all_of in pairs.runs() for run in _cut(all_of, share.num_ranks)]
    clusters, head = _readable_clusters(pairs, factors)
    if clusters is None:
        order = None
        block = _BLOCK if pairs.rows.device.type == "cpu" else _BLOCK_ELSEWHERE
        all_clusters = range(0 if factors is None else factors.num_columns())
        of_runs = [
            [Rows(place, all_clusters) for place in _cut(run, -(-_length(run) // block))]
            for run in runs
        ]
    else:
        orders = [clusters[run].argsort(kind="stable") + run.start for run in runs]
        order = numpy.concatenate(orders)
        of_runs = [list(_by_cluster(run.start, numpy.bincount(clusters[run]))) for run in runs]

    all_rows = [rows for run in of_runs for rows in run]
    numbers, first = [], 0
    for of_run in of_runs:
        numbers.append(range(first, first + len(of_run)))
        first += len(of_run)
    no_negatives = _no_negatives(factors if order is not None else None)
    one_graph = _OneGraph(pairs, order, all_rows)
    blocks = []
    for a, b in _share_out(runs, pairs, share, all_pairs):
        partners = _partners(pairs, runs[a], runs[b])
        for n in numbers[a]:
            for m in numbers[b]:
                i, j = all_rows[n], all_rows[m]
                negatives = partners and not no_negatives(i, j)
                if n <= m and (negatives or all_pairs):
                    blocks.append(Block(i, j, negatives, one_graph.places(n, m)))
    return Layout(None if order is None else torch.from_numpy(order), head, blocks)


def _length(run: slice) -> int:
    return int(run.stop - run.start)


def _couples(count: int) -> list[tuple[int, int]]:
    """Each number with itself and the later ones. (The compiler knows no combinations.)"""
    return [(a, b) for a in range(count) for b in range(a, count)]


def _partners(pairs: Pairs, a: slice, b: slice) -> bool:
    """Whether two runs may have negatives in each other."""
    of_views = a.start // pairs.num_graphs(), b.start // pairs.num_graphs()
    return not pairs.across_views or of_views[0] != of_views[1]


def _cut(run: slice, parts: int) -> list[slice]:
    """As equal as can be; none of them empty."""
    ends = [run.start + _length(run) * part // parts for part in range(parts + 1)]
    return [slice(*pair) for pair in itertools.pairwise(ends) if pair[0] < pair[1]]


def _readable_clusters(pairs: Pairs, factors: Factors | None) -> tuple[Any, int]:
    """Those of all rows as an array, if Python can look at them; of the head that has most."""
    if factors is None or factors.right.is_floating_point():
        return None, 0
    if not all(map(can_be_read, (factors.right, factors.log_left, pairs.rows.detach()))):
        return None, 0
    of_heads = factors.right.unsqueeze(-1).flatten(1).numpy()  # [M, H]
    head = int(numpy.ptp(of_heads, axis=0).argmax())
    return of_heads[:, head], head


def _by_cluster(start: int, counts: Any) -> Iterator[Rows]:
    """Rows of one cluster, or of several small ones, for each block."""
    first, held = 0, 0  # clusters first.. have so many rows that wait for a block
    for cluster, count in enumerate(counts.tolist()):
        if held + count > _BLOCK and held > 0:
            yield Rows(slice(start, start + held), range(first, cluster))
            start, held = start + held, 0
        if held == 0:
            first = cluster
        if count > _BLOCK:
            for place in _cut(slice(start, start + count), -(-count // _BLOCK)):
                yield Rows(place, range(cluster, cluster + 1))
            start += count
        else:
            held += count
    if held > 0:
        yield Rows(slice(start, start + held), range(first, len(counts)))


def _share_out(
    runs: list[slice], pairs: Pairs, share: Share, all_pairs: bool
) -> Sequence[tuple[int, int]]:
    """The pairs of runs that are one rank's, so that all ranks have about equally many pairs.

    Runs do not depend on clusters: in a close call two ranks might see different ones.
    """
    if share.num_ranks == 1:
        couples = _couples(len(runs))
        return [(a, b) for a, b in couples if all_pairs or _partners(pairs, runs[a], runs[b])]
    each = None if all_pairs or not pairs.across_views else len(runs) // pairs.num_views
    return _shares(tuple(map(_length, runs)), each, share.num_ranks)[share.rank]


@functools.lru_cache(maxsize=16)  # the same ones in every step
def _shares(
    lengths: tuple[int, ...], runs_of_a_view: int | None, num_ranks: int
) -> list[list[tuple[int, int]]]:
    """For each rank its pairs of runs: the largest one left goes to the rank that has least."""
    areas = {
        (a, b): lengths[a] * lengths[b] * (1 if a == b else 2)
        for a, b in _couples(len(lengths))
        if runs_of_a_view is None or a // runs_of_a_view != b // runs_of_a_view
    }
    of_ranks: list[list[tuple[int, int]]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for both in sorted(areas, key=lambda both: -areas[both]):
        load, rank = heapq.heappop(loads)
        of_ranks[rank].append(both)
        heapq.heappush(loads, (load + areas[both], rank))
    return of_ranks


def _no_negatives(factors: Factors | None) -> Any:
    """Whether rows I and J have no weight for each other: by a table of clusters, where sorted."""
    if factors is None or not factors.looked_up() or factors.lines is not factors.right:
        return lambda i, j: False
    none = (factors.log_left == -torch.inf).numpy()

    def no_negatives(i: Rows, j: Rows) -> bool:
        a = slice(i.clusters.start, i.clusters.stop)
        b = slice(j.clusters.start, j.clusters.stop)
        return bool(none[a, b].all() and none[b, a].all())

    return no_negatives


class _OneGraph:
    """Where the blocks of sorted rows have pairs of one graph."""

    def __init__(self, pairs: Pairs, order: Any, some_rows: list[Rows]) -> None:
        self.sorted = order is not None
        if not self.sorted:
            return
        self.count = len(some_rows)
        starts = numpy.array([rows.place.start for rows in some_rows])
        place = numpy.empty_like(order)
        place[order] = numpy.arange(len(order))
        of_views = [place[view] for view in pairs.views()]
        couples = _couples(pairs.num_views)
        first = numpy.concatenate([of_views[a] for a, _ in couples])
        second = numpy.concatenate([of_views[b] for _, b in couples])
        # Both (i, j) and (j, i): one of them is in a block, or both are.
        i, j = numpy.concatenate([first, second]), numpy.concatenate([second, first])
        of_i, of_j = (numpy.searchsorted(starts, end, side="right") - 1 for end in (i, j))
        widths = numpy.array([rows.size() for rows in some_rows])
        flat = (j - starts[of_j]) * widths[of_i] + i - starts[of_i]
        keys = of_i * self.count + of_j
        by_block = keys.argsort(kind="stable")
        self.flat = torch.from_numpy(flat[by_block])
        self.keys = keys[by_block]

    def places(self, n: int, m: int) -> Tensor | None:
        """In the block of rows number n and rows number m."""
        if not self.sorted:
            return None
        key = n * self.count + m
        start, stop = numpy.searchsorted(self.keys, (key, key + 1))
        return self.flat[start:stop]
