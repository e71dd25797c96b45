"""The candidates: contrastive losses with given options, and what scripts do besides.

`InfoNCE` itself is asked where it can be. The losses of two views are written once more, in a form
that has what `InfoNCE` does not do: an epsilon, a diagonal that is not masked, a positive that
counts twice.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.recognition.probe import labels_of

# Options that are fitted, from which values, and up to which.
OPTIONS = {
    "hardness": ((0.0, 0.2, 0.5, 1.0, 2.0, 4.0, 8.0), 100.0),
    "debias": ((0.0, 0.03, 0.06, 0.1, 0.2, 0.3, 0.4, 0.5, 0.7), 0.99),
}
# What scripts do besides, with the number that is fitted (its logarithm), and where the fit starts.
DIFFERENCES = {
    "denominator": ("it adds {:.3g} to the denominator", 1e-4),
    "logarithm": ("it adds {:.3g} within the logarithm", 1e-4),
    "norm": ("it adds {:.3g} to the norm of each embedding", 1e-4),
    "norms": ("it adds {:.3g} to the product of two norms", 1e-4),
    "positives": ("the positive is {:.3g} times in the denominator", 1.5),
}
# Terms that are added, whose weight follows by least squares.
TERMS = {
    "smoothing": "it has a label smoothing of {:.3g}",
    "lengths": "it adds {:.3g} times the mean square of the embeddings' lengths",
}

Given = dict[str, Tensor]  # the parameters [B] of B losses, by name


class Structure(NamedTuple):
    """A contrastive loss of two views, by what is in the denominator of a query."""

    similarity: str
    within: bool  # whether keys of the query's own view are negatives
    itself: bool  # whether the query is its own negative: nobody masked the diagonal
    decoupled: bool

    def scores(self, x: Tensor, y: Tensor, given: Given) -> Tensor:
        """Compute the scores / temperature of queries and keys, ``[B, N, N]``."""
        products = x @ y.mT
        if self.similarity == "cosine":
            a, b = (z.norm(dim=2, keepdim=True) + given.get("norm", 0.0) for z in (x, y))
            products = products / (a * b.mT + given.get("norms", 0.0))
        return products / given["temperature"]

    def one_way(self, x: Tensor, y: Tensor, given: Given, extra: str) -> list[Tensor]:
        """The mean loss ``[B]`` of queries x, whose positives are the same rows of y; an extra."""
        eye, cross = torch.eye(x.shape[1], dtype=torch.bool), self.scores(x, y, given)
        keys, positive = [cross.masked_fill(eye, -math.inf)], cross.diagonal(dim1=1, dim2=2)
        if self.within:
            within = self.scores(x, x, given)
            keys.append(within if self.itself else within.masked_fill(eye, -math.inf))
        logits = torch.cat(keys, 2)
        log_sum = logits.logsumexp(2, keepdim=True)  # [B, N, 1]
        if "hardness" in given:  # Robinson et al. 2021, with debiasing where debias is given
            is_no_key = logits == -math.inf
            count = (~is_no_key).to(x.dtype).sum(2, keepdim=True).log()
            weights = (given["hardness"] * logits).masked_fill(is_no_key, -math.inf)
            log_sum = (logits + weights).logsumexp(2, keepdim=True) + count
            log_sum = log_sum - weights.logsumexp(2, keepdim=True)
            if "debias" in given:
                debias, own = given["debias"], positive.unsqueeze(2)
                sums = (log_sum.exp() - debias * (count + own).exp()) / (1 - debias)
                log_sum = sums.maximum((count - 1 / given["temperature"]).exp()).log()
        if not self.decoupled:
            own = positive.unsqueeze(2)
            own = own + given["positives"].log() if "positives" in given else own
            log_sum = torch.logaddexp(log_sum, own)
        if "denominator" in given:
            log_sum = torch.logaddexp(log_sum, given["denominator"].log())
        losses = log_sum - positive.unsqueeze(2)
        if "logarithm" in given:
            losses = -((-losses).exp() + given["logarithm"]).log()
        terms = [losses.mean((1, 2))]
        if extra == "lengths":
            terms.append(x.square().sum(2).mean(1))
        if extra == "smoothing":  # the mean score of keys, by that of the positive
            is_key = logits > -math.inf
            total = logits.masked_fill(~is_key, 0.0).sum(2) + positive
            terms.append((total / (is_key.sum(2) + 1) - positive).mean(1))
        return terms

    def terms(self, views: Sequence[Tensor], given: Given, extra: str = "") -> Tensor:
        """Both directions, each of which has a weight of its own; then extra terms ``[B, T]``."""
        given = {name: x.view(-1, 1, 1) for name, x in given.items()}
        (first, *one), (second, *other) = (
            self.one_way(x, y, given, extra) for x, y in (views, views[::-1])
        )
        return torch.stack([first, second, *one, *other], 1)

    def candidate(self, *fitted: str) -> "Candidate":
        """Return this loss by options of ``InfoNCE``, and by what ``InfoNCE`` does not do."""
        options: dict[str, Any] = {} if self.within else {"negatives": "cross"}
        options |= {"decoupled": True} if self.decoupled else {}
        options |= {} if self.similarity == "cosine" else {"similarity": self.similarity}
        itself = ["each embedding is its own negative: the diagonal is not masked"]
        return Candidate(options, self.terms, fitted, tuple(itself * self.itself))


def _with_labels(views: Sequence[Tensor], given: Given, options: dict[str, Any]) -> Tensor:
    """``InfoNCE`` of embeddings ``[B, N, D]`` with labels."""
    labels = labels_of(views[0].shape[1])

    def value(temperature: Tensor, z: Tensor) -> Tensor:
        return InfoNCE(temperature=temperature, engine="dense", **options)(z, labels=labels)

    values: Tensor = torch.func.vmap(value)(given["temperature"], views[0])
    return values.unsqueeze(1)


class Candidate(NamedTuple):
    """A loss of which the temperature is fitted, and perhaps further parameters."""

    options: dict[str, Any]  # of `InfoNCE`
    terms: Callable[..., Tensor]  # [B, T] of its value, by views [B, N, D] and by parameters
    fitted: tuple[str, ...] = ()  # the other parameters: names of options or of differences
    differences: tuple[str, ...] = ()  # what `InfoNCE` does not do

    def names(self) -> tuple[str, ...]:
        return ("temperature", *self.fitted)

    def given(self, parameters: Tensor) -> Given:
        """The parameters ``[B, P]`` by name. But for those of options they are logarithms."""
        return {
            name: x if name in OPTIONS else x.exp()
            for name, x in zip(self.names(), parameters.unbind(1), strict=True)
        }


TWO_VIEWS = [
    Structure(similarity, *keys, decoupled).candidate()
    for similarity, keys, decoupled in itertools.product(
        ("cosine", "dot"), ((False, False), (True, False), (True, True)), (False, True)
    )
]
HARD = [
    Structure(similarity, within, False, decoupled).candidate(*fitted)
    for similarity, fitted in (("cosine", ("hardness", "debias")), ("dot", ("hardness",)))
    for within, decoupled in itertools.product((True, False), (False, True))
]
WITH_LABELS = [
    Candidate(options, partial(_with_labels, options=options))
    for similarity in ({}, {"similarity": "dot"})
    for form in (
        *({}, {"over_positives": "supcon"}, {"over_positives": "sum"}),
        *({"decoupled": True}, {"over_positives": "sum", "decoupled": True}),
    )
    for options in [{**form, **similarity}]
]
