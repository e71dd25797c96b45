"""How much a pair of embeddings counts: three kinds of weights, each of which can fill a block."""

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# e^x is computed as 2^(x log2 e), which is faster on a CPU.
LOG2_E = math.log2(math.e)


class Table(NamedTuple):
    """Weights by the clusters of both embeddings: W_ij is the mean over heads of T_h[c_ih, c_jh].

    A -inf leaves the pair out.
    """

    log_weights: tuple[Tensor, ...]  # log T_h, [K_h, K_h] for each of H heads
    clusters: Tensor  # [M + B, H] int64

    def prepared(self, logs: bool) -> list[tuple[Tensor, Tensor]]:
        """log2 of T_h / H, or T_h / H itself: transposed for axis 0, and as it is for axis 1."""
        log_heads = math.log(len(self.log_weights))
        tables = [(log_w - log_heads) * LOG2_E for log_w in self.log_weights]
        tables = tables if logs else [_normal(table.exp2_()) for table in tables]
        return [(table.T.contiguous(), table) for table in tables]

    def columns(self, prepared: list[tuple[Tensor, Tensor]], i: slice, axis: int) -> list[Tensor]:
        """W_ij of embeddings I with every cluster, ``[K, I]`` for each head; W_ji for axis 1.

        They are gathered once for all blocks of I, and whole rows of them for each block, not pair
        by pair.
        """
        of_heads = zip(prepared, self.clusters[i].unbind(1), strict=True)
        return [tables[axis].index_select(1, clusters) for tables, clusters in of_heads]

    def block(self, columns: list[Tensor], j: slice, logs: bool, out: Any = None) -> Tensor:
        """The weights of a block, ``[J, I]``."""
        clusters, add = self.clusters[j].unbind(1), torch.logaddexp2 if logs else torch.add
        weights = torch.index_select(columns[0], 0, clusters[0], out=out)
        for of_head, numbers in zip(columns[1:], clusters[1:], strict=True):
            weights = add(weights, of_head.index_select(0, numbers), out=out)
        return weights


class Factors(NamedTuple):
    """Weights of few columns: W_ij = left_i . right_j, none negative. A 0 leaves the pair out."""

    left: Tensor  # [M + B, R]
    right: Tensor  # [M + B, R]

    def prepared(self, logs: bool) -> list[tuple[Tensor, Tensor]]:
        """Both factors; the left one is that of the query."""
        return [(_normal(self.left), self.right)]

    def columns(self, prepared: list[tuple[Tensor, Tensor]], i: slice, axis: int) -> list[Tensor]:
        """The factor of I, ``[R, I]``, and that of all others."""
        return [prepared[0][axis][i].T, prepared[0][1 - axis]]

    def block(self, columns: list[Tensor], j: slice, logs: bool, out: Any = None) -> Tensor:
        """The weights of a block, ``[J, I]``."""
        weights = torch.mm(columns[1][j], columns[0], out=out)
        return weights.log2_() if logs else weights


class Gaussian(NamedTuple):
    """The paper's weight by the pair's own cosine: exp(-(s_ij - mean_i)^2 / (2 variance_i)).

    The engine scales it: the mean of W_ij over all embeddings j, i itself among them, is 1. Another
    formula is another class with these two methods.
    """

    mean: Tensor  # [M + B]
    variance: Tensor  # [M + B] infinite where every weight is 1

    def numbers(self, scale: float | Tensor) -> tuple[Tensor, ...]:
        """The formula's numbers for each embedding, ``[M + B]`` each, if it gets scale * cosine."""
        # Not 1 / scale^2: squares of scaled cosines would overflow at low temperatures.
        return self.mean * scale, (0.5 * LOG2_E / self.variance).sqrt_() / scale

    def formula(self, scaled: Tensor, *numbers: Tensor, out: Tensor | None = None) -> Tensor:
        """log2 W of scaled cosines; the numbers are broadcast along them."""
        mean, sharpness = numbers
        deviations = torch.mul(torch.sub(scaled, mean, out=out), sharpness, out=out)
        return torch.mul(deviations, deviations, out=out).neg_()


def reordered(weights: Any, order: Tensor) -> Any:
    if weights is None:
        return None
    if isinstance(weights, Table):
        return weights._replace(clusters=weights.clusters[order])
    return type(weights)(*[of_each[order] for of_each in weights])


def _normal(weights: Any) -> Any:
    """Without denormal numbers, which make matrix products slow."""
    return F.threshold(weights, torch.finfo(weights.dtype).tiny, 0.0)
