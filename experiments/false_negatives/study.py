"""Which masks of negatives are compared, and how their settings are chosen. plan.md says why."""

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.cluster import KMeans
from sklearn.preprocessing import normalize, scale
from torch import Tensor, nn
from torch_geometric.data import Batch, Data

from experiments.common import results
from experiments.common.digits import graphs_of_digits
from experiments.common.graphs import (
    DIM,
    GIN,
    INFO_NCE,
    PGCL,
    SETTING,
    UNTRAINED,
    Projected,
    batches_of,
    embed,
    train,
)
from experiments.common.probes import halves, measured
from experiments.common.results import Config, Run, matching
from experiments.common.tu import load
from pgcl_losses import Batch as Embeddings
from pgcl_losses import InfoNCE, PGCLLoss, Repulsion, SinkhornPrototypes, repulsion
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

RECORDS = Path(__file__).parent
CHOOSING_SEEDS, SEEDS = range(400, 405), range(410, 420)
ORACLE, SUPCON, SHUFFLED = "oracle", "SupCon, all labels", "labels shuffled"
RANDOM, RANDOM_PUSH = "random mask, PGCL's pairs", "random mask, PGCL's push"
MASK_ALONE, DETACHED = "PGCL, mask alone", "PGCL, consistency detached"
DETACHED_MASK = "PGCL, mask alone, consistency detached"
ONE, THREE = "two trainings, one clustering", "two trainings, three clusterings"
MEASURES = "labels_1", "labels_5", "all"
PROTOTYPES = 10
PGCLS = {
    PGCL: {},
    MASK_ALONE: {"weighting": "uniform"},
    DETACHED: {},
    DETACHED_MASK: {"weighting": "uniform"},
}


class Set(NamedTuple):
    """What differs between sets."""

    classes: int
    temperatures: tuple[float, ...]
    epochs: int = 20
    perturb: float = 0.2
    standardise: bool = False  # embeddings, before they are measured
    has_variants: bool = False  # of PGCL
    seeds: range = SEEDS
    first: float = 0.5  # the temperature of a first training
    second: tuple[float, ...] = (0.2, 0.5, 1.0)  # the temperatures of question 5


FIVE, TWO = (0.2, 0.5, 1.0, 2.0, 4.0), (0.5, 2.0)
SETS = {
    "digits": Set(10, FIVE, perturb=0.1, has_variants=True),
    "MSRC_9": Set(8, FIVE, epochs=60, standardise=True, has_variants=True, first=4.0, second=FIVE),
    "MUTAG": Set(2, TWO),
    "PTC_MR": Set(2, TWO),
    "PROTEINS": Set(2, TWO),
    "NCI1": Set(2, TWO, epochs=5, seeds=SEEDS[:5]),
}
LOSSES = INFO_NCE, PGCL, ORACLE, SUPCON  # of which each has a best temperature
Given = Callable[[Data], dict[str, Any]]  # of a batch, what the loss is called with


def same(scores: Tensor, pair: Any) -> Tensor:
    """Leave out the pairs of graphs that are in the same group."""
    return scores.masked_fill(pair.query == pair.key, -torch.inf)


class RandomMask:
    """A mask whose errors are drawn for each batch, with rates within and between classes."""

    def __init__(self, within: float, between: float, seed: int) -> None:
        self.rates, self.random = (within, between), torch.Generator().manual_seed(seed)

    def given(self, batch: Data) -> dict[str, Any]:
        same_class = batch.y[:, None] == batch.y
        drawn = torch.rand(same_class.shape, generator=self.random).triu()
        drawn = drawn + drawn.triu(1).T  # both graphs of a pair leave each other out
        self.left_out = drawn < torch.where(same_class, *self.rates)
        return {"metadata": torch.arange(len(batch.y))}

    def score_mod(self, scores: Tensor, pair: Any) -> Tensor:
        return scores.masked_fill(self.left_out[pair.query, pair.key], -torch.inf)


