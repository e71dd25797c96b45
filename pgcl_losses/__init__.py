"""Prototypical graph contrastive learning as loss modules for PyTorch.

Equations are those of Lin et al., Prototypical Graph Contrastive Learning,
10.1109/TNNLS.2022.3191086.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from pgcl_losses.batch import Assignment, Batch, PGCLTerms
from pgcl_losses.consistency import ConsistencyLoss
from pgcl_losses.contrast import PrototypeReweightedNCE
from pgcl_losses.diagnostics import diagnostics
from pgcl_losses.info_nce import InfoNCE
from pgcl_losses.pgcl import PGCLLoss
from pgcl_losses.prototypes import SinkhornPrototypes
from pgcl_losses.sinkhorn import sinkhorn

__version__ = "0.3.0.dev0"

# The adapters of a checkout lie beside this package; of an installation, in it.
_adapters = Path(__file__).parents[1] / "adapters" / "__init__.py"
if not (Path(__file__).parent / "adapters").exists() and _adapters.exists():
    _spec = spec_from_file_location("pgcl_losses.adapters", _adapters)
    assert _spec is not None
    assert _spec.loader is not None
    adapters = sys.modules["pgcl_losses.adapters"] = module_from_spec(_spec)
    _spec.loader.exec_module(adapters)

__all__ = [
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
