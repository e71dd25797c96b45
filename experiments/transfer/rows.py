"""The rows of the tables: how an encoder may have been pre-trained."""

from typing import Any

from experiments.shelf.rows import ROWS as LOSSES

NONE, MASKING, RECIPE = "no pre-training", "attribute masking", "recipe"
PRETRAINED = (*LOSSES, RECIPE, MASKING)

# The recipe's numbers, all of them. What is pre-trained with others is another run.
LOSS: dict[str, Any] = {"num_prototypes": 42, "consistency_weight": 1.0}
LEAD = 0.5  # share of all steps in which the prototypes learn alone
STARTS = (LEAD,)  # shares of all steps after which the prototypes start from rows: by k-means
START_BATCHES = 8  # whose rows they start from


def leads(row: str) -> bool:
    """Whether its prototypes learn alone at first; then they cannot rest at first, too."""
    return row == RECIPE and LEAD > 0


def beyond_the_paper(row: str, steps: int) -> dict[str, Any]:
    """What a run of so many steps has in its configuration, where the paper's rows have nothing."""
    if row != RECIPE:
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
        "lead_steps": config.get("lead_steps", 0),
    }
    return steps | (config["loss"] if "loss" in config else LOSSES[config["row"]])