class DetachedPrototypes(SinkhornPrototypes):
    """The consistency moves the prototypes and not the encoder."""

    def forward(self, batch: Embeddings) -> Embeddings:
        assigned = super().forward(batch._replace(embeddings=batch.embeddings.detach()))
        return assigned._replace(embeddings=batch.embeddings)


def loss_of(config: Config, groups: Tensor) -> tuple[nn.Module, Given]:
    """The loss of a row, and what it is called with for a batch.

    ``groups [G, R]``: R clusterings of graphs. torch's generator is left as it is, so that all
    losses of one seed get the same batches and views.
    """
    row, temperature = config["row"], config["temperature"]
    random = torch.Generator().manual_seed(config["seed"])
    if row in PGCLS:
        with torch.random.fork_rng(devices=[]):
            options = {"consistency_weight": 1.0, "temperature": temperature, **PGCLS[row]}
            pgcl = PGCLLoss(DIM, PROTOTYPES, **options)
            if row in (DETACHED, DETACHED_MASK):
                detached = DetachedPrototypes(DIM, PROTOTYPES, temperature=temperature)
                detached.load_state_dict(pgcl.prototypes.state_dict())
                pgcl.prototypes = detached
        return pgcl, lambda batch: {}
    if row == SUPCON:
        return InfoNCE.like("SupCon", temperature=temperature), lambda batch: {"labels": batch.y}
    if row in (RANDOM, RANDOM_PUSH):
        mask = RandomMask(*config["rates"], config["seed"])
        return InfoNCE(temperature=temperature, score_mod=mask.score_mod), mask.given
    if row in (INFO_NCE, UNTRAINED):
        return InfoNCE(temperature=temperature), lambda batch: {}

    def one_of_groups(batch: Data) -> dict[str, Any]:
        column = torch.randint(groups.shape[1], (), generator=random)
        return {"metadata": groups[batch.number, column]}

    return InfoNCE(temperature=temperature, score_mod=same), one_of_groups


def trained(config: Config, graphs: list[Data], groups: Tensor) -> ContrastiveModel:
    """A new encoder with a projection head after all epochs."""
    torch.manual_seed(config["seed"])
    encoder = Projected(GIN(graphs[0].num_node_features))
    loss, given = loss_of(config, groups)
    augments = NodeDrop(SETTING["drop"]), EdgePerturb(config["perturb"])
    model = ContrastiveModel(encoder, *augments, loss)
    loader = batches_of(graphs, SETTING["batch_size"])
    train(model, loader, config | {"lr": SETTING["lr"]}, given)
    return model


@functools.cache
def graphs_of(file: Path | None) -> list[Data]:
    graphs = graphs_of_digits() if file is None else load(file)
    for number, graph in enumerate(graphs):
        graph.number = number
    return graphs


def run(config: Config, file: Path | None) -> Run:
    """Train with these options, and measure embeddings and projections of both halves."""
    started = time.perf_counter()
    graphs = graphs_of(file)
    labels = np.array([int(graph.y) for graph in graphs])
    parts = dict(zip(("development", "held_out"), halves(labels), strict=True))
    chosen = parts["development"] if config["trained on"] == "half" else range(len(graphs))
    training = [graphs[i] for i in chosen]
    model = trained(config, training, groups_of(config, labels, file))
    found: Run = {"config": config}
    for place, module in (("", model.encoder.encoder), (" after the head", model.encoder)):
        z = embed(module, graphs)
        z = scale(z.astype(float)) if SETS[config["set"]].standardise else z
        for part, half in parts.items():
            found[part + place] = measured(z[half], labels[half], config["seed"], *MEASURES)
    if config["row"] in (INFO_NCE, PGCL) and config["trained on"] == "half":
        found["push"] = push(model, training, config["seed"])
    return found | {"seconds": round(time.perf_counter() - started, 1)}


