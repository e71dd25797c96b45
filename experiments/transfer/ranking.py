"""How well numbers rank molecules, in the mean over tasks."""

import numpy as np
from sklearn.metrics import average_precision_score, roc_auc_score

SCORES = {"auc": roc_auc_score, "ap": average_precision_score}  # ROC-AUC, average precision


def ranking(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Both scores in per cent, means over the tasks ``[N, tasks]`` that have both classes there.

    Labels are 0, 1, or nan where nothing was measured. Average precision is that of chance where it
    is the share of ones; ROC-AUC where it is 50.
    """
    both = [task for task, column in enumerate(labels.T) if has_both(column)]
    known = {task: ~np.isnan(labels[:, task]) for task in both}
    return {
        name: 100
        * mean([score(labels[known[t], t].astype(int), logits[known[t], t]) for t in both])
        for name, score in SCORES.items()
    }


def has_both(labels: np.ndarray) -> bool:
    """Whether both classes were measured."""
    return bool((labels == 0).any() and (labels == 1).any())


def mean(scores: list[float]) -> float:
    return float(np.mean(scores)) if scores else float("nan")
