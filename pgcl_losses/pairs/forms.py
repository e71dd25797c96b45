"""The losses of the literature as formulas: the loss of a query from its negatives and positives.

A form gets log S of each query, the log-sum-exp of its negatives, and the scores x_p = s_p / tau of
its positives with their weights w_p. With E = sum_p w_p e^{x_p} and a_p = w_p / sum_p w_p, the loss
is

- "mean": the mean over positives of log(1 + S / e^{x_p}), weighted by a_p: InfoNCE of each
  positive;
- "supcon": log(S + E) - sum_p a_p x_p: the loss L_out of Khosla et al., NeurIPS 2020;
- "sum": log(1 + S / E): the positives are added up within the logarithm.

With one positive all three are InfoNCE. Decoupled losses (Yeh et al., ECCV 2022) leave the
positives out of the denominator: log(S / e^{x_p}). All formulas are plain torch, and autograd
differentiates them.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.base.modes import is_transformed

# log(1 + e^x) is x from here on, even for float64.
_LINEAR_FROM = 40.0

# The losses of some rows [I], and which queries have positives [I]; None: all have.
LossesOfRows = tuple[Tensor, Tensor | None]


class Positives(NamedTuple):
    """How much each positive of some rows counts, and to which row it belongs.

    Positives are a matrix with a row for each query, ``[I, P]``, or a list ``[p]`` if queries have
    different numbers of them.
    """

    num_rows: int
    weights: Tensor | None  # [I, P] or [p]; 0: no positive; None: all are 1
    row: Tensor | None = None  # [p] the row of each positive in a list

    def spread(self, values: Tensor) -> Tensor:
        """Repeat a value of each row ``[I]`` for the positives of the row."""
        return values.unsqueeze(1) if self.row is None else values.index_select(0, self.row)

    def sum(self, values: Tensor) -> Tensor:
        """Add up values of positives by row, ``[I]``."""
        if self.row is None:
            return values.sum(1)
        return values.new_zeros(self.num_rows).index_add(0, self.row, values)

    def amax(self, values: Tensor) -> Tensor:
        """The largest value of positives by row, ``[I]``; -inf without any."""
        if self.row is None:
            return values.amax(1)
        least = values.new_full((self.num_rows,), -math.inf)
        return least.scatter_reduce(0, self.row, values, "amax")


class Form(NamedTuple):
    """The loss of a query as a function of log S and of its positives.

    To add a loss of several positives, add a value of ``over_positives`` and its formula below. For
    one positive of weight 1 it must be InfoNCE, which `losses` and `two_views` compute without it.
    """

    over_positives: str = "mean"
    decoupled: bool = False  # whether positives are left out of the denominator
    debias: float = 0.0  # tau+ of Chuang et al.; above 0 it needs log_count

    def losses(
        self,
        log_s: Tensor,  # [I], -inf for a query without negatives
        x: Tensor,  # [I, P] or [p] scores of positives; any finite number where the weight is 0
        positives: Positives,
        temperature: float | Tensor,
        log_count: Tensor | None,  # [I] log of the number of negatives, for debias
    ) -> LossesOfRows:
        """Compute the losses ``[I]``, and which queries have positives ``[I]`` (None: all have).

        A query without positives has loss 0, or NaN if its log S is NaN.
        """
        w = positives.weights
        if w is None and x.shape[1] == 1 and self.debias == 0:
            return self.against(log_s - x.squeeze(1)), None  # all forms agree
        w = torch.ones_like(x) if w is None else w
        total = positives.sum(w)  # [I]
        exist = total > 0
        share = w / positives.spread(total.where(exist, 1.0))  # a_p
        if self.debias > 0 and log_count is not None:
            log_s = self._debiased(log_s, x, share, positives, temperature, log_count)
        if self.over_positives == "mean":
            losses = positives.sum(self.against(positives.spread(log_s) - x) * share)
        elif self.over_positives == "sum":
            losses = self.against(log_s - _log_e(x, w, positives))
        elif self.over_positives == "supcon":
            losses = _supcon(log_s, x, w, share, positives)
        else:
            raise NotImplementedError(f"over_positives={self.over_positives!r} has no formula here")
        return losses.where(exist, log_s.detach().where(log_s.isnan(), 0.0)), exist

    def against(self, gaps: Tensor) -> Tensor:
        """The loss of gaps log S - x: log(1 + S / e^x), or log(S / e^x) if decoupled."""
        if self.decoupled:
            return gaps.masked_fill(gaps == -math.inf, 0.0)  # without negatives the loss is 0
        return F.softplus(gaps, threshold=_LINEAR_FROM)

    def derivatives(self, gaps: Tensor) -> Tensor:
        """The derivatives of `against`."""
        return (gaps != -math.inf).to(gaps.dtype) if self.decoupled else gaps.sigmoid()

    def _debiased(
        self,
        log_s: Tensor,
        x: Tensor,
        share: Tensor,
        positives: Positives,
        temperature: float | Tensor,
        log_count: Tensor,
    ) -> Tensor:
        """Correct log S for negatives that are of the query's own class.

        Return the log of N max((S / N - tau+ E_a) / (1 - tau+), e^{-1 / tau}), where N is the
        number of negatives, E_a the mean of e^x over positives, and e^{-1 / tau} the smallest e^x
        of a cosine. Chuang et al., Debiased Contrastive Learning, NeurIPS 2020.
        """
        log_mean = (log_s - log_count).masked_fill(log_s == -math.inf, 0.0)  # log(S / N)
        above = (x - positives.spread(log_mean)).clamp_max(_LINEAR_FROM)
        ratio = self.debias * positives.sum(above.exp() * share)  # tau+ E_a / (S / N)
        remainder = 1 - ratio.clamp_max(1 - torch.finfo(x.dtype).eps)
        corrected = log_mean + remainder.log() - math.log1p(-self.debias)
        least = -torch.ones_like(log_mean) / temperature
        # Comparisons with NaN are false, so a NaN stays a NaN.
        return least.where((ratio >= 1) | (corrected < least), corrected) + log_count


class Compared(Form):
    """No loss: 1 for a query that has both positives and negatives, and 0 for another."""

    def against(self, gaps: Tensor) -> Tensor:
        return (gaps > -math.inf).to(gaps.dtype)


def _log_e(x: Tensor, w: Tensor, positives: Positives) -> Tensor:
    """Compute log E = log sum_p w_p e^{x_p}; any finite number for a query without positives."""
    is_constant = not (w.requires_grad or is_transformed(w))  # transforms hide requires_grad
    if positives.row is None and is_constant:
        return (x + w.log().clamp_min_(torch.finfo(x.dtype).min / 2)).logsumexp(1)
    # A weight of 0 has a gradient like any other weight, and its e^x may exceed the others by any
    # factor. So exponents are clamped to a number up to which e^x does not overflow.
    peaks = positives.amax(x.detach() + w.detach().log())
    peaks = peaks.masked_fill(peaks == -math.inf, 0.0)
    largest = math.log(torch.finfo(x.dtype).max) - 8
    total = positives.sum((x - positives.spread(peaks)).clamp_max(largest).exp() * w)
    return total.where(total > 0, 1.0).log() + peaks


def _supcon(log_s: Tensor, x: Tensor, w: Tensor, share: Tensor, positives: Positives) -> Tensor:
    """Compute log(S + E) - sum_p a_p x_p.

    The larger of S and E is taken out of the sum: log(S + E) is log S + log1p(E / S) or log E +
    log1p(S / E). Then a loss near 0 is not lost to rounding.
    """
    log_e = _log_e(x, w, positives)
    larger = log_s.maximum(log_e)
    ratio = (-(log_s - log_e).abs()).exp()
    return ratio.log1p() + positives.sum((positives.spread(larger) - x) * share)
