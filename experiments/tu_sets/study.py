"""What the tables and figures run: sets, rows, settings and seeds. plan.md says why."""

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from experiments.common import results
from experiments.common.graphs import (
    ABLATION,
    GRAPH_CL,
    INFO_NCE,
    PGCL,
    SETTING,
    UNTRAINED,
    options_of,
)
from experiments.common.results import Config, Run, matching

from .evaluate import MEASURES

SMALL, LARGE = ("MUTAG", "PTC_MR", "PROTEINS"), ("NCI1", "COLLAB", "REDDIT-BINARY")
TEMPERATURES = (0.2, 0.5, 1.0, 2.0)
CHOOSING = (100, 101)  # seeds that choose temperatures
LOSSES = (INFO_NCE, GRAPH_CL, PGCL)
CURVES = ("PTC_MR", "PROTEINS")  # sets of figures 4 and 5
OPTIONS = {"num_prototypes": (6, 10, 20, 40, 80), "batch_size": (32, 64, 128, 256, 512)}
RECORD = Path(__file__).parent / "results.jsonl"

# It has 12 million edges: 20 epochs would take most of an hour.
SHORTER = {"COLLAB": {"epochs": 2}}

Temperatures = dict[str, dict[str, float]]  # set -> loss -> temperature


def seeds_of(dataset: str) -> range:
    return range(5 if dataset in LARGE else 10)


def config_of(dataset: str, row: str, seed: int, **options: Any) -> Config:
    """A configuration without the digest of the set."""
    setting = SETTING | SHORTER.get(dataset, {}) | options
    return {"dataset": dataset, "seed": seed, **options_of(row, setting)}


def choosing(datasets: Iterable[str]) -> Iterator[Config]:
    """The runs that choose temperatures: of the small sets alone."""
    needed = [name for name in SMALL if {name, *LARGE} & {*datasets}]
    for name, row, tau, seed in itertools.product(needed, LOSSES, TEMPERATURES, CHOOSING):
        yield config_of(name, row, seed, temperature=tau)


def table_1(datasets: Iterable[str], chosen: Temperatures) -> Iterator[Config]:
    """All losses at their temperatures."""
    for name in datasets:
        for seed, row in itertools.product(seeds_of(name), (UNTRAINED, *LOSSES)):
            options = {} if row == UNTRAINED else {"temperature": chosen[name][row]}
            yield config_of(name, row, seed, **options)


def table_3(datasets: Iterable[str]) -> Iterator[Config]:
    """The ablation on the small sets, in the paper's setting."""
    for name in [name for name in SMALL if name in datasets]:
        for seed, row in itertools.product(seeds_of(name), (INFO_NCE, *ABLATION)):
            yield config_of(name, row, seed)


def figures(datasets: Iterable[str]) -> Iterator[Config]:
    """Accuracy over K (figure 4) and N (figure 5)."""
    for name in [name for name in CURVES if name in datasets]:
        for seed, (option, values) in itertools.product(range(5), OPTIONS.items()):
            for value, row in itertools.product(values, (INFO_NCE, PGCL)):
                yield config_of(name, row, seed, **{option: value})


def temperatures(runs: Iterable[Run], datasets: Iterable[str]) -> Temperatures:
    """Of each loss the temperature with the best mean of all measures, seeds 100 and 101.

    A large set has the temperature that is best over the three small sets.
    """
    runs = [run for run in runs if run["config"]["seed"] in CHOOSING]

    def best(sets: Iterable[str], row: str) -> float:
        def accuracies(tau: float) -> list[float]:
            of_sets = (matching(runs, config_of(name, row, 0, temperature=tau)) for name in sets)
            return [run[name] for of in of_sets for run in of.values() for name in MEASURES]

        return results.best(TEMPERATURES, accuracies)

    return {
        name: {row: best((name,) if name in SMALL else SMALL, row) for row in LOSSES}
        for name in datasets
    }
