"""Which trainings are compared, on which sets, and how one is made. plan.md says why."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.cluster import KMeans
from sklearn.preprocessing import scale
from torch import Tensor, nn
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GATConv, global_mean_pool

from experiments.common import results
from experiments.common.digits import graphs_of_digits
from experiments.common.graphs import (
    DIM,
    GIN,
    INFO_NCE,
    LAYERS,
    PGCL,
    SETTING,
    UNTRAINED,
    WIDTH,
    Projected,
    batches_of,
    embed,
)
from experiments.common.probes import halves, measured
from experiments.common.results import Config, Run
from experiments.common.tu import load
from experiments.few_labels.study import OF_PGCL, TEMPERATURES, Set
from pgcl_losses import Batch as Embeddings
from pgcl_losses import InfoNCE, PGCLLoss, PrototypeReweightedNCE
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

RECORDS = Path(__file__).parent
WARM_UP, SCHEDULE = "warm-up", "InfoNCE, two temperatures"
K_MEANS, FOLLOW, RANDOM = "k-means", "follow", "random"  # prototypes when PGCL begins
FORMS = RANDOM, FOLLOW, K_MEANS  # the simplest first
PLACEBO, CONSISTENCY, EXCLUSION, WEIGHTS = "placebo", "consistency", "exclusion", "weights"
UNIFORM, NO_EXCLUSION = {"weighting": "uniform"}, {"exclude_same_cluster": False}
PARTS: dict[str, dict[str, Any]] = {
    CONSISTENCY: UNIFORM | NO_EXCLUSION,
    EXCLUSION: UNIFORM,
    WEIGHTS: NO_EXCLUSION,
}

# About 200 steps, as in few_labels; digits and MSRC_9 have the epochs that they have there.
SETS = {
    "digits": Set(20, perturb=0.1, standardise=False),
    "MSRC_9": Set(60),
    "MSRC_21": Set(40),
    "Letter-med": Set(12),
    "ENZYMES": Set(40),
    "MUTAG": Set(60),
    "PTC_MR": Set(60),
    "PROTEINS": Set(22),
    "NCI1": Set(6),
    "Cuneiform": Set(60),
    "Fingerprint": Set(10),
}
CHOOSE_ON = "digits", "MSRC_9", "MSRC_21", "Letter-med"
EXPLORED = "ENZYMES", "MUTAG", "PTC_MR", "PROTEINS", "NCI1"
NEW = "Cuneiform", "Fingerprint"
LEAST = {"Cuneiform": 8, "Fingerprint": 2}  # graphs of a class that a file must have, where not 10
SMALLEST = {"Fingerprint": 20}  # classes with fewer graphs are left out
CHOOSING_SEEDS, SEEDS = range(700, 705), range(710, 730)
FEW, FEWEST = SEEDS[:10], SEEDS[:5]  # of controls; of the second encoder
NEEDED = {"labels_1": 2, "nmi": 2, "labels_5": 6, "all": 5}  # graphs of each class of a half
TRACKED = 10  # times that a tracked run is measured
SECOND, FORMER_SECOND = "GAT, normalised", "GAT"  # encoders; the record has both
CLUSTERS = 10  # of k-means, for `within`


def config_of(name: str, row: str, times: int = 1, **options: Any) -> Config:
    """A configuration without seed. ``times``: how often the epochs of the set."""
    of_set = SETS[name]
    length = {"epochs": times * of_set.epochs, "perturb": of_set.perturb}
    return {"set": name, "row": row, **length, **options}


def info_nce(name: str, times: int = 1, **options: Any) -> Config:
    return config_of(name, INFO_NCE, times, temperature=InfoNCE().temperature, **options)


def untrained(name: str) -> Config:
    """The encoder as it is initialised, which the quick comparison of digits shows."""
    return config_of(name, UNTRAINED, times=0, temperature=InfoNCE().temperature)


def pgcl(name: str, num_prototypes: int, times: int = 1, **options: Any) -> Config:
    """PGCL from the first step on, with its default temperature and lambda."""
    loss = PGCLLoss(DIM)
    given = {"temperature": loss.temperature, "consistency_weight": loss.consistency_weight}
    return config_of(name, PGCL, times, **given, num_prototypes=num_prototypes, **options)


def warm_up(
    name: str, form: str, num_prototypes: int, fraction: float = 0.5, times: int = 1, **options: Any
) -> Config:
    """InfoNCE for a fraction of the epochs, and then PGCL, with the defaults of both."""
    first = {"form": form, "first": InfoNCE().temperature, "fraction": fraction}
    return pgcl(name, num_prototypes, times, **first, **options) | {"row": WARM_UP}


def schedule(name: str, first: float, second: float) -> Config:
    """InfoNCE at one temperature for half of the epochs, and at another for the others."""
    return config_of(name, SCHEDULE, first=first, temperature=second, fraction=0.5)


def forms(name: str) -> list[Config]:
    """The candidates with prototypes: the simplest first, and then fewer prototypes first."""
    today = [pgcl(name, number) for number in (10, 20, 50)]
    return today + [warm_up(name, *of) for of in itertools.product(FORMS, (20, 50))]


def candidates(name: str) -> list[Config]:
    return [info_nce(name), *forms(name)]


def schedules(name: str) -> list[Config]:
    return [schedule(name, *pair) for pair in ((1.0, 0.5), (2.0, 0.5), (0.5, 1.0))]


def settings(name: str, form: Config) -> dict[str, list[Config]]:
    """Nine settings of InfoNCE and of PGCL after a warm-up, of which each has its best."""
    pairs = itertools.product(OF_PGCL, (10, 20, 50))
    return {
        INFO_NCE: [config_of(name, INFO_NCE, temperature=tau) for tau in TEMPERATURES],
        WARM_UP: [form | {"temperature": tau, "num_prototypes": number} for tau, number in pairs],
    }


def parts(name: str, form: str, number: int) -> list[Config]:
    return [warm_up(name, form, number, part=part) for part in PARTS]


class Beside(nn.Module):
    """A contrast, beside which prototypes learn from embeddings without gradient."""

    def __init__(self, contrast: nn.Module, pgcl: PGCLLoss) -> None:
        super().__init__()
        self.contrast, self.pgcl = contrast, pgcl

    def forward(self, z1: Tensor, z2: Tensor) -> Tensor:
        a = self.pgcl.prototypes(z1.detach(), z2.detach())
        needs = () if isinstance(self.contrast, InfoNCE) else (a,)
        consistency = self.pgcl.consistency(a)
        return self.contrast(z1, z2, *needs) + self.pgcl.consistency_weight * consistency


def permuted(seed: int) -> Any:
    """A hook for PGCL's contrast: clusters are permuted over graphs, in both views the same."""
    random = torch.Generator().manual_seed(seed)

    def permute(contrast: nn.Module, given: tuple[Embeddings]) -> tuple[Embeddings]:
        (batch,) = given
        by_view = batch.views(batch.clusters)  # [V, N, H]
        order = torch.randperm(by_view.shape[1], generator=random)
        return (batch._replace(clusters=by_view[:, order].reshape(batch.clusters.shape)),)

    return permute


