"""Tables of clusters and classes, from the records beside this file."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from docs.programs.tables import markdown
from experiments.common.results import Run, read
from experiments.common.tables import (
    CLUSTERS,
    RESULTS,
    difference,
    listed,
    paired,
    paragraph,
    sourced,
    spread,
)

from . import study
from .study import BY_KMEANS, BY_PROTOTYPES, CLASSES, SETS

INFO_NCE, UNTRAINED = "InfoNCE, k-means", "untrained, k-means"
AGAINST = (BY_KMEANS, INFO_NCE), (BY_PROTOTYPES, BY_KMEANS)
Seeds = dict[int, float]


class Results:
    """The held-out halves of all sets, in the settings that the record chooses."""

    def __init__(self, runs: Iterable[Run]) -> None:
        runs = list(runs)
        self.common = study.settings(runs, study.CHOOSE_ON)
        self.runs = [run for run in runs if run["config"]["seed"] in study.SEEDS]
        self.by_set = {name: study.of_set(self.runs, name, study.SEEDS) for name in SETS}

    def of(self, name: str, label: str, half: str = "held_out", measure: str = "nmi") -> Seeds:
        """A measure by seed: with as many clusters as classes, or "chosen" by the silhouette."""
        setting = self.common[label]
        config = study.config_of(name, label, setting)
        return study.values(self.by_set[name], config, setting.space, half, measure)

    def numbers(self, name: str) -> list[float]:
        """How many clusters the silhouette chooses, for each seed."""
        return [*self.of(name, BY_KMEANS, "chosen", "clusters").values()]


def differences(results: Results) -> str:
    """NMI of some methods minus that of others, in the common setting."""
    lines = [
        [name, *(difference(results.of(name, a), results.of(name, b)) for a, b in AGAINST)]
        for name in SETS
    ]
    return markdown(["points of NMI", *(f"{a} minus {b}" for a, b in AGAINST)], lines)


def scores(results: Results) -> str:
    """On how many sets each method is above another one, minus those where it is below."""
    score = dict.fromkeys(results.common, 0)
    for name, (a, b) in itertools.product(SETS, itertools.permutations(score, 2)):
        delta = paired(results.of(name, a), results.of(name, b))
        if delta is not None:
            score[a] += (delta.low > 0) - (delta.high < 0)
    ordered = sorted(score, key=lambda label: -score[label])
    named = listed([f"{label} {score[label]:+d}" for label in ordered])
    return paragraph(
        "By the plan, a method scores +1 for each set and each other method that it is "
        f"significantly above, and -1 where it is below: {named}."
    )


def reliability(results: Results) -> str:
    """What the script does: its NMI beside no training, and how many clusters it chooses."""
    lines = []
    for name in SETS:
        numbers = results.numbers(name)
        nmi = (spread(results.of(name, label).values()) for label in (BY_KMEANS, UNTRAINED))
        of_numbers = f"{np.median(numbers):g} ({min(numbers)} to {max(numbers)})"
        lines.append([name, CLASSES[name], *nmi, of_numbers])
    head = "NMI, as the script", "NMI, untrained", "clusters by silhouette: median (range)"
    return markdown(["set", "classes", *head], lines)


def pages() -> dict[Path, dict[str, str]]:
    """Tables by page and marker."""
    runs = list(read(study.RECORD).values())
    results = Results(runs)
    return {
        CLUSTERS: {"clusters": sourced(reliability(results), results.runs)},
        RESULTS: {
            "clusters": sourced(differences(results), results.runs),
            "scores of clusters": scores(results),
        },
    }
