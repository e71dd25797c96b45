"""ROC-AUC, the mean over tasks."""

import numpy as np
from sklearn.metrics import roc_auc_score


def has_both(labels: np.ndarray) -> bool:
    """Whether both classes were measured."""
    return bool((labels == 0).any() and (labels == 1).any())


def roc_auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """In per cent, the mean over the tasks ``[N, tasks]`` that have both classes.

    Labels are 0, 1, or nan where nothing was measured.
    """
    if np.isnan(logits).any():
        raise ValueError("logits are nan, as training has diverged")
    scores = []
    for values, answers in zip(logits.T, labels.T, strict=True):
        if has_both(answers):
            measured = ~np.isnan(answers)
            scores.append(roc_auc_score(answers[measured], values[measured]))
    return 100 * float(np.mean(scores)) if scores else float("nan")
