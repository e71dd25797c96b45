"""The losses compared on nodes: InfoNCE, the paper's PGCL, and changes of one option each."""

from typing import Any

from experiments.common.losses import Options
from experiments.common.rows import INFO_NCE, PGCL, RECOMMENDED, RIVALS, ROWS, recipe

RAW, UNTRAINED = "raw features", "untrained GCN"

_PAPER: Options = {"num_prototypes": 10, "consistency_weight": 6.0}
_MORE: Options = {"num_prototypes": 50, "consistency_weight": 1.0}
_LATER: Options = _MORE | {"lead": 0.5, "start": (0.0, 0.5)}
_UNIFORM: Options = {"weighting": "uniform"}
# From the paper's options towards the recommended ones, then changes of one option each.
CAUSES: dict[str, Options] = {
    "lambda=0.6": _PAPER | {"consistency_weight": 0.6},
    "K=50, lambda=1": _MORE,
    "K=50, lambda=1, initialised": _MORE | {"start": (0.0,)},
    "K=50, lambda=1, warm-up": _MORE | {"lead": 0.5},
    "K=50, lambda=1, initialised, warm-up (R)": _LATER,
    "R, K=7": _LATER | {"num_prototypes": 7},
    "R, K=200": _LATER | {"num_prototypes": 200},
    "R, lambda=0.3": _LATER | {"consistency_weight": 0.3},
    "R, lambda=3": _LATER | {"consistency_weight": 3.0},
    "R, consistency without gradient to the encoder": _LATER | {"rows_learn": False},
    "R, uniform weights": _LATER | _UNIFORM,
    "R, uniform weights, no exclusion": _LATER | _UNIFORM | {"exclude_same_cluster": False},
    "R, soft clusters": _LATER | {"soft_clusters": True},
}
ABLATION: dict[str, Options] = {
    row: {} if row == INFO_NCE else _PAPER | options for row, options in ROWS.items()
}
FIXED = ABLATION | CAUSES | RIVALS
# Changes of the recommended options, which depend on the temperature and the number of nodes.
_FEW: Options = {"num_prototypes": 50}
CHANGES = {
    "recommended, but K=300": {"num_prototypes": 300},
    "recommended, but K=50": _FEW,
    "recommended, but K=50, lambda=1": _FEW | {"consistency_weight": 1.0},
    "recommended, but K=50, lambda=0": _FEW | {"consistency_weight": 0.0},
    "recommended, but K=50, lambda=1, prediction at tau": _FEW
    | {"consistency_weight": 1.0, "prediction_temperature": None},
}
TRAINED = (*ABLATION, RECOMMENDED, *CHANGES, *CAUSES, *RIVALS)
ALL = (RAW, UNTRAINED, *TRAINED)
FEW = (RAW, UNTRAINED, INFO_NCE, PGCL, RECOMMENDED)


def with_loss(row: str, nodes: int, temperature: float) -> dict[str, Any]:
    """A row in a configuration: its options, as the name of the row may change."""
    if row in (RAW, UNTRAINED):
        return {"row": row}
    if row in FIXED:
        return {"row": "loss", "loss": FIXED[row]}
    loss = recipe(nodes, temperature) | CHANGES.get(row, {})
    if loss["prediction_temperature"] is None:
        loss["prediction_temperature"] = temperature
    return {"row": "loss", "loss": loss}