class GAT(nn.Module):
    """Batch of G graphs -> embeddings ``[G, 96]``: three layers, mean pooling of the last.

    Without the batch normalisation, embeddings collapsed on two sets, whatever the loss.
    """

    def __init__(self, num_features: int) -> None:
        super().__init__()
        widths = [num_features, DIM, DIM, DIM]
        self.convs = nn.ModuleList(
            GATConv(width, WIDTH, heads=DIM // WIDTH) for width in widths[:LAYERS]
        )
        self.norms = nn.ModuleList(nn.BatchNorm1d(DIM) for _ in range(LAYERS))

    def forward(self, batch: Batch) -> Tensor:
        x = batch.x
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = F.elu(norm(conv(x, batch.edge_index)))
        return global_mean_pool(x, batch.batch, batch.num_graphs)


def losses_of(config: Config) -> tuple[nn.Module, nn.Module]:
    """The losses of both phases, which are one where the training has one phase.

    torch's generator is left as it is: all losses of one seed get the same batches and views.
    """
    row, temperature = config["row"], config["temperature"]
    if row in (INFO_NCE, UNTRAINED):
        loss: nn.Module = InfoNCE(temperature=temperature)
        return loss, loss
    if row == SCHEDULE:
        return InfoNCE(temperature=config["first"]), InfoNCE(temperature=temperature)
    weight = config["consistency_weight"]
    with torch.random.fork_rng(devices=[]):
        pgcl = PGCLLoss(
            DIM, config["num_prototypes"], temperature=temperature, consistency_weight=weight
        )
    if row == PGCL:
        return pgcl, pgcl
    first: nn.Module = InfoNCE(temperature=config["first"])
    if config["form"] == FOLLOW:
        first = Beside(first, pgcl)
    part = config.get("part")
    if part == PLACEBO:
        pgcl.contrast.register_forward_pre_hook(permuted(config["seed"]))
    elif part == CONSISTENCY:
        pgcl.contrast.weighting, pgcl.contrast.exclude_same_cluster = "uniform", False
    elif part is not None:
        return first, Beside(PrototypeReweightedNCE(temperature=temperature, **PARTS[part]), pgcl)
    return first, pgcl


def within(z: np.ndarray, clusters: np.ndarray) -> float:
    """The share of the variance of unit embeddings that lies inside their clusters."""
    z = z / np.linalg.norm(z, axis=1, keepdims=True)
    inside = sum(((z[clusters == c] - z[clusters == c].mean(0)) ** 2).sum() for c in set(clusters))
    return float(inside / ((z - z.mean(0)) ** 2).sum())


def within_k_means(z: np.ndarray, seed: int) -> float:
    units = z / np.linalg.norm(z, axis=1, keepdims=True)
    clusters = KMeans(CLUSTERS, n_init=3, random_state=seed).fit_predict(units)
    return round(within(z, clusters), 4)


@functools.lru_cache(maxsize=1)
def graphs_of(name: str, file: Path | None) -> list[Data]:
    graphs = graphs_of_digits() if file is None else load(file)
    counts = torch.cat([graph.y for graph in graphs]).bincount()
    return [graph for graph in graphs if counts[graph.y] >= SMALLEST.get(name, 0)]


def run(config: Config, file: Path | None, keep: Callable[..., Any] | None = None) -> Run:
    """Train with these options, and measure the embeddings of both halves.

    The run also has what ``keep`` makes of the model and the graphs.
    """
    started = time.perf_counter()
    name, seed, epochs = config["set"], config["seed"], config["epochs"]
    graphs = graphs_of(name, file)
    labels = np.array([int(graph.y) for graph in graphs])
    torch.manual_seed(seed)
    encoder = Projected((GAT if config.get("encoder") == SECOND else GIN)(graphs[0].num_features))
    loader = batches_of(graphs, SETTING["batch_size"])
    first, second = losses_of(config)
    augments = NodeDrop(SETTING["drop"]), EdgePerturb(config["perturb"])
    model = ContrastiveModel(encoder, *augments, first)
    both = itertools.chain(first.parameters(), second.parameters())
    parameters = [*encoder.parameters(), *dict.fromkeys(both)]
    optimizer = torch.optim.Adam(parameters, lr=SETTING["lr"])
    switch = int(config.get("fraction", 0) * epochs)

    def values(half: np.ndarray, names: Iterable[str]) -> dict[str, float]:
        z = embed(encoder.encoder, graphs)
        if SETS[name].standardise:
            z = scale(z.astype(float))
        fewest = np.unique(labels[half], return_counts=True)[1].min()
        enough = [measure for measure in names if fewest >= NEEDED[measure]]
        return measured(z[half], labels[half], seed, *enough)

    development, held_out = halves(labels)
    found: Run = {"config": config}
    track = []
    for epoch in range(epochs):
        if epoch == epochs // 2 and seed in SEEDS:
            found["within_at_half"] = within_k_means(embed(encoder, graphs), seed)
        if epoch == switch and second is not first:
            model.loss = second
            if config.get("form") == K_MEANS:
                pgcl: Any = getattr(second, "pgcl", second)
                with torch.random.fork_rng(devices=[]):
                    pgcl.prototypes.start_from_(torch.from_numpy(embed(encoder, graphs)))
        model.train()
        for batch in loader:
            loss = model(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if config.get("track") and (epoch + 1) % (epochs // TRACKED) == 0:
            of_z = within_k_means(embed(encoder, graphs), seed)
            track.append([epoch + 1, of_z, values(held_out, ["labels_1"])["labels_1"]])
    confirms = ("all",) if seed in SEEDS else ()
    found["development"] = values(development, ["labels_1", "labels_5"])
    found["held_out"] = values(held_out, ["labels_1", "labels_5", "nmi", *confirms])
    found["within"] = within_k_means(embed(encoder, graphs), seed)
    if track:
        found["track"] = track
    if keep:
        found["kept"] = keep(model, graphs)
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def values(runs: Iterable[Run], config: Config, half: str, measure: str) -> dict[int, float]:
    """A measure by seed, of the runs with these options that have it."""
    found = results.matching(runs, config)
    return {seed: run[half][measure] for seed, run in found.items() if measure in run[half]}
