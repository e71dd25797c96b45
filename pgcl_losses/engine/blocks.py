"""Sums over negatives, block by block: for batches of any size, without an M x M matrix in memory.

e^{s / tau} is symmetric, so a block of the pairs of queries I and J serves the sums of both; its
matrices are ``[J, I]``, with the sums of I along axis 0 and those of J along axis 1. Where J are no
queries, only axis 0 has sums. The gradient computes the blocks again unless all of them are small,
except for the memory: its embeddings have no gradient, so one pass gives the sums and, as in
attention, their gradient.
"""

import math
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from pgcl_losses._modes import can_be_read
from pgcl_losses.engine.pair_weights import LOG2_E
from pgcl_losses.engine.pairs import (
    Block,
    Pairs,
    block_size,
    blocks_of,
    by_query,
    exclude,
    exclude_empty,
    fill_by_index,
)

_KEPT_UP_TO = 1 << 22  # pairs: reading a kept block is faster than another product
# Up to here e^{s / tau} of millions of pairs adds up in float32 without subtracting a maximum.
_LARGEST_EXPONENT = 40.0
# A smaller fraction of a sum counts as e^-60, which is negligible.
_SMALLEST_FRACTION = -60.0 * LOG2_E


class _Shared(threading.local):
    """Memory of blocks on a CPU: the pages of new memory cost a quarter of a small step."""

    def __init__(self) -> None:
        self.scratch: dict[tuple[int, torch.dtype], Tensor] = {}


_shared = _Shared()


class Sums(NamedTuple):
    """The sums of one process's portion of the pairs; over all portions e^log_s add up to S."""

    log_s: Tensor  # [Q] of the queries, -inf where one has no negatives
    log_totals: Tensor | None  # [Q] of the pair weight over all embeddings
    counts: Tensor | None  # [Q] of negatives


