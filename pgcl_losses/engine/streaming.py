"""The engine for batches of any size: blocks of pairs, and nothing of size R x C in memory.

The gradient is computed from the rows again, block by block, and no block is kept. Where queries
and columns are the same rows, e^{s/t} is symmetric and a block serves the queries of both its
sides: two thirds of the arithmetic of a dense loss.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from pgcl_losses.engine.dense import dense, logits
from pgcl_losses.engine.pairs import Bells, Pairs, Table

# Up to here e^{s/t} of millions of pairs adds up in float32 without a maximum taken off first.
_LARGEST_EXPONENT = 40.0

# Tracing an autograd function, torch.compile of torch 2.4 takes tensors outside of it for others of
# the same name inside: wrong losses, and no error. 2.11 is the first version where we saw it right.
TRACEABLE = tuple(int(number) for number in torch.__version__.split(".")[:2]) >= (2, 11)

_BLOCK = 640  # rows of a symmetric block: a block of pairs stays in the cache
# A block's weights are a product of that rank; looking them up costs less above.
_MOST_CLUSTERS = 256
_ELEMENTS = 1 << 21  # of a block of queries against all columns


def streaming(pairs: Pairs, temperature: float) -> Tensor:
    """Each query's loss, with the gradient of the dense engine; not differentiable twice."""
    if torch.compiler.is_compiling() and not TRACEABLE:
        outside = torch.compiler.disable(_streaming)  # type: ignore[no-untyped-call]  # torch's gap
        return outside(pairs, temperature)  # type: ignore[no-any-return]  # as above
    return _streaming(pairs, temperature)


def _streaming(pairs: Pairs, temperature: float) -> Tensor:
    losses: Tensor
    if _is_symmetric(pairs) and 1 / temperature <= _LARGEST_EXPONENT:
        losses = _Symmetric.apply(  # type: ignore[no-untyped-call]  # torch's gap
            pairs.rows, pairs, temperature
        )
    else:
        losses = _ByQueries.apply(  # type: ignore[no-untyped-call]  # torch's gap
            pairs.rows, pairs.columns, pairs, temperature
        )
    return losses


def _is_symmetric(pairs: Pairs) -> bool:
    """Whether blocks I <= J are enough, and the weights cheap for both sides of a block."""
    if isinstance(pairs.weights, Table) and pairs.weights.log_weights.shape[1] > _MOST_CLUSTERS:
        return False
    if isinstance(pairs.weights, Bells) and pairs.weights.population is not pairs.rows:
        return False
    return pairs.rows is pairs.columns


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
        for block in _blocks(rows, pairs, temperature):
            weighting.add(block)
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
        for block in _blocks(rows, ctx.pairs, ctx.temperature):
            i, j = block.i, block.j
            d_pairs = block.values.mul_(ctx.weighting.shares(block, *sides))
            d_rows[i].addmm_(d_pairs, rows[j])
            if i != j:
                d_rows[j].addmm_(d_pairs.T, rows[i])
        positives = ctx.pairs.positives
        d_rows.addcmul_(d_scores.unsqueeze(1), rows[positives], value=-1)
        d_rows.index_add_(0, positives, d_scores.unsqueeze(1) * rows, alpha=-1)
        return d_rows, None, None


class _Block(NamedTuple):
    """The pairs of rows I with rows J; its matrices ``[B, B]`` are reused by the next block."""

    i: slice
    j: slice
    exponents: Tensor  # s / t, kept for weights that look at it
    values: Tensor  # e^{s / t}, or 0 for what is no negative
    spare: Sequence[Tensor]  # scratch


