"""What type checkers must accept, and what they must not: mypy reads this file, nothing runs it.

Each line with an ignore has a mistake in it. If the mistake were accepted, mypy would say that the
ignore is unused.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import assert_type

from pgcl_losses import (
    Assignment,
    Batch,
    ConsistencyLoss,
    InfoNCE,
    PGCLLoss,
    PGCLTerms,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
)

if TYPE_CHECKING:
    from adapters.pygcl import (
        InfoNCEContrastLoss,
        PGCLContrastLoss,
    )  # installed as pgcl_losses.adapters


def calls(z1: Tensor, z2: Tensor) -> None:
    assert_type(PGCLLoss(8)(z1, z2), Tensor)
    assert_type(PGCLLoss(8, (4, 6)).terms(z1, z2), PGCLTerms)
    assert_type(InfoNCE()(z1, z2, z1), Tensor)
    prototypes = SinkhornPrototypes(8, [4, 6])
    assignments = prototypes(z1, z2)
    assert_type(assignments, tuple[Assignment, ...])
    assert_type(prototypes.start_from_(z1), SinkhornPrototypes)
    assert_type(ConsistencyLoss()(*assignments), Tensor)
    contrast = PrototypeReweightedNCE(negative_ranks=(2, 8), soft_clusters=True)
    weight = prototypes.weight
    assert_type(contrast(z1, z2, assignments=assignments, prototypes=weight), Tensor)
    assert_type(PGCLContrastLoss(8, (4, 6), queue_size=5).pgcl, PGCLLoss)
    assert_type(InfoNCEContrastLoss(temperature=0.5).info_nce, InfoNCE)


def stages(batch: Batch) -> None:
    assigned = SinkhornPrototypes(8)(batch)
    assert_type(assigned, Batch)
    assert_type(ConsistencyLoss()(assigned), Tensor)
    assert_type(PrototypeReweightedNCE()(assigned), Tensor)
    assert_type(InfoNCE()(batch), Tensor)


def wrong_calls(z1: Tensor) -> None:
    PGCLLoss(8)(z1, None)  # type: ignore[arg-type]  # a view that is no Tensor
    InfoNCE()(z1, [z1])  # type: ignore[arg-type]  # a list in place of a view
    ConsistencyLoss()(z1, z1)  # type: ignore[arg-type]  # embeddings in place of assignments


def wrong_choices() -> None:
    PGCLLoss(8, weighting="prototpye")  # type: ignore[arg-type]  # a slip of the pen
    PGCLLoss(8, negatives="al")  # type: ignore[arg-type]  # "all"
    PGCLLoss(8, reduction="average")  # type: ignore[arg-type]  # "mean"
    PGCLLoss(8, engine="block")  # type: ignore[arg-type]  # "blocks"
    PGCLLoss(8, negative_ranks=2)  # type: ignore[arg-type]  # a pair of numbers
    InfoNCE(negatives="al")  # type: ignore[arg-type]  # "all"
    InfoNCE(reduction="average")  # type: ignore[arg-type]  # "mean"
    InfoNCE(engine="block")  # type: ignore[arg-type]  # "blocks"
    ConsistencyLoss(reduction="average")  # type: ignore[arg-type]  # "mean"
    PrototypeReweightedNCE(weighting="prototpye")  # type: ignore[arg-type]  # a slip of the pen
    PrototypeReweightedNCE(negatives="al")  # type: ignore[arg-type]  # "all"
    PrototypeReweightedNCE(reduction="average")  # type: ignore[arg-type]  # "mean"
    PrototypeReweightedNCE(engine="block")  # type: ignore[arg-type]  # "blocks"
    PGCLContrastLoss(8, weighting="prototpye")  # type: ignore[arg-type]  # a slip of the pen


def wrong_names(z1: Tensor) -> None:
    PGCLLoss(8, wieghting="sample")  # type: ignore[call-arg]  # the name of an option
    PGCLLoss(8)(z1, z1, negatives="all")  # type: ignore[call-arg]  # it is an option
    InfoNCE(weighting="uniform")  # type: ignore[call-arg]  # it has none
    PGCLContrastLoss(8, wieghting="sample")  # type: ignore[call-arg]  # the name of an option
    InfoNCEContrastLoss(tau=0.2)  # type: ignore[call-arg]  # temperature


def wrong_assignments(pgcl: PGCLLoss, contrast: PrototypeReweightedNCE, nce: InfoNCE) -> None:
    contrast.weighting = "prototpye"  # type: ignore[assignment]  # a slip of the pen
    nce.negatives = "al"  # type: ignore[assignment]  # "all"
    pgcl.consistency_weight = "6"  # type: ignore[assignment]  # no number
