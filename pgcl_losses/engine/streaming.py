"""The engine for batches of any size: blocks of pairs, and nothing of size R x C in memory.

The gradient is computed from the rows again, block by block, and no block is kept. Where queries
and columns are the same rows, e^{s/t} is symmetric and a block serves the queries of both its
sides: two thirds of the arithmetic of a dense loss.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pgcl_losses.engine.dense import dense, logits
from pgcl_losses.engine.pairs import Bells, Pairs, Table

# Up to here e^{s/t} of millions of pairs adds up in float32 without a maximum taken off first.
_LARGEST_EXPONENT = 40.0

_BLOCK = 512  # rows of a symmetric block: a block of pairs stays in the cache
_ELEMENTS = 1 << 21  # of a block of queries against all columns


def streaming(pairs: Pairs, temperature: float) -> Tensor:
    """Each query's loss, with the gradient of the dense engine; not differentiable twice."""
    weights = pairs.weights
    symmetric = pairs.rows is pairs.columns and (
        not isinstance(weights, Bells) or weights.population is pairs.rows
    )
    losses: Tensor
    if symmetric and 1 / temperature <= _LARGEST_EXPONENT:
        losses = _Symmetric.apply(  # type: ignore[no-untyped-call]  # torch's gap
            pairs.rows, pairs, temperature
        )
    else:
        losses = _ByQueries.apply(  # type: ignore[no-untyped-call]  # torch's gap
            pairs.rows, pairs.columns, pairs, temperature
        )
    return losses


def _slices(length: int, block: int) -> list[slice]:
    return [slice(start, min(start + block, length)) for start in range(0, length, block)]


class _ByQueries(torch.autograd.Function):
    """A block of queries against all columns at a time, as the dense engine would."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, columns: Tensor, pairs: Pairs, temperature: float
    ) -> Tensor:
        ctx.save_for_backward(rows, columns)
        ctx.pairs, ctx.temperature = pairs, temperature
        blocks = _slices(len(rows), max(1, _ELEMENTS // len(columns)))
        return torch.cat([dense(pairs.of_queries(block), temperature) for block in blocks])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor, Tensor, None, None]:
        rows, columns = ctx.saved_tensors
        d_rows, d_columns = torch.empty_like(rows), torch.zeros_like(columns)
        scales = d_losses / ctx.temperature
        for block in _slices(len(rows), max(1, _ELEMENTS // len(columns))):
            queries = ctx.pairs.of_queries(block)
            d_scores = logits(queries, ctx.temperature).softmax(1)  # [B, C]
            positive = queries.positives.unsqueeze(1)
            d_scores.scatter_add_(1, positive, -torch.ones_like(d_scores[:, :1]))
            d_scores *= scales[block].unsqueeze(1)
            torch.mm(d_scores, columns, out=d_rows[block])
            d_columns.addmm_(d_scores.T, rows[block])
        return d_rows, d_columns, None, None


class _Symmetric(torch.autograd.Function):
    """Blocks of pairs I <= J of one set of rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, pairs: Pairs, temperature: float) -> Tensor:
        sums_by = _BellSums if isinstance(pairs.weights, Bells) else _TableSums
        weighting = sums_by(pairs, temperature)
        for i, j, exponents, values in _blocks(rows, pairs, temperature):
            weighting.add(i, j, exponents, values)
        sums = weighting.totals()  # [M] sum_j W_ij e^{s_ij / t}
        positive = (rows * rows[pairs.positives]).sum(1) / temperature
        ctx.save_for_backward(rows, sums, positive)
        ctx.pairs, ctx.temperature, ctx.weighting = pairs, temperature, weighting
        return F.softplus(sums.log() - positive)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_losses: Tensor) -> tuple[Tensor, None, None]:
        rows, sums, positive = ctx.saved_tensors
        d_scores = d_losses * torch.sigmoid(sums.log() - positive) / ctx.temperature  # [M]
        # A query without negatives has nothing to share out.
        sides = ctx.weighting.sides(d_scores / sums.clamp_min(torch.finfo(sums.dtype).tiny))
        d_rows = torch.zeros_like(rows)
        for i, j, exponents, values in _blocks(rows, ctx.pairs, ctx.temperature):
            d_pairs = values.mul_(ctx.weighting.shares(i, j, exponents, *sides))
            d_rows[i].addmm_(d_pairs, rows[j])
            if i != j:
                d_rows[j].addmm_(d_pairs.T, rows[i])
        positives = ctx.pairs.positives
        d_rows.addcmul_(d_scores.unsqueeze(1), rows[positives], value=-1)
        d_rows.index_add_(0, positives, d_scores.unsqueeze(1) * rows, alpha=-1)
        return d_rows, None, None


