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

# log(1 + e^x) is x from here on, even for float64.
_LINEAR_FROM = 40.0


class Form(NamedTuple):
    """The loss of a query as a function of log S and of its positives.

    To add a loss of several positives, add a value of ``over_positives`` and its formula below.
    """

    over_positives: str = "mean"
    decoupled: bool = False  # whether positives are left out of the denominator
    debias: float = 0.0  # tau+ of Chuang et al.; above 0 it needs log_count

    def losses(
        self,
        log_s: Tensor,  # [I], -inf for a query without negatives
        x: Tensor,  # [I, P] scores of positives; any finite number where w is 0
        w: Tensor | None,  # [I, P] weights of positives, 0 for padding; None: all are 1
        temperature: float | Tensor,
        log_count: Tensor | None,  # [I] log of the number of negatives, for debias
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the losses ``[I]``, and which queries have positives ``[I]`` (None: all have).

        A query without positives has loss 0, or NaN if its log S is NaN.
        """
        if w is None and x.shape[1] == 1 and self.debias == 0:
            return self._against(log_s - x.squeeze(1)), None  # all forms agree
        w = torch.ones_like(x) if w is None else w
        total = w.sum(1)  # [I]
        exist = total > 0
        share = w / total.where(exist, 1.0).unsqueeze(1)  # [I, P] a_p
        if self.debias > 0 and log_count is not None:
            log_s = self._debiased(log_s, x, share, temperature, log_count)
        if self.over_positives == "mean":
            losses = (self._against(log_s.unsqueeze(1) - x) * share).sum(1)
        elif self.over_positives == "sum":
            losses = self._against(log_s - _log_sum(x, w))
        else:
            losses = _supcon(log_s, x, w, share)
        return losses.where(exist, log_s.detach().where(log_s.isnan(), 0.0)), exist

    def _against(self, gaps: Tensor) -> Tensor:
        """The loss of gaps log S - x: log(1 + S / e^x), or log(S / e^x) if decoupled."""
        if self.decoupled:
            return gaps.masked_fill(gaps == -math.inf, 0.0)  # without negatives the loss is 0
        return F.softplus(gaps, threshold=_LINEAR_FROM)

    def _debiased(
        self,
        log_s: Tensor,
        x: Tensor,
        share: Tensor,
        temperature: float | Tensor,
        log_count: Tensor,
    ) -> Tensor:
        """Correct log S for negatives that are of the query's own class.

        Return the log of N max((S / N - tau+ E_a) / (1 - tau+), e^{-1 / tau}), where N is the
        number of negatives, E_a the mean of e^x over positives, and e^{-1 / tau} the smallest e^x
        of a cosine. Chuang et al., Debiased Contrastive Learning, NeurIPS 2020.
        """
        log_mean = (log_s - log_count).masked_fill(log_s == -math.inf, 0.0)  # log(S / N)
        above = (x - log_mean.unsqueeze(1)).clamp_max(_LINEAR_FROM)
        ratio = self.debias * (above.exp() * share).sum(1)  # tau+ E_a / (S / N)
        remainder = 1 - ratio.clamp_max(1 - torch.finfo(x.dtype).eps)
        corrected = log_mean + remainder.log() - math.log1p(-self.debias)
        lowest = -torch.ones_like(log_mean) / temperature
        # Comparisons with NaN are false, so a NaN stays a NaN.
        return lowest.where((ratio >= 1) | (corrected < lowest), corrected) + log_count


def _largest_exponent(like: Tensor) -> float:
    """Return a number up to which e^x does not overflow, with some room to add and multiply.

    Exponents are clamped to it, since a positive of weight 0 may exceed the others by any factor.
    """
    return math.log(torch.finfo(like.dtype).max) - 8


def _log_sum(x: Tensor, w: Tensor) -> Tensor:
    """Compute log E = log sum_p w_p e^{x_p}; 0 for a query without positives.

    A weight of 0 has a gradient like any other weight.
    """
    peaks = x.detach().masked_fill(w == 0, -math.inf).amax(1)
    exist = peaks != -math.inf  # True for a NaN as well
    peaks = peaks.masked_fill(~exist, 0.0)
    powers = (x - peaks.unsqueeze(1)).clamp_max(_largest_exponent(x)).exp()
    return (powers * w).sum(1).where(exist, 1.0).log() + peaks


def _supcon(log_s: Tensor, x: Tensor, w: Tensor, share: Tensor) -> Tensor:
    """Compute log(S + E) - sum_p a_p x_p.

    The larger of S and E is taken out of the sum: log(S + E) is log S + log1p(E / S) or log E +
    log1p(S / E). Then a loss near 0 is not lost to rounding. Nor is the derivative by the smaller
    of S and E: it is small, but a weight of 0 multiplies it by the large e^{x_p} / E.
    """
    log_e = _log_sum(x, w)
    above = log_s > log_e
    by_s = (x - log_s.unsqueeze(1)).clamp_max(_largest_exponent(x)).exp()  # [I, P] e^{x_p} / S
    by_e = (log_s - log_e).clamp_max(0.0).exp()  # [I] S / E
    ratio = (by_s * w).sum(1).where(above, by_e)
    larger = log_s.where(above, log_e)
    return ratio.log1p() + ((larger.unsqueeze(1) - x) * share).sum(1)
