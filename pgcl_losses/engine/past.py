"""Sums over past embeddings, which are negatives of every embedding of a batch.

They need no gradient, so one pass over them gives the sums and the gradient of the batch, as in
attention: two products instead of three, on any device and beside any engine. No block is kept.
"""

import math
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.engine.blocks import Run, in_blocks
from pgcl_losses.engine.contract import LOG2_E, Pairs, Past, Portion, check_once, may_overflow
from pgcl_losses.engine.lookup import BlockWeights
from pgcl_losses.ranks import Ranks


class OverPast(torch.autograd.Function):
    """Log of the sums ``[M]`` over past embeddings, and of the pair weight's totals ``[M]``."""

    @staticmethod
    def forward(
        ctx: Any,
        embeddings: Tensor,
        temperature: float | Tensor,
        pairs: Pairs,
        past: Past,
        ranks: Ranks,
    ) -> tuple[Tensor, Tensor]:
        portion = Portion(ranks.rank, len(ranks.counts)).of(len(past.embeddings))
        sums = _Sums(pairs, temperature, past, any(ctx.needs_input_grad[:2]))
        for j in in_blocks(portion, embeddings.device):
            for i in in_blocks(slice(0, len(embeddings)), embeddings.device):
                sums.add(i, j)
        log_sums = sums.logs()
        log_s, log_totals = ranks.add_logs(log_sums), sums.totals.log()
        if pairs.by_cosine is not None:
            log_totals = ranks.add_logs(log_totals)
        # Each process adds its fraction of the mean over all.
        fraction = (log_sums - log_s.clamp_min(torch.finfo(log_s.dtype).min)).exp_()
        ctx.save_for_backward(embeddings, sums.means() * fraction.unsqueeze(1))
        ctx.temperature, ctx.ranks = temperature, ranks
        ctx.mark_non_differentiable(log_totals)
        return log_s, log_totals

    @staticmethod
    def backward(ctx: Any, d_log_s: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        check_once()
        embeddings, means = ctx.saved_tensors
        d_log_s = ctx.ranks.add(d_log_s, "the sums' gradient")
        d_embeddings = means * (d_log_s / ctx.temperature).unsqueeze(1)
        d_temperature = None
        if ctx.needs_input_grad[1]:
            d_temperature = (embeddings * d_embeddings).sum() / -ctx.temperature
        return d_embeddings, d_temperature, None, None, None


class _Sums:
    """Sums of W e^{s / tau} and of W e^{s / tau} z_j, to which blocks of pairs are added."""

    def __init__(
        self, pairs: Pairs, temperature: float | Tensor, past: Past, with_gradient: bool
    ) -> None:
        self.pairs, self.past, self.count = pairs, past, len(pairs.embeddings)
        scale = LOG2_E / temperature  # to exponents of 2
        self.scaled = pairs.embeddings.detach() * scale
        self.weights: BlockWeights | None = None
        if past.by_cluster is not None:
            self.weights = BlockWeights(past.by_cluster, logarithms=True)
        self.numbers = pairs.by_cosine.numbers(scale) if pairs.by_cosine else ()
        self.sums = torch.zeros_like(pairs.embeddings[:, 0])  # [M]
        self.totals = torch.zeros_like(self.sums)  # of the pair weight
        # Exponents of 2 that are subtracted, where sums might overflow.
        self.peaks = torch.zeros_like(self.sums)
        self.has_peaks = may_overflow(temperature)
        if self.has_peaks:
            self.peaks.fill_(-torch.inf)
        self.may_vanish = self.has_peaks or self.weights is not None or len(self.numbers) > 0
        self.vectors = torch.zeros_like(pairs.embeddings) if with_gradient else None  # [M, D]
        self.buffer = pairs.embeddings.new_empty(0)
        self.lowest = 1 + math.log2(torch.finfo(self.sums.dtype).tiny)

    def add(self, i: slice, j: slice) -> None:
        others, mine = self.past.embeddings[j], self.scaled[i]
        if self.buffer.numel() < len(others) * len(mine):
            self.buffer = mine.new_empty(len(others) * len(mine))
        out = self.buffer[: len(others) * len(mine)].view(len(others), len(mine))
        logits = self.weigh(torch.mm(others, mine.T, out=out), i, j)
        if self.has_peaks:
            peaks = torch.maximum(self.peaks[i], logits.amax(0))
            finite = peaks.masked_fill(peaks == -torch.inf, 0.0)
            smaller = (self.peaks[i] - finite).exp2_()
            self.sums[i] *= smaller
            if self.vectors is not None:
                self.vectors[i] *= smaller.unsqueeze(1)
            self.peaks[i] = peaks
            logits -= finite
        if self.may_vanish:  # denormal numbers make matrix products slow
            terms = torch.threshold_(logits.clamp_min_(self.lowest).exp2_(), 2.0**self.lowest, 0.0)
        else:
            terms = logits.exp2_()
        self.sums[i] += terms.sum(0)
        if self.vectors is not None:
            self.vectors[i].addmm_(terms.T, others)

    def weigh(self, logits: Tensor, i: slice, j: slice) -> Tensor:
        """Log2 of W e^{s / tau} from that of e^{s / tau} ``[J, I]``, in place; totals are added."""
        absent = None if self.past.present is None else ~self.past.present[j].unsqueeze(1)
        if self.pairs.by_cosine is not None:
            log_weights = self.pairs.by_cosine.formula(logits, *[n[i] for n in self.numbers])
            logits += log_weights
            weights = log_weights.exp2_()
            if absent is not None:
                weights.masked_fill_(absent, 0.0)
            self.totals[i] += weights.sum(0)
        if self.weights is not None:
            run = Run(slice(j.start + self.count, j.stop + self.count), range(0))
            logits += self.weights.of(Run(i, range(0)), run, 0)
        if absent is not None:
            logits.masked_fill_(absent, -torch.inf)
        if self.pairs.items is not None and self.past.items is not None:
            of_one_item = self.past.items[j].unsqueeze(1) == self.pairs.items[i]
            logits.masked_fill_(of_one_item, -torch.inf)
        return logits

    def logs(self) -> Tensor:
        """Log of the sums, -inf where there is no negative."""
        peaks = self.peaks.masked_fill(self.peaks == -torch.inf, 0.0)
        return self.sums.log() + peaks / LOG2_E

    def means(self) -> Tensor:
        """Past embeddings averaged by their terms of the sums ``[M, D]``; 0 without any."""
        if self.vectors is None:
            return self.pairs.embeddings.new_zeros(self.count, 1)
        tiny = torch.finfo(self.sums.dtype).tiny
        return self.vectors / torch.threshold(self.sums, tiny, torch.inf).unsqueeze(1)
