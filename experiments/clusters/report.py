"""Tables of clusters and classes, from the records beside this file."""

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from docs.tables import markdown
from experiments.common.results import Run, matching, read
from experiments.common.tables import CLUSTERS, RESULTS, difference, paired, sourced, spread

from . import study
from .study import BY_KMEANS, BY_PROTOTYPES, CLASSES, METHODS, SETS, Setting

ROUNDED = study.RECORD.with_name("rounding.jsonl")
INFO_NCE, UNTRAINED = "InfoNCE, k-means", "untrained, k-means"
TRAINED = [label for label in METHODS if label != UNTRAINED]
AGAINST = [
    *((label, INFO_NCE) for label in METHODS if label != INFO_NCE),
    (BY_PROTOTYPES, BY_KMEANS),
    (BY_KMEANS, UNTRAINED),
    (BY_PROTOTYPES, UNTRAINED),
]
Seeds = dict[int, float]


class Results:
    """The held-out halves of all sets, in the settings that the record chooses."""

    def __init__(self, runs: Iterable[Run], others: Iterable[Run] | None = None) -> None:
        runs = list(runs)
        self.common, self.own = study.settings(runs, study.CHOOSE_ON), study.tuned(runs)
        of_seeds = runs if others is None else others
        self.runs = [run for run in of_seeds if run["config"]["seed"] in study.SEEDS]
        self.by_set = {name: study.of_set(self.runs, name, study.SEEDS) for name in SETS}

    def of(self, name: str, label: str, measure: str = "nmi", own: bool = False) -> Seeds:
        """A measure by seed, with as many clusters as classes."""
        setting = (self.own[name] if own else self.common)[label]
        config = study.config_of(name, label, setting)
        return study.values(self.by_set[name], config, setting.space, "held_out", measure)

    def chosen(self, name: str, label: str, measure: str = "nmi") -> Seeds:
        """A measure by seed, or with "clusters" their number, which the silhouette chooses."""
        if label == BY_PROTOTYPES:
            by_seed = {}
            for config in study.with_chosen(name, self.common, self.by_set[name]):
                seed = config["seed"]
                clusters = matching(self.by_set[name], config)[seed]["clusters"][study.ASSIGN]
                of = clusters["held_out"] | {"clusters": config["num_prototypes"]}
                by_seed[seed] = of[measure]
            return by_seed
        setting = self.common[label]
        config = study.config_of(name, label, setting)
        return study.values(self.by_set[name], config, setting.space, "chosen", measure)

    def wins(self, label: str) -> tuple[int, int]:
        """How many intervals of this method's NMI minus that of others are above and below 0."""
        others = [other for other in METHODS if other != label]
        pairs = itertools.product(SETS, others)
        signs = [paired(self.of(name, label), self.of(name, other)).sign for name, other in pairs]
        return signs.count(1), signs.count(-1)

    def mean(self, label: str) -> float:
        return float(np.mean([np.mean([*self.of(name, label).values()]) for name in SETS]))


def recommended(results: Results) -> str:
    """The trained method with the highest score, as in plan.md."""

    def score(label: str) -> tuple[int, float]:
        above, below = results.wins(label)
        return above - below, results.mean(label)

    return max(TRAINED, key=score)


def shown(setting: Setting, label: str) -> str:
    tau = "" if label == UNTRAINED else f"tau={setting.temperature:g}"
    space = "" if setting.space == study.ASSIGN else setting.space
    return ", ".join(part for part in (tau, space) if part)


def table(results: Results, measure: str = "nmi") -> str:
    """A measure of all methods in the common setting."""
    lines = [
        [name, CLASSES[name], *(spread(results.of(name, m, measure).values()) for m in METHODS)]
        for name in SETS
    ]
    return markdown([study.MEASURES[measure], "classes", *METHODS], lines)


def scores(results: Results) -> str:
    """The planned comparison of each method with all others, over all sets."""
    lines = []
    for label in METHODS:
        above, below = results.wins(label)
        setting = shown(results.common[label], label)
        lines.append([label, setting, above, below, above - below, f"{results.mean(label):.1f}"])
    return markdown(["method", "setting", "above", "below", "score", "mean NMI"], lines)