def _blocks(
    rows: Tensor, pairs: Pairs, temperature: float
) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """(I, J, s/t, e^{s/t} or 0 for what is no negative) for all blocks of pairs I <= J."""
    scaled = rows / temperature
    blocks = _slices(len(rows), _BLOCK)
    for number, i in enumerate(blocks):
        for j in blocks[number:]:
            exponents = torch.mm(scaled[i], rows[j].T)  # [B, B]
            keep = isinstance(pairs.weights, Bells)
            values = exponents.exp() if keep else exponents.exp_()
            if i == j:
                values.fill_diagonal_(0.0)
            _clear(values, pairs.positives[i] - j.start)
            if pairs.left_out is not None:
                clusters = pairs.left_out
                values.masked_fill_(clusters.rows[i].unsqueeze(1) == clusters.columns[j], 0.0)
            yield i, j, exponents, values


def _clear(values: Tensor, columns: Tensor) -> None:
    """Set one entry of each row to 0, where its column is inside of the block."""
    inside = columns.clamp(0, values.shape[1] - 1).unsqueeze(1)
    outside = inside != columns.unsqueeze(1)
    values.scatter_(1, inside, values.gather(1, inside) * outside)


class _TableSums:
    """Weights by cluster: sums per cluster first, weights afterwards, as products of small rank."""

    def __init__(self, pairs: Pairs, temperature: float) -> None:
        rows = pairs.rows
        if isinstance(pairs.weights, Table):
            table = pairs.weights.log_weights.exp()  # [T, K]
            self.weights = table.index_select(0, pairs.weights.rows)  # [M, K]
            self.members = F.one_hot(pairs.weights.columns, table.shape[1]).to(rows.dtype)  # [M, K]
        else:
            self.weights = self.members = rows.new_ones(len(rows), 1)
        self.sums = torch.zeros_like(self.weights)  # [M, K]

    def add(self, i: slice, j: slice, exponents: Tensor, values: Tensor) -> None:
        self.sums[i].addmm_(values, self.members[j])
        if i != j:
            self.sums[j].addmm_(values.T, self.members[i])

    def totals(self) -> Tensor:
        return (self.sums * self.weights).sum(1)

    def sides(self, d_sums: Tensor) -> tuple[Tensor, Tensor]:
        """Two ``[M, 2K]`` whose products are the shares of a block."""
        shares = self.weights * d_sums.unsqueeze(1)
        return torch.cat([shares, self.members], dim=1), torch.cat([self.members, shares], dim=1)

    def shares(self, i: slice, j: slice, exponents: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """d_i W_ij + d_j W_ji."""
        return left[i] @ right[j].T


class _BellSums:
    """Weights by the cosine of the pair itself."""

    def __init__(self, pairs: Pairs, temperature: float) -> None:
        assert isinstance(pairs.weights, Bells)
        # In units of the exponents s / t.
        self.mean = pairs.weights.mean / temperature  # [M]
        self.sharpness = -(temperature**2) / (2 * pairs.weights.variance)  # [M]
        self.sums, self.weights = torch.zeros_like(self.mean), torch.zeros_like(self.mean)

    def bells(self, i: slice, exponents: Tensor) -> Tensor:
        """w of the queries I, which are the rows of the block: a new ``[B, B]``."""
        deviation = exponents - self.mean[i].unsqueeze(1)
        return deviation.square_().mul_(self.sharpness[i].unsqueeze(1)).exp_()

    def add(self, i: slice, j: slice, exponents: Tensor, values: Tensor) -> None:
        sides = [(i, exponents, values)]
        if i != j:
            sides.append((j, exponents.T, values.T))
        for queries, own_exponents, own_values in sides:
            bells = self.bells(queries, own_exponents)
            self.weights[queries] += bells.sum(1)
            self.sums[queries] += bells.mul_(own_values).sum(1)

    def totals(self) -> Tensor:
        self.scale = len(self.weights) / self.weights  # [M] M_i
        return self.sums * self.scale

    def sides(self, d_sums: Tensor) -> tuple[Tensor, Tensor]:
        """What each query's bells are scaled by in the gradient, ``[M, 1]`` for either side."""
        scales = (d_sums * self.scale).unsqueeze(1)
        return scales, scales

    def shares(self, i: slice, j: slice, exponents: Tensor, left: Tensor, right: Tensor) -> Tensor:
        """d_i W_ij + d_j W_ji."""
        of_j = self.bells(j, exponents.T).mul_(right[j])
        return self.bells(i, exponents).mul_(left[i]).add_(of_j.T)
