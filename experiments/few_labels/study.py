"""Which losses train on which sets, and by which labels settings are chosen. plan.md says why."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from sklearn.preprocessing import scale
from torch_geometric.data import Data

from experiments.common import results
from experiments.common.digits import graphs_of_digits
from experiments.common.graphs import (
    BALANCED,
    CENTRED,
    DIM,
    GRAPH_CL,
    INFO_NCE,
    PGCL,
    PLAIN,
    SETTING,
    UNTRAINED,
    embed,
    trained,
)
from experiments.common.probes import NAMES, halves, measured
from experiments.common.results import Config, Run, matching
from experiments.common.tu import load
from pgcl_losses import InfoNCE, PGCLLoss

RECORDS = Path(__file__).parent
CHOOSING_SEEDS = range(600, 602)
MEASURES = NAMES
TEMPERATURES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 2.0, 4.0)  # of InfoNCE
PREDICTIONS, WEIGHTS, OF_PGCL = (PLAIN, CENTRED, BALANCED), (0.3, 1.0, 6.0), (0.2, 0.5, 1.0)
OPTIONS = "temperature", "consistency_weight", "predictions", "num_prototypes"
PAPER = dict(zip(OPTIONS, (0.2, 6.0, PLAIN, 10), strict=True))
PROTOTYPES = 20, 50  # K, in place of the paper's 10
CURVE = (0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
LONGER, OF_LENGTHS = (1, 2, 4), (0.2, 0.5, 1.0, 2.0, 4.0)  # times the epochs; temperatures
FEW, OF_CURVE = 10, 5  # seeds, where not all of a set run
AT_BEST, OF_PAPER = "at its best", "PGCL, the paper's options"


class Set(NamedTuple):
    """What differs between sets."""

    epochs: int
    perturb: float = 0.2
    standardise: bool = True  # embeddings, before they are measured
    seeds: range = range(610, 620)  # that results are of
    in_depth: bool = False  # temperatures, lengths of training, and GraphCL's own loss
    is_tuned: bool = True  # the losses have their best settings too


SETS = {
    "digits": Set(20, perturb=0.1, standardise=False, seeds=range(610, 630), in_depth=True),
    "MSRC_9": Set(60, seeds=range(610, 630), in_depth=True),
    # About 200 steps each.
    "ENZYMES": Set(40),
    "MSRC_21": Set(40),
    "Letter-low": Set(12, is_tuned=False),
    "Letter-med": Set(12, is_tuned=False),
    "Letter-high": Set(12),
}


def config_of(name: str, row: str, times: int = 1, **options: Any) -> Config:
    """A configuration without seed. ``times``: how often the epochs of the set."""
    of_set = SETS[name]
    length = {"epochs": times * of_set.epochs, "perturb": of_set.perturb}
    return {"set": name, "row": row, **({} if row == UNTRAINED else length), **options}


def defaults() -> Config:
    """The options of `PGCLLoss` that are claims."""
    loss = PGCLLoss(DIM)
    predictions = BALANCED if loss.prototypes.balance_predictions else PLAIN
    of_loss = loss.temperature, loss.consistency_weight, predictions, loss.prototypes.heads[0]
    return dict(zip(OPTIONS, of_loss, strict=True))


def grid(predictions: str, num_prototypes: int = 10) -> list[Config]:
    """Options of PGCL: all weights and temperatures, with these predictions."""
    pairs = itertools.product(OF_PGCL, WEIGHTS)
    others = predictions, num_prototypes
    return [dict(zip(OPTIONS, (*pair, *others), strict=True)) for pair in pairs]


def candidates(name: str, row: str) -> list[Config]:
    """Nine settings, of which each loss has its best."""
    if row == PGCL:
        others = (defaults()[option] for option in ("predictions", "num_prototypes"))
        return [config_of(name, row, **options) for options in grid(*others)]
    return at_temperatures(name, row, TEMPERATURES, times=1)


def choosing(name: str) -> Iterator[Config]:
    """The candidates of all losses, and of the defaults."""
    yield config_of(name, UNTRAINED)
    for row in (INFO_NCE, GRAPH_CL) if SETS[name].in_depth else (INFO_NCE,):
        yield from candidates(name, row)
    for predictions in PREDICTIONS:
        yield from (config_of(name, PGCL, **options) for options in grid(predictions))


def choosing_prototypes(name: str) -> list[Config]:
    """The defaults with other numbers of prototypes."""
    return [config_of(name, PGCL, **defaults() | {"num_prototypes": k}) for k in PROTOTYPES]


def best(runs: Iterable[Run], of: Iterable[Config], measure: str = "labels_1") -> Config:
    """The best setting by the choosing seeds, on the development half."""
    runs = [run for run in runs if run["config"]["seed"] in CHOOSING_SEEDS]
    return results.best(of, lambda config: values(runs, config, "development", measure).values())


def rows(name: str, runs: Iterable[Run], measure: str = "labels_1") -> dict[str, Config]:
    """What is reported: losses at their defaults, and at their best by this measure."""
    runs = list(runs)
    of_info_nce = config_of(name, INFO_NCE, temperature=InfoNCE().temperature)
    found = {UNTRAINED: config_of(name, UNTRAINED), INFO_NCE: of_info_nce}
    losses = (INFO_NCE, PGCL, GRAPH_CL) if SETS[name].in_depth else (INFO_NCE, PGCL)
    for row in losses if SETS[name].is_tuned else ():
        found[f"{row} {AT_BEST}"] = best(runs, candidates(name, row), measure)
    found[PGCL] = config_of(name, PGCL, **defaults())
    return {**found, OF_PAPER: config_of(name, PGCL, **PAPER)}


def at_temperatures(name: str, row: str, temperatures: Iterable[float], times: int) -> list[Config]:
    """A loss with its defaults at other temperatures."""
    options = defaults() if row == PGCL else {}
    return [config_of(name, row, times, **options | {"temperature": tau}) for tau in temperatures]


def of_length(name: str, row: str, times: int) -> list[Config]:
    """The settings from which a longer training chooses, as many for each loss."""
    return at_temperatures(name, row, OF_LENGTHS, times)


@functools.lru_cache(maxsize=1)
def graphs_of(file: Path | None) -> list[Data]:
    return graphs_of_digits() if file is None else load(file)


def run(config: Config, file: Path | None, keep: Callable[..., Any] | None = None) -> Run:
    """Train with these options, and measure the embeddings of both halves.

    The run also has what ``keep`` makes of the model and the graphs.
    """
    started = time.perf_counter()
    graphs = graphs_of(file)
    labels = np.array([int(graph.y) for graph in graphs])
    model = trained(SETTING | {"freeze_epochs": 0} | config, graphs)
    z = embed(model.encoder.encoder, graphs)
    if SETS[config["set"]].standardise:
        z = scale(z.astype(float))
    found: Run = {"config": config}
    for name, half in zip(("development", "held_out"), halves(labels), strict=True):
        found[name] = measured(z[half], labels[half], config["seed"], *MEASURES)
    if keep:
        found["kept"] = keep(model, graphs)
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def values(runs: Iterable[Run], config: Config, half: str, name: str) -> dict[int, float]:
    """A measure by seed, of the runs with these options."""
    return {seed: run[half][name] for seed, run in matching(runs, config).items()}
