"""What the pairs of a block weigh by their clusters, for every engine made of torch operations."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.engine.blocks import Run
from pgcl_losses.engine.contract import LOG2_E, Factors, Table


class BlockWeights:
    """W or log2 W for the sums along an axis of a block: ``[J, I]``, ``[1, I]`` or ``[J, 1]``."""

    def __init__(
        self,
        weights: Table | Factors,
        *,
        logarithms: bool,
        sort: Callable[[Tensor], Tensor] = lambda values: values,
        sorted_head: int = 0,
    ) -> None:
        """``sort``: from the order of the embeddings to that of the blocks."""
        self.logarithms, self.sorted_head = logarithms, sorted_head
        self.factors: tuple[Tensor, Tensor] | None = None
        self.heads: list[tuple[Tensor, Tensor, Tensor]] = []  # T, its transpose, clusters [M]
        if isinstance(weights, Factors):
            self.factors = sort(_normal(weights.left)), sort(weights.right)
            return
        log_heads = math.log(len(weights.log_weights))
        for logs, clusters in zip(weights.log_weights, weights.clusters.unbind(1), strict=True):
            table = (logs - log_heads) * LOG2_E if log_heads else logs * LOG2_E
            table = table if logarithms else _normal(table.exp2_())
            self.heads.append((table, table.T.contiguous(), sort(clusters)))

    def of(self, i: Run, j: Run, axis: int, out: Tensor | None = None) -> Tensor:
        """Of axis 0 the weights W_ij that the sums of I take, of axis 1 the W_ji of J."""
        if self.factors is not None:
            left, right = self.factors
            of_j, of_i = (left, right) if axis else (right, left)
            weights = torch.mm(of_j[j.span], of_i[i.span].T, out=out)
            return weights.log2_() if self.logarithms else weights
        add = torch.logaddexp2 if self.logarithms else torch.add
        weights = self._looked_up(0, i, j, axis, out)
        for head in range(1, len(self.heads)):
            of_head = self._looked_up(head, i, j, axis, None)
            is_matrix = out is not None and out.shape in (weights.shape, of_head.shape)
            weights = add(weights, of_head, out=out if is_matrix else None)
        return weights

    def _looked_up(self, head: int, i: Run, j: Run, axis: int, out: Tensor | None) -> Tensor:
        table, transposed, clusters = self.heads[head]
        of_i = of_j = range(len(table))
        if head == self.sorted_head:
            of_i, of_j = i.clusters or of_i, j.clusters or of_j
        mine, others = (j, of_i) if axis else (i, of_j)
        if len(others) == 1:
            return transposed[others.start].index_select(0, clusters[mine.span]).unsqueeze(axis)
        by_j = (table if axis else transposed)[of_j.start : of_j.stop]
        lines = by_j.index_select(1, clusters[i.span])  # [clusters of J, I]
        numbers = clusters[j.span] - of_j.start if of_j.start else clusters[j.span]
        return torch.index_select(lines, 0, numbers, out=out)  # copies of whole lines


def _normal(weights: Tensor) -> Tensor:
    """Without denormal numbers, which make matrix products slow."""
    return F.threshold(weights, torch.finfo(weights.dtype).tiny, 0.0)
