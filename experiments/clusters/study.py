"""What is clustered, by which methods, and how their settings are chosen. plan.md says why."""

import functools
import itertools
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.metrics import (
    adjusted_rand_score,
    normalized_mutual_info_score,
    silhouette_score,
)
from sklearn.preprocessing import normalize, scale
from torch_geometric.data import Data

from experiments.common import results
from experiments.common.digits import graphs_of_digits
from experiments.common.graphs import (
    GRAPH_CL,
    INFO_NCE,
    PGCL,
    SETTING,
    UNTRAINED,
    embed,
    options_of,
    trained,
)
from experiments.common.probes import halves
from experiments.common.results import Config, Run, matching
from experiments.common.tu import load

RECORD = Path(__file__).parent / "results.jsonl"
SETS: dict[str, Config] = {  # what differs from `SETTING`
    "digits": {"perturb": 0.1},
    "MSRC_9": {"epochs": 60},
    "MUTAG": {},
    "PTC_MR": {},
    "PROTEINS": {},
    "NCI1": {"epochs": 5},
    "REDDIT-BINARY": {"epochs": 2},
    "COLLAB": {"epochs": 1},
}
CHOOSE_ON = ("digits", "MSRC_9", "MUTAG", "PTC_MR", "PROTEINS")  # the other sets choose nothing
CLASSES = dict.fromkeys(SETS, 2) | {"digits": 10, "MSRC_9": 8, "COLLAB": 3}
CHOOSING_SEEDS, SEEDS = range(110, 114), range(200, 220)
TEMPERATURES = (0.2, 0.5, 1.0, 2.0, 4.0)
ASSIGN = "assign"
SPACES = ("embeddings", "standardised", "projections")  # where k-means clusters
MOST = 20  # clusters, where their number is chosen


class Setting(NamedTuple):
    """A temperature, and where clusters are found: by `ASSIGN` or in one of the `SPACES`."""

    temperature: float
    space: str


class Method(NamedTuple):
    """A way to cluster graphs: a loss, and its prototypes or k-means."""

    row: str
    spaces: tuple[str, ...] = SPACES

    def candidates(self) -> list[Setting]:
        temperatures = TEMPERATURES[:1] if self.row == UNTRAINED else TEMPERATURES
        return [Setting(*values) for values in itertools.product(temperatures, self.spaces)]

    def config(self, name: str, temperature: float, clusters: int) -> Config:
        """A configuration without seed. The prototypes are as many as clusters for `assign`."""
        prototypes = clusters if self.spaces == (ASSIGN,) else SETTING["num_prototypes"]
        setting = SETTING | {"consistency_weight": 1.0, "freeze_epochs": 0} | SETS[name]
        further = {"temperature": temperature, "num_prototypes": prototypes}
        return {"dataset": name, **options_of(self.row, setting | further)}


METHODS = {
    "PGCL, assign": Method(PGCL, (ASSIGN,)),
    "PGCL, k-means": Method(PGCL),
    "InfoNCE, k-means": Method(INFO_NCE),
    "GraphCL's own loss, k-means": Method(GRAPH_CL),
    "untrained, k-means": Method(UNTRAINED),
}
BY_PROTOTYPES, BY_KMEANS = "PGCL, assign", "PGCL, k-means"
Settings = dict[str, Setting]  # by method


def config_of(name: str, label: str, setting: Setting) -> Config:
    """A method on a set, with as many clusters as classes, without seed."""
    return METHODS[label].config(name, setting.temperature, CLASSES[name])


def of_set(runs: Iterable[Run], name: str, seeds: range) -> list[Run]:
    """The runs of a set with these seeds."""
    return [
        run for run in runs if run["config"]["dataset"] == name and run["config"]["seed"] in seeds
    ]


def values(runs: Iterable[Run], config: Config, space: str, half: str, name: str = "nmi") -> Any:
    """Seed -> a measure in per cent of the clusters in a space."""
    by_seed = matching(runs, config)
    return {seed: run["clusters"][space][half][name] for seed, run in by_seed.items()}


def choosing() -> Iterator[Config]:
    """The runs that choose settings."""
    for name, seed, method in itertools.product(CHOOSE_ON, CHOOSING_SEEDS, METHODS.values()):
        for temperature in dict.fromkeys(setting.temperature for setting in method.candidates()):
            yield method.config(name, temperature, CLASSES[name]) | {"seed": seed}


def settings(runs: Iterable[Run], names: Iterable[str]) -> Settings:
    """Of each method the setting with the highest mean NMI on the development halves of sets."""
    runs = list(runs)
    choosing_runs = {name: of_set(runs, name, CHOOSING_SEEDS) for name in names}

    def nmi(label: str, setting: Setting) -> list[float]:
        """Of the choosing seeds, on all sets."""
        by_set = (
            values(of_name, config_of(name, label, setting), setting.space, "development")
            for name, of_name in choosing_runs.items()
        )
        return [value for by_seed in by_set for value in by_seed.values()]

    return {
        label: results.best(method.candidates(), functools.partial(nmi, label))
        for label, method in METHODS.items()
    }


