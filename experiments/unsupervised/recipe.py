"""InfoNCE, then PGCL, beside InfoNCE on whole graphs, by five measures; prints tables.

python -m experiments.unsupervised.recipe --root data             # adds to the committed runs

It was tuned on MUTAG, PTC_MR and PROTEINS; the other sets are held out.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.preprocessing import scale
from torch import Tensor
from torch_geometric.loader import DataLoader

from experiments.common import probes, results
from experiments.common.arguments import count
from experiments.common.losses import Objective, Options
from experiments.common.rows import INFO_NCE, PGCL, RECOMMENDED, RIVALS, recipe
from experiments.common.tables import difference, markdown, measures, spread
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

from .data import fetch, load
from .evaluate import accuracy
from .model import DIM, GIN, Projected
from .train import SETTING, SHORTER, UNTRAINED, embed

SETS = ("MUTAG", "PTC_MR", "PROTEINS", "NCI1", "REDDIT-BINARY", "COLLAB")
RUNS = Path(__file__).parent / "recipe.jsonl"
TRAINING = {name: SETTING[name] for name in ("batch_size", "epochs", "drop", "lr")}
TEMPERATURE = 0.2
STARTING = 10  # batches whose embeddings initialise the prototypes
LOSSES: dict[str, Options | None] = {
    UNTRAINED: None,
    INFO_NCE: {},
    PGCL: {"num_prototypes": 10, "consistency_weight": 6.0},
    RECOMMENDED: recipe(TRAINING["batch_size"], TEMPERATURE),
    **RIVALS,
}


def configuration(dataset: str, digest: str, row: str, seed: int) -> results.Config:
    """The configuration of a run; an untrained encoder has no loss."""
    config: dict[str, Any] = {"dataset": dataset, "data": digest, "seed": seed, "loss": LOSSES[row]}
    if row != UNTRAINED:
        config |= TRAINING | SHORTER.get(dataset, {})
    return json.loads(json.dumps(config))


def run(config: results.Config, graphs_file: Path) -> results.Run:
    """The five measures after the last epoch, ready for JSON."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    graphs = load(graphs_file)
    labels = torch.cat([graph.y for graph in graphs]).numpy()
    encoder = GIN(graphs[0].num_node_features)
    history: list[dict[str, Any]] = []
    if config["loss"] is not None:
        loader = DataLoader(graphs, config["batch_size"], shuffle=True)
        history = train(config, encoder, loader)
    embeddings = embed(encoder, graphs).astype(np.float64)
    values = {"probe": accuracy(embeddings, labels, config["seed"])}
    values |= probes.without_training(scale(embeddings), labels, config["seed"])
    return {
        "config": config,
        **{name: round(value, 3) for name, value in values.items()},
        "history": history,
        "seconds": round(time.perf_counter() - started, 1),
    }


def train(config: results.Config, encoder: GIN, loader: DataLoader) -> list[dict[str, Any]]:
    """Returns the diagnostics of the last batch of each epoch."""
    steps = config["epochs"] * len(loader)
    objective = Objective(config["loss"], DIM, TEMPERATURE, steps)
    augments = NodeDrop(config["drop"]), EdgePerturb(config["drop"])
    model = ContrastiveModel(Projected(encoder), *augments, objective)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    step, history = 0, []
    for _ in range(config["epochs"]):
        model.train()
        for batch in loader:
            objective.begin(step, lambda: projections(model, loader))
            loss, diagnostics = objective(*model.embeddings(batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        history.append(diagnostics())
    return history


def projections(model: ContrastiveModel, loader: DataLoader) -> Tensor:
    """Projections of some batches."""
    return torch.cat([model.embeddings(batch)[0] for batch in itertools.islice(loader, STARTING)])


def tables(runs: Collection[results.Run]) -> dict[str, str]:
    """By measure: means of losses against sets, and differences from InfoNCE, paired by seed."""
    by_set: dict[str, dict[str, dict[int, results.Run]]] = {}  # set -> loss -> seed -> run
    for run in runs:
        config = run["config"]
        if results.agrees(config, TRAINING | SHORTER.get(config["dataset"], {})):
            of_set = by_set.setdefault(config["dataset"], {})
            of_set.setdefault(results.key(config["loss"]), {})[config["seed"]] = run
    names = [name for name in SETS if name in by_set]

    def values(name: str, row: str, measure: str) -> dict[int, float]:
        runs = by_set[name].get(results.key(LOSSES[row]), {})
        return {seed: run[measure] for seed, run in runs.items()}

    pairs = {}
    for measure in probes.NAMES:
        means, deltas = {}, {}
        for row in LOSSES:
            seeds = [values(name, row, measure) for name in names]
            means[row] = [spread([*of_set.values()]) if of_set else "" for of_set in seeds]
            bases = (values(name, INFO_NCE, measure) for name in names)
            deltas[row] = [*map(difference, seeds, bases)] if row != INFO_NCE else []
        pairs[f"graphs {measure}"] = "\n\n".join(
            markdown([first, *names], [[row, *cells] for row, cells in rows.items() if any(cells)])
            for first, rows in (("loss", means), (f"minus {INFO_NCE}", deltas))
        )
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m experiments.unsupervised.recipe",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--datasets", nargs="+", default=SETS, help=f"default: {', '.join(SETS)}")
    add("--root", type=Path, help="folder of NAME.zip or NAME/; without it, sets are downloaded")
    add("--rows", nargs="+", default=list(LOSSES), choices=list(LOSSES), metavar="ROW")
    add("--seeds", type=count, default=5)
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=RUNS)
    add("--cache", type=Path, default=Path("runs/data"), help="folder for processed data sets")
    args = parser.parse_args()
    try:
        for dataset in args.datasets:
            file, digest = fetch(dataset, args.root, args.cache)
            configs = {
                (row, seed): configuration(dataset, digest, row, seed)
                for seed, row in itertools.product(range(args.seeds), args.rows)
            }
            jobs = [(config, file) for config in configs.values()]
            done = results.complete(args.output, jobs, run, args.workers)
            rows: dict[str, dict[int, results.Run]] = {row: {} for row in args.rows}
            for (row, seed), config in configs.items():
                rows[row][seed] = done[results.key(config)]
            print(f"\n{dataset}\n\n{measures(rows, probes.NAMES, INFO_NCE)}")
    except (ValueError, results.Stopped) as error:
        sys.exit(f"experiments.unsupervised.recipe: {error}")


if __name__ == "__main__":
    main()
