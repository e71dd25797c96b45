"""One run: fine-tune an encoder on the tasks of a set, and score it on new scaffolds."""

import copy
import csv
import time
from pathlib import Path
from typing import Any

import numpy as np
import rdkit
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset, Subset
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from .inputs import LabelledSet
from .model import Tasks, encoder_of
from .molecules import Molecules
from .ranking import SCORES, ranking
from .scaffold import TEST, TRAIN, VALID


class LabelledMolecules(Dataset):
    """Molecules with labels ``[1, tasks]``, nan where nothing was measured."""

    def __init__(self, molecules: Molecules, labels: Tensor) -> None:
        self.molecules, self.labels = molecules, labels

    def __len__(self) -> int:
        return len(self.molecules)

    def __getitem__(self, index: int) -> Data:
        graph = self.molecules[index]
        graph.y = self.labels[index : index + 1]
        return graph


def run(
    config: dict[str, Any], data: LabelledSet, encoder: Path | None, predictions: Path | None = None
) -> dict[str, Any]:
    """The results of a run with this configuration, ready for JSON."""
    started = time.perf_counter()
    device = torch.device(data.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    molecules = LabelledMolecules(Molecules(data.folder), data.labels)
    torch.manual_seed(config["seed"])
    model = Tasks(encoder_of(encoder, config["dropout"]), len(data.tasks)).to(device)
    train = Subset(molecules, np.flatnonzero(data.parts == TRAIN))
    # A last batch of one molecule would stop batch normalisation.
    full = len(train) > config["batch_size"]
    loader = DataLoader(train, config["batch_size"], shuffle=True, drop_last=full)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    scores: dict[str, dict[str, list[float]]] = {name: {"valid": [], "test": []} for name in SCORES}
    best: dict[str, Tensor] = {}
    for _ in range(config["epochs"]):
        train_epoch(model, loader, optimizer)
        for name, part in (("valid", VALID), ("test", TEST)):
            indices = np.flatnonzero(data.parts == part)
            logits = predicted(model, Subset(molecules, indices))
            for score, value in ranking(logits.numpy(), data.labels[indices].numpy()).items():
                scores[score][name].append(round(value, 3))
        if best_epoch(scores["auc"]) == len(scores["auc"]["valid"]) - 1:
            best = copy.deepcopy(model.state_dict())
    if predictions is not None:
        model.load_state_dict(best)
        write(predictions, data, molecules.molecules.lines, predicted(model, molecules).sigmoid())
    return {
        "config": config,
        **scores,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"rdkit": rdkit.__version__},
    }


def best_epoch(auc: dict[str, list[float]]) -> int:
    """The first epoch with the best validation score."""
    return int(np.argmax(auc["valid"]))


def write(path: Path, data: LabelledSet, lines: np.ndarray, probabilities: Tensor) -> None:
    """A table with each molecule's line in its file, from 0, its part, and its probabilities."""
    names = {TRAIN: "train", VALID: "valid", TEST: "test"}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", newline="") as file:  # an existing file is an error
        table = csv.writer(file)
        table.writerow(["row", "part", *data.tasks])
        for line, part, values in zip(lines, data.parts, probabilities.tolist(), strict=True):
            table.writerow([line, names[part], *(f"{value:.4f}" for value in values)])


def train_epoch(model: Tasks, loader: DataLoader, optimizer: torch.optim.Optimizer) -> None:
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


@torch.no_grad()
def predicted(model: Tasks, labelled: Dataset) -> Tensor:
    """Logits ``[N, tasks]``."""
    model.eval()
    device = next(model.parameters()).device
    return torch.cat([model(b.to(device)).float().cpu() for b in DataLoader(labelled, 256)])
