"""What type checkers must accept, and what they must not: mypy reads this file, nothing runs it.

Each line with an ignore has a mistake in it; if it were accepted, the ignore would be unused.
"""

from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import assert_type

from pgcl_losses import (
    Assignment,
    Assignments,
    Batch,
    ConsistencyLoss,
    InfoNCE,
    PGCLLoss,
    PGCLTerms,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
)

if TYPE_CHECKING:  # installed as pgcl_losses.adapters
    from adapters.pygcl import DualBranchContrast


def calls(z1: Tensor, z2: Tensor, batch: Batch) -> None:
    assert_type(PGCLLoss(8, (4, 6)).terms(z1, z2), PGCLTerms)
    prototypes = SinkhornPrototypes(8, [4, 6]).start_from_(z1)
    assignments = prototypes(z1, z2)
    assert_type(assignments, Assignments)
    assert_type(assignments[0], Assignment)
    assert_type(ConsistencyLoss()(assignments), Tensor)
    assert_type(ConsistencyLoss()(*assignments), Tensor)
    contrast = PrototypeReweightedNCE(weighting="sample")
    assert_type(contrast(z1, z2, assignments), Tensor)
    assert_type(prototypes(batch), Batch)
    assert_type(contrast(prototypes(batch)), Tensor)
    assert_type(DualBranchContrast(PGCLLoss(8), mode="G2G")(g1=z1, g2=z2), Tensor)


def mistakes(z1: Tensor, pgcl: PGCLLoss) -> None:
    pgcl(z1, None)  # type: ignore[arg-type]  # a view that is no Tensor
    ConsistencyLoss()(z1, z1)  # type: ignore[arg-type]  # embeddings in place of assignments
    PGCLLoss(8, num_prototypes="ten")  # type: ignore[arg-type]  # a number, or one for each head
    PGCLLoss(8, weighting="prototpye")  # type: ignore[arg-type]  # a slip of the pen
    ConsistencyLoss(reduction="average")  # type: ignore[arg-type]  # "mean"
    InfoNCE(engine="block")  # type: ignore[arg-type]  # "chunks"
    pgcl(z1, z1, negatives="all")  # type: ignore[call-arg]  # it is an option
    DualBranchContrast(InfoNCE(), mode="G2")  # type: ignore[arg-type]  # "G2G"
    pgcl.consistency_weight = "6"  # type: ignore[assignment]  # no number
