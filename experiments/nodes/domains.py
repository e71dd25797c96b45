"""Clusters of the nodes of one graph: prototypes alone, beside k-means on the same encoder.

python -m experiments.nodes.domains confirm --root data
python -m experiments.nodes.domains confirm --dataset Cora --seeds 0 --picture clusters.png

domains.md says what is compared. `choose` selects settings, always by the same seeds of other sets
than `confirm` uses; `explain` trains with and without a head.
Finished runs are in --output, one JSON line each, and are not run again. --picture draws the nodes
of the first set and seed, by classes and by prototypes, in a training of its own.
"""

import argparse
import itertools
import time
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.cluster import AgglomerativeClustering, KMeans
from sklearn.manifold import TSNE
from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score
from sklearn.preprocessing import normalize
from torch import Tensor, nn

from docs.programs.tables import markdown
from experiments.common import results
from experiments.common.arguments import count, parser_of, program
from experiments.common.results import Config, Run
from experiments.common.tables import DOCS, difference, sourced, spread
from pgcl_losses import ConsistencyLoss, InfoNCE, SinkhornPrototypes, diagnostics

from .data import SETS, load, raw_folder
from .train import GCN, SETTING, WIDTH, sparse_if_faster, views_of

RECORD = Path(__file__).parent / "domains.jsonl"
CLASSES = {"Cora": 7, "CiteSeer": 6, "DBLP": 4, "Photo": 8, "CS": 15}
CHOOSE_ON, CONFIRM_ON = ("Cora", "CiteSeer"), ("Photo",)
CHOOSING_SEEDS, SEEDS, EXPLAINING_SEEDS = range(100, 103), range(10), range(200, 203)
WITHOUT_HEAD, SEEDS_WITHOUT_HEAD = {"head": False}, range(300, 310)
UNTRAINED, INFO_NCE, PROTOTYPES = "untrained", "InfoNCE", "prototypes"
NOT_TRAINED: Config = {"row": UNTRAINED, "temperature": 1.0}
MANY = 64  # prototypes that are joined to groups
TEMPERATURES = {INFO_NCE: (0.4, 1.0, 2.0), PROTOTYPES: (0.1, 0.2, 0.5)}
OF_WARM_UP = 1.0  # temperature of InfoNCE
TRAINING = SETTING | {"steps": 300, "batch": 1024}
ASSIGN, GROUPS, PROJECTIONS, EMBEDDINGS = "assign", "groups", "projections", "embeddings"
SHOWN = {  # temperature, and whether predictions are balanced
    "good: balanced predictions": (0.1, True),
    "slow: collapsed at first": (0.1, False),
    "bad: prototypes die": (0.2, True),
}
WATCHED = "used", "spread", "effective_rank", "agreement"  # of diagnostics, while training


def candidates(row: str, num_prototypes: int) -> Iterator[Config]:
    """The settings of a loss."""
    for temperature in TEMPERATURES.get(row, (1.0,)):
        if row != PROTOTYPES:
            yield {"row": row, "temperature": temperature}
            continue
        for balanced, warm_up in ((False, 0.0), (True, 0.0), (False, 0.5)):
            further = {"balance_predictions": balanced, "warm_up": warm_up}
            number = {"num_prototypes": num_prototypes}
            yield {"row": row, "temperature": temperature, **further, **number}


def config_of(dataset: str, setting: Config, seed: int) -> Config:
    config = {"dataset": dataset, **setting, "seed": seed}
    if setting["row"] != UNTRAINED:
        config |= TRAINING
    return config


def run(config: Config, folder: Path) -> Run:
    """Train with this configuration, cluster all nodes, and compare clusters with classes."""
    started = time.perf_counter()
    _, _, labels = load(config["dataset"], folder)
    embeddings, projections, prototypes, history = trained(config, folder)
    number, seed = CLASSES[config["dataset"]], config["seed"]
    found = {}
    for space, points in ((EMBEDDINGS, embeddings), (PROJECTIONS, projections)):
        kmeans = KMeans(number, n_init=10, random_state=seed)
        found[space] = kmeans.fit_predict(normalize(points.numpy().astype(float)))
    if prototypes is not None:
        clusters = prototypes.assign(projections).numpy()
        found[ASSIGN] = clusters
        if len(prototypes.weight) > number:
            tree = AgglomerativeClustering(number, metric="cosine", linkage="average")
            found[GROUPS] = tree.fit_predict(prototypes.weight.detach().numpy())[clusters]
    measured = {space: agreement(labels.numpy(), clusters) for space, clusters in found.items()}
    seconds = round(time.perf_counter() - started, 1)
    return {"config": config, "clusters": measured, "history": history, "seconds": seconds}


