"""The engine for batches of any size: blocks of pairs, and nothing of size M x M in memory.

e^{s / tau} is symmetric, so a block of the pairs of rows I and rows J serves the sums of both. The
gradient is computed from the rows again, block by block, and no block is kept: two thirds of the
arithmetic of a dense loss. Which blocks there are: `blocks.py`.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from pgcl_losses.engine.blocks import Block, Layout, layout
from pgcl_losses.engine.lookup import BlockWeights, along
from pgcl_losses.engine.pairs import (
    ALL_PAIRS,
    LARGEST_EXPONENT,
    LOG2_E,
    Factors,
    Gaussian,
    Pairs,
    Share,
    Sums,
    check_kinds,
    weight_of,
)
from pgcl_losses._modes import can_be_read

# At lower temperatures than 1 / LARGEST_EXPONENT, down to this one, sums are first tried with so
# much taken off all exponents that the largest is at most this, unless a log W is below that.
_LARGEST_EXPONENT_TRIED = 100.0
_HIGHEST = 60.0
_SMALLEST_LOG_WEIGHT_TRIED = -12.0
# Shares of a sum below e^-60 count as that, which is nothing beside the others. Products choke on
# numbers too small for float32.
_SMALLEST_SHARE = -60.0


def log_sums(pairs: Pairs, temperature: float, share: Share = ALL_PAIRS) -> Sums:
    """See `Sums`."""
    check_kinds("streaming", pairs.weights, Factors, Gaussian)
    laid = layout(pairs, share, forward=True)
    if 1 / temperature <= LARGEST_EXPONENT:
        return _add_up(_Plain(pairs, temperature, laid), pairs, temperature, laid)
    if _may_be_tried(pairs, temperature):
        off = max(1 / temperature - _HIGHEST, 0.0)
        sums = _add_up(_Plain(pairs, temperature, laid, off), pairs, temperature, laid)
        # Of these, exponents that were raised to the lowest are a rounding error at most.
        dtype = pairs.rows.dtype
        smallest = math.log(len(pairs.rows) / torch.finfo(dtype).eps) + _lowest(dtype) + off
        none = sums.log_sums == -torch.inf
        if bool((none | ~(sums.log_sums < smallest)).all()):
            return sums
    return _add_up(_Logarithms(pairs, temperature, laid), pairs, temperature, laid)


def _may_be_tried(pairs: Pairs, temperature: float) -> bool:
    """Whether sums can be looked at, of which few if any will be too small."""
    if 1 / temperature > _LARGEST_EXPONENT_TRIED or not can_be_read(pairs.rows.detach()):
        return False
    factors = weight_of(Factors, pairs.weights)
    if factors is not None:
        log_left = factors.log_left
        small = (log_left > -torch.inf) & (log_left < _SMALLEST_LOG_WEIGHT_TRIED)
        if factors.right.is_floating_point() or bool(small.any()):
            return False
    return weight_of(Gaussian, pairs.weights) is None


def _lowest(dtype: torch.dtype) -> float:
    """The lowest exponent x of which e^x W can still be held, for all W that are tried."""
    return math.log(torch.finfo(dtype).tiny) - _SMALLEST_LOG_WEIGHT_TRIED


def gradient(
    pairs: Pairs, temperature: float, log_s: Tensor, slopes: Tensor, share: Share
) -> Tensor:
    """Gradient ``[M, D]`` of the sum of slopes_i log S_i, as far as this share's pairs go.

    ``log_s``: the log-sums of all shares together, without the Gaussian's scale.
    """
    laid = layout(pairs, share, forward=False)
    kind = _Plain if 1 / temperature <= LARGEST_EXPONENT else _Logarithms
    ends = kind(pairs, temperature, laid)
    ends.start_gradient(laid.sort(log_s), laid.sort(slopes / temperature))
    rows = laid.sort(pairs.rows.detach())
    d_rows = torch.zeros_like(rows)
    for block, exponents, scratch in _exponents(rows, temperature, laid, ends.scratch):
        i, j = block.i.place, block.j.place
        d_pairs = ends.d_pairs(block, exponents, scratch)  # [J, I] of the sum by s_ij, both ends
        d_rows[i].addmm_(d_pairs.T, rows[j])
        if i != j:
            d_rows[j].addmm_(d_pairs, rows[i])
    return laid.unsort(d_rows)


def _add_up(ends: "_Plain | _Logarithms", pairs: Pairs, temperature: float, laid: Layout) -> Sums:
    rows = laid.sort(pairs.rows.detach())
    for block, exponents, scratch in _exponents(rows, temperature, laid, ends.scratch):
        ends.add(block, exponents, scratch)
    sums = ends.sums()
    log_masses = None if sums.log_masses is None else laid.unsort(sums.log_masses)
    return Sums(laid.unsort(sums.log_sums), log_masses)


def _exponents(
    rows: Tensor, temperature: float, laid: Layout, scratch: int
) -> Iterator[tuple[Block, Tensor, list[Tensor]]]:
    """Each block with its exponents s / t, of 2, and so many matrices of scratch.

    Their memory is the next block's as well.
    """
    most = max([0, *(block.i.size() * block.j.size() for block in laid.blocks)])
    buffer = rows.new_empty(1 + scratch, most)
    for block in laid.blocks:
        shape = block.j.size(), block.i.size()
        exponents, *others = buffer[:, : shape[0] * shape[1]].view(-1, *shape).unbind()
        i, j = rows[block.i.place], rows[block.j.place]
        torch.addmm(exponents, j, i.T, beta=0, alpha=LOG2_E / temperature, out=exponents)
        yield block, exponents, others


class _PairGaussian:
    """The Gaussian of each pair, as an exponent of 2."""

    def __init__(self, gaussian: Gaussian, temperature: float, laid: Layout) -> None:
        scale = LOG2_E / temperature  # from cosines to exponents
        self.mean = laid.sort(gaussian.mean) * scale  # [M]
        # Squares of exponents would overflow at temperatures that are very low.
        self.sharpness = (0.5 * LOG2_E / laid.sort(gaussian.variance)).sqrt_() / scale  # [M]
        self.zero = self.mean.new_zeros(())

    def of(self, exponents: Tensor, mine: slice, end: int, out: Tensor) -> Tensor:
        deviations = torch.sub(exponents, along(self.mean[mine], end), out=out)
        deviations.mul_(along(self.sharpness[mine], end))
        return torch.addcmul(self.zero, deviations, deviations, value=-1, out=deviations)


class _Ends:
    """The sums of all rows, to which blocks are added, each at its two ends."""

    logarithms: bool

    def __init__(self, pairs: Pairs, temperature: float, laid: Layout) -> None:
        self.pairs = pairs
        factors = weight_of(Factors, pairs.weights)
        gaussian = weight_of(Gaussian, pairs.weights)
        self.weights = None
        if factors is not None:
            self.weights = BlockWeights(factors, laid, logarithms=self.logarithms)
        self.gaussian = None if gaussian is None else _PairGaussian(gaussian, temperature, laid)
        self.totals = torch.zeros_like(pairs.rows[:, 0])  # [M]
        self.masses = torch.zeros_like(self.totals)

    def log_masses(self) -> Tensor | None:
        return None if self.gaussian is None else self.masses.log()

    def fill_graphs(self, block: Block, matrix: Tensor, value: float) -> None:
        """Fill the pairs of one graph."""
        if block.one_graph is None:
            self.pairs.fill_graphs(matrix, block.j.place, block.i.place, value)
        else:
            matrix.view(-1).index_fill_(0, block.one_graph, value)


class _Plain(_Ends):
    """Sums as they are, or of e^{s / t - off}: for temperatures at which nothing overflows."""

    logarithms = False

    def __init__(
        self, pairs: Pairs, temperature: float, laid: Layout, off: float | None = None
    ) -> None:
        super().__init__(pairs, temperature, laid)
        self.off = off
        self.scratch = 2 if self.gaussian is None else 3

    def values(self, block: Block, exponents: Tensor, out: Tensor) -> Tensor:
        """e^{s / t}; 0 for pairs of one graph."""
        if self.off is not None:
            exponents.sub_(self.off * LOG2_E).clamp_min_(_lowest(exponents.dtype) * LOG2_E)
        values = torch.exp2(exponents, out=out)
        self.fill_graphs(block, values, 0.0)
        return values

    def add(self, block: Block, exponents: Tensor, scratch: list[Tensor]) -> None:
        values = exponents if self.gaussian is None else scratch[1]
        if block.negatives:
            self.values(block, exponents, values)
        for end in block.ends():
            mine, weighted = block.rows(end).place, values
            if self.gaussian is not None:
                weighted = self.gaussian.of(exponents, mine, end, scratch[2]).exp2_()
                self.masses[mine] += weighted.sum(end)
                if not block.negatives:
                    continue
                weighted.mul_(values)
            of_rows: Tensor | float = 1.0
            if self.weights is not None:
                weights = self.weights.of(block, end, scratch[0])
                if weights.shape == weighted.shape:
                    weighted = weights.mul_(weighted)
                else:
                    of_rows = weights
            self.totals[mine] += (weighted.sum(end, keepdim=True) * of_rows).flatten()

    def sums(self) -> Sums:
        log_sums = self.totals.log()
        return Sums(log_sums if self.off is None else log_sums + self.off, self.log_masses())

    def start_gradient(self, log_s: Tensor, slopes: Tensor) -> None:
        smallest = math.log(torch.finfo(log_s.dtype).tiny)
        by_sum = slopes * log_s.clamp_min(smallest).neg_().exp_()
        # A row without negatives has nothing to share out.
        self.by_sum = by_sum.masked_fill_(log_s == -torch.inf, 0.0)  # [M]

    def d_pairs(self, block: Block, exponents: Tensor, scratch: list[Tensor]) -> Tensor:
        """e^{s / t} (d_i W_ij + d_j W_ji)."""
        of_i, of_j = (along(self.by_sum[block.rows(end).place], end) for end in (0, 1))
        if self.gaussian is None:
            values = self.values(block, exponents, exponents)
            if self.weights is None:
                return values.mul_(torch.add(of_i, of_j, out=scratch[0]))
            of_i = self.weights.of(block, 0, scratch[0]).mul_(of_i)
            weights_j = self.weights.of(block, 1, scratch[1])
            return values.mul_(torch.addcmul(of_i, weights_j, of_j, out=scratch[0]))
        if self.weights is not None:
            of_i = self.weights.of(block, 0, scratch[0]).mul_(of_i)
            of_j = self.weights.of(block, 1, scratch[1]).mul_(of_j)
        i, j, part = block.i.place, block.j.place, scratch[2]
        at_j = self.gaussian.of(exponents, j, 1, part).add_(exponents).exp2_()
        values = torch.mul(at_j, of_j, out=scratch[1])
        at_i = self.gaussian.of(exponents, i, 0, part).add_(exponents).exp2_()
        values.addcmul_(at_i, of_i)
        self.fill_graphs(block, values, 0.0)
        return values


class _Logarithms(_Ends):
    """Sums with a running maximum taken off: for any temperature."""

    logarithms = True
    scratch = 3

    def __init__(self, pairs: Pairs, temperature: float, laid: Layout) -> None:
        super().__init__(pairs, temperature, laid)
        self.peaks = torch.full_like(self.totals, -torch.inf)

    def logits(self, block: Block, end: int, exponents: Tensor, scratch: list[Tensor]) -> Tensor:
        """s / t + log W of the rows at one end, -inf for what is no negative.

        The Gaussian's part alone stays in the last matrix of scratch.
        """
        logits = scratch[end]
        if self.weights is None:
            logits.copy_(exponents)
        else:
            torch.add(exponents, self.weights.of(block, end, logits), out=logits)
        if self.gaussian is not None:
            logits += self.gaussian.of(exponents, block.rows(end).place, end, scratch[2])
        if not block.negatives:
            logits.fill_(-torch.inf)
        self.fill_graphs(block, logits, -torch.inf)
        return logits

    def add(self, block: Block, exponents: Tensor, scratch: list[Tensor]) -> None:
        for end in block.ends():
            mine = block.rows(end).place
            logits = self.logits(block, end, exponents, scratch)
            if self.gaussian is not None:
                self.masses[mine] += scratch[2].exp2_().sum(end)
            peaks = torch.maximum(self.peaks[mine], logits.amax(end))
            finite = peaks.masked_fill(peaks == -torch.inf, 0.0)
            logits.sub_(along(finite, end)).clamp_min_(_lowest(logits.dtype) * LOG2_E)
            added = logits.exp2_().sum(end).masked_fill_(peaks == -torch.inf, 0.0)
            self.totals[mine] = self.totals[mine] * (self.peaks[mine] - finite).exp2_() + added
            self.peaks[mine] = peaks

    def sums(self) -> Sums:
        finite = self.peaks.masked_fill(self.peaks == -torch.inf, 0.0)
        return Sums(self.totals.log() + finite / LOG2_E, self.log_masses())

    def start_gradient(self, log_s: Tensor, slopes: Tensor) -> None:
        # A row without negatives has nothing to share out.
        self.slopes = slopes.masked_fill(log_s == -torch.inf, 0.0)
        self.log_s = log_s.masked_fill(log_s == -torch.inf, 0.0) * LOG2_E

    def d_pairs(self, block: Block, exponents: Tensor, scratch: list[Tensor]) -> Tensor:
        of_i, of_j = (
            self.logits(block, end, exponents, scratch)
            .sub_(along(self.log_s[block.rows(end).place], end))
            .clamp_(_SMALLEST_SHARE * LOG2_E, 0.0)  # log S is rounded, but no share is above 1
            .exp2_()
            for end in (0, 1)
        )
        of_j.mul_(self.slopes[block.j.place].unsqueeze(1))
        return of_j.addcmul_(of_i, self.slopes[block.i.place])