class Blocks:
    """log S_i of all queries, S_i the sum of W_ij e^{s_ij / tau} over negatives, and its gradient.

    Of several processes, each computes every n-th block.
    """

    def __init__(
        self,
        pairs: Pairs,
        temperature: float | Tensor,
        rank: int = 0,
        num_ranks: int = 1,
        share_memory: bool = False,
        exact: bool = False,  # also sums of weights that are negligible beside the positive
    ) -> None:
        self.pairs, self.temperature = pairs, temperature
        self.z = pairs.embeddings  # [M, D]
        self.scale = LOG2_E / temperature  # from cosines to exponents of 2
        # Whether a maximum is subtracted from exponents.
        self.logs = exact or not pairs.is_unit or _may_overflow(temperature)
        self.excluded = -math.inf if self.logs else 0.0
        self.prepared = [] if pairs.weights is None else pairs.weights.prepared(self.logs)
        self.numbers = pairs.pair_weight.numbers(self.scale) if pairs.pair_weight else ()
        self.by_index = None if pairs.positives is None else by_query(pairs.positives)
        self.num_queries = pairs.num_queries()
        # A pair weight counts all pairs.
        self.blocks = [
            block
            for block in blocks_of(pairs, block_size(self.z.device), num_ranks)
            if self._are_negatives(block) or pairs.pair_weight is not None
        ][rank::num_ranks]
        self.row, self.columns = -1, dict[int, list[Tensor]]()  # of weights, for blocks of one I
        # Blocks of one step may use the memory of the step before.
        share_memory = share_memory and can_be_read(self.z)
        self.scratch = _shared.scratch if share_memory else dict[tuple[int, torch.dtype], Tensor]()
        self.kept: dict[int, list[Tensor]] = {}  # the terms of a block, by its number
        self.of_memory: tuple[Tensor, Tensor] | None = None

    def log_sums(self, with_gradient: bool = False, count: bool = False) -> Sums:
        sums = self.z.new_zeros(self.num_queries)  # [Q]
        peaks = torch.full_like(sums, -math.inf) if self.logs else sums  # exponents of 2
        totals = None if self.pairs.pair_weight is None else torch.zeros_like(sums)
        counts = torch.zeros_like(sums) if count else None
        means: Tensor | None = None  # [Q, D] of the memory
        if with_gradient and self.pairs.memory is not None:
            means = torch.zeros_like(self.z[: self.num_queries])
        lowest = 1 + math.log2(torch.finfo(sums.dtype).tiny)
        in_batch = [block for block in self.blocks if not block.is_memory]
        keep = with_gradient and sum([block.shape().numel() for block in in_batch]) <= _KEPT_UP_TO
        for block in self.blocks:
            of_sides = self._terms(block, keep and not block.is_memory, True, totals)
            if not self._are_negatives(block):
                continue
            # Both sides of a block on the diagonal have the same sums.
            for axis, side in enumerate(block.sides[: 1 if block.i == block.j else 2]):
                terms = of_sides[axis]
                if counts is not None:
                    out = self._scratch(2, terms.shape)  # a sum of bools is slower
                    counts[side].add_(torch.ne(terms, self.excluded, out=out).sum(axis))
                if self.logs:
                    peak = torch.maximum(peaks[side], terms.amax(axis))
                    finite = peak.masked_fill(peak == -math.inf, 0.0)
                    smaller = (peaks[side] - finite).exp2_()
                    sums[side] *= smaller
                    if means is not None:
                        means[side] *= smaller.unsqueeze(1)
                    peaks[side] = peak
                    out = self._scratch(axis, terms.shape)
                    terms = torch.sub(terms, finite.unsqueeze(axis), out=out)
                    # Denormal numbers make exponentials and matrix products slow.
                    terms.clamp_min_(lowest).exp2_()
                    if block.is_memory:
                        torch.threshold_(terms, 2.0**lowest, 0.0)
                sums[side].add_(terms.sum(axis))
                if block.is_memory and means is not None:
                    means[side].addmm_(terms.T, self._keys(block))
        log_s = sums.log()
        if self.logs:
            log_s = (log_s + peaks / LOG2_E).masked_fill_(peaks == -math.inf, -math.inf)
        if means is not None:
            self.of_memory = means.div_(sums.masked_fill(sums == 0, math.inf).unsqueeze(1)), log_s
        return Sums(log_s, None if totals is None else totals.log(), counts)

    def gradient(self, log_s: Tensor, d_log_s: Tensor) -> tuple[Tensor, Tensor | None]:
        """Of the sum of d_log_s_i log S_i, by embeddings: of the batch's pairs, of the memory's.

        Both are ``[M, D]``. ``log_s``: of all portions together, without a pair weight's total.
        """
        d_exponents = d_log_s / self.temperature
        if self.logs:
            log2_s = log_s.masked_fill(log_s == -math.inf, 0.0) * LOG2_E
            d = d_exponents
        else:  # by S, whose inverse, and its product with 1 / tau, must not overflow
            lowest = math.log(torch.finfo(log_s.dtype).tiny) + 8
            d = log_s.clamp_min(lowest).neg_().exp_().mul_(d_exponents)
        z, d_z = self.z, torch.zeros_like(self.z)
        for block in self.blocks:
            if block.is_memory or not self._are_negatives(block):
                continue
            i, j, of_sides = block.i, block.j, self._terms(block)
            shape = of_sides[0].shape
            if self.logs:  # W e^{s / tau} / S; log S is rounded, but no pair exceeds its sum
                of_sides = [
                    torch.sub(terms, log2_s[side].unsqueeze(axis), out=self._scratch(axis, shape))
                    .clamp_(_SMALLEST_FRACTION, 0.0)
                    .exp2_()
                    for axis, (side, terms) in enumerate(zip(block.sides, of_sides, strict=True))
                ]
            d_pairs = torch.mul(of_sides[0], d[i], out=self._scratch(0, shape))
            if len(of_sides) > 1:
                d_pairs.addcmul_(of_sides[1], d[j].unsqueeze(1))
            d_z[i].addmm_(d_pairs.T, z[j])
            if i != j:
                d_z[j].addmm_(d_pairs, z[i])
        if self.of_memory is None:
            return d_z, None
        means, log_sums = self.of_memory
        fractions = (log_sums - log_s).masked_fill_(log_s == -math.inf, -math.inf).exp_()
        return d_z, means * (d_exponents * fractions).unsqueeze(1)

    def _are_negatives(self, block: Block) -> bool:
        return block.is_memory or (block.are_compared and self.pairs.negatives != "memory")

    def _terms(
        self,
        block: Block,
        keep: bool = False,
        for_sums: bool = False,
        totals: Tensor | None = None,
    ) -> list[Tensor]:
        """W e^{s / tau} ``[J, I]`` of each side, 0 for pairs that are no negatives.

        log2 of it, if a maximum is to be subtracted. ``keep``: for the gradient. ``for_sums``: of
        one side, if both have the same sums. Adds to the totals of the pair weight.
        """
        if block.number in self.kept:
            return self.kept[block.number]
        pairs, z, logs = self.pairs, self.z, self.logs
        shape = block.shape()
        kept = 10 + 2 * block.number if keep else 0  # numbers of scratch that stay
        is_plain = pairs.weights is None and pairs.pair_weight is None
        out = self._scratch(kept if keep and is_plain else 4, shape)
        powers = exponents = torch.mm(self._keys(block), z[block.i].T * self.scale, out=out)
        if pairs.pair_weight is None:
            exclude(exponents if logs else exponents.exp2_(), self.excluded, pairs, block)
        elif not logs:
            powers = torch.exp2(exponents, out=self._scratch(3, shape))
            exclude(powers, self.excluded, pairs, block)
        of_sides = []
        one_side = for_sums and not keep and block.i == block.j
        for axis, side in enumerate(block.sides[:1] if one_side else block.sides):
            terms, out = powers, self._scratch(kept + axis, shape)
            if pairs.pair_weight is not None:
                numbers = [of_all[side].unsqueeze(axis) for of_all in self.numbers]
                terms = pairs.pair_weight.formula(exponents, *numbers, out=out)
                if totals is not None or not logs:
                    weights = torch.exp2(terms, out=self._scratch(2, shape) if logs else terms)
                    if totals is not None and not (axis == 1 and block.i == block.j):
                        exclude_empty(weights, 0.0, pairs, block)
                        totals[side].add_(weights.sum(axis))
                if logs:
                    exclude(terms.add_(exponents), self.excluded, pairs, block)
                else:
                    terms.mul_(powers)
            if pairs.weights is not None:
                of_both = pairs.pair_weight is not None
                weights = self._weights(block, axis, self._scratch(2, shape) if of_both else out)
                combine = torch.add if logs else torch.mul
                terms = combine(terms, weights, out=out)
            if self.by_index is not None and not block.is_memory:
                given = self.by_index, block.i, block.j, axis
                terms = fill_by_index(terms, self.excluded, *given)
            of_sides.append(terms)
        if keep:
            self.kept[block.number] = of_sides
        return of_sides

    def _keys(self, block: Block) -> Tensor:
        """Embeddings J, ``[J, D]``."""
        if self.pairs.memory is None or not block.is_memory:
            return self.z[block.j]
        return self.pairs.memory[block.j.start - len(self.z) : block.j.stop - len(self.z)]

    def _weights(self, block: Block, axis: int, out: Tensor | None) -> Tensor:
        """Those of a table or factors, ``[J, I]``."""
        assert self.pairs.weights is not None
        if self.row != block.i.start:
            self.row, self.columns = block.i.start, {}
        if axis not in self.columns:
            self.columns[axis] = self.pairs.weights.columns(self.prepared, block.i, axis)
        return self.pairs.weights.block(self.columns[axis], block.j, self.logs, out)

    def _scratch(self, number: int, shape: torch.Size) -> Tensor:
        """One of a few matrices, whose memory all blocks share."""
        size, key = shape.numel(), (number, self.z.dtype)
        memory = self.scratch.get(key)
        if memory is None or memory.shape[0] < size:
            with torch.inference_mode(False):  # such a tensor could not be used outside of it
                memory = torch.empty(size, dtype=self.z.dtype, device=self.z.device)
            self.scratch[key] = memory
        return memory[:size].view(shape)


def _may_overflow(temperature: float | Tensor) -> bool:
    """Whether sums of e^{s / tau} need a maximum subtracted, as far as Python can tell."""
    if isinstance(temperature, Tensor):
        temperature = temperature.detach()
        if temperature.device.type != "cpu":
            return True
    return 1 / float(temperature) > _LARGEST_EXPONENT