def trained(
    config: Config, folder: Path
) -> tuple[Tensor, Tensor, SinkhornPrototypes | None, list[dict[str, float]]]:
    """Train; return embeddings and projections of all nodes, prototypes, and what was watched."""
    torch.manual_seed(config["seed"])
    x, edge_index, _ = load(config["dataset"], folder)
    features, encoder = sparse_if_faster(x), GCN(x.shape[1])
    head: nn.Module = nn.Identity()
    if config.get("head", True):
        head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ELU(), nn.Linear(WIDTH, WIDTH))
    modules: list[nn.Module] = [encoder, head]
    prototypes, consistency = None, ConsistencyLoss()
    if config["row"] == PROTOTYPES:
        balanced = config["balance_predictions"]
        options = {"temperature": config["temperature"], "balance_predictions": balanced}
        prototypes = SinkhornPrototypes(WIDTH, config["num_prototypes"], **options)
        modules.append(prototypes)
    of_contrast = config["temperature"] if prototypes is None else OF_WARM_UP
    contrast, visible = InfoNCE(temperature=of_contrast), torch.ones(x.shape[1])
    steps = config.get("steps", 0)
    first = int(config.get("warm_up", 0.0) * steps)  # step in which prototypes begin
    parameters = itertools.chain.from_iterable(module.parameters() for module in modules)
    optimizer = torch.optim.Adam(
        parameters, lr=config.get("lr", 0), weight_decay=config.get("weight_decay", 0)
    )
    history = []
    for step in range(steps):
        if prototypes is not None and step == first > 0:
            with torch.no_grad():
                prototypes.start_from_(head(encoder(features, edge_index, visible)))
        batch, views = views_of(config, step, *x.shape, edge_index)
        z1, z2 = (head(encoder(features, *view)[batch]) for view in views)
        if prototypes is None or step < first:
            loss = contrast(z1, z2)
        else:
            assignments = prototypes(z1, z2)
            loss = consistency(assignments)
            if step % 20 == 0 or step + 1 == steps:
                numbers = diagnostics(assignments)
                history.append({"step": step, **{name: numbers[name] for name in WATCHED}})
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        embeddings = encoder(features, edge_index, visible)
        return embeddings, head(embeddings), prototypes, history


def agreement(labels: np.ndarray, clusters: np.ndarray) -> dict[str, float]:
    """How well clusters agree with classes, and the largest cluster, in per cent."""
    return {
        "nmi": round(100 * float(normalized_mutual_info_score(labels, clusters)), 3),
        "ari": round(100 * float(adjusted_rand_score(labels, clusters)), 3),
        "largest": round(100 * float(np.bincount(clusters).max() / len(clusters)), 1),
    }


def of_setting(
    runs: Iterable[Run], dataset: str, setting: Config, space: str, measure: str = "nmi"
) -> dict[int, float]:
    """A measure by seed."""
    config = config_of(dataset, setting, 0)
    by_seed = results.matching(runs, config)
    return {seed: found["clusters"][space][measure] for seed, found in by_seed.items()}


def chosen(runs: Collection[Run]) -> dict[str, tuple[Config, str]]:
    """The setting and the space of each method, by the mean NMI on the sets that choose."""
    runs = [run for run in runs if run["config"]["seed"] in CHOOSING_SEEDS]

    def best(row: str, *spaces: str) -> tuple[Config, str]:
        def values(candidate: tuple[Config, str]) -> list[float]:
            setting, space = candidate
            found = []
            for name in CHOOSE_ON:
                of_set = setting | numbers(row, name)
                found += of_setting(runs, name, of_set, space).values()
            return found

        pairs = [*itertools.product(candidates(row, 0), spaces)]
        return results.best(pairs, values)

    return {
        PROTOTYPES: best(PROTOTYPES, ASSIGN),
        INFO_NCE: best(INFO_NCE, EMBEDDINGS, PROJECTIONS),
    }


def numbers(row: str, name: str, number: int | None = None) -> Config:
    """How many prototypes: by default as many as the set has classes."""
    return {"num_prototypes": number or CLASSES[name]} if row == PROTOTYPES else {}


def choosing() -> Iterator[Config]:
    """The runs that choose settings."""
    for name, row, seed in itertools.product(CHOOSE_ON, TEMPERATURES, CHOOSING_SEEDS):
        for setting in candidates(row, CLASSES[name]):
            yield config_of(name, setting, seed)


