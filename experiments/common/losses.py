"""Losses by their options, with the schedule of PGCL's prototypes over a run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pgcl_losses import InfoNCE, PGCLLoss, diagnostics

from .rivals import BarlowTwins

Options = dict[str, Any]
SCHEDULE: Options = {"lead": 0.0, "start": (), "one_batch": False, "rows_learn": True}
DIAGNOSTICS = ("agreement", "mean_cosine", "consistency_ratio", "dead_prototypes")


class Objective(nn.Module):
    """``views -> loss``, by options of `PGCLLoss`, ``num_prototypes`` among them, and six more.

    lead: fraction of the run that is a warm-up by InfoNCE. At its end prototypes are initialised
        from embeddings. (In version 0.2 they learned in it, and were not initialised.)
    start: fractions of the run after which the prototypes are initialised by `begin`.
    one_batch: whether `begin` gets the embeddings of one batch, or of as many as there are.
    temperature: of this loss, in place of the argument.
    prediction_temperature: of the consistency; by default the contrast's.
    rows_learn: False keeps the consistency's gradient from the encoder.

    ``{"rival": name, ...}``: another loss, with its own options. No options: InfoNCE.

    torch's generator is left as it is: all losses of one seed get the same batches and views.
    """

    def __init__(self, options: Options, dim: int, temperature: float, steps: int) -> None:
        super().__init__()
        options = {**SCHEDULE, **options}
        self.trains_encoder = options.pop("rows_learn")
        self.one_batch = options.pop("one_batch")
        self.starts = {round(fraction * steps) for fraction in options.pop("start")}
        warmup_steps = round(options.pop("lead") * steps)
        rival = options.pop("rival", None)
        temperature = options.pop("temperature", temperature)
        prediction_temperature = options.pop("prediction_temperature", temperature)
        self.loss: nn.Module
        if rival == "Barlow Twins":
            self.loss = BarlowTwins()
        elif rival == "debiased":
            self.loss = InfoNCE(temperature=temperature, **{"debias": 0.1, **options})
        elif "num_prototypes" in options:
            options = {"warmup_steps": warmup_steps, **options}
            with torch.random.fork_rng(devices=[]):
                self.loss = PGCLLoss(dim, temperature=temperature, **options)
            self.loss.prototypes.temperature = prediction_temperature
        else:
            self.loss = InfoNCE(temperature=temperature, **options)

    def has_prototypes(self) -> bool:
        return isinstance(self.loss, PGCLLoss)

    @torch.no_grad()
    def begin(self, step: int, embeddings: Callable[[], Tensor]) -> None:
        """Before a step, counted from 0: initialise the prototypes if it is time."""
        if step in self.starts:
            with torch.random.fork_rng(devices=[]):
                self.loss.prototypes.start_from_(embeddings())

    def forward(self, *views: Tensor) -> tuple[Tensor, Callable[[], dict[str, Any]]]:
        """The loss, and a function that returns it with its diagnostics, as numbers."""
        if not isinstance(self.loss, PGCLLoss):
            value = self.loss(*views)
            return value, lambda: {"loss": value.item()}
        terms = self.loss.terms(*views)
        value = terms.loss if self.trains_encoder else self.without_encoder_gradient(terms, views)

        def numbers() -> dict[str, Any]:
            values = diagnostics(terms)
            return {name: values[name] for name in DIAGNOSTICS if name in values} | {
                "loss": value.item()
            }

        return value, numbers

    def without_encoder_gradient(self, terms: Any, views: tuple[Tensor, ...]) -> Tensor:
        """The loss whose consistency trains the prototypes alone."""
        if not terms.assignments:  # the warm-up
            return terms.loss
        prototypes = self.loss.prototypes.eval()  # this step is counted already
        batch = prototypes(*(view.detach() for view in views))
        prototypes.train()
        consistency = self.loss.consistency(*batch)
        return terms.contrast + self.loss.consistency_weight * consistency
