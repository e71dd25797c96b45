"""How negatives and positives make the loss of a query: values, and slopes for the gradient.

With log S the log-sum-exp of a query's negatives and x_p the score of a positive, cosine / tau, the
loss is the mean over the positives of a term of the gap log S - x_p. Debiased negatives: Chuang et
al., Debiased Contrastive Learning, NeurIPS 2020.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


def exponential(gaps: Tensor) -> tuple[Tensor, Tensor]:
    """e^x / S."""
    values = gaps.clamp_min(-_LINEAR_FROM).neg().exp()
    return values, -values.where(gaps >= -_LINEAR_FROM, 0.0)


class Mean(NamedTuple):
    """The mean of a term over the positives of each query, by an offset of each query."""

    values: Tensor  # [Q]
    slopes: Tensor  # [Q] the derivative by the offsets
    exist: Tensor | None  # [Q] whether a query has positives; None: all have
    kept: Any = None  # what the gradient uses again


MeanOf = Callable[[Term, Tensor], Mean]  # of a term, by offsets [Q]


class Slopes(NamedTuple):
    """The derivatives of a weighted sum of losses."""

    log_s: Tensor  # [Q]
    means: Sequence[tuple[Mean, Tensor | float]]  # each mean over positives, with that by it
    temperature: Tensor | None = None  # [] beside that through scores


class Form(NamedTuple):
    """The loss of a query: its positives against the sum of its negatives."""

    decoupled: bool = False  # whether positives are left out of the denominator
    debias: float = 0.0  # tau+ of debiased negatives, which need log_count

    def __call__(
        self, log_s: Tensor, mean_of: MeanOf, temperature: float | Tensor, log_count: Any = None
    ) -> tuple[Mean, Callable[[Tensor | float], Slopes]]:
        """The losses, and a function from the derivatives by them to those by sums and means."""
        term = decoupled if self.decoupled else coupled
        if self.debias == 0:
            losses = mean_of(term, log_s)
            return losses, lambda d_losses: Slopes(d_losses * losses.slopes, [(losses, d_losses)])

        none = log_s == -torch.inf
        log_mean = (log_s - log_count).masked_fill(none, 0.0)
        ratio = mean_of(exponential, log_mean)
        corrected, by_mean, by_ratio, by_temperature = _debiased(
            log_mean, ratio.values, temperature, self.debias
        )
        losses = mean_of(term, corrected + log_count)

        def slopes(d_losses: Tensor | float) -> Slopes:
            d = d_losses * losses.slopes
            d_log_s = d * (by_mean + by_ratio * ratio.slopes).masked_fill(none, 0.0)
            means = (losses, d_losses), (ratio, d * by_ratio)
            return Slopes(d_log_s, means, (d * by_temperature).sum())

        return losses, slopes


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
