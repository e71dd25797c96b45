"""The comparison that plan.md describes. Settings are chosen first, then the other runs follow.

python -m experiments.digits.study --output runs/digits.jsonl

Finished runs are in --output, one JSON line each, and are not run again.
"""

import itertools
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.cluster import KMeans
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import normalized_mutual_info_score
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler, normalize, scale

from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.graphs import (
    GRAPH_CL,
    INFO_NCE,
    PGCL,
    UNTRAINED,
    embed,
    options_of,
    trained,
)
from experiments.common.graphs import SETTING as PAPER_SETTING
from experiments.common.probes import few_labels

from .data import graphs_of_digits, halves

RECORD = Path(__file__).parent / "results.jsonl"
SETTING = PAPER_SETTING | {"perturb": 0.1}
TEMPERATURES, PROTOTYPES, WEIGHTS = (0.2, 0.5, 1.0, 2.0), (10, 20, 40), (6.0, 1.0)
CHOOSING, REPORTED = range(100, 105), range(10)  # seeds
PAPER, FREE = "PGCL, the paper's K and lambda", "PGCL, prototypes never frozen"
MEASURES = {
    "labels_1": "1 label per class",
    "labels_5": "5 labels per class",
    "nmi": "k-means NMI",
    "all": "all labels",
}

Settings = dict[str, dict[str, Any]]


def candidates(row: str) -> list[dict[str, Any]]:
    """The settings that a row is chosen from."""
    has_prototypes = row in (PGCL, PAPER)
    grid = itertools.product(
        TEMPERATURES,
        PROTOTYPES if row == PGCL else PROTOTYPES[:1],
        WEIGHTS if row == PGCL else WEIGHTS[:1],
    )
    return [
        options_of(
            PGCL if has_prototypes else row,
            SETTING
            | {"temperature": temperature, "num_prototypes": number, "consistency_weight": weight},
        )
        for temperature, number, weight in grid
    ]


def run(config: dict[str, Any]) -> results.Run:
    """Train with these options, and measure the embeddings of both halves."""
    started = time.perf_counter()
    graphs = graphs_of_digits()
    labels = np.array([int(graph.y) for graph in graphs])
    z = embed(trained(config, graphs).encoder.encoder, graphs)
    development, held_out = (
        measured(z[half], labels[half], config["seed"]) for half in halves(labels)
    )
    seconds = round(time.perf_counter() - started, 1)
    return {"config": config, "development": development, "held_out": held_out, "seconds": seconds}


def measured(embeddings: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float]:
    """All measures in per cent."""
    kmeans = KMeans(10, n_init=10, random_state=seed)
    clusters = kmeans.fit_predict(normalize(embeddings))
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    values = {
        "labels_1": few_labels(embeddings, labels, 1, seed),
        "labels_1_scaled": few_labels(scale(embeddings.astype(float)), labels, 1, seed),
        "labels_5": few_labels(embeddings, labels, 5, seed),
        "nmi": 100 * float(normalized_mutual_info_score(labels, clusters)),
        "all": 100 * float(cross_val_score(probe, embeddings, labels, cv=5).mean()),
    }
    return {name: round(value, 3) for name, value in values.items()}


def means(
    runs: Iterable[results.Run], options: dict[str, Any], half: str, name: str
) -> dict[int, float]:
    """A measure by seed, of the runs with these options."""
    return {seed: run[half][name] for seed, run in results.matching(runs, options).items()}


def chosen(runs: Iterable[results.Run]) -> Settings:
    """Of each row the options with the best one-shot accuracy on the development half."""
    runs = [run for run in runs if run["config"]["seed"] in CHOOSING]

    def accuracy(options: dict[str, Any]) -> float:
        by_seed = means(runs, options, "development", "labels_1")
        if not by_seed:
            raise ValueError(f"the record has no runs that choose settings of {options}")
        return float(np.mean([*by_seed.values()]))

    return {row: max(candidates(row), key=accuracy) for row in (INFO_NCE, GRAPH_CL, PGCL, PAPER)}


def reported(settings: Settings) -> list[dict[str, Any]]:
    """The options that results are of: the chosen ones, and both losses at every temperature."""
    over = [
        settings[row] | {"temperature": temperature}
        for row in (INFO_NCE, PGCL)
        for temperature in TEMPERATURES
    ]
    return [{"row": UNTRAINED}, *settings.values(), never_frozen(settings), *over]


def never_frozen(settings: Settings) -> dict[str, Any]:
    return settings[PGCL] | {"freeze_epochs": 0}


def jobs(options: Iterable[dict[str, Any]], seeds: Iterable[int]) -> list[tuple[dict[str, Any]]]:
    return [(of_row | {"seed": seed},) for seed, of_row in itertools.product(seeds, options)]


def main() -> None:
    parser = parser_of("digits.study", __doc__)
    parser.add_argument("--workers", type=count, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/digits.jsonl"))
    args = parser.parse_args()
    choosing = jobs([c for row in (INFO_NCE, GRAPH_CL, PGCL) for c in candidates(row)], CHOOSING)
    runs = results.complete(args.output, choosing, run, args.workers)
    settings = chosen(runs.values())
    results.complete(args.output, jobs(reported(settings), REPORTED), run, args.workers)
    for row, options in settings.items():
        print(row, options)


if __name__ == "__main__":
    program("digits.study", main)
