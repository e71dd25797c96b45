"""The losses that are compared: the rows of the tables, and their options."""

from typing import Any

INFO_NCE, BOTH, PGCL = "InfoNCE (GraphCL)", "InfoNCE + consistency", "PGCL"
RECOMMENDED = "PGCL, recommended"
UNIFORM = {"weighting": "uniform", "exclude_same_cluster": False}
SAMPLE = {"weighting": "sample", "exclude_same_cluster": False}
CONTRAST_ALONE = {"consistency_weight": 0.0}
ROWS: dict[str, dict[str, Any]] = {  # the paper's ablation, as options of `PGCLLoss`
    INFO_NCE: UNIFORM | CONTRAST_ALONE,
    "consistency alone": {"contrast_weight": 0.0},
    "sample-reweighted": SAMPLE | CONTRAST_ALONE,
    "prototype-reweighted": CONTRAST_ALONE,
    BOTH: UNIFORM,
    "sample-reweighted + consistency": SAMPLE,
    PGCL: {},
}
# Other losses against false negatives, or without negatives, as options of `Objective`.
RIVALS: dict[str, dict[str, Any]] = {
    "debiased InfoNCE": {"rival": "debiased"},
    "debiased InfoNCE, hard negatives": {"rival": "debiased", "hardness": 1.0},
    "Barlow Twins": {"rival": "Barlow Twins"},
}
# Nodes of a graph, all in one batch.
NODES = {"Cora": 2708, "CiteSeer": 3327, "blocks": 2000}

FIRST_HELD_OUT_SEED = 5  # of synthetic settings; earlier seeds had been looked at


def is_development(index: int) -> bool:
    """Whether the synthetic setting with this index was used for tuning; else it is held out."""
    return index % 2 == 0


def recipe(batch_size: int, temperature: float) -> dict[str, Any]:
    """InfoNCE, then PGCL: `PGCLLoss.recommended` of version 0.2, as options of `Objective`."""
    return {
        "num_prototypes": max(2, min(1000, batch_size // 3)),
        "consistency_weight": min(1.0, 0.2 / temperature),
        "lead": 0.75,
        "start": (0.75,),
        "prediction_temperature": min(temperature, 0.2),
    }
