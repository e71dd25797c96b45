"""What the parts of the loss hand each other: one batch, of one process or of many."""

from typing import Literal, NamedTuple

from torch import Tensor

from pgcl_losses.gather import Ranks

Negatives = Literal["all", "cross"]


class Assignment(NamedTuple):
    """How the samples of one view belong to the prototypes."""

    log_probs: Tensor  # [N, K] log p, the prediction, with gradient
    targets: Tensor  # [N, K] q, the balanced assignment, without
    clusters: Tensor  # [N] argmax_k q


class Batch(NamedTuple):
    """The samples of all ranks, view by view; a part adds what it makes, and needs what it reads.

    ``SinkhornPrototypes()(batch)`` returns the batch with all fields; ``ConsistencyLoss()(batch)``
    and ``PrototypeReweightedNCE()(batch)`` return their loss.
    """

    ranks: Ranks
    rows: Tensor | None = None  # [V, N, D] unit rows
    prototypes: Tensor | None = None  # [K, D] unit rows
    log_probs: Tensor | None = None  # [V, N, K]
    targets: Tensor | None = None  # [V, N, K]
    clusters: Tensor | None = None  # [V, N]
    negatives: Negatives | None = None  # for this call, instead of the option of that name

    def need(self, name: str) -> Tensor:
        """One of the fields; an error if no part has made it."""
        value: Tensor | None = getattr(self, name)
        if value is None:
            raise ValueError(f"the batch has no {name}: call SinkhornPrototypes on it first")
        return value

    def own_assignments(self) -> tuple[Assignment, ...]:
        """Those of this rank's samples, one for each view."""
        fields = (self.ranks.own(self.need(name)) for name in Assignment._fields)
        return tuple([Assignment(*of_view) for of_view in zip(*fields, strict=True)])


def check_alone(given: tuple[object, ...]) -> None:
    """A batch has all views in it."""
    if len(given) > 1:
        raise TypeError(
            f"a batch has all views in it: give it alone, but got {len(given)} arguments"
        )
