"""The rows of the tables: how an encoder may have been pre-trained."""

from typing import Any

from experiments.common.rows import RECOMMENDED, recipe
from experiments.common.rows import ROWS as LOSSES

NONE, MASKING = "no pre-training", "attribute masking"
PRETRAINED = (*LOSSES, RECOMMENDED, MASKING)

# Of the recommended setting, for batches of 256 and the contrast's default temperature, which is
# the prediction's, too. What is pre-trained with other numbers is another run.
_SETTING = recipe(256, 0.2)
LOSS = {name: _SETTING[name] for name in ("num_prototypes", "consistency_weight")}
LEAD: float = _SETTING["lead"]  # fraction of all steps that is a warm-up by InfoNCE
STARTS: tuple[float, ...] = _SETTING["start"]  # shares after which they start from rows
START_BATCHES = 8  # whose rows they start from


def leads(row: str) -> bool:
    """Whether it begins with a warm-up; then its prototypes are not frozen at first."""
    return row == RECOMMENDED and LEAD > 0


def beyond_the_paper(row: str, steps: int) -> dict[str, Any]:
    """What a run of so many steps has in its configuration, where the paper's rows have nothing."""
    if row != RECOMMENDED:
        return {}
    return {
        "loss": LOSS,
        "lead_steps": round(LEAD * steps),
        "start_steps": [round(share * steps) for share in STARTS],
        "start_batches": START_BATCHES,
    }


def options(config: dict[str, Any], batches: int) -> dict[str, Any]:
    """Of `PGCLLoss`, for a run with this configuration and so many batches an epoch."""
    steps = {
        "freeze_steps": config["freeze_epochs"] * batches,
        "warmup_steps": config.get("lead_steps", 0),
    }
    return steps | (config["loss"] if "loss" in config else LOSSES[config["row"]])
