"""Tables of runs: last and best epochs, and paired differences with their confidence intervals."""

from collections.abc import Iterable

import numpy as np

from experiments.shelf.results import Run
from experiments.shelf.rows import INFO_NCE, PGCL
from experiments.shelf.tables import difference, paired, spread

from .data import SYNTHETIC
from .train import ALL_ROWS, LOSSES, SETTING, UNTRAINED


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


def named(runs: Iterable[Run]) -> str:
    """The set of these runs, and whether it is synthetic."""
    (name,) = {run["config"]["dataset"] for run in runs}
    return f"synthetic graphs ({name})" if name == SYNTHETIC else name


def comparison(runs: Iterable[Run]) -> str:
    """A Markdown table of one set under one configuration."""
    runs = list(runs)
    rows = by_row(runs)
    lines = [
        f"| {named(runs)} | seeds | last epoch | best epoch by test accuracy (optimistic) "
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


def verdict(runs: Iterable[Run]) -> str:
    """What the difference of PGCL and InfoNCE says, in a sentence; empty without both."""
    runs = list(runs)
    rows = by_row(runs)
    if not {INFO_NCE, PGCL} <= rows.keys():
        return ""
    ours, theirs = (
        {seed: last_epoch(run) for seed, run in rows[row].items()} for row in (PGCL, INFO_NCE)
    )
    delta = paired(ours, theirs)
    if delta is None:
        return "Fewer than three seeds do not tell PGCL and InfoNCE apart: take --seeds 5."
    said = "not significantly different from"
    if not delta.low <= 0 <= delta.high:
        said = "significantly above" if delta.mean > 0 else "significantly below"
    return f"On {named(runs)} PGCL is {said} InfoNCE: {delta} points, {len(ours)} seeds."


LOOKS = ("seeds", "best of its looks", "last epoch", "chosen epoch, fresh folds", "minus InfoNCE")


def of_looks(runs: Iterable[Run]) -> str:
    """A Markdown table of one set under the paper's protocol."""
    lines = [f"| | {' | '.join(LOOKS)} |", "| --- |" + " --- |" * len(LOOKS)]
    lines += [f"| {row} | {' | '.join(cells)} |" for row, cells in cells_of_looks(runs).items()]
    return "\n".join(lines)


def cells_of_looks(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Row, with its lambda where that is another one -> its cells; differences on fresh folds."""
    order, rows = [UNTRAINED, *LOSSES], dict[str, list[Run]]()
    for run in sorted(runs, key=lambda run: order.index(run["config"]["row"])):
        weight = run["config"].get("consistency_weight", SETTING["consistency_weight"])
        other = f", lambda={weight:g}" if weight != SETTING["consistency_weight"] else ""
        rows.setdefault(run["config"]["row"] + other, []).append(run)
    fresh = {
        row: {run["config"]["seed"]: float(np.mean(run["fresh"])) for run in of_row}
        for row, of_row in rows.items()
    }
    return {
        row: [
            str(len(of_row)),
            spread([best_epoch(run) for run in of_row]),
            spread([last_epoch(run) for run in of_row]),
            spread(list(fresh[row].values())),
            difference(fresh[row], fresh.get(INFO_NCE, {})),
        ]
        for row, of_row in rows.items()
    }