def deciding(
    names: Iterable[str],
    seeds: Iterable[int],
    settings: dict[str, tuple[Config, str]],
    **more: Any,
) -> Iterator[Config]:
    """The runs of both plans; ``more``: what the second one changes."""
    for name, seed in itertools.product(names, seeds):
        yield config_of(name, NOT_TRAINED, seed)
        for row, (setting, _) in settings.items():
            yield config_of(name, setting | numbers(row, name) | more, seed)
        if not more:
            yield config_of(name, settings[PROTOTYPES][0] | numbers(PROTOTYPES, name, MANY), seed)


def explaining(names: Iterable[str], settings: dict[str, tuple[Config, str]]) -> Iterator[Config]:
    """The chosen prototypes with and without a head, on seeds that decide nothing."""
    for name, seed, has_head in itertools.product(names, EXPLAINING_SEEDS, (True, False)):
        setting = settings[PROTOTYPES][0] | numbers(PROTOTYPES, name)
        yield config_of(name, setting | ({} if has_head else WITHOUT_HEAD), seed)


def against(
    runs: Collection[Run], name: str, ours: Config, others: Iterable[tuple[Config, str]]
) -> list[str]:
    """NMI of `assign`, and its differences from other clusters, by setting and space."""
    by_prototypes = of_setting(runs, name, ours, ASSIGN)
    deltas = [difference(by_prototypes, of_setting(runs, name, *other)) for other in others]
    return [spread(by_prototypes.values()), *deltas]


def explanation(runs: Collection[Run]) -> str:
    """The table's first columns of the runs with and without a head."""
    setting, lines = chosen(runs)[PROTOTYPES][0], []
    runs = [run for run in runs if run["config"]["seed"] in EXPLAINING_SEEDS]
    for name, more in itertools.product(CONFIRM_ON, ({}, WITHOUT_HEAD)):
        of = setting | numbers(PROTOTYPES, name) | more
        cells = [of_setting(runs, name, of, space).values() for space in (ASSIGN, EMBEDDINGS)]
        row = f"{name}, {'without a head' if more else 'with a head'}"
        lines.append([row, *(spread(values) for values in cells)])
    return markdown(["set", "NMI of `assign`", "k-means on the embeddings"], lines)


def second_table(runs: Collection[Run]) -> str:
    """NMI of `assign` without a head, and the differences from other clusters."""
    settings, lines = chosen(runs), []
    runs = [run for run in runs if run["config"]["seed"] in SEEDS_WITHOUT_HEAD]
    for name in (*CONFIRM_ON, *CHOOSE_ON):
        ours, info_nce = (
            settings[row][0] | numbers(row, name) | WITHOUT_HEAD for row in (PROTOTYPES, INFO_NCE)
        )
        others = [(setting, EMBEDDINGS) for setting in (ours, info_nce, NOT_TRAINED)]
        lines.append([name, *against(runs, name, ours, others)])
    head = ["set", "NMI of `assign`", "minus k-means, same encoder"]
    head += ["minus InfoNCE, k-means", "minus untrained, k-means"]
    return sourced(markdown(head, lines), runs)


def table(runs: Collection[Run]) -> str:
    """NMI of `assign`, and the differences from other clusters."""
    settings, lines = chosen(runs), []
    runs = [run for run in runs if run["config"]["seed"] in SEEDS]
    (ours, _), (info_nce, space) = settings[PROTOTYPES], settings[INFO_NCE]
    for name in CONFIRM_ON:
        few, many = (ours | numbers(PROTOTYPES, name, number) for number in (None, MANY))
        others = (
            (few, PROJECTIONS),
            (few, EMBEDDINGS),
            (many, GROUPS),
            (info_nce, space),
            (NOT_TRAINED, EMBEDDINGS),
        )
        described = (of_setting(runs, name, few, ASSIGN, m).values() for m in ("ari", "largest"))
        cells = against(runs, name, few, others)
        lines.append([name, *cells, *(spread(values) for values in described)])
    head = [
        "set",
        "NMI of `assign`",
        "minus k-means on the projections",
        "minus k-means on the embeddings",
        f"minus {MANY} prototypes in groups",
        "minus InfoNCE, k-means",
        "minus untrained, k-means",
        "ARI of `assign`",
        "largest cluster",
    ]
    return sourced(markdown(head, lines), runs)


