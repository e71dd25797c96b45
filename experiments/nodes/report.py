"""Fills docs/results_nodes.md from the committed runs.

python -m experiments.nodes.report
"""

import sys
from collections.abc import Collection
from pathlib import Path

from experiments.common import results
from experiments.common.probes import NAMES
from experiments.common.rows import INFO_NCE, NODES
from experiments.common.tables import measures, refill

from .data import SYNTHETIC
from .rows import ALL, RAW, UNTRAINED, with_loss
from .train import setting

# Name of the table: the set, and the temperature if it is not GRACE's.
TABLES = {
    "Cora": ("Cora", None),
    "CiteSeer": ("CiteSeer", None),
    "CiteSeer, tau=0.4": ("CiteSeer", 0.4),
    "blocks": (SYNTHETIC, None),
    "blocks, tau=0.2": (SYNTHETIC, 0.2),
    "blocks, tau=0.9": (SYNTHETIC, 0.9),
}
HERE = Path(__file__).parent
RUNS, PAGE = HERE / "results.jsonl", HERE.parents[1] / "docs" / "results_nodes.md"


def by_row(
    runs: Collection[results.Run], dataset: str, temperature: float | None = None
) -> dict[str, dict[int, results.Run]]:
    """Row -> seed -> run of one set at one temperature, in the order of the rows.

    If several rows are the same loss at this temperature, the first one is kept.
    """
    temperature = temperature or setting(dataset)["temperature"]
    usual = setting(dataset) | {"dataset": dataset, "temperature": temperature}
    of_set = [run for run in runs if results.agrees(run["config"], usual)]
    digests = {run["config"]["data"] for run in of_set}
    if len(digests) > 1:
        raise ValueError(f"{dataset}: runs on {len(digests)} graphs, {', '.join(sorted(digests))}")
    labels: dict[str, str] = {}
    for row in ALL:
        wanted = with_loss(row, NODES[dataset], temperature)
        labels.setdefault(results.key(wanted.get("loss", row)), row)
    rows = {
        row: {run["config"]["seed"]: run for run in of_set if results.key(loss_of(run)) == name}
        for name, row in labels.items()
    }
    return {row: seeds for row, seeds in rows.items() if seeds}


def loss_of(run: results.Run) -> results.Config | str:
    """The options of a run's loss, or the row that trains nothing."""
    row = run["config"]["row"]
    return row if row in (RAW, UNTRAINED) else run["config"]["loss"]


def pages(runs: Collection[results.Run]) -> dict[Path, dict[str, str]]:
    """The tables of these runs, by page."""
    tables = {name: by_row(runs, *of_set) for name, of_set in TABLES.items()}
    return {PAGE: {name: measures(rows, NAMES, INFO_NCE) for name, rows in tables.items()}}


def main() -> None:
    runs = list(results.read(RUNS).values())
    if not runs:
        sys.exit(f"experiments.nodes.report: {RUNS} has no runs")
    refill(pages(runs))


if __name__ == "__main__":
    main()
