"""ROC-AUC, the mean over tasks."""

import numpy as np
from scipy.stats import rankdata


def has_both(labels: np.ndarray) -> bool:
    """Whether both classes were measured."""
    return bool((labels == 0).any() and (labels == 1).any())


def roc_auc(logits: np.ndarray, labels: np.ndarray) -> float:
    """In per cent, the mean over the tasks ``[N, tasks]`` that have both classes.

    Labels are 0, 1, or nan where nothing was measured. scikit-learn's function has the same values,
    but takes longer than the probes.
    """
    if np.isnan(logits).any():
        raise ValueError("logits are nan, as training has diverged")
    scores = []
    for values, answers in zip(logits.T, labels.T, strict=True):
        if has_both(answers):
            ones, zeros = values[answers == 1], values[answers == 0]
            # Pairs of a one and a zero in the right order; ties count half.
            ranks = rankdata(np.concatenate([ones, zeros]))[: len(ones)]
            ordered = ranks.sum() - len(ones) * (len(ones) + 1) / 2
            scores.append(ordered / (len(ones) * len(zeros)))
    return 100 * float(np.mean(scores)) if scores else float("nan")
