"""Tables of what the swap changes, from runs."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from docs.tables import markdown
from experiments.common.results import Run, read
from experiments.common.tables import DOCS, difference, spread

from .study import AFTER, BEFORE, FIRST, PGCL, ROUNDED

ROWS = (BEFORE, AFTER, PGCL)


def by_seed(runs: Iterable[Run], **options: object) -> dict[int, Run]:
    return {run["config"]["seed"]: run for run in runs if options.items() <= run["config"].items()}


def apart(runs: Iterable[Run], other: str, eps: float, steps: int, **options: object) -> str:
    """The largest difference of losses to the script's own, relative to these, over all seeds."""
    own, others = (
        by_seed(runs, dtype="float64", eps=eps, row=row, **options) for row in (BEFORE, other)
    )
    both = [(own[seed]["losses"], others[seed]["losses"]) for seed in own.keys() & others.keys()]
    far = [abs(a - b) / abs(a) for pair in both for a, b in list(zip(*pair, strict=True))[:steps]]
    return f"{max(far):.0e}" if far else ""


def tables(runs: Iterable[Run]) -> str:
    """Accuracy, time and lines; then the largest differences of losses in float64."""
    runs = list(runs)
    pairs = {(run["config"]["script"], run["config"]["dataset"]): None for run in runs}
    measured, compared = [], []
    for script, name in pairs:
        of = {"script": script, "dataset": name}
        rows = {row: by_seed(runs, dtype="float32", row=row, **of) for row in ROWS}
        svm = {
            row: {seed: run["accuracy"] for seed, run in seeds.items()}
            for row, seeds in rows.items()
        }
        seconds = [
            f"{np.mean([run['epoch_seconds'] for run in seeds.values()]):.2g}"
            for seeds in rows.values()
        ]
        lines = max(run["lines"] for run in rows[AFTER].values())
        means = [spread(svm[row].values()) for row in ROWS]
        deltas = [difference(svm[row], svm[BEFORE]) for row in (AFTER, PGCL)]
        label = f"{script}, {name}"
        measured.append([label, len(svm[BEFORE]), *means, *deltas, " / ".join(seconds), lines])
        columns = [(AFTER, 1e-8, 1), (AFTER, 1e-8, FIRST), (ROUNDED, 1e-8, FIRST)]
        columns.append((AFTER, 1e-3, FIRST))
        compared.append([label, *(apart(runs, *column, **of) for column in columns)])
    minus = [f"{row} minus {BEFORE}" for row in (AFTER, PGCL)]
    head = ["accuracy in %", "seeds", *ROWS, *minus, "seconds of an epoch", "lines changed"]
    far = ["first step", f"first {FIRST} steps", f"{ROUNDED}, {FIRST} steps"]
    far.append(f"{FIRST} steps, Adam with eps=1e-3")
    second = markdown(["largest difference of losses", *far], compared)
    return f"{markdown(head, measured)}\n\n{second}"


def pages() -> dict[Path, dict[str, str]]:
    runs = read(Path(__file__).with_name("record.jsonl"))
    return {DOCS / "swap.md": {"graphcl": tables(runs.values())}}
