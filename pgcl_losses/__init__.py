"""Prototypical graph contrastive learning as loss modules for PyTorch."""

from pathlib import Path

from pgcl_losses.batch import AssignedBatch, Assignment, Batch
from pgcl_losses.consistency import ConsistencyLoss
from pgcl_losses.contrast import PrototypeReweightedNCE
from pgcl_losses.diagnostics import diagnostics
from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.pgcl import PGCLLoss, PGCLTerms
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.sinkhorn import sinkhorn

__version__ = "0.2.0"

# The adapters of a checkout lie beside this package; of an installation, in it.
_beside = Path(__file__).parents[1]
if (_beside / "adapters" / "pygcl.py").exists() and (_beside / "pyproject.toml").exists():
    __path__.append(str(_beside))

__all__ = [
    "AssignedBatch",
    "Assignment",
    "Batch",
    "ConsistencyLoss",
    "InfoNCE",
    "PGCLLoss",
    "PGCLTerms",
    "PrototypeReweightedNCE",
    "SinkhornPrototypes",
    "diagnostics",
    "sinkhorn",
]
