"""The rule that chooses a form of PGCL, and what is run after it."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from experiments.common import results
from experiments.common.results import Config, Run

from . import study
from .study import CHOOSE_ON, CHOOSING_SEEDS, FEW, FEWEST, SEEDS

LONGER, IN_DEPTH = 4, ("digits", "MSRC_21")
FRACTIONS = 0.25, 0.75
PARTS = (
    "choose",
    "controls",
    "confirm",
    "longer",
    "encoder",
    "parts",
    "fractions",
    "track",
    "tune",
    "best",
)


def runs_of(name: str, *folders: Path) -> list[Run]:
    """The runs of a set: the committed ones, and those in other folders."""
    files = [folder / f"{name}.jsonl" for folder in (study.RECORDS, *folders)]
    return [run for file in files for run in results.read(file).values()]


def means(runs: Iterable[Run], configs: Sequence[Config]) -> list[float]:
    """One-shot accuracy of each configuration on the development half, by the choosing seeds."""
    runs = [run for run in runs if run["config"]["seed"] in CHOOSING_SEEDS]
    found = [[*study.values(runs, c, "development", "labels_1").values()] for c in configs]
    if missing := [c for c, of in zip(configs, found, strict=True) if not of]:
        raise ValueError(f"the record has no runs that choose settings of {missing[0]}")
    return [float(np.mean(of)) for of in found]


def distances(*folders: Path) -> np.ndarray:
    """``[sets, candidates]``: how many points a candidate is below the best one of a set."""
    by_set = np.array([means(runs_of(n, *folders), study.candidates(n)) for n in CHOOSE_ON])
    return by_set.max(1, keepdims=True) - by_set


def rule(distances: np.ndarray) -> int:
    """The position of the first of the tied candidates ``[sets, C]``: the simplest comes first."""
    return results.tied(dict(enumerate(distances.T.tolist())))[0]


def chosen(name: str, *folders: Path, times: int = 1) -> Config:
    """The form of PGCL that the rule chooses among those with prototypes, for a set."""
    position = rule(distances(*folders)[:, 1:])  # the first candidate is InfoNCE
    return study.forms(name)[position] | {"epochs": times * study.SETS[name].epochs}


def best(name: str, *folders: Path) -> dict[str, Config]:
    """The best of nine settings of each loss, by the choosing seeds on the development half."""
    runs, found = runs_of(name, *folders), {}
    for row, configs in study.settings(name, chosen(name, *folders)).items():
        found[row] = configs[int(np.argmax(means(runs, configs)))]
    return found


def jobs(part: str, name: str, folder: Path) -> tuple[list[Config], Sequence[int]]:
    """The configurations of a part of the study on a set, and their seeds; empty if it has none."""
    chooses, in_depth = name in CHOOSE_ON, name in IN_DEPTH
    if part == "choose":
        return (study.candidates(name) if chooses else []), CHOOSING_SEEDS
    ours = chosen(name, folder)
    if part == "confirm":
        today = [study.pgcl(name, 10)] if chooses or name in study.NEW else []
        return [study.info_nce(name), ours, *today], SEEDS
    if part == "controls":
        return ([*study.schedules(name), ours | {"part": study.PLACEBO}] if chooses else []), FEW
    if part == "longer":
        configs = [study.info_nce(name, LONGER), chosen(name, folder, times=LONGER)]
        return (configs if in_depth else []), FEW
    if part == "encoder":
        rows = study.info_nce(name), study.pgcl(name, 10), ours
        return ([row | {"encoder": study.SECOND} for row in rows] if chooses else []), FEWEST
    if part == "parts":
        return ([ours | {"part": of} for of in study.PARTS] if chooses else []), FEWEST
    if part == "fractions":
        return ([ours | {"fraction": of} for of in FRACTIONS] if chooses else []), FEWEST
    if part == "tune":
        both = study.settings(name, ours).values()
        return ([c for of in both for c in of] if chooses else []), CHOOSING_SEEDS
    if part == "best":
        return ([*best(name, folder).values()] if chooses else []), SEEDS
    configs = [study.info_nce(name), study.pgcl(name, 10), ours]
    return ([c | {"track": True} for c in configs] if in_depth else []), FEWEST
