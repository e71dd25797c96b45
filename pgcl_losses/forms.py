"""How negatives and positives make the loss of a query: values, and their derivatives.

With log S the log-sum-exp of a query's negatives, x_p the score of a positive, s / tau, and E the
sum of w_p e^{x_p} over positives of weight w_p, a loss is one of

- "mean": the mean over positives of log(1 + e^{log S - x_p}), InfoNCE's;
- "supcon": log(S + E) - the mean of x_p, which is log(1 + S / E) + the mean of log E - x_p;
- "sum": log(1 + S / E).

Debiased negatives: Chuang et al., Debiased Contrastive Learning, NeurIPS 2020.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# log(1 + e^x) is x from here on, even for float64.
_LINEAR_FROM = 40.0

# Of gaps: the value of each and its derivative.
Term = Callable[[Tensor], tuple[Tensor, Tensor]]


def coupled(gaps: Tensor) -> tuple[Tensor, Tensor]:
    """-log(e^x / (e^x + S)): the positive is in its denominator."""
    return F.softplus(gaps, threshold=_LINEAR_FROM), gaps.sigmoid()


def decoupled(gaps: Tensor) -> tuple[Tensor, Tensor]:
    """-log(e^x / S); 0 without negatives."""
    none = gaps == -torch.inf
    return gaps.masked_fill(none, 0.0), (~none).to(gaps.dtype)


def fraction(gaps: Tensor) -> tuple[Tensor, Tensor]:
    """e^x / E, the derivative of log E by x. log E is rounded, but no positive exceeds its sum."""
    values = gaps.clamp_min(0.0).neg().exp()
    return values, -values


def exponential(gaps: Tensor) -> tuple[Tensor, Tensor]:
    """e^x / S, up to e^40."""
    values = gaps.clamp_min(-_LINEAR_FROM).neg().exp()
    return values, -values.where(gaps >= -_LINEAR_FROM, 0.0)


def largest_exponent(like: Tensor) -> float:
    """Of e^x that does not overflow: a positive of weight 0 may exceed E by any factor."""
    return math.log(torch.finfo(like.dtype).max) - 8


class Mean(NamedTuple):
    """A mean over the positives of each query, or a loss that is made of such means."""

    values: Tensor  # [Q]
    grads: Tensor  # [Q] the derivative by the offsets of gaps
    exist: Tensor | None  # [Q] whether a query has positives; None: all have
    kept: Any = None  # what the gradient uses again


def of_existing(values: Tensor, grads: Tensor, exist: Tensor | None, offsets: Tensor) -> Mean:
    """Without positives a query's loss is 0, or NaN if its offset is."""
    if exist is None:
        return Mean(values, grads, None)
    alone = offsets.where(offsets.isnan(), 0.0)
    return Mean(values.where(exist, alone), grads.masked_fill(~exist, 0.0), exist)


class Positives(Protocol):
    """The positives p of each query, with scores x_p and weights w_p."""

    def mean(self, term: Term, offsets: Tensor) -> Mean:
        """The weighted mean of a term of the gaps offset - x_p; offsets are ``[Q]``."""

    def log_sum(self) -> Mean:
        """log E; 0 where a query has no positives."""


class Gradients(NamedTuple):
    """The derivatives of a weighted sum of losses."""

    log_s: Tensor  # [Q]
    means: Sequence[tuple[Mean, Tensor | float]]  # each mean over positives, with that by it
    temperature: Tensor | None = None  # [] beside that through scores


Loss = tuple[Mean, Callable[[Tensor | float], Gradients]]


class Form(NamedTuple):
    """The loss of a query: its positives against the sum of its negatives."""

    over_positives: str = "mean"
    decoupled: bool = False  # whether positives are left out of the denominator
    debias: float = 0.0  # tau+ of debiased negatives, which need log_count

    def __call__(
        self,
        log_s: Tensor,
        positives: Positives,
        temperature: float | Tensor,
        log_count: Any = None,
    ) -> Loss:
        """The losses, and a function from the derivatives by them to those by sums and means."""
        if self.debias == 0:
            return self._of_sums(log_s, positives)
        none = log_s == -torch.inf
        log_mean = (log_s - log_count).masked_fill(none, 0.0)
        ratio = positives.mean(exponential, log_mean)
        corrected, by_mean, by_ratio, by_temperature = _debiased(
            log_mean, ratio.values, temperature, self.debias
        )
        losses, grads_by = self._of_sums(corrected + log_count, positives)

        def grads(d_losses: Tensor | float) -> Gradients:
            d, means, _ = grads_by(d_losses)
            d_log_s = d * (by_mean + by_ratio * ratio.grads).masked_fill(none, 0.0)
            return Gradients(d_log_s, [*means, (ratio, d * by_ratio)], (d * by_temperature).sum())

        return losses, grads

    def _of_sums(self, log_s: Tensor, positives: Positives) -> Loss:
        term = decoupled if self.decoupled else coupled
        if self.over_positives == "mean":
            mean = positives.mean(term, log_s)
            return mean, lambda d_losses: Gradients(d_losses * mean.grads, [(mean, d_losses)])
        log_e = positives.log_sum()
        losses = of_existing(*term(log_s - log_e.values), log_e.exist, log_s)
        if self.over_positives == "sum":
            return losses, lambda d_losses: Gradients(
                d_losses * losses.grads, [(log_e, -d_losses * losses.grads)]
            )
        spread = positives.mean(decoupled, log_e.values)

        def grads(d_losses: Tensor | float) -> Gradients:
            d_log_s = d_losses * losses.grads
            d_log_e = d_losses * (log_e.values - log_s).sigmoid()  # d_losses - d_log_s, not rounded
            return Gradients(d_log_s, [(log_e, d_log_e), (spread, d_losses)])

        return losses._replace(values=losses.values + spread.values), grads


def _debiased(
    log_mean: Tensor, ratio: Tensor, temperature: float | Tensor, debias: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log of max((S / N - tau+ P) / (1 - tau+), e^{-1 / tau}), with N negatives; derivatives of it.

    ``log_mean``: of S / N. ``ratio``: P over S / N, P the mean over positives of e^{s / tau}.
    """
    lowest = -torch.ones_like(log_mean) / temperature
    remainder = 1 - (debias * ratio).clamp_max(1.0 - torch.finfo(ratio.dtype).eps)
    corrected = log_mean + remainder.log() - math.log1p(-debias)
    # A NaN is in neither of them.
    is_lowest = (debias * ratio >= 1) | (corrected < lowest)
    by_mean = (~is_lowest).to(ratio)
    by_temperature = is_lowest / torch.as_tensor(temperature).square()
    return (
        corrected.where(~is_lowest, lowest),
        by_mean,
        by_mean * -debias / remainder,
        by_temperature,
    )
