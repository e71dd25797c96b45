"""The weighted sums over pairs: one contract (`contract.py`), several ways to compute it."""

from pgcl_losses.engine.contract import (
    Factors,
    Gaussian,
    Pairs,
    PairWeight,
    Table,
    compared_sets,
)
from pgcl_losses.engine.dispatch import (
    ENGINE_CHOICES,
    Engine,
    check_engine,
    choice_facts,
    log_weighted_sums,
)

__all__ = [
    "ENGINE_CHOICES",
    "Engine",
    "Factors",
    "Gaussian",
    "PairWeight",
    "Pairs",
    "Table",
    "check_engine",
    "choice_facts",
    "compared_sets",
    "log_weighted_sums",
]
