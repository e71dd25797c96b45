"""Which settings run on digits and MSRC_9, by which labels they are chosen. plan.md says why."""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import normalized_mutual_info_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize, scale

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
from experiments.common.probes import few_labels, halves
from experiments.common.results import Run, matching
from experiments.common.tu import load

CHOOSING_SEEDS = range(100, 105)
FROZEN, PAPER = "PGCL, frozen in the first epoch", "PGCL, the paper's lambda"
MEASURES = {
    "labels_1": "1 label per class",
    "labels_5": "5 labels per class",
    "nmi": "k-means NMI",
    "all": "all labels",
}
LOSSES = (INFO_NCE, GRAPH_CL, PGCL, PAPER)

Options = dict[str, Any]


@dataclass(frozen=True)
class Study:
    """A set of graphs, and the settings that are compared on it."""

    name: str
    setting: Options
    temperatures: tuple[float, ...]
    prototypes: tuple[int, ...]  # K, for PGCL; with the paper's lambda the first alone
    weights: tuple[float, ...]  # lambda, for PGCL
    seeds: range  # that results are of
    standardise: bool  # embeddings, before they are measured

    @property
    def record(self) -> Path:
        return Path(__file__).parent / f"{self.name}.jsonl"

    def candidates(self, row: str) -> list[Options]:
        """The settings that a row is chosen from."""
        grid = itertools.product(
            self.temperatures,
            self.prototypes if row == PGCL else self.prototypes[:1],
            self.weights if row == PGCL else [SETTING["consistency_weight"]],
        )
        names = "temperature", "num_prototypes", "consistency_weight"
        return [
            options_of(
                PGCL if row == PAPER else row, self.setting | dict(zip(names, values, strict=True))
            )
            for values in grid
        ]

    def choosing(self) -> list[Options]:
        return [options for row in LOSSES for options in self.candidates(row)]

    def rows(self, runs: Iterable[Run]) -> dict[str, Options]:
        """The options of each row: with the best one-shot accuracy on the development half."""
        runs = [run for run in runs if run["config"]["seed"] in CHOOSING_SEEDS]

        def accuracy(options: Options) -> float:
            by_seed = values(runs, options, "development", "labels_1")
            if not by_seed:
                raise ValueError(f"the record has no runs that choose settings of {options}")
            return float(np.mean([*by_seed.values()]))

        rows = {row: max(self.candidates(row), key=accuracy) for row in LOSSES}
        pgcl = rows[PGCL]
        rows[PGCL] = pgcl | {"freeze_epochs": 0}  # the default of PGCLLoss
        return {UNTRAINED: {"row": UNTRAINED}, **rows, FROZEN: pgcl | {"freeze_epochs": 1}}

    def reported(self, rows: dict[str, Options]) -> list[Options]:
        """The options that results are of: all rows, and two losses at every temperature."""
        over = itertools.product((rows[INFO_NCE], rows[PGCL]), self.temperatures)
        return [*rows.values(), *(row | {"temperature": tau} for row, tau in over)]


DIGITS = Study(
    "digits",
    # Settings were chosen with frozen prototypes.
    SETTING | {"perturb": 0.1, "freeze_epochs": 1},
    temperatures=(0.2, 0.5, 1.0, 2.0),
    prototypes=(10, 20, 40),
    weights=(6.0, 1.0),
    seeds=range(40, 80),
    standardise=False,
)
MSRC_9 = Study(
    "MSRC_9",
    SETTING | {"epochs": 60, "freeze_epochs": 0},
    temperatures=(0.2, 0.5, 1.0, 2.0, 4.0),
    prototypes=(10,),
    weights=(1.0,),
    seeds=range(40, 60),
    standardise=True,
)
STUDIES = {study.name: study for study in (DIGITS, MSRC_9)}


def jobs(
    study: Study,
    options: Iterable[Options],
    seeds: Iterable[int],
    source: tuple[Path | None, str | None] = (None, None),
) -> list[tuple[Options, str, Path | None]]:
    """Arguments of `run`; ``source`` is the file of a set and its digest, digits have none."""
    file, digest = source
    data = {"data": digest} if digest else {}
    pairs = itertools.product(seeds, options)
    return [(of_row | {"seed": seed} | data, study.name, file) for seed, of_row in pairs]


def run(config: Options, name: str, file: Path | None) -> Run:
    """Train with these options, and measure the embeddings of both halves."""
    started = time.perf_counter()
    graphs = graphs_of_digits() if file is None else load(file)
    labels = np.array([int(graph.y) for graph in graphs])
    z = embed(trained(config, graphs).encoder.encoder, graphs)
    if STUDIES[name].standardise:
        z = scale(z.astype(float))
    measures = (measured(z[half], labels[half], config["seed"]) for half in halves(labels))
    of_halves = dict(zip(("development", "held_out"), measures, strict=True))
    return {"config": config, **of_halves, "seconds": round(time.perf_counter() - started, 1)}


def measured(embeddings: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """All measures in per cent."""
    kmeans = KMeans(len(np.unique(labels)), n_init=10, random_state=seed)
    clusters = kmeans.fit_predict(normalize(embeddings))
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    measures = {
        "labels_1": few_labels(embeddings, labels, 1, seed),
        "labels_1_scaled": few_labels(scale(embeddings.astype(float)), labels, 1, seed),
        "labels_5": few_labels(embeddings, labels, 5, seed),
        "nmi": 100 * float(normalized_mutual_info_score(labels, clusters)),
        "all": 100 * float(cross_val_score(probe, embeddings, labels, cv=5).mean()),
    }
    return {name: round(value, 3) for name, value in measures.items()}


def values(runs: Iterable[Run], options: Options, half: str, name: str) -> dict[int, float]:
    """A measure by seed, of the runs with these options."""
    return {seed: run[half][name] for seed, run in matching(runs, options).items()}
