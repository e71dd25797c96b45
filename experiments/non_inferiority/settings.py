"""Settings in which both `recommended` and InfoNCE were run, from files of other folders."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common import results
from experiments.common.probes import NAMES
from experiments.common.rows import FRESH, NODES, is_chosen, recipe
from experiments.common.tables import SEEDS, Delta, paired

HOUSE = Path(__file__).parents[1]
MAP_RUNS, GRAPH_RUNS, NODE_RUNS = (
    HOUSE / room / file
    for room, file in (
        ("synthetic", "recipe.jsonl"),
        ("unsupervised", "recipe.jsonl"),
        ("nodes", "results.jsonl"),
    )
)
SBM = "blocks"  # the synthetic graph of experiments.nodes
KNOBS = ("spread", "duplicates", "imbalance", "batch_size", "temperature", "epsilon", "epochs")
# Of the map, every second place. All but CiteSeer were named before any run of the others was
# looked at. CiteSeer was to confirm, until the rules for lambda and K were changed by it.
CHOSEN_ON = (
    "MUTAG",
    "PTC_MR",
    "PROTEINS",
    "Cora, tau=0.4",
    "CiteSeer, tau=0.9",
    "CiteSeer, tau=0.4",
)


class Place(NamedTuple):
    """Where both were run by the same seeds."""

    kind: str
    name: str
    chosen: bool  # whether the setting was chosen by what it does here
    deltas: dict[str, Delta]  # what is gained over InfoNCE, by measure


def all_places() -> list[Place]:
    """Of all rooms that have runs."""
    return [*of_map(), *of_sets("graphs", GRAPH_RUNS), *of_sets("nodes", NODE_RUNS)]


def of_map() -> Iterator[Place]:
    """In the order of classes, knobs and their values, whatever the order of the runs."""
    by_place: dict[str, list[results.Run]] = {}
    for run in results.read(MAP_RUNS).values():
        by_place.setdefault(results.key(run["config"]["place"]), []).append(run)
    places = [json.loads(key) for key in by_place]
    usual = {knob: Counter(p[knob] for p in places).most_common(1)[0][0] for knob in KNOBS}

    def turned(knobs: dict[str, Any]) -> str | None:
        return next((knob for knob in KNOBS if knobs[knob] != usual[knob]), None)

    def order(knobs: dict[str, Any]) -> tuple[Any, ...]:
        knob = turned(knobs) or KNOBS[0]
        return knobs["classes"], KNOBS.index(knob), knobs[knob]

    for index, knobs in enumerate(sorted(places, key=order)):
        name = f"{knobs['classes']} classes"
        if knob := turned(knobs):
            name += f", {knob.replace('_', ' ')} {knobs[knob]}"
        chosen = is_chosen(index)
        runs = by_place[results.key(knobs)]
        seen = [run for run in runs if chosen or run["config"]["seed"] >= FRESH]
        yield from place("map", name, chosen, seen)


def of_sets(kind: str, path: Path) -> Iterator[Place]:
    """Runs with other data, or another training, are another place."""
    by_rest: dict[str, list[results.Run]] = {}
    for run in results.read(path).values():
        rest = {n: value for n, value in run["config"].items() if n not in ("loss", "seed", "row")}
        by_rest.setdefault(results.key(rest), []).append(run)
    for runs in by_rest.values():
        config = runs[0]["config"]
        name, is_synthetic = named(config), config["dataset"] == SBM
        yield from place("sbm" if is_synthetic else kind, name, name in CHOSEN_ON, runs)


def named(config: results.Config) -> str:
    """A set, with its temperature where it is not the same for all."""
    name, temperature = config["dataset"], config.get("temperature")
    name = "SBM" if name == SBM else name
    return f"{name}, tau={temperature}" if temperature else name


def place(kind: str, name: str, chosen: bool, runs: Iterable[results.Run]) -> Iterator[Place]:
    """One, if both losses have enough seeds in common."""
    info_nce: dict[int, results.Run] = {}
    recommended: dict[int, results.Run] = {}
    both = (recommended, info_nce)
    for run in runs:
        if run["config"].get("loss") == {}:
            info_nce[run["config"]["seed"]] = run
        elif is_recommended(run["config"]):
            recommended[run["config"]["seed"]] = run
    if len(info_nce.keys() & recommended.keys()) < SEEDS:
        return
    deltas = {
        measure: paired(*({seed: run[measure] for seed, run in of.items()} for of in both))
        for measure in NAMES
    }
    yield Place(kind, name, chosen, {name: d for name, d in deltas.items() if d is not None})


def is_recommended(config: results.Config) -> bool:
    """Whether a run's loss is the setting for its batch and temperature; epsilon is the place's."""
    loss = {name: value for name, value in (config.get("loss") or {}).items() if name != "epsilon"}
    if not loss:
        return False
    training = config.get("place", config)
    batch_size = training.get("batch_size") or NODES[config["dataset"]]
    return loss == json.loads(json.dumps(recipe(batch_size, training.get("temperature", 0.2))))