def differences(results: Results) -> str:
    lines = [
        [name, *(difference(results.of(name, a), results.of(name, b)) for a, b in AGAINST)]
        for name in SETS
    ]
    return markdown(["points of NMI", *(f"{a} minus {b}" for a, b in AGAINST)], lines)


def own_settings(results: Results) -> str:
    """NMI in the setting that is best for a set, by the other half of its labels."""
    lines = []
    for name in study.CHOOSE_ON:
        cells = []
        for label, setting in results.own[name].items():
            nmi = spread(results.of(name, label, own=True).values())
            cells.append(f"{nmi} ({shown(setting, label)})")
        pair = (results.of(name, label, own=True) for label in (BY_KMEANS, INFO_NCE))
        lines.append([name, *cells, difference(*pair)])
    head = ["NMI, own settings", *METHODS, f"{BY_KMEANS} minus {INFO_NCE}"]
    return markdown(head, lines)


def chosen_numbers(results: Results) -> str:
    """The numbers of clusters that the silhouette chooses."""
    # `assign` has the number that is chosen for k-means.
    heads = {label: label for label in METHODS if label != BY_KMEANS}
    heads[BY_PROTOTYPES] = "PGCL, assign and k-means"
    lines = []
    for name in SETS:
        cells = []
        for label in heads:
            numbers = [*results.chosen(name, label, "clusters").values()]
            cells.append(f"{np.median(numbers):g} ({min(numbers)} to {max(numbers)})")
        lines.append([name, CLASSES[name], *cells])
    return markdown(["clusters: median (range)", "classes", *heads.values()], lines)


def with_chosen_numbers(results: Results) -> str:
    """NMI with the numbers of clusters that the silhouette chooses."""
    lines = [[name, *(spread(results.chosen(name, m).values()) for m in METHODS)] for name in SETS]
    return markdown(["NMI, clusters chosen", *METHODS], lines)


def restarts(results: Results, each: int = 5) -> str:
    """What the training with the highest silhouette of five gains over the mean training."""
    lines = []
    for name in SETS:
        cells = []
        for label in TRAINED:
            setting = results.common[label]
            runs = matching(results.by_set[name], study.config_of(name, label, setting))
            clusters = [runs[seed]["clusters"][setting.space] for seed in study.SEEDS]
            groups = [clusters[start : start + each] for start in range(0, len(clusters), each)]
            best = [max(group, key=lambda of: of["silhouette"]) for group in groups]
            means = (np.mean([of["held_out"]["nmi"] for of in some]) for some in (best, clusters))
            cells.append(f"{np.subtract(*means):+.1f}")
        lines.append([name, *cells])
    return markdown(["points of NMI", *TRAINED], lines)


def rounding(results: Results, rounded: Results) -> str:
    """The first seeds once more with other kernels of torch."""
    lines = []
    trained = [(label, INFO_NCE) for label in TRAINED if label != INFO_NCE]
    for name, (one, other) in itertools.product(("digits", "MSRC_9"), trained):
        cells = []
        seeds = rounded.of(name, one).keys() & rounded.of(name, other).keys()
        for of in (results, rounded):
            pair = ({seed: of.of(name, label)[seed] for seed in seeds} for label in (one, other))
            cells.append(difference(*pair))
        whole = difference(results.of(name, one), results.of(name, other))
        lines.append([f"{name}, {one} minus {other}", whole, *cells])
    head = "points of NMI", "20 seeds", "10 of them", "the same 10, no vector instructions"
    return markdown(head, lines)


def pages() -> dict[Path, dict[str, str]]:
    """Tables by page and marker."""
    runs = list(read(study.RECORD).values())
    results = Results(runs)
    return {
        CLUSTERS: {
            "clusters": sourced(table(results), results.runs),
            "scores": scores(results),
            "numbers": chosen_numbers(results),
        },
        RESULTS: {
            "cluster differences": sourced(differences(results), results.runs),
            "cluster ari": table(results, "ari"),
            "cluster own settings": own_settings(results),
            "cluster numbers": with_chosen_numbers(results),
            "cluster restarts": restarts(results),
            "cluster rounding": rounding(results, Results(runs, read(ROUNDED).values())),
        },
    }
