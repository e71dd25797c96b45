"""The table of what the swap changes, from runs."""

from collections.abc import Iterable
from pathlib import Path

from docs.programs.tables import markdown
from experiments.common.results import Run, read
from experiments.common.tables import DOCS, difference, spread

from .study import AFTER, BEFORE, PGCL

ROWS = (BEFORE, AFTER, PGCL)


def by_seed(runs: Iterable[Run], **options: object) -> dict[int, Run]:
    return {run["config"]["seed"]: run for run in runs if options.items() <= run["config"].items()}


def apart(runs: Iterable[Run], **options: object) -> str:
    """The largest difference of losses to the script's own, relative to these, over all seeds.

    Adam has a large eps, because it would otherwise turn rounding into steps.
    """
    own, others = (
        by_seed(runs, dtype="float64", eps=1e-3, row=row, **options) for row in (BEFORE, AFTER)
    )
    both = [(own[seed]["losses"], others[seed]["losses"]) for seed in own.keys() & others.keys()]
    far = [abs(a - b) / abs(a) for pair in both for a, b in zip(*pair, strict=True)]
    return f"{max(far):.0e}" if far else ""


def table(runs: Iterable[Run]) -> str:
    """Accuracy with each loss, and the largest difference of losses."""
    runs = list(runs)
    lines = []
    for script, name in {(x["config"]["script"], x["config"]["dataset"]): None for x in runs}:
        of = {"script": script, "dataset": name}
        rows = (by_seed(runs, dtype="float32", row=row, **of) for row in ROWS)
        own, *others = ({seed: run["accuracy"] for seed, run in row.items()} for row in rows)
        deltas = (difference(other, own) for other in others)
        lines.append([f"{script}, {name}", spread(own.values()), *deltas, apart(runs, **of)])
    minus = (f"{row} minus {BEFORE}" for row in (AFTER, PGCL))
    return markdown(["accuracy in %", BEFORE, *minus, "losses differ by"], lines)


def pages() -> dict[Path, dict[str, str]]:
    runs = read(Path(__file__).with_name("record.jsonl"))
    return {DOCS / "swap.md": {"graphcl": table(runs.values())}}
