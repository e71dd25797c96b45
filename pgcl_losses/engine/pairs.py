"""What every engine computes: the contract between the mathematics and the engines.

An engine computes log S_i, S_i = sum of W_ij e^{s_ij / tau} over the negatives j of query i, for
every query, with gradient to the queries. Engines do not handle positives.
"""

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

    def scaled(self, logs: bool) -> list[tuple[Tensor, Tensor]]:
        """log2 of T_h / H, or T_h / H itself: transposed for axis 0, and as it is for axis 1."""
        log_heads = math.log(len(self.log_weights))
        tables = [(log_w - log_heads) * LOG2_E for log_w in self.log_weights]
        tables = tables if logs else [_normal(table.exp2_()) for table in tables]
        return [(table.T.contiguous(), table) for table in tables]

    def lines(self, scaled: list[tuple[Tensor, Tensor]], i: slice, axis: int) -> list[Tensor]:
        """W_ij of embeddings I with every cluster, ``[K, I]`` for each head; W_ji for axis 1.

        They are gathered once for all blocks of I, and whole rows of them for each block, not pair
        by pair.
        """
        of_heads = zip(scaled, self.clusters[i].unbind(1), strict=True)
        return [tables[axis].index_select(1, clusters) for tables, clusters in of_heads]

    def fill(self, lines: list[Tensor], j: slice, logs: bool, out: Tensor | None = None) -> Tensor:
        """The weights of a block, ``[J, I]``."""
        clusters, add = self.clusters[j].unbind(1), torch.logaddexp2 if logs else torch.add
        weights = torch.index_select(lines[0], 0, clusters[0], out=out)
        for of_head, numbers in zip(lines[1:], clusters[1:], strict=True):
            weights = add(weights, of_head.index_select(0, numbers), out=out)
        return weights


class Factors(NamedTuple):
    """Weights of few columns: W_ij = left_i . right_j, none negative. A 0 leaves the pair out."""

    left: Tensor  # [M + B, R]
    right: Tensor  # [M + B, R]

    def scaled(self, logs: bool) -> list[tuple[Tensor, Tensor]]:
        """Both factors; the left one is that of the query."""
        return [(_normal(self.left), self.right)]

    def lines(self, scaled: list[tuple[Tensor, Tensor]], i: slice, axis: int) -> list[Tensor]:
        """The factor of I, ``[R, I]``, and that of all others."""
        return [scaled[0][axis][i].T, scaled[0][1 - axis]]

    def fill(self, lines: list[Tensor], j: slice, logs: bool, out: Tensor | None = None) -> Tensor:
        """The weights of a block, ``[J, I]``."""
        weights = torch.mm(lines[1][j], lines[0], out=out)
        return weights.log2_() if logs else weights


class Gaussian(NamedTuple):
    """The paper's weight by the pair's own cosine: exp(-(s_ij - mean_i)^2 / (2 variance_i)).

    Engines scale it: the mean of W_ij over all embeddings j, i itself among them, is 1. Another
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
    """Which embeddings are negatives of each other, and how much each pair counts.

    Embeddings lie in sets, one after the other: views, or sets of any lengths. All of them are
    queries, or those of the first set. Past embeddings, those of a memory, are negatives of every
    query, and have no gradient. Tensors of ``[M + B]`` hold the past behind the batch. Weights
    multiply, and are constants for the gradient.
    """

    embeddings: Tensor  # [M, D] of unit length
    lengths: tuple[int, ...]  # of each set
    negatives: str = "all"  # "cross": of other sets and the past; "memory": the past
    items: Tensor | None = None  # [M + B] int64; None: an embedding's position in its set
    past: Tensor | None = None  # [B, D] of unit length
    present: Tensor | None = None  # [M + B] bool, False for empty slots of the memory; None: all
    weights: Table | Factors | None = None
    pair_weight: Gaussian | None = None
    first_queries: bool = False  # whether only the first set has queries
    listed: tuple[Tensor, Tensor] | None = None  # [P] queries in order, [P] keys: no negatives

    def sets(self) -> list[slice]:
        """The embeddings of each set."""
        ends = list(itertools.accumulate(self.lengths))
        return [slice(end - length, end) for end, length in zip(ends, self.lengths, strict=True)]

    def num_queries(self) -> int:
        return self.lengths[0] if self.first_queries else len(self.embeddings)

    def num_past(self) -> int:
        return 0 if self.past is None else self.past.shape[0]

    def num_samples(self) -> Tensor:
        """How many embeddings are present, ``[]``."""
        if self.present is not None:
            return self.present.sum().to(self.embeddings)
        # A tensor: a number would recompile graphs for each batch size.
        return self.embeddings.new_full((), self.embeddings.shape[0] + self.num_past())

    def keys(self) -> Tensor:
        """All embeddings, ``[M + B, D]``."""
        return self.embeddings if self.past is None else torch.cat([self.embeddings, self.past])

    def set_numbers(self) -> Tensor:
        """The number of each embedding's set, ``[M]``."""
        numbers = torch.arange(len(self.lengths), device=self.embeddings.device)
        return torch.cat([a.expand(n) for a, n in zip(numbers, self.lengths, strict=True)])

    def left_out(self) -> "LeftOut":
        """Which pairs are no negatives, for engines that mask them one by one."""
        sets, items = self.set_numbers(), self.items
        if self.negatives == "memory":  # as in one set, where none are negatives
            sets = torch.zeros_like(sets)
        past = sets.new_full((self.num_past(),), NO_ITEM)
        if items is None:
            positions = [torch.arange(length, device=sets.device) for length in self.lengths]
            items = torch.cat([*positions, past])
        sets = torch.cat([sets, past])
        log_present = self.embeddings.new_zeros(len(sets))
        if self.present is not None:
            log_present = log_present.masked_fill(~self.present, -math.inf)
        return LeftOut(items, None if self.negatives == "all" else sets, log_present)

    def check_weights(self, engine: str, *kinds: type) -> None:
        """Raise an error for weights of a kind that the engine does not compute."""
        if self.weights is not None and not isinstance(self.weights, kinds):
            names = " and ".join([kind.__name__ for kind in kinds])
            got = type(self.weights).__name__
            raise TypeError(f"engine={engine!r} computes weights of kind {names}, but got {got}")


class LeftOut(NamedTuple):
    """Pairs of one item, of one set, or with an empty slot are no negatives."""

    items: Tensor  # [M + B]
    sets: Tensor | None  # [M + B] None where embeddings of one set are negatives
    log_present: Tensor  # [M + B] -inf for empty slots, else 0

    def mask(self, i: Any, j: Any) -> Tensor:
        """Whether pairs are no negatives, for indices of any shapes."""
        same = self.items[i] == self.items[j]
        return same if self.sets is None else same | (self.sets[i] == self.sets[j])


class Sums(NamedTuple):
    """The sums of one process's portion of the pairs; over all portions e^log_sums add up to S.

    With a pair weight they add up to S_i / Z_i, Z_i = num_samples / e^log_totals_i.
    """

    log_sums: Tensor  # [Q] of the queries, -inf where one has no negatives
    log_totals: Tensor | None  # [Q] of the pair weight over all embeddings
    kept: tuple[Tensor | None, ...]  # what the gradient can use again


def _normal(weights: Any) -> Any:
    """Without denormal numbers, which make matrix products slow."""
    return F.threshold(weights, torch.finfo(weights.dtype).tiny, 0.0)
