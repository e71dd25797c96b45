"""What every engine computes: the contract between the mathematics and the engines.

An engine computes S_i = sum of W_ij e^{s_ij / tau} for every embedding i, over the embeddings j of
other items in the sets that i's set is compared with, with gradient to the embeddings. The
engine does not see the positives.
"""

import itertools
import math
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read, is_eager

# Up to here e^{s / tau} of millions of pairs adds up in float32 without subtracting a maximum.
LARGEST_EXPONENT = 40.0
# e^x is computed as 2^(x log2 e), in a third of the time on a CPU; -inf takes as long as any x.
LOG2_E = math.log2(math.e)


class Table(NamedTuple):
    """Weights by the clusters of both embeddings: W_ij is the mean over heads of T_h[c_ih, c_jh].

    A -inf leaves the pair out.
    """

    log_weights: tuple[Tensor, ...]  # log T_h, [K_h, K_h] for each of H heads
    clusters: Tensor  # [M, H] int64


class Factors(NamedTuple):
    """Weights of few columns: W_ij = left_i . right_j, none negative. A 0 leaves the pair out."""

    left: Tensor  # [M, R]
    right: Tensor  # [M, R]


class PairWeight(Protocol):
    """Weights by the pair's own cosine: W_ij = Z_i 2^formula(s_ij, numbers of i).

    The engine chooses Z_i: the mean of W_ij over all embeddings j, i itself among them, is 1.
    """

    def numbers(self, scale: float | Tensor) -> tuple[Tensor, ...]:
        """What the formula takes for each embedding, ``[M]`` each, where it gets scale * cosine."""

    def formula(self, scaled: Tensor, *numbers: Tensor, out: Tensor | None = None) -> Tensor:
        """Log2 W of a block ``scaled``, which ``out`` may be; numbers are a line or a column."""


class Gaussian(NamedTuple):
    """The paper's weight: exp(-(s_ij - mean_i)^2 / (2 variance_i))."""

    mean: Tensor  # [M]
    variance: Tensor  # [M] infinite where every weight is 1

    def numbers(self, scale: float | Tensor) -> tuple[Tensor, ...]:
        """Mean and sharpness; squares of scaled cosines would overflow at low temperatures."""
        return self.mean * scale, (0.5 * LOG2_E / self.variance).sqrt_() / scale

    def formula(self, scaled: Tensor, *numbers: Tensor, out: Tensor | None = None) -> Tensor:
        mean, sharpness = numbers
        deviations = torch.sub(scaled, mean, out=out).mul_(sharpness)
        return torch.addcmul(deviations.new_zeros(()), deviations, deviations, value=-1, out=out)


class Pairs(NamedTuple):
    """Which embeddings are negatives of each other, and how much each pair counts.

    Sets are slices of one matrix: views, or others of any lengths. Weights of both kinds multiply;
    without any, W_ij is 1. They are constants for the gradient.
    """

    embeddings: Tensor  # [M, D] of unit length
    lengths: tuple[int, ...]  # of each set
    compared: tuple[tuple[int, int], ...]  # (a, b) with a <= b: sets with negatives in each other
    items: Tensor | None = None  # [M] int64; None: an embedding's item is its position in its set
    by_cluster: Table | Factors | None = None
    by_cosine: PairWeight | None = None

    def sets(self) -> list[slice]:
        """The embeddings of each set."""
        bounds = [0, *itertools.accumulate(self.lengths)]
        return [slice(*both) for both in itertools.pairwise(bounds)]

    def compares_all(self) -> bool:
        num_sets = len(self.lengths)
        return len(self.compared) == num_sets * (num_sets + 1) // 2

    def partners(self, number: int) -> list[int]:
        """The sets that one of them is compared with."""
        return sorted({a + b - number for a, b in self.compared if number in (a, b)})

    def fill_items(self, matrix: Tensor, i: slice, j: slice, value: float) -> None:
        """Fill the pairs of one item in a matrix ``[I, J]``, in place."""
        if self.items is not None:
            matrix.masked_fill_(self.items[i].unsqueeze(1) == self.items[j], value)
            return
        length, num_sets, width = self.lengths[0], len(self.lengths), j.stop - j.start
        is_all = i == j == slice(0, self.embeddings.shape[0])
        if is_all and self.lengths == (length,) * num_sets and is_eager():
            # Item g of one set and of another, or the same one: of all sets at once. (Compilers
            # refuse as_strided.)
            strides = (length * width, length, width + 1)
            matrix.as_strided((num_sets, num_sets, length), strides).fill_(value)
            return
        sets, flat = self.sets(), matrix.view(-1)
        for a, b in itertools.product(sets, sets):
            # They lie on a diagonal. (Tensor.diagonal makes the compiler of torch 2.13 warn.)
            first = max(0, i.start - a.start, j.start - b.start)
            end = min(a.stop, i.stop) - a.start, min(b.stop, j.stop) - b.start
            count = min(end) - first
            if count > 0:
                corner = (a.start + first - i.start) * width + b.start + first - j.start
                flat[corner : corner + (count - 1) * (width + 1) + 1 : width + 1].fill_(value)


