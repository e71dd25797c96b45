"""A run of the map: vectors with planted classes, a small encoder, and how close classes end up."""

import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

from experiments.common.rows import ROWS
from pgcl_losses import PGCLLoss, diagnostics

SIGNAL, NUISANCE, WIDTH, DIM = 8, 24, 64, 32
TRAINING, KNOWN, ASKED = 4096, 2000, 2000  # samples to learn from, to look up, and to ask for

KNOBS: dict[str, Any] = {
    "classes": 4,
    "spread": 1.0,  # inside a class, as a standard deviation; the centres have 1.2
    "duplicates": 0,  # originals of each class, of which samples are near-copies; 0: no copies
    "imbalance": 0.0,  # class number r has a share in proportion to r ** -imbalance
    "batch_size": 128,
    "num_prototypes": 10,  # or several, one for each head
    "consistency_weight": 6.0,
    "temperature": 0.2,
    "epsilon": 0.05,
    "epochs": 15,
    "freeze_epochs": 0,
    "warm_up_epochs": 0,  # over which the consistency weight rises from 0
    "negative_ranks": None,  # or the first and the end of the ranks that negatives are taken from
    "soft_clusters": False,
    "start_from_rows": False,  # where the prototypes start, also after a lead; else at random
    "lead_epochs": 0,  # of a warm-up by InfoNCE (in version 0.2 the prototypes learned in it)
}


class Planted:
    """Samples hide their class in a few latent directions; the rest is drawn anew for each view."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.spread = config["spread"]
        self.shares = torch.arange(1.0, config["classes"] + 1) ** -config["imbalance"]
        self.centers = 1.2 * torch.randn(config["classes"], SIGNAL)
        self.mix = torch.randn(SIGNAL + NUISANCE, WIDTH) / (SIGNAL + NUISANCE) ** 0.5

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        labels = torch.multinomial(self.shares, count, replacement=True)
        return self.around(labels), labels

    def around(self, labels: Tensor) -> Tensor:
        return self.centers[labels] + self.spread * torch.randn(len(labels), SIGNAL)

    def labelled(self, count: int) -> tuple[Tensor, Tensor]:
        """Views of new samples, and their classes."""
        signal, labels = self.draw(count)
        return self.view(signal), labels

    def view(self, signal: Tensor) -> Tensor:
        noisy = signal + 0.3 * torch.randn_like(signal)
        return torch.tanh(torch.cat([noisy, torch.randn(len(signal), NUISANCE)], dim=1) @ self.mix)


def run(config: dict[str, Any]) -> dict[str, Any]:
    """How much of the neighbours' classes is right after training, and what no label says of it."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    data, known, asked, signal, encoder = drawn(config)
    loss_of = build(config)
    train(config, data, signal, encoder, loss_of)
    accuracy = of_neighbours(encoder, known, asked)
    seen = without_labels(config, data, signal, encoder, loss_of)
    seconds = round(time.perf_counter() - started, 1)
    return {"config": config, "accuracy": round(accuracy, 2), **seen, "seconds": seconds}


class Drawn(NamedTuple):
    """What a run begins with. It does not depend on the loss: all losses are asked the same."""

    data: Planted
    known: tuple[Tensor, Tensor]
    asked: tuple[Tensor, Tensor]
    signal: Tensor  # to learn from
    encoder: nn.Module


def drawn(config: dict[str, Any]) -> Drawn:
    data = Planted(config)
    known, asked = (data.labelled(count) for count in (KNOWN, ASKED))
    signal, labels = data.draw(TRAINING)
    if config["duplicates"]:
        originals = data.around(torch.arange(config["classes"]).repeat(config["duplicates"]))
        which = torch.randint(config["duplicates"], (TRAINING,)) * config["classes"] + labels
        signal = originals[which] + 0.05 * torch.randn(TRAINING, SIGNAL)
    encoder = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, DIM))
    return Drawn(data, known, asked, signal, encoder)


def build(config: dict[str, Any]) -> PGCLLoss:
    steps = TRAINING // config["batch_size"]
    names = {"freeze_epochs": "freeze_steps", "lead_epochs": "warmup_steps"}
    waits = {name: config[epochs] * steps for epochs, name in names.items()}
    options = {"consistency_weight": config["consistency_weight"], **ROWS[config["row"]]}
    same = ("num_prototypes", "temperature", "epsilon", "negative_ranks", "soft_clusters")
    return PGCLLoss(DIM, **options, **waits, **{name: config[name] for name in same})


def train(
    config: dict[str, Any], data: Planted, signal: Tensor, encoder: nn.Module, loss_of: PGCLLoss
) -> None:
    optimizer = torch.optim.Adam([*encoder.parameters(), *loss_of.parameters()], lr=1e-3)
    weight = loss_of.consistency_weight
    starts = {0, config["lead_epochs"]} if config["start_from_rows"] else set()
    for epoch in range(config["epochs"]):
        if epoch <= config["warm_up_epochs"] > 0:
            loss_of.consistency_weight = weight * epoch / config["warm_up_epochs"]
        if epoch in starts:
            with torch.no_grad():
                loss_of.prototypes.start_from_(encoder(data.view(signal)))
        for batch in signal[torch.randperm(len(signal))].split(config["batch_size"]):
            loss = loss_of(encoder(data.view(batch)), encoder(data.view(batch)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def of_neighbours(
    encoder: nn.Module, known: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor]
) -> float:
    """Per cent of new samples whose class is that of most of their ten nearest neighbours."""
    nearest = KNeighborsClassifier(10, metric="cosine")
    nearest.fit(encoder(known[0]).numpy(), known[1].numpy())
    return 100 * float(nearest.score(encoder(asked[0]).numpy(), asked[1].numpy()))


def without_labels(
    config: dict[str, Any], data: Planted, signal: Tensor, encoder: nn.Module, loss_of: PGCLLoss
) -> dict[str, float]:
    """What can be seen in one batch: agreement, the terms' gradients, how many negatives count."""
    some = signal[: config["batch_size"]]
    views = [encoder(data.view(some)).detach().requires_grad_() for _ in range(2)]
    loss_of.eval()
    terms = loss_of.terms(*views)
    lengths = []
    for weight, term in (
        (loss_of.contrast_weight, terms.contrast),
        (loss_of.consistency_weight, terms.consistency),
    ):
        length = 0.0  # a contrast of weight 0 is not computed and has no gradient
        if weight > 0:
            gradient = torch.autograd.grad(term, views, retain_graph=True, materialize_grads=True)
            length = weight * torch.cat(gradient).norm().item()
        lengths.append(length)

    rows = F.normalize(torch.cat(views).detach())
    graph = torch.arange(len(rows)) % len(some)
    same_graph = graph[:, None] == graph
    pull = (rows @ rows.T / config["temperature"]).masked_fill(same_graph, -torch.inf).softmax(1)
    effective = torch.special.entr(pull).sum(1).exp().mean().item() / (len(rows) - 2)
    seen = diagnostics(terms)
    agreements = [head["agreement"] for head in seen.get("heads", [seen])]
    return {
        "agreement": round(sum(agreements) / len(agreements), 4),  # mean over heads
        "gradient_share": round(lengths[1] / sum(lengths), 4),  # of consistency
        "effective_negatives": round(effective, 4),
    }
