"""InfoNCE and PGCL on synthetic clusters, each at the temperature that is best for it.

python -m experiments.synthetic.temperature   # runs what temperature.jsonl lacks, fills the pages

The plan is experiments/plan.md. Temperatures are chosen on the development settings, by one-shot
accuracy; the held-out settings are run at them, with seeds of their own.
"""

import argparse
import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import results
from experiments.common.arguments import count
from experiments.common.losses import Options
from experiments.common.probes import NAMES
from experiments.common.rows import FIRST_HELD_OUT_SEED, is_development, recipe
from experiments.common.tables import Delta, holm, markdown, paired, refill

from .recipe import PAGE, run
from .recipe import settings as all_settings

RUNS = Path(__file__).parent / "temperature.jsonl"
CONCLUSIONS = PAGE.parent / "results.md"
TEMPERATURES = (0.2, 0.5, 1.0, 2.0)
INFO_NCE, PGCL = LABELS = ("InfoNCE", "InfoNCE, then PGCL")
WEIGHTS = "InfoNCE, then weighted negatives alone (K=50, lambda 0, from one half on)"
TRIED = (*LABELS, WEIGHTS)  # on the development settings; the last one after the plan
SEEDS = range(FIRST_HELD_OUT_SEED, FIRST_HELD_OUT_SEED + 5)  # of the held-out settings
PRIMARY = "labels_1"
Runs = dict[str, results.Run]


def settings(development: bool) -> list[dict[str, Any]]:
    """Of development or held out, without those that differ in the temperature alone."""
    return [
        setting
        for index, setting in enumerate(all_settings())
        if is_development(index) == development and setting["temperature"] == TEMPERATURES[0]
    ]


def config(setting: dict[str, Any], label: str, temperature: float, seed: int) -> results.Config:
    """The prototypes are initialised from the last batches of InfoNCE."""
    loss: Options = {}
    if label == PGCL:
        loss = {"epsilon": setting["epsilon"], **recipe(setting["batch_size"], temperature)}
        del loss["start"]
    elif label == WEIGHTS:
        loss = {"epsilon": setting["epsilon"], "num_prototypes": 50, "consistency_weight": 0.0}
        loss["lead"] = 0.5
    setting = setting | {"temperature": temperature}
    return json.loads(json.dumps({"place": setting, "loss": loss, "seed": seed}))


def development() -> list[results.Config]:
    return [
        config(setting, label, temperature, 0)
        for setting in settings(True)
        for temperature in TEMPERATURES
        for label in TRIED
    ]


def held_out(best: dict[str, float]) -> list[results.Config]:
    return [
        config(setting, label, best[label], seed)
        for seed in SEEDS
        for setting in settings(False)
        for label in LABELS
    ]


def means(done: Runs, label: str, name: str) -> dict[float, float]:
    """The mean of a measure over the development settings, by temperature."""
    return {
        temperature: float(
            np.mean(
                [
                    done[results.key(config(setting, label, temperature, 0))][name]
                    for setting in settings(True)
                ]
            )
        )
        for temperature in TEMPERATURES
    }


def best_temperatures(done: Runs) -> dict[str, float]:
    """By one-shot accuracy."""
    of_labels = {label: means(done, label, PRIMARY) for label in LABELS}
    return {label: max(of_label, key=of_label.__getitem__) for label, of_label in of_labels.items()}


def chosen_table(done: Runs) -> str:
    """One- and five-shot accuracy at every temperature, over the development settings."""
    lines = []
    for label in TRIED:
        one, five = (means(done, label, name).values() for name in (PRIMARY, "labels_5"))
        pairs = zip(one, five, strict=True)
        lines.append([label, *(f"{each:.1f} / {other:.1f}" for each, other in pairs)])
    columns = (f"tau={temperature:g}" for temperature in TEMPERATURES)
    return markdown(["accuracy in %, 1 / 5 labels per class", *columns], lines)


def difference(done: Runs, best: dict[str, float], setting: dict[str, Any], name: str) -> Delta:
    """PGCL minus InfoNCE in a held-out setting, each at its best temperature."""
    ours, theirs = (
        {seed: done[results.key(config(setting, label, best[label], seed))][name] for seed in SEEDS}
        for label in (PGCL, INFO_NCE)
    )
    delta = paired(ours, theirs)
    if delta is None:
        raise ValueError("too few seeds")
    return delta


def held_out_table(done: Runs, best: dict[str, float]) -> str:
    """By number of classes; in brackets, how many settings differ after Holm's correction."""
    deltas = {
        name: [
            (setting["classes"], difference(done, best, setting, name))
            for setting in settings(False)
        ]
        for name in NAMES
    }
    significant = {
        id(delta) for pairs in deltas.values() for delta in holm([delta for _, delta in pairs])
    }
    classes = sorted({setting["classes"] for setting in settings(False)})
    groups = {f"{number} classes": [number] for number in classes} | {"all": classes}
    lines = []
    for label, numbers in groups.items():
        cells = []
        for pairs in deltas.values():
            here = [delta for number, delta in pairs if number in numbers]
            signs = [delta.mean > 0 for delta in here if id(delta) in significant]
            mean = np.mean([delta.mean for delta in here])
            cells.append(f"{mean:+.1f} ({signs.count(True)}, {signs.count(False)})")
        lines.append([label, len(here), *cells])
    return markdown(["held out", "settings", *NAMES.values()], lines)


def pages(done: Runs, best: dict[str, float]) -> dict[Path, dict[str, str]]:
    """The tables of these runs, by page."""
    held_out = {"best temperatures": held_out_table(done, best)}
    return {PAGE: {"temperatures": chosen_table(done)} | held_out, CONCLUSIONS: held_out}


def complete(output: Path, wanted: Collection[results.Config], workers: int) -> Runs:
    jobs = [(each,) for each in wanted]
    return results.complete(output, jobs, run, workers)


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.synthetic.temperature",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--workers", type=count, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=RUNS)
    args = parser.parse_args()
    try:
        best = best_temperatures(complete(args.output, development(), args.workers))
        done = complete(args.output, held_out(best), args.workers)
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.synthetic.temperature: {error}")
    tables = pages(done, best)
    if args.output == RUNS:
        refill(tables)
    print(*tables[PAGE].values(), sep="\n\n")


if __name__ == "__main__":
    main()
