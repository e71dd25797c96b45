"""ROC-AUC and average precision, means over tasks."""

import numpy as np
from scipy.stats import rankdata


def auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """ROC-AUC: the fraction of pairs of a one and a zero in order; ties count half."""
    ones = int(labels.sum())
    won = rankdata(logits)[labels == 1].sum() - ones * (ones + 1) / 2
    return float(won / (ones * (len(labels) - ones)))


def ap(logits: np.ndarray, labels: np.ndarray) -> float:
    """Average precision: mean over ones of the fraction of ones among scores at least as high."""
    ones = labels == 1
    as_high = rankdata(-logits, "max")[ones]
    return float(np.mean(rankdata(-logits[ones], "max") / as_high))


SCORES = {"auc": auc, "ap": ap}


def ranking(logits: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Both scores in per cent, means over the tasks ``[N, tasks]`` that have both classes there.

    Labels are 0, 1, or nan where nothing was measured. Chance has an average precision of the
    fraction of ones, and a ROC-AUC of 50. Values are those of scikit-learn, whose functions take
    longer than the probes.
    """
    if np.isnan(logits).any():
        raise ValueError("a model's logits are nan: its training has diverged, lower --lr")
    both = [task for task, column in enumerate(labels.T) if has_both(column)]
    known = {task: ~np.isnan(labels[:, task]) for task in both}
    return {
        name: 100 * mean([score(logits[known[t], t], labels[known[t], t]) for t in both])
        for name, score in SCORES.items()
    }


def has_both(labels: np.ndarray) -> bool:
    """Whether both classes were measured."""
    return bool((labels == 0).any() and (labels == 1).any())


def mean(scores: list[float]) -> float:
    return float(np.mean(scores)) if scores else float("nan")