def groups_of(config: Config, labels: np.ndarray, file: Path | None) -> Tensor:
    """The groups of graphs ``[G, R]`` within which a row has no negatives."""
    if config["row"] in (ONE, THREE):
        others = range(1, 2) if config["row"] == ONE else range(1, 4)
        seeds = (config["seed"] + 1000 * other for other in others)
        return torch.stack([clusters(config, seed, file) for seed in seeds], dim=1)
    if config["row"] == SHUFFLED:
        labels = np.random.default_rng(config["seed"]).permutation(labels)
    return torch.from_numpy(labels).unsqueeze(1)


def clusters(config: Config, seed: int, file: Path | None) -> Tensor:
    """The clusters ``[G]`` by k-means on the projections of a first training by InfoNCE."""
    projections = first_projections(config["set"], config["epochs"], seed, file)
    kmeans = KMeans(config["clusters"], n_init=10, random_state=seed)
    return torch.from_numpy(kmeans.fit_predict(projections).astype(np.int64))


@functools.cache
def first_projections(name: str, epochs: int, seed: int, file: Path | None) -> np.ndarray:
    first = config_of(name, INFO_NCE, SETS[name].first, "all") | {"epochs": epochs, "seed": seed}
    graphs = graphs_of(file)
    model = trained(first, graphs, torch.empty(len(graphs), 0))
    return normalize(embed(model.encoder, graphs))


def push(model: ContrastiveModel, graphs: list[Data], seed: int) -> dict[str, float]:
    """Which push PGCL's clusters leave out, and of how many pairs, in batches of two views.

    InfoNCE has no clusters: prototypes are made from its projections, by k-means.
    """
    torch.manual_seed(seed)
    loader = batches_of(graphs, SETTING["batch_size"])
    model.train()
    with torch.no_grad():
        batches = [(batch.y, *views_of(model, batch)) for batch in loader]
    pgcl = model.loss
    if not isinstance(pgcl, PGCLLoss):
        pgcl = PGCLLoss(DIM, PROTOTYPES, consistency_weight=0.0, temperature=pgcl.temperature)
        pgcl.prototypes.start_from_(torch.cat([z for _, *views in batches for z in views]))
    pgcl.eval()
    found = [of_batch(pgcl, *batch) for batch in batches]
    return {name: round(float(np.mean([x[name] for x in found])), 4) for name in found[0]}


def views_of(model: ContrastiveModel, batch: Batch) -> tuple[Tensor, Tensor]:
    return model.encoder(model.augment1(batch)), model.encoder(model.augment2(batch))


def of_batch(pgcl: PGCLLoss, y: Tensor, z1: Tensor, z2: Tensor) -> dict[str, float]:
    """The push of a batch, and how many of its pairs are in the same cluster."""
    found: Repulsion = repulsion(pgcl, z1, z2, classes=y)
    assigned = torch.cat([view.clusters for view in pgcl.prototypes(z1, z2)])
    graph, classes = torch.arange(len(y)).repeat(2), y.repeat(2)
    of_others = graph[:, None] != graph
    excluded, same_class = assigned[:, None] == assigned, classes[:, None] == classes
    rates = [
        float(excluded[of_others & group].double().mean()) for group in (same_class, ~same_class)
    ]
    return {
        "plain_within": found.plain_within,
        "within": found.within,
        "left_out_within": found.left_out_within,
        "left_out_between": found.left_out_between,
        "pairs_within": rates[0],
        "pairs_between": rates[1],
    }


def config_of(name: str, row: str, temperature: float, part: str, times: int = 1) -> Config:
    """A configuration without seed. ``times``: how often the epochs of the set."""
    of_set = SETS[name]
    epochs = 0 if row == UNTRAINED else times * of_set.epochs
    return {
        "set": name,
        "row": row,
        "trained on": part,
        "temperature": temperature,
        "epochs": epochs,
        "perturb": of_set.perturb,
    }


