"""PGCL beside InfoNCE on synthetic clusters: tensors only, no graphs, half a minute on two cores.

Each sample hides a class in a few of its latent directions; the rest is nuisance, drawn afresh for
each view. Two copies of one small encoder learn without labels, one with PGCL, one with InfoNCE.
Labels are used only to measure the result: purity of 10 k-means clusters, and a linear probe on
held-out samples.

    python examples/synthetic_clusters.py --classes 10
"""

import argparse

import torch
from sklearn.cluster import KMeans  # pip install -e '.[experiments]'
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn
from tqdm import tqdm  # pip install -e '.[experiments]'

from pgcl_losses import PGCLLoss, diagnostics

parser = argparse.ArgumentParser(description="PGCL beside InfoNCE on synthetic clusters.")
parser.add_argument("--classes", type=int, default=4, help="number of classes")
parser.add_argument("--prototypes", type=int, default=10, help="K of PGCL")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--samples", type=int, default=4096, help="training samples")
parser.add_argument("--seeds", type=int, default=3, help="runs to average over")
args = parser.parse_args()
for name, least in {"classes": 2, "prototypes": 1, "epochs": 1, "samples": 1, "seeds": 1}.items():
    if getattr(args, name) < least:
        parser.error(f"--{name} must be {least} or more, but it is {getattr(args, name)}")

BATCH, SIGNAL, NUISANCE, WIDTH, DIM = 128, 8, 24, 64, 32
LOSSES = {
    "InfoNCE": {"weighting": "uniform", "exclude_same_cluster": False, "consistency_weight": 0.0},
    "PGCL": {},
}


class SyntheticClusters:
    """Samples with a hidden class, seen through one fixed random layer."""

    def __init__(self) -> None:
        self.centers = 1.2 * torch.randn(args.classes, SIGNAL)
        self.mix = torch.randn(SIGNAL + NUISANCE, WIDTH) / (SIGNAL + NUISANCE) ** 0.5

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        labels = torch.randint(args.classes, (count,))
        return self.centers[labels] + torch.randn(count, SIGNAL), labels

    def view(self, signal: Tensor) -> Tensor:
        noisy = signal + 0.3 * torch.randn_like(signal)
        return torch.tanh(torch.cat([noisy, torch.randn(len(signal), NUISANCE)], dim=1) @ self.mix)


def evaluate(encoder: nn.Module, data: SyntheticClusters) -> tuple[float, float]:
    """Purity of k-means clusters, and a linear probe's accuracy on held-out samples."""
    (train_signal, train_labels), (signal, labels) = data.draw(1000), data.draw(1000)
    with torch.no_grad():
        train_z, z = (
            nn.functional.normalize(encoder(data.view(s))).numpy() for s in (train_signal, signal)
        )
    clusters = torch.tensor(KMeans(10, n_init=4, random_state=0).fit_predict(z)).long()
    members = nn.functional.one_hot(clusters, 10).T @ nn.functional.one_hot(labels, args.classes)
    purity = members.max(dim=1).values.sum().item() / len(labels)
    probe = LogisticRegression(max_iter=1000).fit(train_z, train_labels)
    return purity, probe.score(z, labels)


def train(name: str, seed: int, progress: tqdm) -> tuple[list[tuple[float, float]], dict]:
    torch.manual_seed(seed)
    data = SyntheticClusters()
    signal, _ = data.draw(args.samples)
    encoder = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, DIM))
    loss_of = PGCLLoss(DIM, args.prototypes, **LOSSES[name])
    optimizer = torch.optim.Adam([*encoder.parameters(), *loss_of.parameters()], lr=1e-3)

    history = [evaluate(encoder, data)]
    for _ in range(args.epochs):
        for batch in signal[torch.randperm(len(signal))].split(BATCH):
            terms = loss_of.terms(encoder(data.view(batch)), encoder(data.view(batch)))
            optimizer.zero_grad()
            terms.loss.backward()
            optimizer.step()
        history.append(evaluate(encoder, data))
        progress.update()
        progress.set_postfix(run=f"{name} seed {seed}", loss=f"{terms.loss.item():.3f}")
    return history, diagnostics(terms, loss_of.prototypes.weight)


def main() -> None:
    results, last = {}, {}
    with tqdm(total=len(LOSSES) * args.seeds * args.epochs, unit="epoch") as progress:
        for name in LOSSES:
            runs = [train(name, seed, progress) for seed in range(args.seeds)]
            results[name] = torch.tensor([history for history, _ in runs])  # [seeds, epochs, 2]
            last[name] = runs[-1][1]

    print(f"\n{args.classes} classes, mean over {args.seeds} seeds (epoch 0: untrained)\n")
    print("epoch   purity: InfoNCE   PGCL     probe: InfoNCE   PGCL")
    for epoch in range(0, args.epochs + 1, max(1, args.epochs // 5)):
        (info_purity, info_probe), (purity, probe) = (
            results[name][:, epoch].mean(0).tolist() for name in LOSSES
        )
        print(f"{epoch:5d}{info_purity:18.3f}{purity:7.3f}{info_probe:19.3f}{probe:7.3f}")
    difference = results["PGCL"][:, -1] - results["InfoNCE"][:, -1]  # [seeds, 2]
    for what, column in (("purity", 0), ("probe", 1)):
        each = ", ".join(f"{value:+.3f}" for value in difference[:, column].tolist())
        print(f"PGCL minus InfoNCE, {what}, seed by seed: {each}")
    print("diagnostics of PGCL's last batch:", last["PGCL"])


if __name__ == "__main__":
    main()
