"""The contract between the mathematics and the engines.

An engine computes S_i = sum over negatives j of W_ij e^{s_ij / tau} for every row i of one set of
unit rows, with gradient to the rows. It visits each pair once, for both its rows.
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses._modes import is_eager
from pgcl_losses._normalize import on_cpu

# Up to here e^{s / tau} of millions of pairs adds up in float32 without a maximum taken off first.
LARGEST_EXPONENT = 40.0
# e^x is computed as 2^(x log2 e), in a third of the time on a CPU; -inf takes as long as any x.
LOG2_E = math.log2(math.e)


class Factors(NamedTuple):
    """Weights of few columns: W_ij = left_i . right_j, and no factor is negative.

    Weights by clusters have this form. For a table T looked up by two clusters, left_i is the line
    T[c_i], and right_j has a 1 at column c_j and zeros elsewhere. A zero leaves the pair out.

    With several heads, their tables lie along the diagonal of one table: left_i is the sum of a
    line of each, and right_j has a 1 in the columns of each.

    The left factors are given as logarithms, as some are too small for float32.
    """

    log_left: Tensor  # [M, R], or the few different lines [L, R]
    right: Tensor  # [M, R]; or int64, where right_j has its ones: [M], or [M, H] with heads
    lines: Tensor | None = None  # int64, which lines are left_i's, where there are few: as right

    def num_columns(self) -> int:
        return self.log_left.shape[1]

    def looked_up(self) -> bool:
        """Whether right_j has a single 1, so that W_ij is an entry of left_i."""
        return self.right.dim() == 1

    def left_lines(self) -> Tensor:
        """``[M, R]``, or the few different lines ``[L, R]``."""
        smallest = torch.finfo(self.log_left.dtype).tiny
        return F.threshold(self.log_left.exp(), smallest, 0.0)  # products choke on smaller ones

    def log_left_of_rows(self) -> Tensor:
        """``[M, R]``, whichever form it has, of one head."""
        return self.log_left if self.lines is None else self.log_left.index_select(0, self.lines)

    def left_matrix(self) -> Tensor:
        """``[M, R]``, whichever form it has."""
        left = self.left_lines()
        if self.lines is None:
            return left
        first, *others = self.lines.unsqueeze(-1).flatten(1).unbind(1)  # of each head
        of_rows = left.index_select(0, first)
        for lines in others:
            of_rows += left.index_select(0, lines)
        return of_rows

    def right_matrix(self) -> Tensor:
        """``[M, R]``, whichever form it has."""
        if self.right.is_floating_point():
            return self.right
        zeros = self.log_left.new_zeros(len(self.right), self.num_columns())
        return zeros.scatter_(1, self.right.unsqueeze(-1).flatten(1), 1.0)

    def of_heads(self) -> "list[Lookup]":
        """What is looked up for each head, in the table of all; nothing if right_j is no lookup."""
        if self.right.is_floating_point():
            return []
        if self.lines is None or self.looked_up():
            return [Lookup(self.right, self.lines)]
        heads = zip(self.right.unbind(1), self.lines.unbind(1), strict=True)
        return [Lookup(right, lines) for right, lines in heads]

    def log_block(self, others: slice, some: slice, *, exactly: bool) -> Tensor:
        """Log W ``[J, I]`` of some rows i, which number the columns, and others j: a new matrix.

        If ``exactly``, heads are added up in logarithms. If not, it takes less time, and weights
        too small for float32 become -inf.
        """
        heads = self.of_heads()
        if not heads or (len(heads) > 1 and not exactly):
            return (self.right_matrix()[others] @ self.left_matrix()[some].T).log_()
        of_heads = []
        for right, lines in heads:
            if lines is not None and not on_cpu(self.log_left):
                of_heads.append(self.log_left[lines[some], right[others].unsqueeze(1)])
                continue
            if lines is None:
                by_column = self.log_left[some].T.contiguous()
            else:
                by_column = self.log_left.T.index_select(1, lines[some])
            of_heads.append(by_column.index_select(0, right[others]))  # copies of whole lines
        return functools.reduce(torch.logaddexp, of_heads)


class Lookup(NamedTuple):
    """Where left_i and right_j are looked up, for one head."""

    right: Tensor  # [M] int64, the column of each row's cluster
    lines: Tensor | None  # [M] int64, and its line; None if each row has one of its own


def mean_of(several: Sequence[Factors]) -> Factors:
    """Factors whose W_ij is the mean of several: their columns side by side."""
    if len(several) == 1:
        return several[0]
    scale = math.log(len(several))
    if not all(factors.looked_up() and factors.lines is not None for factors in several):
        log_left = torch.cat([factors.log_left_of_rows() for factors in several], dim=1)
        return Factors(log_left - scale, torch.cat([f.right_matrix() for f in several], dim=1))
    height = sum(len(table.log_left) for table in several)
    width = sum(table.num_columns() for table in several)
    log_left = several[0].log_left.new_full((height, width), -torch.inf)
    right: list[Tensor] = []
    lines: list[Tensor] = []
    line = column = 0
    for table in several:
        end = line + len(table.log_left), column + table.num_columns()
        log_left[line : end[0], column : end[1]] = table.log_left - scale
        right.append(table.right + column)
        assert table.lines is not None
        lines.append(table.lines + line)
        line, column = end
    return Factors(log_left, torch.stack(right, dim=1), torch.stack(lines, dim=1))


class Gaussian(NamedTuple):
    """Weights by the pair's own cosine: W_ij = Z_i exp(-(s_ij - mean_i)^2 / (2 variance_i)).

    The engine chooses Z_i: the mean of W_ij over all M rows j, the row i itself among them, is 1.
    """

    mean: Tensor  # [M]
    variance: Tensor  # [M] infinite where every weight is 1


Weight = Factors | Gaussian


class Pairs(NamedTuple):
    """One set of rows, which of them are negatives of each other, and how much each pair counts.

    Row i is graph i % N in view i // N, with N = M / num_views. Rows of one graph are no negatives,
    and with ``across_views`` neither are rows of one view. Weights of different kinds multiply;
    without any, W_ij is 1. They are constants for the gradient.
    """

    rows: Tensor  # [M, D] unit rows
    num_views: int
    across_views: bool = False
    weights: tuple[Weight, ...] = ()

    def num_graphs(self) -> int:
        return self.rows.shape[0] // self.num_views

    def views(self) -> list[slice]:
        """The rows of each view."""
        num = self.num_graphs()
        return [slice(v * num, (v + 1) * num) for v in range(self.num_views)]

    def runs(self) -> list[slice]:
        """All rows; or the views, where the rows of one have no negatives among each other."""
        return self.views() if self.across_views else [slice(0, len(self.rows))]

    def fill_graphs(self, matrix: Tensor, i: slice, j: slice, value: float) -> None:
        """Fill the pairs of one graph in a matrix ``[I, J]`` of rows i and rows j, in place."""
        height, width = i.stop - i.start, j.stop - j.start
        num_graphs, flat = self.num_graphs(), matrix.view(-1)
        if height == width == len(self.rows) and is_eager():  # compilers refuse as_strided
            # Graph g of one view and of another, or the same one: of all views at once.
            of_graphs = (self.num_views, self.num_views, num_graphs)
            strides = (num_graphs * width, num_graphs, width + 1)
            matrix.as_strided(of_graphs, strides).fill_(value)
            return
        for views_apart in range(1 - self.num_views, self.num_views):
            # They lie on diagonals. (Tensor.diagonal makes the compiler of torch 2.13 warn.)
            right = views_apart * num_graphs + i.start - j.start
            length = min(height, width - right) if right >= 0 else min(height + right, width)
            if length > 0:
                first = right if right >= 0 else -right * width
                last = first + (length - 1) * (width + 1)
                flat[first : last + 1 : width + 1].fill_(value)


class Sums(NamedTuple):
    """What an engine returns for the pairs of its share; e^log_sums of all shares add up to S.

    With a Gaussian they add up to S_i / Z_i, and Z_i = M / e^log_masses_i.
    """

    log_sums: Tensor  # [M] -inf where there is no negative
    log_masses: Tensor | None = None  # [M] of the Gaussian over all rows, negatives or not


class Share(NamedTuple):
    """Which of all pairs to compute: each of several ranks has a share, a single one has all."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, length: int) -> slice:
        """One of ``num_ranks`` runs of a length, as equal as can be."""
        ends = (length * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return slice(*ends)


ALL_PAIRS = Share()


Kind = TypeVar("Kind")


def weight_of(kind: type[Kind], weights: Sequence[object]) -> Kind | None:
    """The weight of one kind, if there is one."""
    of_kind = [weight for weight in weights if isinstance(weight, kind)]
    if len(of_kind) > 1:
        raise TypeError(f"weights must hold one {kind.__name__} at most, but got {len(of_kind)}")
    return of_kind[0] if of_kind else None


def check_kinds(engine: str, weights: Sequence[object], *kinds: type) -> None:
    """An engine names the kinds of weight that it computes; any other is an error."""
    for weight in weights:
        if not isinstance(weight, kinds):
            computed = " and ".join(kind.__name__ for kind in kinds)
            raise TypeError(
                f"engine={engine!r} computes weights of the kinds {computed}, "
                f"but got {type(weight).__name__}"
            )
