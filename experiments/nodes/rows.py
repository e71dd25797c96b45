"""What is compared on nodes: no training, InfoNCE, the paper's PGCL, its changes one at a time."""

from typing import Any

from experiments.common.losses import Options
from experiments.common.rows import INFO_NCE, PGCL, RECOMMENDED, RIVALS, ROWS, recipe

RAW, UNTRAINED = "raw features", "untrained GCN"


_PAPER: Options = {"num_prototypes": 10, "consistency_weight": 6.0}
_MORE: Options = {"num_prototypes": 50, "consistency_weight": 1.0}
_LATER: Options = _MORE | {"lead": 0.5, "start": (0.0, 0.5)}
_UNIFORM: Options = {"weighting": "uniform"}
# From the paper's setting towards the recommended one, and then changes of one thing each.
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
# Changes of the recommended setting, which goes by the temperature and by the number of nodes.
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
    """What a configuration says of a row: the options themselves, as a row's name may change."""
    if row in (RAW, UNTRAINED):
        return {"row": row}
    if row in FIXED:
        return {"row": "loss", "loss": FIXED[row]}
    loss = recipe(nodes, temperature) | CHANGES.get(row, {})
    if loss["prediction_temperature"] is None:
        loss["prediction_temperature"] = temperature
    return {"row": "loss", "loss": loss}
