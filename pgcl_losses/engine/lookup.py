"""The weights of a block of pairs, by its factors: looked up, or multiplied out."""

import torch
from torch import Tensor

from pgcl_losses.engine.blocks import Block, Layout
from pgcl_losses.engine.pairs import LOG2_E, Factors, Lookup


def along(of_rows: Tensor, end: int) -> Tensor:
    """Numbers of the rows at one end, as a line or a column of a block ``[J, I]``."""
    return of_rows.unsqueeze(1) if end else of_rows


class BlockWeights:
    """W of the rows at one end of a block: ``[I]`` or ``[J, 1]``, one for each; or ``[J, I]``."""

    def __init__(self, factors: Factors, laid: Layout, *, logarithms: bool) -> None:
        """Or log2 W."""
        self.logarithms = logarithms
        heads = factors.of_heads()
        self.lookups: list[_Lookup] = []
        if not heads:
            self.left = laid.sort(factors.left_matrix())  # [M, R]
            self.right = laid.sort(factors.right_matrix())
            return
        left = factors.log_left * LOG2_E if logarithms else factors.left_lines()
        by_column = left if factors.lines is None else left.T.contiguous()
        square = factors.lines is factors.right
        self.lookups = [
            _Lookup(left, by_column, lookup, laid, of_sorted=laid.head == head, square=square)
            for head, lookup in enumerate(heads)
        ]

    def of(self, block: Block, end: int, out: Tensor) -> Tensor:
        if not self.lookups:
            of_j, of_i = (self.left, self.right) if end else (self.right, self.left)
            weights = torch.mm(of_j[block.j.place], of_i[block.i.place].T, out=out)
            return weights.log2_() if self.logarithms else weights
        if len(self.lookups) == 1:
            return self.lookups[0].of(block, end, out)
        first, *others = [lookup.of(block, end, torch.empty_like(out)) for lookup in self.lookups]
        add = torch.logaddexp2 if self.logarithms else torch.add
        for of_head in others:
            vectors = first.shape == of_head.shape != out.shape
            first = add(first, of_head, out=None if vectors else out)
        return first


class _Lookup:
    """Weights that are entries of the left factors, by one cluster of each row."""

    def __init__(
        self,
        left: Tensor,
        by_column: Tensor,
        lookup: Lookup,
        laid: Layout,
        *,
        of_sorted: bool,
        square: bool,
    ) -> None:
        """``square``: the line of a row has the number of its cluster."""
        self.of_sorted, self.square = of_sorted, square
        self.right = laid.sort(lookup.right)  # [M]
        self.lines = None if lookup.lines is None else laid.sort(lookup.lines)
        self.left = laid.sort(left) if lookup.lines is None else left  # [M, R] or [L, R]
        self.by_column = by_column  # [R, L], where there are lines
        self.columns, self.rows = range(left.shape[1]), range(len(left))
        if laid.order is not None and not of_sorted:  # a head has its own part of the table
            self.columns = _spread(self.right)
            self.rows = self.rows if self.lines is None else _spread(self.lines)

    def of(self, block: Block, end: int, out: Tensor) -> Tensor:
        i, j = block.i.place, block.j.place
        mine, others = block.rows(end), block.rows(1 - end)
        clusters = others.clusters if self.of_sorted else self.columns
        if len(clusters) == 1:
            return along(self._column(mine.place, clusters.start), end)
        if end == 0:  # left_i at the cluster of j
            few = slice(clusters.start, clusters.stop)
            if self.lines is None:
                of_clusters = self.left[i, few].T.contiguous()
            else:
                of_clusters = self.by_column[few].index_select(1, self.lines[i])
            return _copies(of_clusters, self.right[j], few.start, out)
        if self.lines is None:  # left_j at the cluster of i
            return torch.index_select(self.left[j], 1, self.right[i], out=out)
        some = mine.clusters if self.of_sorted and self.square else self.rows
        of_lines = self.left[some.start : some.stop].index_select(1, self.right[i])
        return _copies(of_lines, self.lines[j], some.start, out)

    def _column(self, mine: slice, cluster: int) -> Tensor:
        if self.lines is None:
            return self.left[mine, cluster].clone()
        return self.by_column[cluster].index_select(0, self.lines[mine])


def _spread(numbers: Tensor) -> range:
    """From the smallest to the largest, which can be read."""
    low, high = numbers.aminmax()
    return range(int(low), int(high) + 1)


def _copies(lines: Tensor, numbers: Tensor, first: int, out: Tensor) -> Tensor:
    """The line of each number, of lines numbered from the first on: copied as a whole."""
    return torch.index_select(lines, 0, numbers - first if first else numbers, out=out)
