"""Prototypical graph contrastive learning (PGCL) as loss modules for PyTorch.

:class:`PGCLLoss` is PGCL; by hand it is :class:`SinkhornPrototypes`, whose assignments go into
:class:`PrototypeReweightedNCE` and :class:`ConsistencyLoss`. :class:`InfoNCE` is the contrast
without clusters, as in many published scripts. The equation numbers in docstrings are the numbers
in Lin et al., Prototypical Graph Contrastive Learning, 10.1109/TNNLS.2022.3191086.
"""

from pgcl_losses.clusters.sinkhorn import sinkhorn
from pgcl_losses.consistency import ConsistencyLoss
from pgcl_losses.contrast import PrototypeReweightedNCE
from pgcl_losses.diagnostics import diagnostics
from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.pairs.batch import Assignment, Assignments, Batch, PGCLTerms
from pgcl_losses.pairs.score_mod import Pair
from pgcl_losses.pgcl import PGCLLoss
from pgcl_losses.prototypes import Prototypes, SinkhornPrototypes
from pgcl_losses.recognition import Recognized, recognize
from pgcl_losses.repulsion import Repulsion, repulsion

__version__ = "0.3.0.dev0"

__all__ = [
    "Assignment",
    "Assignments",
    "Batch",
    "ConsistencyLoss",
    "InfoNCE",
    "PGCLLoss",
    "PGCLTerms",
    "Pair",
    "PrototypeReweightedNCE",
    "Prototypes",
    "Recognized",
    "Repulsion",
    "SinkhornPrototypes",
    "diagnostics",
    "recognize",
    "repulsion",
    "sinkhorn",
]