def _blocks(rows: Tensor, pairs: Pairs, temperature: float) -> Iterator[_Block]:
    """All blocks of pairs I <= J."""
    rows = rows.detach()  # torch.compile of torch 2.4 would record the products
    scaled = rows / temperature
    blocks = _slices(len(rows), _BLOCK)
    keep = int(isinstance(pairs.weights, Bells))
    buffer = rows.new_empty(2 + 2 * keep, min(len(rows), _BLOCK) ** 2)
    clusters = None
    if pairs.left_out is not None:
        # Numbers that floats can hold: what a cluster comes to in sorted order.
        numbers = pairs.left_out.rows
        clusters = torch.searchsorted(numbers.sort().values, numbers).to(rows.dtype)
    for number, i in enumerate(blocks):
        for j in blocks[number:]:
            shape = i.stop - i.start, j.stop - j.start
            matrices = buffer[:, : shape[0] * shape[1]].view(-1, *shape).unbind()
            exponents = torch.mm(scaled[i], rows[j].T, out=matrices[0])
            values = torch.exp(exponents, out=matrices[keep])
            spare = matrices[keep + 1 :]
            if i == j:
                values.diagonal().zero_()
            _clear(values, pairs.positives[i] - j.start)
            if clusters is not None:
                # A comparison into floats is vectorised, one into bools is not.
                differ = torch.ne(clusters[i].unsqueeze(1), clusters[j], out=spare[0])
                values.mul_(differ)
            yield _Block(i, j, exponents, values, spare)


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
            self.weights = table.T.index_select(1, pairs.weights.rows)  # [K, M]
            members = F.one_hot(pairs.weights.columns, table.shape[1]).to(rows.dtype)
            self.members = members.T.contiguous()  # [K, M]
        else:
            self.weights = self.members = rows.new_ones(1, len(rows))
        self.sums = torch.zeros_like(self.weights)  # [K, M]

    def add(self, block: _Block) -> None:
        i, j, values = block.i, block.j, block.values
        self.sums[:, i].addmm_(self.members[:, j], values.T)
        if i != j:
            self.sums[:, j].addmm_(self.members[:, i], values)

    def totals(self) -> Tensor:
        return (self.sums * self.weights).sum(0)

    def sides(self, d_sums: Tensor) -> tuple[Tensor, Tensor]:
        """Two ``[2K, M]`` whose products are the shares of a block."""
        shares = self.weights * d_sums
        return torch.cat([shares, self.members]), torch.cat([self.members, shares])

    def shares(self, block: _Block, left: Tensor, right: Tensor) -> Tensor:
        """d_i W_ij + d_j W_ji."""
        return torch.mm(left[:, block.i].T, right[:, block.j], out=block.spare[0])


class _BellSums:
    """Weights by the cosine of the pair itself."""

    def __init__(self, pairs: Pairs, temperature: float) -> None:
        assert isinstance(pairs.weights, Bells)
        # In units of the exponents s / t.
        self.mean = pairs.weights.mean / temperature  # [M]
        self.sharpness = -(temperature**2) / (2 * pairs.weights.variance)  # [M]
        self.sums, self.weights = torch.zeros_like(self.mean), torch.zeros_like(self.mean)

    def bells(self, queries: slice, axis: int, exponents: Tensor, out: Tensor) -> Tensor:
        """w of the queries, which lie along one axis of the block."""
        mean, sharpness = self.mean[queries], self.sharpness[queries]
        if axis == 0:
            mean, sharpness = mean.unsqueeze(1), sharpness.unsqueeze(1)
        deviation = torch.sub(exponents, mean, out=out)
        return deviation.square_().mul_(sharpness).exp_()

    def add(self, block: _Block) -> None:
        sides = [(0, block.i)] if block.i == block.j else [(0, block.i), (1, block.j)]
        for axis, queries in sides:
            bells = self.bells(queries, axis, block.exponents, block.spare[0])
            self.weights[queries] += bells.sum(1 - axis)
            self.sums[queries] += bells.mul_(block.values).sum(1 - axis)

    def totals(self) -> Tensor:
        self.scale = len(self.weights) / self.weights  # [M] M_i
        return self.sums * self.scale

    def sides(self, d_sums: Tensor) -> tuple[Tensor]:
        """What each query's bells are scaled by in the gradient."""
        return (d_sums * self.scale,)

    def shares(self, block: _Block, scales: Tensor) -> Tensor:
        """d_i W_ij + d_j W_ji."""
        of_i = self.bells(block.i, 0, block.exponents, block.spare[0])
        of_j = self.bells(block.j, 1, block.exponents, block.spare[1])
        return of_j.mul_(scales[block.j]).addcmul_(of_i, scales[block.i].unsqueeze(1))
