"""The weights of a block of pairs, by its factors: looked up, or multiplied out."""

import torch
from torch import Tensor

from pgcl_losses.engine.blocks import Block, Layout
from pgcl_losses.engine.pairs import LOG2_E, Factors


def along(of_rows: Tensor, end: int) -> Tensor:
    """Numbers of the rows at one end, as a line or a column of a block ``[J, I]``."""
    return of_rows.unsqueeze(1) if end else of_rows


class BlockWeights:
    """W of the rows at one end of a block: ``[I]`` or ``[J, 1]``, one for each; or ``[J, I]``."""

    def __init__(self, factors: Factors, laid: Layout, *, logarithms: bool) -> None:
        """Or log2 W."""
        self.logarithms = logarithms
        self.lookups: list[_Lookup] = []
        if factors.right.is_floating_point() or (logarithms and not factors.looked_up()):
            self.left = laid.sort(factors.left_matrix())  # [M, R]
            self.right = laid.sort(factors.right_matrix())
            return
        left = factors.log_left * LOG2_E if logarithms else factors.left_lines()
        if factors.looked_up():
            of_heads = [(factors.right, factors.lines)]
        else:
            assert factors.lines is not None
            of_heads = list(zip(factors.right.unbind(1), factors.lines.unbind(1), strict=True))
        square = factors.lines is factors.right
        by_column = left.T.contiguous() if factors.lines is not None else left
        self.lookups = [
            _Lookup(left, by_column, right, lines, laid, of_sorted=laid.head == head, square=square)
            for head, (right, lines) in enumerate(of_heads)
        ]

    def of(self, block: Block, end: int, out: Tensor) -> Tensor:
        if not self.lookups:
            of_j, of_i = (self.left, self.right) if end else (self.right, self.left)
            weights = torch.mm(of_j[block.j.place], of_i[block.i.place].T, out=out)
            return weights.log2_() if self.logarithms else weights
        if len(self.lookups) == 1:
            return self.lookups[0].of(block, end, out)
        of_heads = [lookup.of(block, end, torch.empty_like(out)) for lookup in self.lookups]
        torch.add(of_heads[0], of_heads[1], out=out)
        for of_head in of_heads[2:]:
            out += of_head
        return out


class _Lookup:
    """Weights that are entries of the left factors, by one cluster of each row."""

    def __init__(
        self,
        left: Tensor,
        by_column: Tensor,
        right: Tensor,
        lines: Tensor | None,
        laid: Layout,
        *,
        of_sorted: bool,
        square: bool,
    ) -> None:
        """``square``: the line of a row has the number of its cluster."""
        self.of_sorted, self.square = of_sorted, square
        self.right = laid.sort(right)  # [M]
        self.lines = None if lines is None else laid.sort(lines)
        self.left = laid.sort(left) if lines is None else left  # [M, R] or [L, R]
        self.by_column = by_column  # [R, L], where there are lines

    def of(self, block: Block, end: int, out: Tensor) -> Tensor:
        i, j = block.i.place, block.j.place
        mine, others = block.rows(end), block.rows(1 - end)
        clusters = others.clusters if self.of_sorted else range(self.left.shape[1])
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
        some = mine.clusters if self.of_sorted and self.square else range(len(self.left))
        of_lines = self.left[some.start : some.stop].index_select(1, self.right[i])
        return _copies(of_lines, self.lines[j], some.start, out)

    def _column(self, mine: slice, cluster: int) -> Tensor:
        if self.lines is None:
            return self.left[mine, cluster].clone()
        return self.by_column[cluster].index_select(0, self.lines[mine])


def _copies(lines: Tensor, numbers: Tensor, first: int, out: Tensor) -> Tensor:
    """The line of each number, of lines numbered from the first on: copied as a whole."""
    return torch.index_select(lines, 0, numbers - first if first else numbers, out=out)
