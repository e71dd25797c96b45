"""Fine-tune pre-trained encoders on properties of molecules, and compare their ROC-AUC.

python -m experiments.molecules.finetune --csv bbbp.csv tox21.csv \\
    --encoders none runs/molecules/InfoNCE-0.pt runs/molecules/PGCL-0.pt

The seeds are those of fine-tuning. Finished runs are appended to --output, one JSON line each, and
are not run again.
"""

import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import rdkit
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader

from docs.programs.tables import markdown
from experiments.common import results
from experiments.common.arguments import count, program
from experiments.common.tables import difference, spread

from .data import TEST, TRAIN, VALID, labelled, roc_auc
from .inputs import Encoder, comparison_parser, complete, origin
from .model import NONE, WIDTH, encoder_of, outputs, train_epoch


def loss_of_labels(model: nn.Module, batch: Batch) -> Tensor:
    """The mean binary cross-entropy of all tasks, over the measured labels."""
    measured = ~batch.y.isnan()
    losses = F.binary_cross_entropy_with_logits(
        model(batch)[measured], batch.y[measured], reduction="sum"
    )
    return losses / measured.sum().clamp(min=1)


def finetune(
    model: nn.Module, parts: Sequence[Sequence[Data]], epochs: int, batch_size: int, lr: float
) -> dict[str, list[float]]:
    """The ROC-AUC of the validation and the test part after each epoch."""
    (train, *others), device = parts, next(model.parameters()).device
    # Batch normalisation cannot train on a last batch of one molecule.
    loader = DataLoader(train, batch_size, shuffle=True, drop_last=len(train) > batch_size)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    auc: dict[str, list[float]] = {"valid": [], "test": []}
    for _ in range(epochs):
        model.train()
        train_epoch(partial(loss_of_labels, model), loader, optimizer, device)
        for scores, graphs in zip(auc.values(), others, strict=True):
            labels = torch.cat([graph.y for graph in graphs]).numpy()
            scores.append(round(roc_auc(outputs(model, graphs).numpy(), labels), 3))
    return auc


def at_best_epoch(auc: dict[str, list[float]]) -> float:
    """Test score at the first epoch with the best validation score."""
    return auc["test"][int(np.argmax(auc["valid"]))]


def run(config: results.Config, table: Path, encoder: Path | None, device: str) -> results.Run:
    """Validation and test ROC-AUC after each epoch."""
    started = time.perf_counter()
    data = labelled(table)
    torch.manual_seed(config["seed"])
    pretrained = encoder_of(encoder, config["dropout"])
    model = nn.Sequential(pretrained, nn.Linear(WIDTH, data.labels.shape[1])).to(device)
    parts = [data.part(part) for part in (TRAIN, VALID, TEST)]
    setting = config["epochs"], config["batch_size"], config["lr"]
    auc = finetune(model, parts, *setting)
    seconds = round(time.perf_counter() - started, 1)
    versions = {"rdkit": rdkit.__version__}
    return {"config": config, "auc": auc, "seconds": seconds, "versions": versions}


def main() -> None:
    parser = comparison_parser("finetune", __doc__)
    add = parser.add_argument
    add("--seeds", type=count, default=3)
    add("--epochs", type=count, default=20)
    add("--batch-size", type=count, default=32)
    args = parser.parse_args()
    encoders = [
        Encoder(str(file or NONE), file, origin(file) if file else None, seed)
        for file in args.encoders
        for seed in range(args.seeds)
    ]
    setting = {"epochs": args.epochs, "batch_size": args.batch_size, "lr": 1e-3, "dropout": 0.5}
    runs = complete(args, encoders, setting, run)
    scores = {
        key: {seed: at_best_epoch(run["auc"]) for seed, run in seeds.items()}
        for key, seeds in runs.items()
    }
    lines = []
    for (name, path), seeds in scores.items():
        minus_none = difference(seeds, scores.get((NONE, path), {}))
        lines.append([path.name, name, spread(seeds.values()), minus_none])
    print(f"\nROC-AUC in per cent, {args.seeds} seeds\n")
    print(markdown(["set", "encoder", "ROC-AUC", "minus no pre-training"], lines))


if __name__ == "__main__":
    program("molecules.finetune", main)
