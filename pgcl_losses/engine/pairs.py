"""Which pairs of embeddings are negatives, which are positives, and how much a negative counts."""

import itertools
import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# The item of an embedding in the memory that was stored without one. A caller's items differ.
NO_ITEM = torch.iinfo(torch.int64).min
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


class Pairs(NamedTuple):
    """The embeddings of a batch and of a memory, and what decides which pairs count.

    Embeddings lie in sets, one after the other: views, or sets of any lengths. All of them are
    queries, or those of the first set. Those of the memory are negatives of every query, and have
    no gradient. Tensors of ``[M + B]`` hold the memory behind the batch. Weights multiply, and are
    constants for the gradient. Positives by index count by their weights alone, whatever their
    items; they are no negatives.
    """

    embeddings: Tensor  # [M, D] of unit length
    lengths: tuple[int, ...]  # of each set
    negatives: str = "all"  # "cross": of other sets and the memory; "memory": of the memory
    items: Tensor | None = None  # [M + B] int64; None: an embedding's position in its set
    memory: Tensor | None = None  # [B, D] of unit length
    filled: Tensor | None = None  # [M + B] bool, False for empty slots of the memory; None: all
    weights: Table | Factors | None = None
    pair_weight: Gaussian | None = None
    hardness: float = 0.0  # beta: weights e^(beta s / tau), of a mean of 1 over the negatives
    first_queries: bool = False  # whether only the first set has queries
    positives: Tensor | None = None  # [2, P] queries and keys
    positive_weights: Tensor | None = None  # [P]

    def sets(self) -> list[slice]:
        """The embeddings of each set."""
        ends = list(itertools.accumulate(self.lengths))
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def num_queries(self) -> int:
        return self.lengths[0] if self.first_queries else self.embeddings.shape[0]

    def size_of_memory(self) -> int:
        return 0 if self.memory is None else self.memory.shape[0]

    def num_samples(self) -> Tensor:
        """How many embeddings there are, without empty slots: ``[]``."""
        if self.filled is not None:
            return self.filled.sum().to(self.embeddings)
        # A tensor: a number would recompile graphs for each batch size.
        return self.embeddings.new_full((), self.embeddings.shape[0] + self.size_of_memory())

    def keys(self) -> Tensor:
        """All embeddings, ``[M + B, D]``."""
        return self.embeddings if self.memory is None else torch.cat([self.embeddings, self.memory])

    def set_numbers(self) -> Tensor:
        """The number of each embedding's set, ``[M]``."""
        numbers = torch.arange(len(self.lengths), device=self.embeddings.device)
        return torch.cat([a.expand(n) for a, n in zip(numbers, self.lengths, strict=True)])

    def are_one_set(self) -> bool:
        """Whether sets make no difference: embeddings of all sets are compared, as queries."""
        return self.negatives == "all" and not self.first_queries

    def masks(self) -> tuple[Tensor, Tensor, Tensor]:
        """Which pairs are negatives, which positives, and the weights of these: ``[M + B, Q]``."""
        count, num_queries = self.embeddings.shape[0], self.num_queries()
        j = torch.arange(count + self.size_of_memory(), device=self.embeddings.device)
        sets, items = self.set_numbers(), self.items
        of_memory = torch.full_like(j[count:], NO_ITEM)
        if items is None:
            positions = [torch.arange(n, device=j.device) for n in self.lengths]
            items = torch.cat([*positions, of_memory])
        same_item = items.unsqueeze(1) == items[:num_queries]
        is_memory = (j >= count).unsqueeze(1)
        if self.negatives == "all":
            compared = j.unsqueeze(1) != j[:num_queries]
        else:
            compared = torch.cat([sets, of_memory]).unsqueeze(1) != sets[:num_queries]
        negatives = compared & ~same_item
        if self.negatives == "memory":
            negatives = negatives & is_memory
        if self.filled is not None:
            negatives = negatives & self.filled.unsqueeze(1)
        positives = compared & same_item & ~is_memory
        if self.positives is None or self.positive_weights is None:
            return negatives, positives, positives.to(self.embeddings)
        pairs, none = self.positives.flip(0).unbind(), negatives.new_zeros(())
        weights = positives.index_put(pairs, none).to(self.embeddings)
        weights = weights.index_put(pairs, self.positive_weights, accumulate=True)
        return negatives.index_put(pairs, none), positives.index_put(pairs, ~none), weights

    def sorted_by_item(self) -> tuple["Pairs", Tensor | None]:
        """The same pairs with the items of each set in order, and the order ``[M]``.

        Then those of one item follow each other. If sets make no difference, all are one set.
        """
        if self.items is None:
            return self, None
        count = len(self.embeddings)
        lengths = (count,) if self.are_one_set() else self.lengths
        of_sets = self.items[:count].split_with_sizes(lengths)
        starts = itertools.accumulate(lengths, initial=0)
        parts = [of_set.argsort() + start for of_set, start in zip(of_sets, starts, strict=False)]
        order = torch.cat(parts)
        of_memory = torch.arange(count, len(self.items), device=order.device)
        with_memory = torch.cat([order, of_memory])
        ordered = self._replace(
            embeddings=self.embeddings[order],
            lengths=lengths,
            items=self.items[with_memory],
            weights=_reordered(self.weights, with_memory),
            pair_weight=_reordered(self.pair_weight, with_memory),
        )
        if self.positives is not None:
            inverse = torch.empty_like(order).scatter_(
                0, order, torch.arange(count, device=order.device)
            )
            ordered = ordered._replace(positives=inverse[self.positives])
        return ordered, order


def _reordered(weights: Any, order: Tensor) -> Any:
    if weights is None:
        return None
    if isinstance(weights, Table):
        return weights._replace(clusters=weights.clusters[order])
    return type(weights)(*[of_each[order] for of_each in weights])


def _normal(weights: Any) -> Any:
    """Without denormal numbers, which make matrix products slow."""
    return F.threshold(weights, torch.finfo(weights.dtype).tiny, 0.0)
