"""What is compared on nodes: no training, InfoNCE, the paper's PGCL, its changes one at a time."""

from typing import Any

from experiments.shelf.losses import Options
from experiments.shelf.rows import INFO_NCE, PGCL, ROWS

RAW, UNTRAINED = "raw features", "untrained GCN"

_PAPER: Options = {"num_prototypes": 10, "consistency_weight": 6.0}
_MORE: Options = {"num_prototypes": 50, "consistency_weight": 1.0}
_START: Options = {"start": (0.0,)}
_LATER: Options = _MORE | {"lead": 0.5, "start": (0.0, 0.5)}
_NO_EXCLUSION: Options = {"weighting": "uniform", "exclude_same_cluster": False}
# From the paper's setting to one that does no harm, a change at a time; then changes of that.
CAUSES: dict[str, Options] = {
    f"{PGCL}, lambda=0.6": _PAPER | {"consistency_weight": 0.6},
    f"{PGCL}, K=50, lambda=1": _MORE,
    "... from rows": _MORE | _START,
    "... lead": _MORE | {"lead": 0.5},
    "... from rows, lead": _MORE | _START | {"lead": 0.5},
    "... from rows, lead, from rows again": _LATER,
    "    K=7": _LATER | {"num_prototypes": 7},
    "    K=200": _LATER | {"num_prototypes": 200},
    "    lambda=0.3": _LATER | {"consistency_weight": 0.3},
    "    lambda=3": _LATER | {"consistency_weight": 3.0},
    "    the consistency teaches prototypes alone": _LATER | {"rows_learn": False},
    "    uniform weights": _LATER | {"weighting": "uniform"},
    "    uniform weights, no exclusion": _LATER | _NO_EXCLUSION,
    "    soft clusters": _LATER | {"soft_clusters": True},
}
RIVALS: dict[str, Options] = {
    "debiased InfoNCE": {"rival": "debiased"},
    "debiased InfoNCE, hard negatives": {"rival": "debiased", "hardness": 1.0},
    "Barlow Twins": {"rival": "Barlow Twins"},
}
ABLATION: dict[str, Options] = {
    row: {} if row == INFO_NCE else _PAPER | options for row, options in ROWS.items()
}
TRAINED = ABLATION | CAUSES | RIVALS
ALL = (RAW, UNTRAINED, *TRAINED)
FEW = (RAW, UNTRAINED, INFO_NCE, PGCL)


def with_loss(row: str) -> dict[str, Any]:
    """What a configuration says of a row: the options themselves, as a row's name may change."""
    return {"row": row} if row in (RAW, UNTRAINED) else {"row": "loss", "loss": TRAINED[row]}
