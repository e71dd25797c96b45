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
from experiments.common.rows import FRESH, is_chosen, recipe
from experiments.common.tables import Delta, holm, paired, refill

from .recipe import PAGE, places, run

RUNS = Path(__file__).parent / "temperature.jsonl"
CONCLUSIONS = PAGE.parent / "results.md"
TEMPERATURES = (0.2, 0.5, 1.0, 2.0)
INFO_NCE, PGCL = LABELS = ("InfoNCE", "InfoNCE, then PGCL")
WEIGHTS = "InfoNCE, then weighted negatives alone (K=50, lambda 0, from one half on)"
TRIED = (*LABELS, WEIGHTS)  # on the development settings; the last one after the plan
SEEDS = range(FRESH, FRESH + 5)  # of the held-out settings
PRIMARY = "labels_1"
Runs = dict[str, results.Run]


def settings(chosen: bool) -> list[dict[str, Any]]:
    """Of development or held out, without those that differ in the temperature alone."""
    usual = [p for index, p in enumerate(places()) if is_chosen(index) == chosen]
    return [place for place in usual if place["temperature"] == TEMPERATURES[0]]


def config(place: dict[str, Any], label: str, temperature: float, seed: int) -> results.Config:
    """The prototypes are initialised by the loss itself, at the end of its warm-up."""
    loss: Options = {}
    if label == PGCL:
        loss = {"epsilon": place["epsilon"], **recipe(place["batch_size"], temperature)}
        del loss["start"]
    elif label == WEIGHTS:
        loss = {"epsilon": place["epsilon"], "num_prototypes": 50, "consistency_weight": 0.0}
        loss["lead"] = 0.5
    place = place | {"temperature": temperature}
    return json.loads(json.dumps({"place": place, "loss": loss, "seed": seed}))


def development() -> list[results.Config]:
    return [
        config(place, label, temperature, 0)
        for place in settings(True)
        for temperature in TEMPERATURES
        for label in TRIED
    ]


def held_out(best: dict[str, float]) -> list[results.Config]:
    return [
        config(place, label, best[label], seed)
        for seed in SEEDS
        for place in settings(False)
        for label in LABELS
    ]


def means(done: Runs, label: str, name: str) -> dict[float, float]:
    """The mean of a measure over the development settings, by temperature."""
    return {
        temperature: float(
            np.mean(
                [
                    done[results.key(config(place, label, temperature, 0))][name]
                    for place in settings(True)
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
    """Markdown: one- and five-shot accuracy at every temperature, on the development settings."""
    head = " | ".join(f"tau={temperature:g}" for temperature in TEMPERATURES)
    lines = [f"| accuracy in %, 1 / 5 labels per class | {head} |"]
    lines.append("| --- |" + " --- |" * len(TEMPERATURES))
    for label in TRIED:
        one, five = (means(done, label, name).values() for name in (PRIMARY, "labels_5"))
        cells = [f"{each:.1f} / {other:.1f}" for each, other in zip(one, five, strict=True)]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def deltas(done: Runs, best: dict[str, float], place: dict[str, Any], name: str) -> Delta:
    """What PGCL has more than InfoNCE in a held-out setting, each at its temperature."""

    def seeds(label: str) -> dict[int, float]:
        return {
            seed: done[results.key(config(place, label, best[label], seed))][name] for seed in SEEDS
        }

    delta = paired(seeds(PGCL), seeds(INFO_NCE))
    if delta is None:
        raise ValueError("too few seeds")
    return delta


def held_out_table(done: Runs, best: dict[str, float]) -> str:
    """Markdown: by number of classes; in brackets, how many settings differ after Holm's."""
    of = {name: [(p, deltas(done, best, p, name)) for p in settings(False)] for name in NAMES}
    left = {id(delta) for pairs in of.values() for delta in holm([delta for _, delta in pairs])}
    lines = [f"| held out | settings | {' | '.join(NAMES.values())} |"]
    lines.append("| --- | --- |" + " --- |" * len(NAMES))
    classes = sorted({place["classes"] for place in settings(False)})
    groups = [*([number] for number in classes), classes]
    for group in groups:
        cells = []
        for pairs in of.values():
            here = [delta for place, delta in pairs if place["classes"] in group]
            signs = [delta.mean > 0 for delta in here if id(delta) in left]
            mean = np.mean([delta.mean for delta in here])
            cells.append(f"{mean:+.1f} ({signs.count(True)}, {signs.count(False)})")
        label = f"{group[0]} classes" if len(group) == 1 else "all"
        lines.append(f"| {label} | {len(here)} | {' | '.join(cells)} |")
    return "\n".join(lines)


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
