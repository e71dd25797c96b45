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

from docs.programs.tables import markdown
from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.graphs import BALANCED, CENTRED, PLAIN, pgcl_of
from experiments.common.probes import measured
from experiments.common.tables import difference, spread
from pgcl_losses import InfoNCE

from .data import load, raw_folder
from .probe import linear
from .train import GCN, sparse_if_faster, views_of

MEASURED_AT = (70, 200)  # epochs
INFO_NCE, PAPER = "InfoNCE", "the paper's PGCL"
LOSSES: dict[str, dict[str, Any]] = {  # options of PGCLLoss
    INFO_NCE: {},
    PAPER: {"num_prototypes": 10, "consistency_weight": 6},
    "PGCL, lambda 1, K=50": {"num_prototypes": 50, "consistency_weight": 1},
    "PGCL, lambda 1, K=50, balanced": {
        "num_prototypes": 50,
        "consistency_weight": 1,
        "predictions": BALANCED,
    },
    "PGCLLoss(dim)": {"num_prototypes": 10, "consistency_weight": 0.3, "temperature": 0.5},
}
# Of the defaults of both losses: those of few_labels.
CANDIDATES: dict[str, dict[str, Any]] = {
    f"{INFO_NCE}, tau {tau:g}": {"temperature": tau} for tau in (0.1, 0.2, 0.5, 1.0, 2.0)
}
CANDIDATES |= {
    f"PGCL, tau {tau:g}, lambda {weight:g}, K={number}, {predictions}": {
        "temperature": tau,
        "consistency_weight": weight,
        "predictions": predictions,
        "num_prototypes": number,
    }
    for number, predictions, weight, tau in itertools.product(
        (10, 50), (PLAIN, CENTRED, BALANCED), (0.3, 1.0, 6.0), (0.2, 0.5, 1.0)
    )
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
    options = {"temperature": config["temperature"]}
    if "consistency_weight" in config:
        criterion: nn.Module = pgcl_of(width, **options | (LOSSES | CANDIDATES)[config["loss"]])
    else:
        criterion = InfoNCE(**options)
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
            one_shot = measured(h, labels.numpy(), seed, "labels_1")["labels_1"]
            values[f"1 label after {epoch}"] = one_shot
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
    losses = [*LOSSES, *CANDIDATES]
    add("--losses", nargs="+", choices=losses, metavar="LOSS", default=[*LOSSES])
    add("--defaults", type=count, metavar="K", help="the candidates of defaults with K prototypes")
    add("--seeds", type=int, nargs="+", default=[*range(2, 12)])
    add("--epochs", type=count, nargs="+", default=[*MEASURED_AT], help="when to evaluate")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/grace.jsonl"))
    add("--cache", type=Path, default=Path("runs/data"), help="folder for downloads")
    return parser.parse_args()


def main() -> None:
    args = parse()
    losses = args.losses
    if args.defaults:
        losses = [
            loss
            for loss, options in CANDIDATES.items()
            if options.get("num_prototypes", args.defaults) == args.defaults
        ]
    jobs = []
    for seed, dataset, loss in itertools.product(args.seeds, args.dataset, losses):
        config = {"dataset": dataset, "loss": loss, "seed": seed, "epochs": args.epochs}
        folder = raw_folder(dataset, args.root, args.cache)
        jobs.append(({**config, **SETTINGS[dataset], **(LOSSES | CANDIDATES)[loss]}, folder))
    runs = results.complete(args.output, jobs, run, args.workers)
    if {*losses} <= {*LOSSES}:
        print(table(runs))


if __name__ == "__main__":
    program("nodes.grace", main)
