"""Molecules: pre-train a GIN without labels, then fine-tune it on a property of MoleculeNet.

Pre-training compares two views of each molecule by InfoNCE or PGCL, and ignores the labels of its
sets. Fine-tuning uses the labels of --dataset, split by scaffold, with and without the pre-trained
weights. PyG downloads the sets unless they are in --root. The first line takes four minutes on two
cores. On two machines its test ROC-AUC was 72.0 ± 2.7 and 68.8 ± 3.2 % without pre-training, and
71.6 ± 5.1 and 68.0 ± 3.5 % with it (three seeds): the 7,831 molecules of Tox21 gain nothing. With
100,000, the gain is 1 to 15 points on six of seven sets (docs/published_code.md):

    python examples/molecules.py --dataset BACE
    python examples/molecules.py --dataset BBBP --pretrain Tox21 MUV --width 300
"""

import argparse
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rdkit.Chem.Scaffolds import MurckoScaffold as murcko  # pip install -r requirements.txt rdkit
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.datasets import MoleculeNet
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GINEConv, global_mean_pool
from torch_geometric.utils.smiles import e_map, x_map
from tqdm import tqdm

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

TRAIN, VALID, TEST = 0, 1, 2
SETS = "BBBP", "BACE", "Tox21", "ToxCast", "SIDER", "ClinTox", "MUV", "HIV", "PCBA"


class Categories(nn.Module):
    """The sum of the embeddings of all categories of an atom or bond."""

    def __init__(self, features: dict[str, list[Any]], width: int) -> None:
        super().__init__()
        most = max(map(len, features.values()))
        self.embedding = nn.EmbeddingBag(len(features) * most, width, mode="sum")
        nn.init.xavier_uniform_(self.embedding.weight)
        self.register_buffer("first", torch.arange(len(features)) * most, persistent=False)

    def forward(self, categories: Tensor) -> Tensor:
        return self.embedding(categories + self.first)


class MoleculeGIN(nn.Module):
    """Atoms ``x [V, 9]`` and bonds ``edge_attr [E, 3]`` of a batch -> embeddings ``[G, width]``."""

    def __init__(self, width: int = 300, layers: int = 5, dropout: float = 0.0) -> None:
        super().__init__()
        self.width, self.dropout = width, dropout
        self.atoms = Categories(x_map, width)
        self.bonds = nn.ModuleList(Categories(e_map, width) for _ in range(layers))
        self.convs = nn.ModuleList(
            GINEConv(
                nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width))
            )
            for _ in range(layers)
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(layers))

    def forward(self, batch: Batch) -> Tensor:
        x = self.atoms(batch.x)
        for conv, bonds, norm in zip(self.convs, self.bonds, self.norms, strict=True):
            x = norm(conv(x, batch.edge_index, bonds(batch.edge_attr)))
            x = x if norm is self.norms[-1] else x.relu()
            x = F.dropout(x, self.dropout, self.training)
        return global_mean_pool(x, batch.batch, batch.num_graphs)


