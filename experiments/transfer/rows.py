"""The rows of the tables: how an encoder may have been pre-trained."""

from typing import Any

from experiments.common.rows import RECOMMENDED, recipe
from experiments.common.rows import ROWS as LOSSES

NONE, MASKING = "no pre-training", "attribute masking"
PRETRAINED = (*LOSSES, RECOMMENDED, MASKING)

# Of InfoNCE, then PGCL, for batches of 256 and the default temperature of contrast and prediction.
# Other numbers are another run.
_RECIPE = recipe(256, 0.2)
LOSS = {name: _RECIPE[name] for name in ("num_prototypes", "consistency_weight")}
LEAD: float = _RECIPE["lead"]  # fraction of the steps that are InfoNCE
STARTS: tuple[float, ...] = _RECIPE["start"]  # fractions after which prototypes are initialised
START_BATCHES = 8  # whose embeddings initialise them


def is_first_info_nce(row: str) -> bool:
    """Whether it begins with InfoNCE, and not with frozen prototypes."""
    return row == RECOMMENDED and LEAD > 0


def recommended_options(row: str, steps: int) -> dict[str, Any]:
    """The options that a run of so many steps has beside those of the paper's rows."""
    if row != RECOMMENDED:
        return {}
    return {
        "loss": LOSS,
        "lead_steps": round(LEAD * steps),
        "start_steps": [round(fraction * steps) for fraction in STARTS],
        "start_batches": START_BATCHES,
    }


def options(config: dict[str, Any], batches: int) -> dict[str, Any]:
    """Options of `PGCLLoss`, for a run with so many batches an epoch."""
    frozen = {"freeze_steps": config["freeze_epochs"] * batches}
    return frozen | (config["loss"] if "loss" in config else LOSSES[config["row"]])
