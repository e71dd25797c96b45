"""The candidates: contrastive losses with numbers that are fitted, such as the temperature.

The losses of two views are written once more, in a form that has what ``InfoNCE`` does not do, such
as an epsilon or a diagonal that is not masked. With labels ``InfoNCE`` itself is called.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.recognition.probe import labels_of

# Where the search for each number begins: the first value, the last one, and how many there are.
# The values between them grow by a constant factor.
GRIDS = {
    "temperature": (5e-4, 5e2, 50),
    "hardness": (0.1, 10.0, 5),
    "debias": (0.01, 0.8, 10),
    "denominator": (1e-8, 1e2, 11),
    "logarithm": (1e-8, 1e-1, 8),
    "positives": (0.25, 4.0, 5),
}
# What ``InfoNCE`` does not do, by the number that is fitted.
DIFFERENCES = {
    "denominator": "it adds {:.3g} to the denominator",
    "logarithm": "it adds {:.3g} within the logarithm",
    "positives": "the positive is {:.3g} times in the denominator",
}
NOT_MASKED = "each embedding is its own negative: the diagonal is not masked"

Numbers = dict[str, Tensor]  # the numbers of B losses by name, each [B, 1, 1]


class Candidate(NamedTuple):
    """A loss with a temperature, and perhaps further numbers, that are fitted."""

    options: dict[str, Any]  # the options of ``InfoNCE`` that are not fitted
    further: tuple[str, ...] = ()  # the numbers besides the temperature
    is_masked: bool = True  # whether an embedding is not its own negative

    def names(self) -> tuple[str, ...]:
        """The names of the numbers, in the order of the parameters."""
        return ("temperature", *self.further)

    def terms(self, views: Sequence[Tensor], parameters: Tensor) -> Tensor:
        """Compute the losses ``[B, T]`` of both directions, or of embeddings with labels.

        Args:
            views (sequence of Tensor): the embeddings ``[B, N, D]`` of one or two views.
            parameters (Tensor): the logarithms ``[B, P]`` of the numbers.

        """
        columns = parameters.exp().unbind(1)
        if len(views) == 1:
            return self._with_labels(views[0], columns[0])
        numbers = {name: x.view(-1, 1, 1) for name, x in zip(self.names(), columns, strict=True)}
        ways = views, views[::-1]
        return torch.stack([self._one_way(x, y, numbers) for x, y in ways], 1)

    def _one_way(self, x: Tensor, y: Tensor, numbers: Numbers) -> Tensor:
        """The mean loss ``[B]`` of queries ``x``, whose positives are the same rows of ``y``."""
        if "similarity" not in self.options:
            x, y = F.normalize(x, dim=2), F.normalize(y, dim=2)
        eye = torch.eye(x.shape[1], dtype=torch.bool)
        cross = x @ y.mT / numbers["temperature"]  # [B, N, N]
        positive = cross.diagonal(dim1=1, dim2=2).unsqueeze(2)  # [B, N, 1]
        negatives = [cross.masked_fill(eye, -math.inf)]
        if "negatives" not in self.options:
            within = x @ x.mT / numbers["temperature"]
            negatives.append(within.masked_fill(eye & self.is_masked, -math.inf))
        log_s = _log_s(torch.cat(negatives, 2), positive, numbers)
        if "decoupled" not in self.options:
            times = numbers.get("positives", torch.ones(1, dtype=x.dtype))
            log_s = torch.logaddexp(log_s, positive + times.log())
        if "denominator" in numbers:
            log_s = torch.logaddexp(log_s, numbers["denominator"].log())
        losses = log_s - positive
        if "logarithm" in numbers:
            losses = -((-losses).exp() + numbers["logarithm"]).log()
        return losses.mean((1, 2))

    def _with_labels(self, z: Tensor, temperatures: Tensor) -> Tensor:
        labels = labels_of(z.shape[1])

        def value(temperature: Tensor, z: Tensor) -> Tensor:
            loss = InfoNCE(temperature=temperature, engine="dense", **self.options)
            return loss(z, labels=labels)

        values: Tensor = torch.func.vmap(value)(temperatures, z)
        return values.unsqueeze(1)

    def is_ours(self) -> bool:
        """Whether ``InfoNCE`` does all that this loss does."""
        return self.is_masked and not set(self.further) & set(DIFFERENCES)

    def changed(self) -> list["Candidate"]:
        """This loss with one difference more."""
        is_decoupled = "decoupled" in self.options
        names = [name for name in DIFFERENCES if not (name == "positives" and is_decoupled)]
        return [self._replace(further=(name,)) for name in names]


def _log_s(logits: Tensor, positive: Tensor, numbers: Numbers) -> Tensor:
    """The logarithm ``[B, N, 1]`` of the sum of the negatives, of which hard ones may count more.

    Hardness is of Robinson et al. (2021), debiasing of Chuang et al. (2020), as in ``InfoNCE``.
    """
    log_s = logits.logsumexp(2, keepdim=True)
    log_count = (logits > -math.inf).to(logits.dtype).sum(2, keepdim=True).log()
    if "hardness" in numbers:
        weights = numbers["hardness"] * logits
        log_mean = (logits + weights).logsumexp(2, keepdim=True)
        log_s = log_mean - weights.logsumexp(2, keepdim=True) + log_count
    if "debias" in numbers:
        debias = numbers["debias"].clamp(max=0.99)
        sums = (log_s.exp() - debias * (log_count + positive).exp()) / (1 - debias)
        log_s = sums.maximum((log_count - 1 / numbers["temperature"]).exp()).log()
    return log_s


def _options(*choices: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All combinations of one choice each."""
    each = itertools.product(*choices)
    return [{name: x for part in parts for name, x in part.items()} for parts in each]


_CROSS, _DOT, _DECOUPLED = {"negatives": "cross"}, {"similarity": "dot"}, {"decoupled": True}
_SUM, _SUPCON = {"over_positives": "sum"}, {"over_positives": "supcon"}
TWO_VIEWS = [Candidate(x) for x in _options([{}, _CROSS], [{}, _DECOUPLED], [{}, _DOT])]
UNMASKED = [Candidate(x, (), False) for x in _options([{}, _DECOUPLED], [{}, _DOT])]
HARD = [
    Candidate(x, further)
    for further in (("hardness",), ("debias",), ("hardness", "debias"))
    for x in _options([{}, _CROSS], [{}, _DECOUPLED], [{}, _DOT])
    if "similarity" not in x or further == ("hardness",)  # debiasing needs cosines
]
WITH_LABELS = [
    Candidate(x)
    for x in _options([{}, _SUPCON, _SUM, _DECOUPLED, {**_SUM, **_DECOUPLED}], [{}, _DOT])
]
