"""A run of the synthetic grid: Gaussian clusters seen through a random layer, a small encoder, and
its 10-NN accuracy."""

import time
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

from experiments.common.losses import KEPT, FirstInfoNCE
from experiments.common.rows import ROWS
from pgcl_losses import PGCLLoss, diagnostics

SIGNAL, NUISANCE, WIDTH, DIM = 8, 24, 64, 32
TRAIN, REFERENCE, TEST = 4096, 2000, 2000  # samples: to train on, neighbours, and queries

DEFAULTS: dict[str, Any] = {
    "classes": 4,
    "spread": 1.0,  # standard deviation inside a class; that of the centres is 1.2
    "duplicates": 0,  # originals per class, of which samples are near-copies; 0: no copies
    "imbalance": 0.0,  # the probability of class r is proportional to r ** -imbalance
    "batch_size": 128,
    "num_prototypes": 10,  # or several, one for each head
    "consistency_weight": 6.0,
    "temperature": 0.2,
    "epsilon": 0.05,
    "epochs": 15,
    "freeze_epochs": 0,
    "warm_up_epochs": 0,  # over which the consistency weight rises from 0
    "negative_ranks": None,  # or a window of positions that negatives are taken from
    "soft_clusters": False,
    "start_from_rows": False,  # initialise prototypes from embeddings, again after InfoNCE
    "lead_epochs": 0,  # of InfoNCE alone (in version 0.2 the prototypes learned meanwhile)
}


class Clusters:
    """Samples have their class in a few latent directions; views draw the other directions anew."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.spread = config["spread"]
        self.class_weights = torch.arange(1.0, config["classes"] + 1) ** -config["imbalance"]
        self.centers = 1.2 * torch.randn(config["classes"], SIGNAL)
        self.mix = torch.randn(SIGNAL + NUISANCE, WIDTH) / (SIGNAL + NUISANCE) ** 0.5

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        labels = torch.multinomial(self.class_weights, count, replacement=True)
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
    """10-NN accuracy after training, and diagnostics that need no labels."""
    started = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(config["seed"])
    data, reference, test, signal, encoder = initial(config)
    loss = build(config)
    train(config, data, signal, encoder, loss)
    accuracy = neighbour_accuracy(encoder, reference, test)
    unsupervised = without_labels(config, data, signal, encoder, loss)
    seconds = round(time.perf_counter() - started, 1)
    return {"config": config, "accuracy": round(accuracy, 2), **unsupervised, "seconds": seconds}


class Initial(NamedTuple):
    """The data and the untrained encoder of a run, which do not depend on its loss."""

    data: Clusters
    reference: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    signal: Tensor  # of the training samples
    encoder: nn.Module


def initial(config: dict[str, Any]) -> Initial:
    data = Clusters(config)
    reference, test = (data.labelled(count) for count in (REFERENCE, TEST))
    signal, labels = data.draw(TRAIN)
    if config["duplicates"]:
        originals = data.around(torch.arange(config["classes"]).repeat(config["duplicates"]))
        which = torch.randint(config["duplicates"], (TRAIN,)) * config["classes"] + labels
        signal = originals[which] + 0.05 * torch.randn(TRAIN, SIGNAL)
    encoder = nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, DIM))
    return Initial(data, reference, test, signal, encoder)


def build(config: dict[str, Any]) -> PGCLLoss:
    frozen = config["freeze_epochs"] * (TRAIN // config["batch_size"])
    options = {"consistency_weight": config["consistency_weight"], **ROWS[config["row"]]}
    same = ("num_prototypes", "temperature", "epsilon", "negative_ranks", "soft_clusters")
    options |= {name: config[name] for name in same}
    return PGCLLoss(DIM, freeze_steps=frozen, **options)


def train(
    config: dict[str, Any], data: Clusters, signal: Tensor, encoder: nn.Module, pgcl: PGCLLoss
) -> None:
    optimizer = torch.optim.Adam([*encoder.parameters(), *pgcl.parameters()], lr=1e-3)
    weight = pgcl.consistency_weight
    starts = {0, config["lead_epochs"]} if config["start_from_rows"] else set()
    lead = config["lead_epochs"] * (TRAIN // config["batch_size"])
    loss_of = FirstInfoNCE(pgcl, lead, 0 if starts else KEPT)
    for epoch in range(config["epochs"]):
        if epoch <= config["warm_up_epochs"] > 0:
            pgcl.consistency_weight = weight * epoch / config["warm_up_epochs"]
        if epoch in starts:
            with torch.no_grad():
                pgcl.prototypes.start_from_(encoder(data.view(signal)))
        for batch in signal[torch.randperm(len(signal))].split(config["batch_size"]):
            loss = loss_of(encoder(data.view(batch)), encoder(data.view(batch)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def neighbour_accuracy(
    encoder: nn.Module, reference: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor]
) -> float:
    """10-NN accuracy in per cent, by cosine."""
    nearest = KNeighborsClassifier(10, metric="cosine")
    nearest.fit(encoder(reference[0]).numpy(), reference[1].numpy())
    return 100 * float(nearest.score(encoder(test[0]).numpy(), test[1].numpy()))


def without_labels(
    config: dict[str, Any], data: Clusters, signal: Tensor, encoder: nn.Module, pgcl: PGCLLoss
) -> dict[str, float]:
    """Of one batch: agreement of the views' clusters, the consistency's fraction of the gradient,
    and the effective fraction of negatives, by the entropy of InfoNCE's weights."""
    batch = signal[: config["batch_size"]]
    views = [encoder(data.view(batch)).detach().requires_grad_() for _ in range(2)]
    terms = pgcl.eval().terms(*views)
    norms = []
    for weight, term in (
        (pgcl.contrast_weight, terms.contrast),
        (pgcl.consistency_weight, terms.consistency),
    ):
        norm = 0.0  # a contrast of weight 0 is not computed and has no gradient
        if weight > 0:
            gradient = torch.autograd.grad(term, views, retain_graph=True, materialize_grads=True)
            norm = weight * torch.cat(gradient).norm().item()
        norms.append(norm)

    z = F.normalize(torch.cat(views).detach())
    graph = torch.arange(len(z)) % len(batch)
    same_graph = graph[:, None] == graph
    softmax = (z @ z.T / config["temperature"]).masked_fill(same_graph, -torch.inf).softmax(1)
    effective = torch.special.entr(softmax).sum(1).exp().mean().item() / (len(z) - 2)
    values = diagnostics(terms)
    agreements = [value for name, value in values.items() if name.endswith("agreement")]
    return {
        "agreement": round(sum(agreements) / len(agreements), 4),  # mean over heads
        "gradient_share": round(norms[1] / sum(norms), 4),
        "effective_negatives": round(effective, 4),
    }