class Past(NamedTuple):
    """Embeddings of earlier batches: negatives of every embedding of `Pairs`, without gradient."""

    embeddings: Tensor  # [B, D] of unit length
    items: Tensor | None  # [B] where the pairs have items
    present: Tensor | None  # [B] bool, those that take part; None: all
    by_cluster: Table | Factors | None  # [M + B] of the pairs, and then of these

    def num_present(self) -> int | Tensor:
        """How many take part."""
        return len(self.embeddings) if self.present is None else self.present.sum()


def of_first(weights: Any, count: int) -> Any:
    """The weights of the first embeddings: of the same kind, or None."""
    if isinstance(weights, Table):
        return weights._replace(clusters=weights.clusters[:count])
    return weights and type(weights)(*[of_all[:count] for of_all in weights])


def as_number(temperature: float | Tensor) -> float:
    """For tensors that Python can read without waiting."""
    return float(temperature.detach() if isinstance(temperature, Tensor) else temperature)


def may_overflow(temperature: float | Tensor) -> bool:
    """Whether sums of e^{s / tau} need a maximum subtracted first, as far as Python can tell."""
    if isinstance(temperature, Tensor) and not can_be_read(temperature.detach()):
        return True
    return 1 / as_number(temperature) > LARGEST_EXPONENT


def d_temperature(embeddings: Tensor, d_embeddings: Tensor, temperature: Tensor) -> Tensor:
    """The gradient of what depends on (z_i . z_j) / temperature alone, from that of all z."""
    return (embeddings * d_embeddings).sum() / (-2 * temperature)


def couples(count: int) -> list[tuple[int, int]]:
    """Each number with itself and the later ones. (The compiler knows no combinations.)"""
    return [(a, b) for a in range(count) for b in range(a, count)]


def compared_sets(num_sets: int, negatives: str) -> tuple[tuple[int, int], ...]:
    """All sets with all of them, or with ``"cross"`` each with the others alone."""
    first = 0 if negatives == "all" else 1
    return tuple([(a, b) for a in range(num_sets) for b in range(a + first, num_sets)])


class Sums(NamedTuple):
    """What an engine returns for the pairs of a portion; e^log_sums of all portions add up to S.

    With a pair weight they add up to S_i / Z_i, and Z_i = M / e^log_totals_i.
    """

    log_sums: Tensor  # [M] -inf where there is no negative
    log_totals: Tensor | None = None  # [M] of the pair weight over all embeddings
    layout: object = None  # what the gradient can use again


class Portion(NamedTuple):
    """Which of all pairs to compute: each of several processes has a portion, a single one all."""

    rank: int = 0
    num_ranks: int = 1

    def of(self, length: int) -> slice:
        """One of ``num_ranks`` runs of a length, as equal as can be."""
        bounds = (length * rank // self.num_ranks for rank in (self.rank, self.rank + 1))
        return slice(*bounds)


ALL_PAIRS = Portion()


def check_kind(engine: str, weights: object, *kinds: type) -> None:
    """An engine names the kinds of weights that it computes; any other is an error."""
    if weights is not None and not isinstance(weights, kinds):
        computed = " and ".join(kind.__name__ for kind in kinds)
        raise TypeError(
            f"engine={engine!r} computes weights of the kinds {computed}, "
            f"but got {type(weights).__name__}"
        )


def check_once(differentiable_again: bool = False) -> None:
    """Where a gradient is to be differentiated (``create_graph=True``), only dense can."""
    if torch.is_grad_enabled() and not differentiable_again:
        raise RuntimeError(
            "the loss is differentiable once here: engine='dense' is any number of times, in one "
            "process and without a memory"
        )