def tuned(runs: Iterable[Run]) -> dict[str, Settings]:
    """The settings of each small set, by its own development half."""
    runs = list(runs)
    return {name: settings(runs, [name]) for name in CHOOSE_ON}


def reported(name: str, seeds: Iterable[int], *every: Settings) -> Iterator[Config]:
    """All methods on a set in each of these settings."""
    pairs = [pair for settings in every for pair in settings.items()]
    for seed, (label, setting) in itertools.product(seeds, pairs):
        yield config_of(name, label, setting) | {"seed": seed}


def with_chosen(name: str, common: Settings, runs: Iterable[Run]) -> Iterator[Config]:
    """For each seed PGCL with as many prototypes as the silhouette chooses clusters.

    The silhouette belongs to k-means on the embeddings of PGCL with ten prototypes.
    """
    setting, assign = common[BY_KMEANS], METHODS[BY_PROTOTYPES]
    before = config_of(name, BY_KMEANS, setting)
    for seed, run in matching(of_set(runs, name, SEEDS), before).items():
        number = run["clusters"][setting.space]["chosen"]["clusters"]
        config = assign.config(name, common[BY_PROTOTYPES].temperature, number)
        yield config | {"seed": seed}


@functools.lru_cache(maxsize=1)
def graphs_of(file: Path | None) -> list[Data]:
    return graphs_of_digits() if file is None else load(file)


def run(config: Config, file: Path | None, choose_in: Collection[str] = ()) -> Run:
    """Train with these options, cluster all graphs, and measure the clusters of both halves.

    In the spaces ``choose_in``, also choose a number of clusters without labels.
    """
    started = time.perf_counter()
    graphs = graphs_of(file)
    labels = np.array([int(graph.y) for graph in graphs])
    model = trained(config, graphs)
    z = embed(model.encoder.encoder, graphs)
    with torch.no_grad():
        projections = model.encoder.head(torch.from_numpy(z)).numpy()
    spaces = {
        "embeddings": normalize(z.astype(float)),
        "standardised": normalize(scale(z.astype(float))),
        "projections": normalize(projections.astype(float)),
    }
    seed, classes = config["seed"], len(np.unique(labels))
    found = {}
    for space, points in spaces.items():
        clusters = kmeans(points, classes, seed, restarts=10)
        found[space] = agreement(points, clusters, labels, seed)
        if space in choose_in:
            number = number_of_clusters(points, seed)
            clusters = kmeans(points, number, seed, restarts=10)
            measures = agreement(points, clusters, labels, seed)
            found[space]["chosen"] = {"clusters": number, **measures["held_out"]}
    if config["row"] == PGCL:
        clusters = model.loss.prototypes.assign(torch.from_numpy(projections)).numpy()
        found[ASSIGN] = agreement(spaces["projections"], clusters, labels, seed)
    return {"config": config, "clusters": found, "seconds": round(time.perf_counter() - started, 1)}


def kmeans(points: np.ndarray, clusters: int, seed: int, restarts: int) -> np.ndarray:
    return KMeans(clusters, n_init=restarts, random_state=seed).fit_predict(points)


def number_of_clusters(points: np.ndarray, seed: int) -> int:
    """The number of clusters, of 2 to 20, with the highest silhouette."""
    numbers = range(2, MOST + 1)
    return max(numbers, key=lambda k: silhouette(points, kmeans(points, k, seed, restarts=3), seed))


def silhouette(points: np.ndarray, clusters: np.ndarray, seed: int) -> float:
    """The mean silhouette of at most 1,000 points; -1 for a single cluster."""
    chosen = np.random.default_rng(seed).permutation(len(points))[:1000]
    if len(np.unique(clusters[chosen])) == 1:
        return -1.0
    return float(silhouette_score(points[chosen], clusters[chosen]))


def agreement(
    points: np.ndarray, clusters: np.ndarray, labels: np.ndarray, seed: int
) -> dict[str, Any]:
    """Measures in per cent of both halves, and of all graphs the silhouette and largest cluster."""
    of_halves = {
        half: {
            "nmi": round(100 * float(normalized_mutual_info_score(labels[i], clusters[i])), 3),
            "ari": round(100 * float(adjusted_rand_score(labels[i], clusters[i])), 3),
        }
        for half, i in zip(("development", "held_out"), halves(labels), strict=True)
    }
    return {
        **of_halves,
        "silhouette": round(silhouette(points, clusters, seed), 4),
        "largest": round(100 * float(np.bincount(clusters).max() / len(clusters)), 1),
    }
