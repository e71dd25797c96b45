"""Fine-tune pre-trained encoders on properties of molecules, and compare their ROC-AUC.

python -m experiments.molecules.finetune --csv bbbp.csv tox21.csv \\
    --encoders none runs/molecules/InfoNCE-0.pt runs/molecules/PGCL-0.pt

The seeds are those of fine-tuning. Finished runs are appended to --output, one JSON line each, and
are not run again.
"""

import time
from pathlib import Path

import rdkit
import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric.loader import DataLoader

from docs.tables import markdown
from experiments.common import results
from experiments.common.arguments import count, program
from experiments.common.tables import difference, spread

from .data import TEST, TRAIN, VALID, labelled
from .inputs import Encoder, comparison_parser, complete, origin
from .model import NONE, WIDTH, encoder_of, outputs
from .ranking import roc_auc
from .report import at_best_epoch


def run(config: results.Config, table: Path, encoder: Path | None, device: str) -> results.Run:
    """Validation and test ROC-AUC after each epoch."""
    started = time.perf_counter()
    data = labelled(table)
    torch.manual_seed(config["seed"])
    pretrained = encoder_of(encoder, config["dropout"])
    model = nn.Sequential(pretrained, nn.Linear(WIDTH, data.labels.shape[1])).to(device)
    train, _ = data.part(TRAIN)
    # Batch normalisation cannot train on a last batch of one molecule.
    drop_last = len(train) > config["batch_size"]
    loader = DataLoader(train, config["batch_size"], shuffle=True, drop_last=drop_last)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    auc: dict[str, list[float]] = {"valid": [], "test": []}
    for _ in range(config["epochs"]):
        train_epoch(model, loader, optimizer)
        for name, part in (("valid", VALID), ("test", TEST)):
            graphs, labels = data.part(part)
            auc[name].append(round(roc_auc(outputs(model, graphs).numpy(), labels), 3))
    seconds = round(time.perf_counter() - started, 1)
    versions = {"rdkit": rdkit.__version__}
    return {"config": config, "auc": auc, "seconds": seconds, "versions": versions}


def train_epoch(model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
    """Minimise the binary cross-entropy of all tasks, over the measured labels."""
    model.train()
    device = next(model.parameters()).device
    for batch in loader:
        batch = batch.to(device)
        measured = ~batch.y.isnan()
        loss = F.binary_cross_entropy_with_logits(
            model(batch)[measured], batch.y[measured], reduction="sum"
        )
        optimizer.zero_grad()
        (loss / measured.sum().clamp(min=1)).backward()
        optimizer.step()


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
        key: {seed: at_best_epoch(run) for seed, run in seeds.items()}
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