def draw() -> Figure:
    """What `diagnostics` shows of three trainings, over the steps."""
    runs = [*results.read(RECORD).values()]
    figure, panels = plt.subplots(1, len(WATCHED), figsize=(10, 2.6), layout="constrained")
    for (label, (temperature, balanced)), line in zip(SHOWN.items(), ("-", ":", "--"), strict=True):
        setting = {"row": PROTOTYPES, "temperature": temperature, "warm_up": 0.0}
        setting |= {"balance_predictions": balanced, **numbers(PROTOTYPES, "Cora")}
        seed = CHOOSING_SEEDS[0]
        found = results.matching(runs, config_of("Cora", setting, seed))[seed]
        label += f" (NMI {found['clusters'][ASSIGN]['nmi']:.0f})"
        steps = [at["step"] for at in found["history"]]
        for axes, measure in zip(panels, WATCHED, strict=True):
            axes.plot(steps, [at[measure] for at in found["history"]], line, label=label)
    for axes, measure in zip(panels, WATCHED, strict=True):
        axes.set(title=measure, xlabel="steps")
        axes.set_ylim(bottom=0)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def picture(config: Config, folder: Path) -> Figure:
    """The nodes' projections in the plane, coloured by class and by prototype."""
    _, projections, prototypes, _ = trained(config, folder)
    assert prototypes is not None
    _, _, labels = load(config["dataset"], folder)
    shown = np.random.default_rng(0).permutation(len(labels))[:3000]
    points = TSNE(metric="cosine", init="pca", random_state=0).fit_transform(projections[shown])
    figure, panels = plt.subplots(1, 2, figsize=(8, 4), layout="constrained")
    clusters = prototypes.assign(projections)
    for axes, values, title in zip(panels, (labels, clusters), ("classes", ASSIGN), strict=True):
        axes.scatter(*points.T, c=values[shown], cmap="tab20", s=2)
        axes.set(title=f"{config['dataset']}: {title}", xticks=[], yticks=[])
    return figure


def pages() -> dict[Path, dict[str, str]]:
    """The table by page."""
    runs = [*results.read(RECORD).values()]
    tables = {
        "domains": table(runs),
        "domains without a head": explanation(runs),
        "domains again": second_table(runs),
    }
    return {DOCS / "prototypes.md": tables}


def parse() -> argparse.Namespace:
    parser = parser_of("nodes.domains", __doc__)
    add = parser.add_argument
    add("part", choices=("choose", "confirm", "explain", "without_head"))
    add("--dataset", nargs="+", choices=SETS, help="sets of PyG; `choose` has its own")
    add("--root", type=Path, help="folder of NAME/ or NAME/raw/; without it, NAME is downloaded")
    add("--seeds", type=int, nargs="+", help="of `confirm`; by default 0 to 9")
    add("--picture", type=Path, help="a new file to draw the nodes of `confirm` into")
    add("--workers", type=count, default=2, help="runs at a time, with one thread each")
    add("--output", type=Path, default=Path("runs/domains.jsonl"))
    add("--cache", type=Path, default=Path("runs/data"), help="folder for downloads")
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.part != "confirm" and (args.seeds or args.picture):
        raise ValueError(f"--seeds and --picture are of confirm, but the part is {args.part}")
    if args.part == "choose" and args.dataset:
        raise ValueError(f"choose trains on {' and '.join(CHOOSE_ON)}: leave --dataset out")
    if args.picture and (args.picture.exists() or not args.picture.parent.is_dir()):
        raise ValueError(f"--picture {args.picture} must be a new file in an existing folder")
    names = CHOOSE_ON if args.part == "choose" else args.dataset or CONFIRM_ON
    folders = {name: raw_folder(name, args.root, args.cache) for name in names}
    settings, seeds = None, args.seeds or [*SEEDS]
    if args.part == "choose":
        configs = [*choosing()]
    else:
        settings = chosen([*results.read(RECORD).values()])
        if args.part == "confirm":
            configs = [*deciding(names, seeds, settings)]
        elif args.part == "explain":
            configs = [*explaining(names, settings)]
        else:
            configs = [*deciding(names, SEEDS_WITHOUT_HEAD, settings, **WITHOUT_HEAD)]
    jobs = [(config, folders[config["dataset"]]) for config in configs]
    for found in results.complete(args.output, jobs, run, args.workers):
        config = found["config"]
        row = [config["row"], config.get("num_prototypes", "")]
        nmi = {space: measured["nmi"] for space, measured in found["clusters"].items()}
        print(config["dataset"], config["seed"], config["temperature"], *row, nmi)
    if args.picture and settings is not None:
        setting = settings[PROTOTYPES][0] | numbers(PROTOTYPES, names[0])
        config = config_of(names[0], setting, seeds[0])
        picture(config, folders[names[0]]).savefig(args.picture, dpi=130)


if __name__ == "__main__":
    program("nodes.domains", main)
