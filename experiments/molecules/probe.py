"""Evaluate frozen encoders by logistic regression with 10, 100 and all labels.

python -m experiments.molecules.probe --csv bbbp.csv tox21.csv \\
    --encoders none runs/molecules/PGCL-0.pt runs/molecules/PGCL-1.pt runs/molecules/PGCL-2.pt

The seeds are those of pre-training. Finished runs are appended to --output, one JSON line each, and
are not run again.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
import rdkit
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import scale

from docs.programs.tables import markdown
from experiments.common import results
from experiments.common.arguments import count, program
from experiments.common.tables import spread

from .data import TEST, TRAIN, VALID, has_both, labelled, roc_auc
from .inputs import Encoder, comparison_parser, complete, origin
from .model import NONE, WIDTH, encoder_of, outputs

SETTING: dict[str, Any] = {
    "few": [10, 100],  # labelled molecules of a task
    "draws": 50,  # of them, for each task
    "most_tasks": 30,  # where a set has more, these are spread evenly over its columns
    "strengths": [1.0, 10.0, 100.0, 1e3, 1e4],  # C of the probe of all labels
}
Labelled = tuple[np.ndarray, np.ndarray]  # embeddings [N, D] and labels [N, tasks] of a part


def run(config: results.Config, table: Path, encoder: Path | None, device: str) -> results.Run:
    """Test ROC-AUC by the number of labels; None if no task has so many."""
    started = time.perf_counter()
    data = labelled(table)
    torch.manual_seed(config["seed"])  # a new encoder is the initial one of pretrain.py
    embeddings = outputs(encoder_of(encoder).to(device), data.graphs).double().numpy()
    z = scale(embeddings) / WIDTH**0.5  # [N, 300], of about unit length
    tasks = data.labels.shape[1]
    some = np.linspace(0, tasks - 1, min(config["most_tasks"], tasks)).round().astype(int)
    labels = data.labels.numpy()[:, some]
    train, valid, test = (
        (z[data.parts == part], labels[data.parts == part]) for part in (TRAIN, VALID, TEST)
    )
    auc = {
        str(count): few_labels(train, test, count, config["draws"], config["seed"])
        for count in config["few"]
    }
    auc["all"] = all_labels(train, valid, test, config["strengths"])
    return {
        "config": config,
        "auc": {labels: value and round(value, 3) for labels, value in auc.items()},
        "seconds": round(time.perf_counter() - started, 1),
        "versions": {"rdkit": rdkit.__version__},
    }


def draw(labels: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
    """``count`` labelled molecules of a task: one of each class, the rest at random."""
    first = [random.choice(np.flatnonzero(labels == value)) for value in (0, 1)]
    rest = np.setdiff1d(np.flatnonzero(~np.isnan(labels)), first)
    return np.concatenate([first, random.choice(rest, count - 2, replace=False)])


def few_labels(train: Labelled, test: Labelled, count: int, draws: int, seed: int) -> float | None:
    """Mean ROC-AUC of logistic regressions on draws of ``count`` training molecules.

    Draws depend on the seed alone. Tasks with fewer labels to train, or without both classes in a
    part, are left out.
    """
    scores = []
    for task, (labels, test_labels) in enumerate(zip(train[1].T, test[1].T, strict=True)):
        enough = (~np.isnan(labels)).sum() >= count
        if enough and has_both(labels) and has_both(test_labels):
            random = np.random.default_rng([seed, count, task])
            for _ in range(draws):
                drawn = draw(labels, count, random)
                probe = fitted(train[0][drawn], labels[drawn])
                scores.append(score([probe], test[0], test_labels[:, None]))
    return float(np.mean(scores)) if scores else None


def all_labels(train: Labelled, valid: Labelled, test: Labelled, strengths: list[float]) -> float:
    """ROC-AUC with all labels of the training part.

    All tasks have one regularisation strength, the one with the best validation score.
    """
    tasks = [task for task, labels in enumerate(train[1].T) if has_both(labels)]
    scores = []
    for strength in strengths:
        probes = [fitted(train[0], train[1][:, task], strength) for task in tasks]
        scores.append([score(probes, z, labels[:, tasks]) for z, labels in (valid, test)])
    return max(scores, key=lambda of_strength: of_strength[0])[1]


def fitted(z: np.ndarray, labels: np.ndarray, strength: float = 1.0) -> LogisticRegression:
    """A logistic regression of the measured labels.

    lbfgs is faster for few samples, but stops short of the optimum for many samples and little
    regularisation, where Newton's method finds it.
    """
    measured = ~np.isnan(labels)
    solver = "lbfgs" if measured.sum() < z.shape[1] else "newton-cholesky"
    probe = LogisticRegression(C=strength, solver=solver, max_iter=1000)
    return probe.fit(z[measured], labels[measured])


def score(probes: list[LogisticRegression], z: np.ndarray, labels: np.ndarray) -> float:
    return roc_auc(np.stack([probe.decision_function(z) for probe in probes], 1), labels)


def main() -> None:
    parser = comparison_parser("probe", __doc__)
    parser.add_argument("--seeds", type=count, default=3, help="of new encoders ('none')")
    args = parser.parse_args()
    encoders = []
    for file in args.encoders:
        if file is None:
            encoders += [Encoder(NONE, None, None, seed) for seed in range(args.seeds)]
        else:
            config = origin(file)
            name = f"{config['row']}, {config['molecules']} molecules x {config['epochs']}"
            encoders.append(Encoder(name, file, config, config["seed"]))
    runs = complete(args, encoders, SETTING, run)
    lines = []
    for (name, path), seeds in runs.items():
        scores = zip(*(run["auc"].values() for run in seeds.values()), strict=True)
        cells = ("" if None in of_labels else spread(of_labels) for of_labels in scores)
        lines.append([path.name, name, len(seeds), *cells])
    print("\nROC-AUC in per cent by the number of labels\n")
    print(markdown(["set", "pre-training", "seeds", *SETTING["few"], "all"], lines))


if __name__ == "__main__":
    program("molecules.probe", main)
