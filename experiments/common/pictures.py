"""Curves of means over seeds, with their standard deviations."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes


def curves(
    axes: Axes, ticks: Sequence[float], seeds: Mapping[str, Sequence[Collection[float]]]
) -> None:
    """A curve for each label, from the values of all seeds at each tick."""
    for label, at_ticks in seeds.items():
        several = [[*values] for values in at_ticks]
        means = [np.mean(values) for values in several]
        deviations = [np.std(values, ddof=1) for values in several]
        axes.errorbar(range(len(ticks)), means, deviations, fmt="o-", capsize=3, label=label)
    axes.set_xticks(range(len(ticks)), ticks)
    axes.spines[["top", "right"]].set_visible(False)
