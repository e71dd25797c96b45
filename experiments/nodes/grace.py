"""PGCL in GRACE's loop, with and without balanced predictions: is it stuck where InfoNCE is not?

python -m experiments.nodes.grace --dataset Cora CiteSeer --root data

GRACE's encoder, views and settings of each set; PGCLLoss takes the place of its loss. grace.md
says what is compared. Finished runs are appended to --output, and are not run again.
"""

import argparse
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from sklearn.preprocessing import normalize
from torch import nn

from docs.tables import markdown
from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.tables import difference, spread
from pgcl_losses import InfoNCE, PGCLLoss

from .data import load, raw_folder
from .probe import linear
from .train import GCN, sparse_if_faster, views_of

MEASURED_AT = (70, 200)  # epochs
INFO_NCE = "InfoNCE"
LOSSES: dict[str, dict[str, Any]] = {  # options of PGCLLoss
    INFO_NCE: {},
    "the paper's PGCL": {},
    "PGCL, lambda 1, K=50": {"num_prototypes": 50, "consistency_weight": 1},
    "PGCL, lambda 1, K=50, balanced": {
        "num_prototypes": 50,
        "consistency_weight": 1,
        "balance_predictions": True,
    },
}
# GRACE's config.yaml; it has no Photo, which gets Cora's. The larger graphs are sampled.
CORA = {"lr": 5e-4, "width": 128, "temperature": 0.4}
CORA |= {"edges_dropped": [0.2, 0.4], "features_masked": [0.3, 0.4]}
CITESEER = {"lr": 1e-3, "width": 256, "temperature": 0.9}
CITESEER |= {"edges_dropped": [0.2, 0.0], "features_masked": [0.3, 0.2]}
DBLP = {"lr": 1e-3, "width": 256, "temperature": 0.7}
DBLP |= {"edges_dropped": [0.1, 0.4], "features_masked": [0.1, 0.0]}
SETTINGS: dict[str, dict[str, Any]] = {
    "Cora": {**CORA, "batch": 2708},
    "CiteSeer": {**CITESEER, "batch": 3327},
    "Photo": {**CORA, "batch": 2048},
    "DBLP": {**DBLP, "batch": 2048},
}


def run(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train by one loss, and evaluate the encoder by a linear probe after some epochs."""
    torch.manual_seed(config["seed"])
    x, edge_index, labels = load(config["dataset"], folder)
    width, seed = config["width"], config["seed"]
    features, encoder = sparse_if_faster(x), GCN(x.shape[1], width)
    head = nn.Sequential(nn.Linear(width, width), nn.ELU(), nn.Linear(width, width))
    if config["loss"] == INFO_NCE:
        criterion: nn.Module = InfoNCE(temperature=config["temperature"])
    else:
        options = {name: config[name] for name in LOSSES[config["loss"]]}
        criterion = PGCLLoss(width, temperature=config["temperature"], **options)
    parameters = [*encoder.parameters(), *head.parameters(), *criterion.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=config["lr"], weight_decay=1e-5)
    values: dict[str, float] = {}
    for epoch in range(1, max(config["epochs"]) + 1):
        batch, views = views_of(config, epoch, *x.shape, edge_index)
        z1, z2 = (head(encoder(features, *view)[batch]) for view in views)
        loss = criterion(z1, z2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if epoch in config["epochs"]:
            with torch.no_grad():
                h = encoder(features, edge_index, torch.ones(x.shape[1])).numpy()
            values[f"probe after {epoch}"] = round(linear(normalize(h), labels.numpy(), seed), 3)
    return {"config": config, **values}


def table(runs: Collection[results.Run]) -> str:
    """Accuracy of InfoNCE in per cent, and what each PGCL has minus it, by set and length."""

    def seeds(dataset: str, measure: str, loss: str) -> dict[int, float]:
        wanted = dataset, loss
        found = [run for run in runs if (run["config"]["dataset"], run["config"]["loss"]) == wanted]
        return {run["config"]["seed"]: run[measure] for run in found}

    lines = []
    places = {(run["config"]["dataset"], n) for run in runs for n in run["config"]["epochs"]}
    for dataset, epochs in sorted(places, key=lambda p: ([*SETTINGS].index(p[0]), p[1])):
        one, *others = (seeds(dataset, f"probe after {epochs}", loss) for loss in LOSSES)
        deltas = [difference(other, one) for other in others]
        lines.append([f"{dataset}, {epochs} epochs", spread(one.values()), *deltas])
    head = ["set", INFO_NCE, *(f"{loss}, minus InfoNCE" for loss in [*LOSSES][1:])]
    return markdown(head, lines)


def parse() -> argparse.Namespace:
    parser = parser_of("nodes.grace", __doc__)
    add = parser.add_argument
    add("--dataset", required=True, nargs="+", choices=SETTINGS, help="sets of PyG")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--losses", nargs="+", choices=LOSSES, default=[*LOSSES])
    add("--seeds", type=int, nargs="+", default=[*range(2, 12)])
    add("--epochs", type=count, nargs="+", default=[*MEASURED_AT], help="when to evaluate")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/grace.jsonl"))
    add("--cache", type=Path, default=Path("runs/data"), help="folder for downloads")
    return parser.parse_args()


def main() -> None:
    args = parse()
    jobs = []
    for seed, dataset, loss in itertools.product(args.seeds, args.dataset, args.losses):
        config = {"dataset": dataset, "loss": loss, "seed": seed, "epochs": args.epochs}
        folder = raw_folder(dataset, args.root, args.cache)
        jobs.append(({**config, **SETTINGS[dataset], **LOSSES[loss]}, folder))
    print(table(results.complete(args.output, jobs, run, args.workers)))


if __name__ == "__main__":
    program("nodes.grace", main)
