"""Tables of runs: both protocols, and paired differences with their confidence intervals."""

from collections.abc import Iterable

from experiments.shelf.results import Run
from experiments.shelf.rows import INFO_NCE
from experiments.shelf.tables import difference, spread

from .train import ALL_ROWS, UNTRAINED


def last_epoch(run: Run) -> float:
    epoch = max(run["accuracy"], key=int)
    return run["accuracy"][epoch]


def best_epoch(run: Run) -> float:
    return max(run["accuracy"].values())


def by_row(runs: Iterable[Run]) -> dict[str, dict[int, Run]]:
    """Row -> seed -> run, in the order of the paper's ablation."""
    rows: dict[str, dict[int, Run]] = {row: {} for row in ALL_ROWS}
    for run in runs:
        rows[run["config"]["row"]][run["config"]["seed"]] = run
    return {row: seeds for row, seeds in rows.items() if seeds}


def comparison(runs: Iterable[Run]) -> str:
    """A Markdown table of one set under one configuration."""
    rows = by_row(runs)
    lines = [
        "| | seeds | last epoch | best epoch by test accuracy (optimistic) "
        "| minus InfoNCE | minus untrained |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    last = {
        row: {seed: last_epoch(run) for seed, run in seeds.items()} for row, seeds in rows.items()
    }
    for row, seeds in rows.items():
        against = [difference(last[row], last.get(other, {})) for other in (INFO_NCE, UNTRAINED)]
        values = spread(list(last[row].values()))
        best = spread([best_epoch(run) for run in seeds.values()])
        lines.append(f"| {row} | {len(seeds)} | {values} | {best} | {' | '.join(against)} |")
    return "\n".join(lines)
