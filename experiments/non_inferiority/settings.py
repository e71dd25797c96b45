"""Settings with runs of both InfoNCE and "InfoNCE, then PGCL", from the records of all folders."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from experiments.common import results
from experiments.common.probes import NAMES
from experiments.common.rows import FIRST_HELD_OUT_SEED, NODES, is_development, recipe
from experiments.common.tables import SEEDS, Delta, paired

FOLDER = Path(__file__).parents[1]
SYNTHETIC_RUNS = FOLDER / "synthetic" / "recipe.jsonl"
GRAPH_RUNS = FOLDER / "unsupervised" / "recipe.jsonl"
NODE_RUNS = FOLDER / "nodes" / "results.jsonl"
SBM = "blocks"  # the synthetic graph of experiments.nodes
OPTIONS = ("spread", "duplicates", "imbalance", "batch_size", "temperature", "epsilon", "epochs")
# Beside every second synthetic setting. All but CiteSeer were named before any held-out run was
# looked at. CiteSeer was held out until it changed the rules for lambda and K.
DEVELOPMENT = (
    "MUTAG",
    "PTC_MR",
    "PROTEINS",
    "Cora, tau=0.4",
    "CiteSeer, tau=0.9",
    "CiteSeer, tau=0.4",
)


class Setting(NamedTuple):
    """Where both were run by the same seeds."""

    kind: str
    name: str
    development: bool  # else held out
    deltas: dict[str, Delta]  # from InfoNCE, by measure


def all_settings() -> list[Setting]:
    return [*synthetic(), *of_sets("graphs", GRAPH_RUNS), *of_sets("nodes", NODE_RUNS)]


def synthetic() -> Iterator[Setting]:
    """In the order of classes, options and their values, whatever the order of the runs."""
    by_setting: dict[str, list[results.Run]] = {}
    for run in results.read(SYNTHETIC_RUNS).values():
        by_setting.setdefault(results.key(run["config"]["place"]), []).append(run)
    settings = [json.loads(key) for key in by_setting]
    usual = {name: Counter(s[name] for s in settings).most_common(1)[0][0] for name in OPTIONS}

    def changed(setting: dict[str, Any]) -> str | None:
        return next((name for name in OPTIONS if setting[name] != usual[name]), None)

    def order(setting: dict[str, Any]) -> tuple[Any, ...]:
        name = changed(setting) or OPTIONS[0]
        return setting["classes"], OPTIONS.index(name), setting[name]

    for index, setting in enumerate(sorted(settings, key=order)):
        label = f"{setting['classes']} classes"
        if name := changed(setting):
            label += f", {name.replace('_', ' ')} {setting[name]}"
        development = is_development(index)
        first_seed = 0 if development else FIRST_HELD_OUT_SEED
        runs = by_setting[results.key(setting)]
        runs = [run for run in runs if run["config"]["seed"] >= first_seed]
        yield from compared("synthetic", label, development, runs)


def of_sets(kind: str, path: Path) -> Iterator[Setting]:
    """Runs on other data, or with other training options, are another setting."""
    by_setting: dict[str, list[results.Run]] = {}
    for run in results.read(path).values():
        rest = {n: value for n, value in run["config"].items() if n not in ("loss", "seed", "row")}
        by_setting.setdefault(results.key(rest), []).append(run)
    for runs in by_setting.values():
        config = runs[0]["config"]
        label, is_sbm = named(config), config["dataset"] == SBM
        yield from compared("sbm" if is_sbm else kind, label, label in DEVELOPMENT, runs)


def named(config: results.Config) -> str:
    """The set, with its temperature where several were run."""
    name, temperature = config["dataset"], config.get("temperature")
    name = "SBM" if name == SBM else name
    return f"{name}, tau={temperature}" if temperature else name


def compared(
    kind: str, name: str, development: bool, runs: Iterable[results.Run]
) -> Iterator[Setting]:
    """One setting, if both losses have enough seeds in common."""
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
    yield Setting(kind, name, development, {name: d for name, d in deltas.items() if d is not None})


def is_recommended(config: results.Config) -> bool:
    """Whether the loss has the recommended options for its batch and temperature, any epsilon."""
    loss = {name: value for name, value in (config.get("loss") or {}).items() if name != "epsilon"}
    if not loss:
        return False
    training = config.get("place", config)
    batch_size = training.get("batch_size") or NODES[config["dataset"]]
    return loss == json.loads(json.dumps(recipe(batch_size, training.get("temperature", 0.2))))
