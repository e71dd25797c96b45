"""One run: a frozen encoder embeds the molecules of a set, and what its rows are good for."""

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

from .inputs import Given
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


def run(config: dict[str, Any], given: Given, encoder: Path | None) -> dict[str, Any]:
    """What came of a run with this configuration, ready for JSON."""
    started = time.perf_counter()
    with threadpool_limits(1):
        found = rounded(scored(config, given, encoder))
    return {
        "config": config,
        **found,
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"rdkit": rdkit.__version__},
    }


def scored(config: dict[str, Any], given: Given, encoder: Path | None) -> dict[str, Any]:
    """By what is asked of the rows."""
    device = torch.device(given.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    torch.manual_seed(config["seed"])  # as pretrain.py begins: the same fresh encoder
    rows = embedded(encoder_of(encoder).to(device), Molecules(given.folder))
    labels = some_tasks(given.labels.numpy(), config["most_tasks"])
    few_labels = {
        str(count): few(rows, labels, given.parts, count, config["draws"], config["seed"])
        for count in config["few"]
    }
    return {
        "labels": few_labels | {ALL: every(rows, labels, given.parts, config["strengths"])},
        "chance": chance(labels[given.parts == TEST]),
        "clusters": clusters(rows, labels, config["seed"]),
    }


@torch.no_grad()
def embedded(encoder: nn.Module, molecules: Molecules) -> np.ndarray:
    """Rows ``[N, 300]`` of about unit length: each number has mean 0, and all the same variance."""
    encoder.eval()
    device = next(encoder.parameters()).device
    rows = []
    for batch in DataLoader(molecules, 256):
        b = batch.to(device)
        rows.append(encoder(b.x, b.edge_index, b.edge_attr, b.batch, b.num_graphs).cpu())
    return scale(torch.cat(rows).double().numpy()) / WIDTH**0.5


def some_tasks(labels: np.ndarray, most: int) -> np.ndarray:
    """The columns of so many tasks, spread evenly; all of them where there are no more."""
    tasks = labels.shape[1]
    return labels[:, np.linspace(0, tasks - 1, min(most, tasks)).round().astype(int)]


def drawn(labels: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """So many molecules of a task that have a label: one of each class, the rest as they come."""
    first = [random.choice(np.flatnonzero(labels == value)) for value in (0, 1)]
    rest = np.setdiff1d(np.flatnonzero(~np.isnan(labels)), first)
    return np.concatenate([first, random.choice(rest, count - 2, replace=False)])


def few(
    rows: np.ndarray, labels: np.ndarray, parts: np.ndarray, count: int, draws: int, seed: int
) -> dict[str, float]:
    """Scores on the test part with ``count`` labelled molecules of the training part, in the mean.

    A logistic regression for each draw of them. Draws are those of the seed, whatever the rows.
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
    here, there = rows[train], rows[test]
    scores = []
    for task in tasks:
        random = np.random.default_rng([seed, count, task])
        answers = labels[train, task]
        for _ in range(draws):
            some = drawn(answers, count, random)
            logits = probed(here[some], answers[some], there)
            scores.append(ranking(logits[:, None], labels[test, task, None]))
    return means(scores) | {"tasks": len(tasks)}


def every(
    rows: np.ndarray, labels: np.ndarray, parts: np.ndarray, strengths: list[float]
) -> dict[str, float]:
    """Scores on the test part with all labels of the training part.

    One strength of regularisation for all tasks, the one that ranks the validation part best.
    """
    train, valid, test = (parts == part for part in (TRAIN, VALID, TEST))
    tasks = [task for task, column in enumerate(labels[train].T) if has_both(column)]
    others = rows[~train]
    best: dict[str, float] = {}
    for strength in strengths:
        logits = np.empty((len(others), len(tasks)))
        for column, task in enumerate(tasks):
            known = train & ~np.isnan(labels[:, task])
            logits[:, column] = probed(rows[known], labels[known, task], others, strength)
        auc = ranking(logits[valid[~train]], labels[valid][:, tasks])["auc"]
        if not best or auc > best["valid"]:
            scores = ranking(logits[test[~train]], labels[test][:, tasks])
            best = scores | {"valid": auc, "strength": strength}
    return best


def probed(
    rows: np.ndarray, labels: np.ndarray, others: np.ndarray, strength: float = 1.0
) -> np.ndarray:
    """Logits of the others by a logistic regression.

    Newton's steps find the optimum where lbfgs, quicker for few rows, stops short of it: with many
    rows and little regularisation.
    """
    solver = "lbfgs" if len(rows) < rows.shape[1] else "newton-cholesky"
    probe = LogisticRegression(C=strength, solver=solver, max_iter=1000).fit(rows, labels)
    return probe.decision_function(others)


def chance(labels: np.ndarray) -> float:
    """Average precision of chance in per cent: the share of ones, mean over the tasks."""
    return 100 * mean([float(np.nanmean(column)) for column in labels.T if has_both(column)])


def clusters(rows: np.ndarray, labels: np.ndarray, seed: int) -> dict[str, float] | None:
    """K-means against the class, where there is a single task with labels of all molecules."""
    if labels.shape[1] > 1 or np.isnan(labels).any():
        return None
    found = without_training(rows, labels[:, 0], seed)
    return {name: found[name] for name in ("nmi", "ari")}


def means(scores: list[dict[str, float]]) -> dict[str, float]:
    names = scores[0] if scores else []
    return {name: mean([score[name] for score in scores]) for name in names}


def rounded(found: Any) -> Any:
    """What is kept need not be exact."""
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    return round(found, 3) if isinstance(found, float) else found
