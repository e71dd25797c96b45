"""Losses by their options, with the schedule of PGCL's prototypes over a run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pgcl_losses import InfoNCE, PGCLLoss, PGCLTerms, diagnostics

from .rivals import BarlowTwins

Options = dict[str, Any]
KEPT = 4096  # embeddings of the last batches before PGCL begins
SCHEDULE: Options = {"lead": 0.0, "start": (), "one_batch": False, "rows_learn": True}
DIAGNOSTICS = ("agreement", "mean_cosine", "consistency_ratio", "dead_prototypes")


class FirstInfoNCE(nn.Module):
    """InfoNCE for so many training calls, then PGCL.

    Between the two the prototypes are initialised from the last ``kept`` embeddings; with 0 they
    are not. torch's generator is left as it is.
    """

    step: Tensor  # training calls so far
    recent: Tensor  # embeddings [kept, D], the last one at the end, zeros where there are too few

    def __init__(self, pgcl: PGCLLoss, steps: int, kept: int = KEPT) -> None:
        super().__init__()
        self.pgcl, self.steps = pgcl, steps
        self.info_nce = InfoNCE(temperature=pgcl.contrast.temperature)
        self.register_buffer("step", torch.zeros((), dtype=torch.long))
        self.register_buffer("recent", torch.zeros(kept * (steps > 0), pgcl.dim))

    def next_loss(self, views: tuple[Tensor, ...]) -> InfoNCE | PGCLLoss:
        """The loss of this training call, which is counted."""
        step, recent = int(self.step), self.recent
        self.step += 1
        if step < self.steps:
            every = torch.cat([recent, *views]).detach()
            recent.copy_(every[len(every) - len(recent) :])
            return self.info_nce
        if step == self.steps and len(recent) > 0:
            initialise(self.pgcl, recent[recent.any(1)])
        return self.pgcl

    def forward(self, *views: Tensor) -> Tensor:
        unused = 0 * self.pgcl.prototypes.weight.sum()  # DDP expects a gradient of all parameters
        return self.next_loss(views)(*views) + unused


@torch.no_grad()
def initialise(pgcl: PGCLLoss, embeddings: Tensor) -> None:
    """Initialise the prototypes from embeddings, and leave torch's generator as it is."""
    with torch.random.fork_rng(devices=[]):
        pgcl.prototypes.start_from_(embeddings)


class Objective(nn.Module):
    """``views -> loss``, by options of `PGCLLoss`, ``num_prototypes`` among them, and six more.

    lead: fraction of the run that is InfoNCE. At its end prototypes are initialised from the last
        embeddings, if ``start`` is empty.
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
        lead = round(options.pop("lead") * steps)
        rival = options.pop("rival", None)
        temperature = options.pop("temperature", temperature)
        prediction_temperature = options.pop("prediction_temperature", temperature)
        self.loss: nn.Module
        if rival == "Barlow Twins":
            self.loss = BarlowTwins()
        elif rival == "debiased":
            self.loss = InfoNCE(temperature=temperature, **{"debias": 0.1, **options})
        elif "num_prototypes" in options:
            with torch.random.fork_rng(devices=[]):
                pgcl = PGCLLoss(dim, temperature=temperature, **options)
            pgcl.prototypes.temperature = prediction_temperature
            self.loss = FirstInfoNCE(pgcl, lead, 0 if self.starts else KEPT) if lead else pgcl
        else:
            self.loss = InfoNCE(temperature=temperature, **options)

    def pgcl(self) -> PGCLLoss | None:
        """The loss that has prototypes, if one has."""
        return next((each for each in self.modules() if isinstance(each, PGCLLoss)), None)

    @torch.no_grad()
    def begin(self, step: int, embeddings: Callable[[], Tensor]) -> None:
        """Before a step, counted from 0: initialise the prototypes if it is time."""
        if step in self.starts:
            initialise(self.pgcl(), embeddings())

    def forward(self, *views: Tensor) -> tuple[Tensor, Callable[[], dict[str, Any]]]:
        """The loss, and a function that returns it with its diagnostics, as numbers."""
        loss = self.loss
        if isinstance(loss, FirstInfoNCE):
            loss = loss.next_loss(views)
        if not isinstance(loss, PGCLLoss):
            value = loss(*views)
            return value, lambda: {"loss": value.item()}
        terms = loss.terms(*views)
        value = terms.loss
        if not self.trains_encoder:
            value = without_encoder_gradient(loss, terms, views)

        def numbers() -> dict[str, Any]:
            values = diagnostics(terms)
            return {name: values[name] for name in DIAGNOSTICS if name in values} | {
                "loss": value.item()
            }

        return value, numbers


def without_encoder_gradient(pgcl: PGCLLoss, terms: PGCLTerms, views: tuple[Tensor, ...]) -> Tensor:
    """The loss whose consistency trains the prototypes alone."""
    prototypes = pgcl.prototypes.eval()  # this step is counted already
    assignments = prototypes(*(view.detach() for view in views))
    prototypes.train()
    return terms.contrast + pgcl.consistency_weight * pgcl.consistency(*assignments)
