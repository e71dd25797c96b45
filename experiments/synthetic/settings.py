"""Settings of the synthetic grid: classes, options of data and training, and losses; its runs."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from experiments.common import results
from experiments.common.results import Config, Run
from experiments.common.rows import BOTH, INFO_NCE, PGCL, ROWS

from .clusters import DEFAULTS

CLASSES = (4, 10, 40)
PROTOTYPES = (5, 10, 20, 42, 84)
WEIGHTS = (0.0, 0.3, 1.0, 6.0)  # of consistency
VALUES: dict[str, tuple[float, ...]] = {
    "spread": (0.5, 1.0, 1.5),
    "duplicates": (0, 2, 8),
    "imbalance": (0.0, 1.0, 2.0),
    "batch_size": (32, 128, 512),
    "temperature": (0.1, 0.2, 0.5),
    "epsilon": (0.01, 0.05, 0.25),
    "epochs": (5, 15, 45),
}
# Options that InfoNCE does not have.
PGCL_ONLY = (
    "num_prototypes",
    "consistency_weight",
    "epsilon",
    "freeze_epochs",
    "warm_up_epochs",
    "negative_ranks",
    "soft_clusters",
    "start_from_rows",
    "lead_epochs",
)
AGREEMENT = 0.65  # above it, try more prototypes


def third_of_batch(setting: Config) -> Config:
    """The setting with K=N/3 and lambda=1, in place of the paper's K=10 and lambda=6."""
    batch_size = setting.get("batch_size", DEFAULTS["batch_size"])
    return setting | {"num_prototypes": batch_size // 3, "consistency_weight": 1.0}


# Losses that are compared with InfoNCE in every setting.
COMPARED: dict[str, Callable[[Config], Config]] = {
    "PGCL, K=10, lambda=6": lambda setting: setting,
    "PGCL, K=N/3, lambda=1": third_of_batch,
    f"{BOTH}, K=N/3, lambda=1": lambda setting: third_of_batch(setting) | {"row": BOTH},
}

_PAPER, _THIRD = {"num_prototypes": 10, "consistency_weight": 6.0}, third_of_batch({})
_WEAKER = _PAPER | {"consistency_weight": 1.0}
_WINDOW_OF_10, _WINDOW_OF_42 = {"negative_ranks": (2, 8)}, {"negative_ranks": (8, 34)}
_SOFT, _HEADS = {"soft_clusters": True}, {"num_prototypes": (10, 42, 84)}
_INITIALISED, _WARM_UP = {"start_from_rows": True}, {"lead_epochs": 5}
# Options of `PGCLLoss` that the paper does not have, each below the line that it is added to.
FAMILY: dict[str, Config] = {
    INFO_NCE: {"row": INFO_NCE},
    "K=10, lambda=6": _PAPER,
    "K=10, lambda=6, positions (2, 8)": _PAPER | _WINDOW_OF_10,
    "K=10, lambda=6, soft clusters": _PAPER | _SOFT,
    "K=10, lambda=1": _WEAKER,
    "K=10, lambda=1, positions (2, 8)": _WEAKER | _WINDOW_OF_10,
    "K=42, lambda=1": _THIRD,
    "K=42, lambda=1, positions (8, 34)": _THIRD | _WINDOW_OF_42,
    "K=42, lambda=1, soft clusters": _THIRD | _SOFT,
    "K=42, lambda=1, initialised": _THIRD | _INITIALISED,
    "K=42, lambda=1, initialised, warm-up": _THIRD | _INITIALISED | _WARM_UP,
    "K=(10, 42, 84), lambda=1": _THIRD | _HEADS,
    "K=(10, 42, 84), lambda=1, initialised, warm-up": _THIRD | _HEADS | _INITIALISED | _WARM_UP,
}


def grid() -> Iterable[Config]:
    """Classes by K by lambda, and InfoNCE."""
    for classes in CLASSES:
        yield {"classes": classes, "row": INFO_NCE}
        for k, weight in itertools.product(PROTOTYPES, WEIGHTS):
            options = {"num_prototypes": k, "consistency_weight": weight}
            yield {"classes": classes, "row": PGCL, **options}


def one_at_a_time() -> list[Config]:
    """For each number of classes, every value of every option, the others at their defaults."""
    settings = {
        results.key({**DEFAULTS, **setting}): setting
        for classes, (name, values) in itertools.product(CLASSES, VALUES.items())
        for setting in ({"classes": classes, name: value} for value in values)
    }
    return list(settings.values())


def compared() -> Iterable[Config]:
    for setting in one_at_a_time():
        yield {**setting, "row": INFO_NCE}
        yield from (options_of(setting) for options_of in COMPARED.values())


def ablation() -> Iterable[Config]:
    """The paper's ablation, with K=10, lambda=6 and with K=N/3, lambda=1."""
    for classes, row in itertools.product(CLASSES, ROWS):
        yield {"classes": classes, "row": row}
        if row != INFO_NCE:
            yield third_of_batch({"classes": classes, "row": row})


def schedule() -> Iterable[Config]:
    """Frozen prototypes, and a consistency weight that rises."""
    for classes in CLASSES:
        yield {"classes": classes, "row": INFO_NCE}
        for options in ({}, {"freeze_epochs": 5}, {"warm_up_epochs": 5}, {"warm_up_epochs": 15}):
            yield {"classes": classes, "row": PGCL, **options}


def family() -> Iterable[Config]:
    for classes, options in itertools.product(CLASSES, FAMILY.values()):
        yield {"classes": classes, **options}


def wanted(seeds: int) -> list[Config]:
    """All runs of the grid, those of the first seed first."""
    settings = [*grid(), *ablation(), *compared(), *schedule(), *family()]
    return [{**complete(setting), "seed": seed} for seed in range(seeds) for setting in settings]


def complete(setting: Config) -> Config:
    """The setting with all options. InfoNCE has one record, whatever PGCL's options are."""
    config = {**DEFAULTS, "row": PGCL, **setting}
    if config["row"] == INFO_NCE:
        config |= {name: DEFAULTS[name] for name in PGCL_ONLY}
    return config


class Grid:
    """Runs by their setting, and PGCL's difference from InfoNCE."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = {results.key(run["config"]): run for run in runs}
        self.seeds = sorted({run["config"]["seed"] for run in self.runs.values()})

    def at(self, **setting: Any) -> list[Run]:
        """The runs of a setting, a seed each."""
        config = complete(setting)
        runs = [self.runs.get(results.key({**config, "seed": seed})) for seed in self.seeds]
        return [run for run in runs if run is not None]

    def mean(self, name: str, **setting: Any) -> float:
        return float(np.mean([run[name] for run in self.at(**setting)] or np.nan))

    def gain(self, **setting: Any) -> float:
        """Points above InfoNCE in the same setting, over the seeds that both have."""
        ours, theirs = (
            {run["config"]["seed"]: run["accuracy"] for run in self.at(**(setting | row))}
            for row in ({}, {"row": INFO_NCE})
        )
        both = ours.keys() & theirs.keys()
        return float(np.mean([ours[seed] - theirs[seed] for seed in both] or np.nan))
