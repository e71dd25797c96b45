"""One run: embed the molecules of a set by a frozen encoder, and measure the embeddings."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import rdkit
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import scale
from threadpoolctl import threadpool_limits
from torch import nn
from torch_geometric.loader import DataLoader

from experiments.common.probes import without_training

from .inputs import LabelledSet
from .model import WIDTH, encoder_of
from .molecules import Molecules
from .ranking import has_both, mean, ranking
from .scaffold import TEST, TRAIN, VALID

ALL = "all"  # labels of the training part
SETTING: dict[str, Any] = {
    "few": [10, 100],  # labelled molecules of a task
    "draws": 50,  # of them, for each task
    "most_tasks": 30,  # where a set has more, these are spread evenly over its columns
    "strengths": [1.0, 10.0, 100.0, 1e3, 1e4],  # C of the probe of all labels
}


def run(config: dict[str, Any], data: LabelledSet, encoder: Path | None) -> dict[str, Any]:
    """The results of a run with this configuration, ready for JSON."""
    started = time.perf_counter()
    with threadpool_limits(1):
        scores = rounded(scored(config, data, encoder))
    return {
        "config": config,
        **scores,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"rdkit": rdkit.__version__},
    }


def scored(config: dict[str, Any], data: LabelledSet, encoder: Path | None) -> dict[str, Any]:
    """Scores with few and with all labels, and of k-means."""
    device = torch.device(data.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(config["seed"])  # the initial encoder of pretrain.py
    z = embedded(encoder_of(encoder).to(device), Molecules(data.folder))
    labels = some_tasks(data.labels.numpy(), config["most_tasks"])
    few_labels = {
        str(count): few(z, labels, data.parts, count, config["draws"], config["seed"])
        for count in config["few"]
    }
    return {
        "labels": few_labels | {ALL: every(z, labels, data.parts, config["strengths"])},
        "chance": chance(labels[data.parts == TEST]),
        "clusters": clusters(z, labels, config["seed"]),
    }


@torch.no_grad()
def embedded(encoder: nn.Module, molecules: Molecules) -> np.ndarray:
    """Embeddings ``[N, 300]`` of about unit length: features have mean 0 and equal variance."""
    encoder.eval()
    device = next(encoder.parameters()).device
    embeddings = []
    for batch in DataLoader(molecules, 256):
        b = batch.to(device)
        embeddings.append(encoder(b.x, b.edge_index, b.edge_attr, b.batch, b.num_graphs).cpu())
    return scale(torch.cat(embeddings).double().numpy()) / WIDTH**0.5


def some_tasks(labels: np.ndarray, most: int) -> np.ndarray:
    """The columns of ``most`` tasks, spread evenly, or of all tasks."""
    tasks = labels.shape[1]
    return labels[:, np.linspace(0, tasks - 1, min(most, tasks)).round().astype(int)]


def draw(labels: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """``count`` labelled molecules of a task: one of each class, the rest at random."""
    first = [random.choice(np.flatnonzero(labels == value)) for value in (0, 1)]
    rest = np.setdiff1d(np.flatnonzero(~np.isnan(labels)), first)
    return np.concatenate([first, random.choice(rest, count - 2, replace=False)])


def few(
    z: np.ndarray, labels: np.ndarray, parts: np.ndarray, count: int, draws: int, seed: int
) -> dict[str, float]:
    """Mean test scores of logistic regressions on draws of ``count`` training molecules.

    Draws depend on the seed alone.
    Tasks with fewer labels to train, or without both classes in a part, are left out.
    """
    train, test = parts == TRAIN, parts == TEST
    tasks = [
        task
        for task, column in enumerate(labels.T)
        if (~np.isnan(column[train])).sum() >= count
        and has_both(column[train])
        and has_both(column[test])
    ]
    train_z, test_z = z[train], z[test]
    scores = []
    for task in tasks:
        random = np.random.default_rng([seed, count, task])
        answers = labels[train, task]
        for _ in range(draws):
            drawn = draw(answers, count, random)
            logits = fitted(train_z[drawn], answers[drawn], test_z)
            scores.append(ranking(logits[:, None], labels[test, task, None]))
    return means(scores) | {"tasks": len(tasks)}


def every(
    z: np.ndarray, labels: np.ndarray, parts: np.ndarray, strengths: list[float]
) -> dict[str, float]:
    """Test scores with all labels of the training part.

    All tasks have one regularisation strength, the one with the best validation score.
    """
    train, valid, test = (parts == part for part in (TRAIN, VALID, TEST))
    tasks = [task for task, column in enumerate(labels[train].T) if has_both(column)]
    others = z[~train]
    best: dict[str, float] = {}
    for strength in strengths:
        logits = np.empty((len(others), len(tasks)))
        for column, task in enumerate(tasks):
            measured = train & ~np.isnan(labels[:, task])
            logits[:, column] = fitted(z[measured], labels[measured, task], others, strength)
        auc = ranking(logits[valid[~train]], labels[valid][:, tasks])["auc"]
        if not best or auc > best["valid"]:
            scores = ranking(logits[test[~train]], labels[test][:, tasks])
            best = scores | {"valid": auc, "strength": strength}
    return best


def fitted(
    z: np.ndarray, labels: np.ndarray, others: np.ndarray, strength: float = 1.0
) -> np.ndarray:
    """Logits of ``others`` by a logistic regression.

    lbfgs is faster for few samples, but stops short of the optimum for many samples and little
    regularisation, where Newton's method finds it.
    """
    solver = "lbfgs" if len(z) < z.shape[1] else "newton-cholesky"
    probe = LogisticRegression(C=strength, solver=solver, max_iter=1000).fit(z, labels)
    return probe.decision_function(others)


def chance(labels: np.ndarray) -> float:
    """Average precision of chance in per cent: the fraction of ones, mean over the tasks."""
    return 100 * mean([float(np.nanmean(column)) for column in labels.T if has_both(column)])


def clusters(z: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float] | None:
    """K-means against the class, if there is one task and all molecules have a label."""
    if labels.shape[1] > 1 or np.isnan(labels).any():
        return None
    values = without_training(z, labels[:, 0], seed)
    return {name: values[name] for name in ("nmi", "ari")}


def means(scores: list[dict[str, float]]) -> dict[str, float]:
    names = scores[0] if scores else []
    return {name: mean([score[name] for score in scores]) for name in names}


def rounded(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: rounded(value) for name, value in values.items()}
    return round(values, 3) if isinstance(values, float) else values