def projected(encoder: MoleculeGIN) -> nn.Sequential:
    """The encoder with its projection head."""
    width = encoder.width
    return nn.Sequential(encoder, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


def loss_of_labels(model: nn.Module, batch: Batch) -> Tensor:
    """The mean binary cross-entropy of all tasks, over the measured labels."""
    measured = ~batch.y.isnan()
    losses = F.binary_cross_entropy_with_logits(
        model(batch)[measured], batch.y[measured], reduction="sum"
    )
    return losses / measured.sum().clamp(min=1)


def train_epoch(
    loss_of: Callable[[Batch], Tensor],
    batches: Iterable[Batch],
    optimizer: torch.optim.Optimizer,
    device: torch.device | str,
) -> float:
    """The loss of the last batch of an epoch."""
    for batch in batches:
        loss = loss_of(batch.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def outputs(model: nn.Module, graphs: Sequence[Data]) -> Tensor:
    """What the model, ``Batch -> [G, D]``, makes of all graphs, without dropout."""
    model.eval()
    device = next(model.parameters()).device
    return torch.cat([model(batch.to(device)).cpu() for batch in DataLoader(graphs, 256)])


def split(smiles: Sequence[str]) -> np.ndarray:
    """The part of each molecule ``[N]``: 80 per cent to train, 10 to validate, 10 to test.

    Molecules of one Bemis-Murcko scaffold stay together. Parts get scaffolds from the most frequent
    to the least, of equally frequent ones the last in the file first. A scaffold that would make a
    part too large goes to the next part.
    """
    members: dict[str, list[int]] = {}
    for index, text in enumerate(tqdm(smiles, desc="scaffolds", unit="molecule", leave=False)):
        scaffold = murcko.MurckoScaffoldSmiles(text, includeChirality=True)
        members.setdefault(scaffold, []).append(index)
    parts = np.full(len(smiles), TEST)
    trained, validated = 0, 0
    for group in sorted(members.values(), key=lambda group: (len(group), group[0]), reverse=True):
        if trained + len(group) <= 0.8 * len(smiles):
            parts[group] = TRAIN
            trained += len(group)
        elif trained + validated + len(group) <= 0.9 * len(smiles):
            parts[group] = VALID
            validated += len(group)
    return parts


def has_both(labels: np.ndarray) -> bool:
    """Whether both classes were measured."""
    return bool((labels == 0).any() and (labels == 1).any())


def roc_auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """In per cent, the mean over the tasks ``[N, tasks]`` that have both classes.

    Labels are 0, 1, or nan where nothing was measured.
    """
    if np.isnan(logits).any():
        raise ValueError("logits are nan, as training has diverged")
    scores = []
    for values, answers in zip(logits.T, labels.T, strict=True):
        if has_both(answers):
            measured = ~np.isnan(answers)
            scores.append(roc_auc_score(answers[measured], values[measured]))
    return 100 * float(np.mean(scores)) if scores else float("nan")


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Molecules: pre-train, then fine-tune.")
    add = parser.add_argument
    add("--dataset", choices=SETS, default="BACE", help="whose labels are predicted")
    add("--pretrain", choices=SETS, nargs="+", default=["Tox21"], help="without their labels")
    add("--root", default="data", help="folder of the sets")
    add("--loss", choices=["InfoNCE", "PGCL"], default="InfoNCE")
    add("--temperature", type=float, default=0.2)
    add("--width", type=int, default=128, help="of the GIN; 300 in papers")
    add("--epochs", type=int, default=8, help="of pre-training")
    add("--tune-epochs", type=int, default=10, help="of fine-tuning")
    add("--seeds", type=int, default=3, help="of fine-tuning")
    args = parser.parse_args()
    if min(args.epochs, args.tune_epochs, args.width) < 1 or args.seeds < 2:
        parser.error("--epochs, --tune-epochs and --width must be 1 or more, --seeds 2 or more")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    labelled = MoleculeNet(args.root, args.dataset)
    unlabelled = [
        Data(x=graph.x, edge_index=graph.edge_index, edge_attr=graph.edge_attr)
        for name in args.pretrain
        for graph in MoleculeNet(args.root, name)
    ]
    part_of = split([graph.smiles for graph in labelled])
    parts = [labelled[np.flatnonzero(part_of == part)] for part in (TRAIN, VALID, TEST)]

    torch.manual_seed(0)
    encoder = MoleculeGIN(args.width)
    model = projected(encoder)  # before the loss, which draws prototypes
    loss_of = InfoNCE(temperature=args.temperature)
    if args.loss == "PGCL":
        loss_of = PGCLLoss(args.width, temperature=args.temperature)
    model = ContrastiveModel(model, NodeDrop(0.2), EdgePerturb(0.2), loss_of).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    loader = DataLoader(unlabelled, 256, shuffle=True, drop_last=len(unlabelled) > 256)
    for epoch in range(1, args.epochs + 1):
        bar = tqdm(loader, unit="batch", leave=False)
        print(f"Epoch: {epoch:03d}, Loss: {train_epoch(model, bar, optimizer, device):.4f}")

    scores: dict[str, list[float]] = {"without": [], "with": []}
    for seed in range(args.seeds):
        for name, values in scores.items():
            torch.manual_seed(seed)
            tuned = MoleculeGIN(args.width, dropout=0.5)
            if name == "with":
                tuned.load_state_dict(encoder.state_dict())
            predictor = nn.Sequential(tuned, nn.Linear(args.width, labelled[0].y.shape[1]))
            auc = finetune(predictor.to(device), parts, args.tune_epochs, batch_size=32, lr=1e-3)
            values.append(at_best_epoch(auc))
            print(f"Seed: {seed}, {name} pre-training, ROC-AUC: {values[-1]:.1f} %")
    for name, values in scores.items():
        mean, deviation = np.mean(values), np.std(values, ddof=1)
        print(f"{args.dataset}, {name} pre-training: {mean:.1f} ± {deviation:.1f}")


if __name__ == "__main__":
    main()
