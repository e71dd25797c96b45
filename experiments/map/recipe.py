"""The recommended setting beside InfoNCE on all places of the map, by five measures.

python -m experiments.map.recipe               # runs what experiments/map/recipe.jsonl lacks

It was chosen on the places of even index, the first one's being 0; the others confirm it.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

from experiments.shelf import probes, results
from experiments.shelf.losses import Objective
from experiments.shelf.rows import recipe

from .places import KNOB_VALUES, knob_places
from .planted import DIM, KNOBS, TRAINING, drawn, of_neighbours

RUNS = Path(__file__).parent / "recipe.jsonl"


def places() -> list[dict[str, Any]]:
    """Each with all knobs of the data and of training."""
    names = ("classes", *KNOB_VALUES)
    return [{name: KNOBS[name] for name in names} | place for place in knob_places()]


def wanted(seeds: int) -> list[results.Config]:
    """All runs, those of the first seed first."""
    configs = [
        {"place": place, "loss": loss, "seed": seed}
        for seed in range(seeds)
        for place in places()
        for loss in ({}, {"epsilon": place["epsilon"]} | recipe(**_known(place)))
    ]
    return json.loads(json.dumps(configs))


def _known(place: dict[str, Any]) -> dict[str, Any]:
    return {name: place[name] for name in ("batch_size", "temperature")}


def run(config: results.Config) -> results.Run:
    """What the rows are good for after training, ready for JSON."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    place = config["place"]
    data, known, asked, signal, encoder = drawn(place)
    steps = place["epochs"] * (TRAINING // place["batch_size"])
    objective = Objective(config["loss"], DIM, place["temperature"], steps)
    optimizer = torch.optim.Adam([*encoder.parameters(), *objective.parameters()], lr=1e-3)
    step = 0
    for _ in range(place["epochs"]):
        for batch in signal[torch.randperm(len(signal))].split(place["batch_size"]):
            objective.begin(step, lambda: encoder(data.view(signal)))
            loss, seen = objective(encoder(data.view(batch)), encoder(data.view(batch)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
    found = {"probe": of_neighbours(encoder, known, asked)}
    with torch.no_grad():
        rows = encoder(asked[0]).numpy()
    found |= probes.without_training(rows, asked[1].numpy(), config["seed"])
    return {
        "config": config,
        **{name: round(value, 2) for name, value in found.items()},
        "history": [seen()],
        "seconds": round(time.perf_counter() - started, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.map.recipe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2, help="runs at a time, a thread each")
    parser.add_argument("--output", type=Path, default=RUNS)
    args = parser.parse_args()
    jobs = [(config,) for config in wanted(args.seeds)]
    try:
        results.complete(args.output, jobs, run, args.workers)
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.map.recipe: {error}")
    print(f"{len(jobs)} runs are in {args.output}")


if __name__ == "__main__":
    main()
