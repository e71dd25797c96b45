"""Tables of runs: both protocols, and paired differences with their confidence intervals."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import stats
from train import INFO_NCE, ROWS, UNTRAINED

Run = dict[str, Any]


def last_epoch(run: Run) -> float:
    epoch = max(run["accuracy"], key=int)
    return run["accuracy"][epoch]


def best_epoch(run: Run) -> float:
    return max(run["accuracy"].values())


def by_row(runs: Iterable[Run]) -> dict[str, dict[int, Run]]:
    """Row -> seed -> run, in the order of the paper's ablation."""
    found: dict[str, dict[int, Run]] = {row: {} for row in ROWS}
    for run in runs:
        found[run["config"]["row"]][run["config"]["seed"]] = run
    return {row: seeds for row, seeds in found.items() if seeds}


def spread(values: list[float]) -> str:
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}"


def difference(seeds: dict[int, Run], others: dict[int, Run]) -> str:
    """Mean over the seeds that both have, with the 95% interval of Student's t."""
    both = sorted(seeds.keys() & others.keys())
    deltas = [last_epoch(seeds[seed]) - last_epoch(others[seed]) for seed in both]
    if len(deltas) < 2 or seeds is others:
        return ""
    mean, error = np.mean(deltas), stats.sem(deltas)
    reach = error * stats.t.ppf(0.975, len(deltas) - 1)
    return f"{mean:+.1f} ({mean - reach:+.1f} to {mean + reach:+.1f})"


def comparison(runs: Iterable[Run]) -> str:
    """A Markdown table of one set under one configuration."""
    rows = by_row(runs)
    lines = [
        "| | seeds | last epoch | best epoch by test accuracy (optimistic) "
        "| minus InfoNCE | minus untrained |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row, seeds in rows.items():
        against = [difference(seeds, rows.get(other, {})) for other in (INFO_NCE, UNTRAINED)]
        values = spread([last_epoch(run) for run in seeds.values()])
        best = spread([best_epoch(run) for run in seeds.values()])
        lines.append(f"| {row} | {len(seeds)} | {values} | {best} | {' | '.join(against)} |")
    return "\n".join(lines)
