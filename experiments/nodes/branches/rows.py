"""The losses compared: options of `Objective`, and when each branches off from InfoNCE."""

from typing import Any, NamedTuple

from experiments.common.losses import Options

INFO_NCE, STOPPED, UNTRAINED = "InfoNCE", "InfoNCE, stopped at three quarters", "untrained"
CANDIDATE = "K=50, lambda 0, from one half on, initialised by itself"
# Fixed in experiments/plan.md by the development record, before the held-out runs.
LENGTH = 400
TEMPERATURE = {INFO_NCE: 2.0, CANDIDATE: 1.2}
SCHEDULE = ("again", "by_itself", "fixed")  # options of a row that are not those of its loss


class Row(NamedTuple):
    """``again``: k-means of all embeddings, every so many steps. ``by_itself``: the prototypes are
    initialised from embeddings of the last batches, not of all nodes. ``fixed``: they are not in
    the optimizer, whose weight decay moved prototypes without a gradient.
    """

    options: Options
    begins: float = 0.75  # the fraction of the run in which it is InfoNCE


def pgcl(num_prototypes: int | str | tuple[int, ...], weight: float, **options: Any) -> Options:
    fixed = {"fixed": True} if weight == 0 else {}  # they have no gradient
    return {"num_prototypes": num_prototypes, "consistency_weight": weight, **fixed, **options}


_UNIFORM = {"weighting": "uniform"}
_NO_EXCLUSION = {"exclude_same_cluster": False}
_AT_LEAST = {"prediction_temperature": 0.2}

ROWS: dict[str, Row] = {
    UNTRAINED: Row({}, 1.0),
    INFO_NCE: Row({}, 1.0),
    STOPPED: Row({}),
    "recommended in version 0.2: K=N/3, lambda 0.5": Row(pgcl("N/3", 0.5, **_AT_LEAST)),
    "K=20, lambda 0": Row(pgcl(20, 0.0)),
    "K=50, lambda 0": Row(pgcl(50, 0.0)),
    "K=50, lambda 0, initialised by itself": Row(pgcl(50, 0.0, by_itself=True)),
    "K=100, lambda 0": Row(pgcl(100, 0.0)),
    "K=200, lambda 0": Row(pgcl(200, 0.0)),
    "K=N/3, lambda 0": Row(pgcl("N/3", 0.0)),
    "K=50, lambda 0, k-means every 25 steps": Row(pgcl(50, 0.0, again=25)),
    "K=50, lambda 0, weights without exclusion": Row(pgcl(50, 0.0, **_NO_EXCLUSION)),
    "K=50, lambda 0, exclusion without weights": Row(pgcl(50, 0.0, **_UNIFORM)),
    "K=50, lambda 0, soft clusters": Row(pgcl(50, 0.0, soft_clusters=True)),
    "K=50, lambda 0.1": Row(pgcl(50, 0.1, **_AT_LEAST)),
    "K=(20, 50, 200), lambda 0": Row(pgcl((20, 50, 200), 0.0)),
    "K=50, lambda 0, from one half on": Row(pgcl(50, 0.0), 0.5),
    CANDIDATE: Row(pgcl(50, 0.0, by_itself=True), 0.5),
    "K=50, lambda 0, from one quarter on": Row(pgcl(50, 0.0), 0.25),
    "K=50, lambda 0, from one half on, k-means every 25 steps": Row(pgcl(50, 0.0, again=25), 0.5),
    "K=20, lambda 0, from one half on": Row(pgcl(20, 0.0), 0.5),
    "weights by sample, from one half on": Row(
        pgcl(2, 0.0, weighting="sample", **_NO_EXCLUSION), 0.5
    ),
    "tau 0.6, from one half on": Row({"temperature": 0.6}, 0.5),
    "tau 0.8, from one half on": Row({"temperature": 0.8}, 0.5),
    "InfoNCE + consistency, K=50, lambda 0.5": Row(
        pgcl(50, 0.5, **_UNIFORM, **_NO_EXCLUSION, **_AT_LEAST)
    ),
    "debiased 0.05, last quarter": Row({"rival": "debiased", "debias": 0.05}),
    "debiased 0.1, last quarter": Row({"rival": "debiased", "debias": 0.1}),
    "hard 0.2, last quarter": Row({"hardness": 0.2}),
    "hard 0.5, last quarter": Row({"hardness": 0.5}),
    "InfoNCE, tau 0.6": Row({"temperature": 0.6}, 0.0),
    "InfoNCE, tau 0.8": Row({"temperature": 0.8}, 0.0),
    "PGCL of the paper": Row(pgcl(10, 6.0), 0.0),
    "debiased 0.1": Row({"rival": "debiased", "debias": 0.1}, 0.0),
    "hard 0.5": Row({"hardness": 0.5}, 0.0),
    "Barlow Twins": Row({"rival": "Barlow Twins"}, 0.0),
}
