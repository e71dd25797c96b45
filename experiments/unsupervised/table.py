"""Tables of runs: last and best epochs, and paired differences with their confidence intervals."""

from collections.abc import Callable, Iterable

import numpy as np

from experiments.common.results import Run
from experiments.common.rows import INFO_NCE, PGCL
from experiments.common.tables import difference, markdown, paired, spread

from .data import SYNTHETIC
from .train import ALL_ROWS, LOSSES, ONE_SHOT, SETTING, UNTRAINED, WL

Measure = Callable[[Run], float | None]


def last_epoch(run: Run) -> float:
    epoch = max(run["accuracy"], key=int)
    return run["accuracy"][epoch]


def one_shot(run: Run) -> float | None:
    """Missing in the oldest records."""
    return run.get(ONE_SHOT)


def best_epoch(run: Run) -> float:
    return max(run["accuracy"].values())


def by_seed(seeds: dict[int, Run], measure: Measure) -> dict[int, float]:
    """The measure by seed, of the runs that have it."""
    values = {seed: measure(run) for seed, run in seeds.items()}
    return {seed: value for seed, value in values.items() if value is not None}


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
    """A table of one set in one setting; accuracy with few labels if all runs have it."""
    runs = list(runs)
    rows = by_row(runs)
    measures: dict[str, Measure] = {"last epoch": last_epoch}
    trained = [run for run in runs if run["config"]["row"] != WL]
    if trained and all(ONE_SHOT in run for run in trained):
        measures["1 label per class"] = one_shot
    columns = [[named(runs), *rows], ["seeds", *(str(len(seeds)) for seeds in rows.values())]]
    for name, measure in measures.items():
        of_rows = {row: by_seed(seeds, measure) for row, seeds in rows.items()}
        columns.append(
            [name, *(spread([*of_row.values()]) if of_row else "" for of_row in of_rows.values())]
        )
        if measure is last_epoch:
            best = [spread([*by_seed(seeds, best_epoch).values()]) for seeds in rows.values()]
            columns.append(["best epoch by test accuracy (optimistic)", *best])
        for label, other in (("minus InfoNCE", INFO_NCE), ("minus untrained", UNTRAINED)):
            base = of_rows.get(other, {})
            columns.append([label, *(difference(of_row, base) for of_row in of_rows.values())])
    head, *lines = zip(*columns, strict=True)
    return markdown(head, lines)


def verdict(runs: Iterable[Run]) -> str:
    """The difference between PGCL and InfoNCE in sentences; empty without both."""
    runs = list(runs)
    rows = by_row(runs)
    if not {INFO_NCE, PGCL} <= rows.keys():
        return ""
    sentences = []
    for name, measure in (("", last_epoch), (" with 1 label per class", one_shot)):
        ours, theirs = (by_seed(rows[row], measure) for row in (PGCL, INFO_NCE))
        delta = paired(ours, theirs)
        if delta is not None:
            verb = "not significantly different from"
            if not delta.low <= 0 <= delta.high:
                verb = "significantly above" if delta.mean > 0 else "significantly below"
            seeds = len(ours.keys() & theirs.keys())
            sentences.append(
                f"On {named(runs)}{name} PGCL is {verb} InfoNCE: {delta} points, {seeds} seeds."
            )
    return "\n".join(sentences) or (
        "Fewer than three seeds do not tell PGCL and InfoNCE apart: take --seeds 5."
    )


EVERY_EPOCH = ("seeds", "best epoch", "last epoch", "best epoch, fresh folds", "minus InfoNCE")


def every_epoch(runs: Iterable[Run]) -> str:
    """A table of one set by the paper's protocol."""
    lines = ([row, *cells] for row, cells in cells_of_rows(runs).items())
    return markdown(["loss", *EVERY_EPOCH], lines)


def cells_of_rows(runs: Iterable[Run]) -> dict[str, list[str]]:
    """Row, with its lambda if it is not the usual one -> its cells; differences on fresh folds."""
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
