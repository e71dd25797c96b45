"""The engine for batches of any size: blocks of pairs, and nothing of size M x M in memory.

e^{s / tau} is symmetric, so a block of the pairs of rows I and rows J, I <= J, serves the sums of
both. The gradient is computed from the rows again, block by block, and no block is kept: two thirds
of the arithmetic of a dense loss.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from pgcl_losses.engine.pairs import (
    ALL_PAIRS,
    LARGEST_EXPONENT,
    Factors,
    Gaussian,
    Pairs,
    Share,
    Sums,
    above_underflow,
    check_kinds,
    weight_of,
)

_BLOCK = 640  # rows of a block: a block of pairs stays in the cache
# Weights of a block are a product of that rank; looking them up costs less above.
_MOST_COLUMNS = 256
_BLOCKS_OF_A_RANK = 2  # along the rows, so that ranks have about equally many pairs


def log_sums(pairs: Pairs, temperature: float, share: Share = ALL_PAIRS) -> Sums:
    """See `Sums`. A share is every so many blocks."""
    ends = _ends(pairs, temperature)
    for block in _blocks(pairs, temperature, share, ends.scratch, forward=True):
        ends.add(block)
    return ends.sums()


def gradient(
    pairs: Pairs, temperature: float, log_s: Tensor, slopes: Tensor, share: Share
) -> Tensor:
    """Gradient ``[M, D]`` of the sum of slopes_i log S_i, as far as this share's pairs go.

    ``log_s``: the log-sums of all shares together, without the Gaussian's scale.
    """
    rows = pairs.rows.detach()
    ends = _ends(pairs, temperature)
    ends.start_gradient(log_s, slopes / temperature)
    d_rows = torch.zeros_like(rows)
    for block in _blocks(pairs, temperature, share, ends.scratch, forward=False):
        i, j = block.i, block.j
        d_pairs = ends.d_pairs(block)  # of the sum by s_ij, from both ends
        d_rows[i].addmm_(d_pairs, rows[j])
        if i != j:
            d_rows[j].addmm_(d_pairs.T, rows[i])
    return d_rows


class _Block(NamedTuple):
    """The pairs of rows I with rows J; its matrices ``[I, J]`` are reused by the next block."""

    i: slice
    j: slice
    exponents: Tensor  # s / t
    negatives: bool  # whether there are any
    scratch: tuple[Tensor, ...]

    def ends(self) -> list[tuple[int, slice]]:
        """The axis along which the rows of an end lie, and these rows."""
        return [(0, self.i)] if self.i == self.j else [(0, self.i), (1, self.j)]


def _blocks(
    pairs: Pairs, temperature: float, share: Share, scratch: int, *, forward: bool
) -> Iterator[_Block]:
    """The blocks of a share, I <= J, with so many matrices of scratch."""
    rows = pairs.rows.detach()  # torch.compile of torch 2.4 would record the products
    scaled = rows / temperature
    size = min(_BLOCK, len(rows))
    if share.num_ranks > 1:
        size = min(size, -(-len(rows) // (_BLOCKS_OF_A_RANK * share.num_ranks)))
    buffer = rows.new_empty(1 + scratch, size**2)
    for i, j, negatives in _places(pairs, size, forward)[share.rank :: share.num_ranks]:
        shape = i.stop - i.start, j.stop - j.start
        matrices = buffer[:, : shape[0] * shape[1]].view(-1, *shape).unbind()
        exponents = torch.mm(scaled[i], rows[j].T, out=matrices[0])
        yield _Block(i, j, exponents, negatives, matrices[1:])


def _places(pairs: Pairs, size: int, forward: bool) -> list[tuple[slice, slice, bool]]:
    """Where blocks lie, and whether they hold negatives.

    Those without are wanted only forward and for a Gaussian, whose mass is that of all rows.
    """
    runs = pairs.views() if pairs.across_views else [slice(0, len(pairs.rows))]
    blocks = [
        (view, slice(start, min(start + size, run.stop)))
        for view, run in enumerate(runs)
        for start in range(run.start, run.stop, size)
    ]
    all_rows = forward and weight_of(Gaussian, pairs.weights) is not None
    places = []
    for number, (view_i, i) in enumerate(blocks):
        for view_j, j in blocks[number:]:
            negatives = not pairs.across_views or view_i != view_j
            if negatives or all_rows:
                places.append((i, j, negatives))
    return places


def _ends(pairs: Pairs, temperature: float) -> "_Plain | _Logarithms":
    """How what a block holds is added to the sums of the rows at its two ends."""
    check_kinds("streaming", pairs.weights, Factors, Gaussian)
    factors = weight_of(Factors, pairs.weights)
    few_columns = factors is None or factors.num_columns() <= _MOST_COLUMNS
    if 1 / temperature <= LARGEST_EXPONENT and few_columns:
        return _Plain(pairs, temperature)
    return _Logarithms(pairs, temperature)


class _PairGaussian:
    """The Gaussian of each pair of a block."""

    @classmethod
    def of(cls, pairs: Pairs, temperature: float) -> "_PairGaussian | None":
        gaussian = weight_of(Gaussian, pairs.weights)
        return None if gaussian is None else cls(gaussian, temperature)

    def __init__(self, gaussian: Gaussian, temperature: float) -> None:
        # In units of the exponents s / t.
        self.mean = gaussian.mean / temperature  # [M]
        self.curvature = -(temperature**2) / (2 * gaussian.variance)  # [M]

    def log(self, block: _Block, end: int, out: Tensor) -> Tensor:
        mine = block.j if end else block.i
        mean, curvature = self.mean[mine], self.curvature[mine]
        if end == 0:
            mean, curvature = mean.unsqueeze(1), curvature.unsqueeze(1)
        return torch.sub(block.exponents, mean, out=out).square_().mul_(curvature)


class _Plain:
    """Sums as they are: for few columns of factors, and temperatures at which nothing overflows."""

    def __init__(self, pairs: Pairs, temperature: float) -> None:
        self.pairs = pairs
        self.gaussian = _PairGaussian.of(pairs, temperature)
        self.scratch = 1 if self.gaussian is None else 3
        self.totals = torch.zeros_like(pairs.rows[:, 0])  # [M]
        self.masses = torch.zeros_like(self.totals)
        factors = weight_of(Factors, pairs.weights)
        self.left = self.right = None if factors is None else factors.left_matrix().T.contiguous()
        if factors is not None:
            self.right = factors.right_matrix().T.contiguous()  # [R, M]
        self.symmetric = factors is None or factors.symmetric

    def factors(self, block: _Block, end: int) -> Tensor:
        """W of the rows at one end, in the last matrix of scratch."""
        assert self.left is not None
        assert self.right is not None
        of_i, of_j = (self.right, self.left) if end else (self.left, self.right)
        return torch.mm(of_i[:, block.i].T, of_j[:, block.j], out=block.scratch[-1])

    def values(self, block: _Block, out: Tensor) -> Tensor:
        """e^{s / t}, times W if that is the same at both ends; 0 for what is no negative."""
        values = torch.exp(block.exponents, out=out)
        if self.symmetric and self.left is not None:
            values.mul_(self.factors(block, 0))
        self.pairs.fill_graphs(values, block.i, block.j, 0.0)
        return values

    def add(self, block: _Block) -> None:
        values = block.exponents if self.gaussian is None else block.scratch[0]
        if block.negatives:
            self.values(block, values)
        for end, mine in block.ends():
            weighted = values
            if self.gaussian is not None:
                weighted = self.gaussian.log(block, end, block.scratch[1]).exp_()
                self.masses[mine] += weighted.sum(1 - end)
                weighted.mul_(values)
            if not block.negatives:
                continue
            if not self.symmetric:
                weighted = self.factors(block, end).mul_(weighted)
            self.totals[mine] += weighted.sum(1 - end)

    def sums(self) -> Sums:
        return Sums(self.totals.log(), None if self.gaussian is None else self.masses.log())

    def start_gradient(self, log_s: Tensor, slopes: Tensor) -> None:
        smallest = math.log(torch.finfo(log_s.dtype).tiny)
        by_sum = slopes * log_s.clamp_min(smallest).neg_().exp_()
        # A row without negatives has nothing to share out.
        by_sum.masked_fill_(log_s == -torch.inf, 0.0)
        self.by_sum = by_sum  # [M]
        if self.gaussian is None:
            ones = torch.ones_like(by_sum).unsqueeze(0)
            left, right = (ones, ones) if self.symmetric else (self.left, self.right)
            assert left is not None
            assert right is not None
            # Their product is d_i W_ij + d_j W_ji.
            self.of_i = torch.cat([left * by_sum, right])  # [2 R, M]
            self.of_j = torch.cat([right, left * by_sum])

    def d_pairs(self, block: _Block) -> Tensor:
        """e^{s / t} (d_i W_ij + d_j W_ji)."""
        i, j = block.i, block.j
        if self.gaussian is None:
            values = self.values(block, block.exponents)
            return values.mul_(torch.mm(self.of_i[:, i].T, self.of_j[:, j], out=block.scratch[-1]))
        at_i, at_j, _ = block.scratch
        self.gaussian.log(block, 0, at_i).add_(block.exponents).exp_()
        self.gaussian.log(block, 1, at_j).add_(block.exponents).exp_()
        at_i.mul_(self.by_sum[i].unsqueeze(1))
        if self.symmetric:
            at_i.addcmul_(at_j, self.by_sum[j])
            if self.left is not None:
                at_i.mul_(self.factors(block, 0))
        else:
            at_i.mul_(self.factors(block, 0))
            at_i.addcmul_(at_j.mul_(self.by_sum[j]), self.factors(block, 1))
        self.pairs.fill_graphs(at_i, i, j, 0.0)
        return at_i


class _Logarithms:
    """Sums with a running maximum taken off: for any temperature and any number of columns."""

    scratch = 3

    def __init__(self, pairs: Pairs, temperature: float) -> None:
        self.pairs = pairs
        self.factors = weight_of(Factors, pairs.weights)
        self.by_column = None if self.factors is None else self.factors.by_column()
        self.gaussian = _PairGaussian.of(pairs, temperature)
        self.totals = torch.zeros_like(pairs.rows[:, 0])  # [M]
        self.masses = torch.zeros_like(self.totals)
        self.peaks = torch.full_like(self.totals, -torch.inf)

    def add(self, block: _Block) -> None:
        for end, mine in block.ends():
            logits = self.logits(block, end)
            if self.gaussian is not None:
                self.masses[mine] += block.scratch[2].exp_().sum(1 - end)
            peaks = torch.maximum(self.peaks[mine], logits.amax(1 - end))
            finite = peaks.masked_fill(peaks == -torch.inf, 0.0)
            above_underflow(logits.sub_(finite if end else finite.unsqueeze(1)))
            added = logits.exp_().sum(1 - end).masked_fill_(peaks == -torch.inf, 0.0)
            self.totals[mine] = self.totals[mine] * (self.peaks[mine] - finite).exp_() + added
            self.peaks[mine] = peaks

    def logits(self, block: _Block, end: int) -> Tensor:
        """s / t + log W of the rows at one end, -inf for what is no negative."""
        mine, others = (block.j, block.i) if end else (block.i, block.j)
        logits, log_gaussian = block.scratch[end], block.scratch[2]
        if not block.negatives:
            logits.fill_(-torch.inf)
        elif self.factors is not None and self.by_column is not None:
            log_weights = self.factors.log_block(self.by_column, others, mine)  # [others, mine]
            torch.add(block.exponents, log_weights if end else log_weights.T, out=logits)
        else:
            logits.copy_(block.exponents)
        if self.gaussian is not None:
            logits += self.gaussian.log(block, end, log_gaussian)
        self.pairs.fill_graphs(logits, block.i, block.j, -torch.inf)
        return logits

    def sums(self) -> Sums:
        finite = self.peaks.masked_fill(self.peaks == -torch.inf, 0.0)
        log_masses = None if self.gaussian is None else self.masses.log()
        return Sums(self.totals.log() + finite, log_masses)

    def start_gradient(self, log_s: Tensor, slopes: Tensor) -> None:
        # A row without negatives has nothing to share out.
        self.slopes = slopes.masked_fill(log_s == -torch.inf, 0.0)
        self.log_s = log_s.masked_fill(log_s == -torch.inf, 0.0)

    def d_pairs(self, block: _Block) -> Tensor:
        i, j = block.i, block.j
        of_i = above_underflow(self.logits(block, 0).sub_(self.log_s[i].unsqueeze(1))).exp_()
        of_j = above_underflow(self.logits(block, 1).sub_(self.log_s[j])).exp_()
        return of_j.mul_(self.slopes[j]).addcmul_(of_i, self.slopes[i].unsqueeze(1))