def values(
    runs: Iterable[Run], config: Config, name: str = "labels_1", part: str = "held_out"
) -> dict[int, float]:
    """A measure by seed, of the runs with these options."""
    return {seed: run[part][name] for seed, run in matching(runs, config).items()}


def best(runs: Iterable[Run], candidates: Iterable[Config], part: str) -> Config:
    """The candidate with the highest mean accuracy with one label over the choosing seeds."""
    runs = [run for run in runs if run["config"]["seed"] in CHOOSING_SEEDS]
    return results.best(candidates, lambda config: values(runs, config, part=part).values())


def of_row(name: str, row: str) -> list[Config]:
    """A row that trains on one half, at all temperatures."""
    return [config_of(name, row, tau, "half") for tau in SETS[name].temperatures]


def rows_of(name: str) -> tuple[str, ...]:
    """The rows of questions 1 to 4 that each have a best temperature."""
    return (*LOSSES, *(PGCLS if SETS[name].has_variants else ()))


def choosing_masks(name: str) -> list[Config]:
    """Questions 1 to 4: the runs that choose temperatures, and measure what PGCL leaves out."""
    return [config for row in dict.fromkeys(rows_of(name)) for config in of_row(name, row)]


def rates(runs: Iterable[Run], config: Config, of: str) -> list[float]:
    """What PGCL leaves out within and between classes, as a mean over the choosing seeds."""
    of_pgcl = matching(runs, config | {"row": PGCL}).items()
    found = [run["push"] for seed, run in of_pgcl if seed in CHOOSING_SEEDS]
    return [
        round(float(np.mean([x[f"{of}_{g}"] for x in found])), 3) for g in ("within", "between")
    ]


def random_masks(name: str, runs: Iterable[Run]) -> Iterator[Config]:
    runs = list(runs)
    for row, of in ((RANDOM, "pairs"), (RANDOM_PUSH, "left_out")):
        for config in of_row(name, row):
            yield config | {"rates": rates(runs, config, of)}


def reported_masks(name: str, runs: Iterable[Run]) -> list[Config]:
    """Questions 1 to 4: the runs that results are of."""
    untrained = config_of(name, UNTRAINED, 1.0, "half")
    shuffled = of_row(name, SHUFFLED)
    return [untrained, *choosing_masks(name), *shuffled, *random_masks(name, runs)]


def second_trainings(name: str) -> list[Config]:
    """Question 5: the candidates of two trainings, with one clustering."""
    sizes = SETS[name].classes, 3 * SETS[name].classes
    pairs = itertools.product(SETS[name].second, sizes)
    return [config_of(name, ONE, tau, "all") | {"clusters": size} for tau, size in pairs]


def longer(name: str, row: str, times: int) -> list[Config]:
    """Question 5: a loss that trains for so many times the epochs, at all temperatures."""
    return [config_of(name, row, tau, "all", times) for tau in SETS[name].second]


def contestants(name: str) -> dict[str, tuple[list[Config], Config]]:
    """Question 5: of each row, the candidates that choose its settings, and what differs."""
    second = second_trainings(name)
    rows = {ONE: (second, {}), THREE: (second, {"row": THREE})}
    for row, times in itertools.product((INFO_NCE, PGCL), (2, 4)):
        epochs = {"epochs": times * SETS[name].epochs}
        rows[f"{row}, {times} x the epochs"] = (longer(name, row, 2), epochs)
    return rows


def choosing_trainings(name: str) -> list[Config]:
    return [config for candidates, _ in contestants(name).values() for config in candidates]


def tuned(name: str, runs: Iterable[Run]) -> dict[str, Config]:
    """Question 5: each row with the settings that are best on the development half."""
    runs = list(runs)
    return {
        row: best(runs, candidates, "development") | changes
        for row, (candidates, changes) in contestants(name).items()
    }
