"""Losses by their options, with the schedule of PGCL's prototypes, for one run of so many steps."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pgcl_losses import InfoNCE, PGCLLoss, diagnostics

from .rivals import BarlowTwins

Options = dict[str, Any]
SCHEDULE: Options = {"lead": 0.0, "start": (), "one_batch": False, "rows_learn": True}
SEEN = ("agreement", "mean_cosine", "consistency_ratio", "dead_prototypes")


class Objective(nn.Module):
    """``views -> loss``, by options of `PGCLLoss`, ``num_prototypes`` among them, and six more.

    lead: fraction of the run that is a warm-up by InfoNCE. At its end prototypes are initialised
        from embeddings. (In the runs of version 0.2 they learned in it, and stayed as they were.)
    start: fractions of the run at which prototypes are initialised by hand.
    one_batch: whether these are the rows of one batch; else of as many as there are, or of several.
    temperature: of this loss, where it is not that of the others.
    prediction_temperature: of the consistency, where it is not the contrast's.
    rows_learn: False keeps the consistency's gradient from the rows, also after the lead.

    ``{"rival": name, ...}``: another loss, with its own options. None at all: InfoNCE.

    torch's generator stays as it is, so that rows of one seed see the same batches and views.
    """

    def __init__(self, options: Options, dim: int, temperature: float, steps: int) -> None:
        super().__init__()
        options = {**SCHEDULE, **options}
        self.rows_learn, self.one_batch = options.pop("rows_learn"), options.pop("one_batch")
        self.starts = {round(share * steps) for share in options.pop("start")}
        lead = round(options.pop("lead") * steps)
        rival = options.pop("rival", None)
        temperature = options.pop("temperature", temperature)
        of_prediction = options.pop("prediction_temperature", temperature)
        self.loss: nn.Module
        if rival == "Barlow Twins":
            self.loss = BarlowTwins()
        elif rival == "debiased":
            self.loss = InfoNCE(temperature=temperature, **{"debias": 0.1, **options})
        elif "num_prototypes" in options:
            of_loss = {"warmup_steps": lead, **options}
            with torch.random.fork_rng(devices=[]):
                self.loss = PGCLLoss(dim, temperature=temperature, **of_loss)
            self.loss.prototypes.temperature = of_prediction
        else:
            self.loss = InfoNCE(temperature=temperature, **options)

    def has_prototypes(self) -> bool:
        return isinstance(self.loss, PGCLLoss)

    def value(self, *views: Tensor) -> Tensor:
        """The loss alone."""
        return self.loss(*views)

    @torch.no_grad()
    def begin(self, step: int, rows: Callable[[], Tensor]) -> None:
        """Before a step, counted from 0; ``rows`` are those of the encoder as it is."""
        if step in self.starts:
            with torch.random.fork_rng(devices=[]):
                self.loss.prototypes.start_from_(rows())

    def forward(self, *views: Tensor) -> tuple[Tensor, Callable[[], dict[str, Any]]]:
        """The loss, and what is seen in it without labels, as numbers."""
        if not isinstance(self.loss, PGCLLoss):
            value = self.loss(*views)
            return value, lambda: {"loss": value.item()}
        terms = self.loss.terms(*views)
        value = terms.loss if self.rows_learn else self.with_rows_at_rest(terms, views)

        def seen() -> dict[str, Any]:
            numbers = diagnostics(terms)
            return {name: numbers[name] for name in SEEN if name in numbers} | {
                "loss": value.item()
            }

        return value, seen

    def with_rows_at_rest(self, terms: Any, views: tuple[Tensor, ...]) -> Tensor:
        """The loss whose consistency teaches the prototypes alone."""
        if not terms.assignments:  # the warm-up
            return terms.loss
        prototypes = self.loss.prototypes.eval()  # this step is counted already
        taught = prototypes(*(view.detach() for view in views))
        prototypes.train()
        consistency = self.loss.consistency(*taught)
        return terms.contrast + self.loss.consistency_weight * consistency
