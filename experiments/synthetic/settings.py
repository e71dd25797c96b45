"""Where the map is drawn: classes, knobs and settings; and the runs that are there."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from experiments.common import results
from experiments.common.results import Config, Run
from experiments.common.rows import BOTH, INFO_NCE, PGCL, ROWS

from .clusters import KNOBS

CLASSES = (4, 10, 40)
PROTOTYPES = (5, 10, 20, 42, 84)
WEIGHTS = (0.0, 0.3, 1.0, 6.0)  # of consistency
KNOB_VALUES: dict[str, tuple[float, ...]] = {
    "spread": (0.5, 1.0, 1.5),
    "duplicates": (0, 2, 8),
    "imbalance": (0.0, 1.0, 2.0),
    "batch_size": (32, 128, 512),
    "temperature": (0.1, 0.2, 0.5),
    "epsilon": (0.01, 0.05, 0.25),
    "epochs": (5, 15, 45),
}
# Knobs that InfoNCE does not have.
NOT_INFO_NCE = (
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
AGREEMENT = 0.65  # above it the map advises more prototypes


def advised(place: Config) -> Config:
    """The place with what the map recommends, beside the paper's K=10 and lambda=6."""
    batch_size = place.get("batch_size", KNOBS["batch_size"])
    return place | {"num_prototypes": batch_size // 3, "consistency_weight": 1.0}


# What is compared with InfoNCE over the knobs: the place, as each setting has it.
COMPARED: dict[str, Callable[[Config], Config]] = {
    "PGCL, K=10, lambda=6": lambda place: place,
    "PGCL, K=N/3, lambda=1": advised,
    f"{BOTH}, K=N/3, lambda=1": lambda place: advised(place) | {"row": BOTH},
}

_PAPER, _RECIPE = {"num_prototypes": 10, "consistency_weight": 6.0}, advised({})
_WEAKER = _PAPER | {"consistency_weight": 1.0}
_PUBLISHED, _SAME_SHARE = {"negative_ranks": (2, 8)}, {"negative_ranks": (8, 34)}  # of 10, of 42
_SOFT, _HEADS = {"soft_clusters": True}, {"num_prototypes": (10, 42, 84)}
_FROM_ROWS, _LEAD = {"start_from_rows": True}, {"lead_epochs": 5}
# What the loss has beside the paper's text, each beside the setting that it is added to.
FAMILY: dict[str, Config] = {
    INFO_NCE: {"row": INFO_NCE},
    "K=10, lambda=6": _PAPER,
    "K=10, lambda=6, ranks (2, 8)": _PAPER | _PUBLISHED,
    "K=10, lambda=6, soft clusters": _PAPER | _SOFT,
    "K=10, lambda=1": _WEAKER,
    "K=10, lambda=1, ranks (2, 8)": _WEAKER | _PUBLISHED,
    "K=42, lambda=1": _RECIPE,
    "K=42, lambda=1, ranks (8, 34)": _RECIPE | _SAME_SHARE,
    "K=42, lambda=1, soft clusters": _RECIPE | _SOFT,
    "K=42, lambda=1, initialised": _RECIPE | _FROM_ROWS,
    "K=42, lambda=1, initialised, warm-up": _RECIPE | _FROM_ROWS | _LEAD,
    "K=(10, 42, 84), lambda=1": _RECIPE | _HEADS,
    "K=(10, 42, 84), lambda=1, initialised, warm-up": _RECIPE | _HEADS | _FROM_ROWS | _LEAD,
}


def grid() -> Iterable[Config]:
    """Classes by K by lambda, and InfoNCE."""
    for classes in CLASSES:
        yield {"classes": classes, "row": INFO_NCE}
        for k, weight in itertools.product(PROTOTYPES, WEIGHTS):
            given = {"num_prototypes": k, "consistency_weight": weight}
            yield {"classes": classes, "row": PGCL, **given}


def knob_places() -> list[Config]:
    """Each number of classes with one knob after the other turned, each place once."""
    places = {
        results.key({**KNOBS, **place}): place
        for classes, (knob, values) in itertools.product(CLASSES, KNOB_VALUES.items())
        for place in ({"classes": classes, knob: value} for value in values)
    }
    return list(places.values())


def knobs() -> Iterable[Config]:
    """The knobs, with the paper's setting and the recipe's."""
    for place in knob_places():
        yield {**place, "row": INFO_NCE}
        yield from (setting(place) for setting in COMPARED.values())


def parts() -> Iterable[Config]:
    """Every row of the ablation, in both settings."""
    for classes, row in itertools.product(CLASSES, ROWS):
        yield {"classes": classes, "row": row}
        if row != INFO_NCE:
            yield advised({"classes": classes, "row": row})


def schedule() -> Iterable[Config]:
    """Freezing and warm-up, in the paper's setting."""
    for classes in CLASSES:
        yield {"classes": classes, "row": INFO_NCE}
        for given in ({}, {"freeze_epochs": 5}, {"warm_up_epochs": 5}, {"warm_up_epochs": 15}):
            yield {"classes": classes, "row": PGCL, **given}


def family() -> Iterable[Config]:
    """The family's options, in the paper's setting, the recipe's and between them."""
    for classes, place in itertools.product(CLASSES, FAMILY.values()):
        yield {"classes": classes, **place}


def wanted(seeds: int) -> list[Config]:
    """All runs of the map, those of the first seed first."""
    places = [*grid(), *parts(), *knobs(), *schedule(), *family()]
    return [{**whole(place), "seed": seed} for seed in range(seeds) for place in places]


def whole(place: Config) -> Config:
    """The place with the knobs that it does not name."""
    config = {**KNOBS, "row": PGCL, **place}
    if config["row"] == INFO_NCE:
        config |= {name: KNOBS[name] for name in NOT_INFO_NCE}
    return config


class Map:
    """Runs by where they are, and what PGCL gains there."""

    def __init__(self, runs: Iterable[Run]) -> None:
        self.runs = {results.key(run["config"]): run for run in runs}
        self.seeds = sorted({run["config"]["seed"] for run in self.runs.values()})

    def at(self, **config: Any) -> list[Run]:
        """The runs of a place, a seed each."""
        place = whole(config)
        runs = [self.runs.get(results.key({**place, "seed": seed})) for seed in self.seeds]
        return [run for run in runs if run is not None]

    def mean(self, name: str, **config: Any) -> float:
        return float(np.mean([run[name] for run in self.at(**config)] or np.nan))

    def gain(self, **config: Any) -> float:
        """Points above InfoNCE at the same place, over the seeds that both have."""
        ours, theirs = (
            {run["config"]["seed"]: run["accuracy"] for run in self.at(**(config | row))}
            for row in ({}, {"row": INFO_NCE})
        )
        both = ours.keys() & theirs.keys()
        return float(np.mean([ours[seed] - theirs[seed] for seed in both] or np.nan))
