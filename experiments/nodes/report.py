"""Makes the tables on nodes in docs/results.md anew from the runs kept beside this file.

python -m experiments.nodes.report
"""

import sys
from collections.abc import Collection
from pathlib import Path

from experiments.shelf import results
from experiments.shelf.probes import NAMES
from experiments.shelf.rows import INFO_NCE, NODES
from experiments.shelf.tables import fill, measures

from .data import SYNTHETIC
from .rows import ALL, RAW, UNTRAINED, with_loss
from .train import setting

# By the name of the table: the set, and the temperature where it is not GRACE's.
TABLES = {
    "Cora": ("Cora", None),
    "CiteSeer": ("CiteSeer", None),
    "CiteSeer, tau=0.4": ("CiteSeer", 0.4),
    "blocks": (SYNTHETIC, None),
}
HERE = Path(__file__).parent
RUNS, PAGE = HERE / "results.jsonl", HERE.parents[1] / "docs" / "results.md"


def by_row(
    runs: Collection[results.Run], dataset: str, temperature: float | None = None
) -> dict[str, dict[int, results.Run]]:
    """Row -> seed -> run of one set at one temperature, in the order of the rows."""
    temperature = temperature or setting(dataset)["temperature"]
    usual = setting(dataset) | {"dataset": dataset, "temperature": temperature}
    of_set = [run for run in runs if results.agrees(run["config"], usual)]
    digests = {run["config"]["data"] for run in of_set}
    if len(digests) > 1:
        raise ValueError(f"{dataset}: runs on {len(digests)} graphs, {', '.join(sorted(digests))}")
    rows = {}
    for row in ALL:
        wanted = with_loss(row, NODES[dataset], temperature)
        name = results.key(wanted.get("loss", row))
        rows[row] = {
            run["config"]["seed"]: run for run in of_set if results.key(loss_of(run)) == name
        }
    return {row: seeds for row, seeds in rows.items() if seeds}


def loss_of(run: results.Run) -> results.Config | str:
    """The options of a run's loss, or that nothing was trained."""
    row = run["config"]["row"]
    return row if row in (RAW, UNTRAINED) else run["config"]["loss"]


def filled(page: str, runs: Collection[results.Run]) -> str:
    tables = {name: by_row(runs, *of_set) for name, of_set in TABLES.items()}
    return fill(page, {name: measures(rows, NAMES, INFO_NCE) for name, rows in tables.items()})


def main() -> None:
    runs = list(results.read(RUNS).values())
    if not runs:
        sys.exit(f"experiments.nodes.report: {RUNS} has no runs")
    page = filled(PAGE.read_text(), runs)
    results.write(PAGE, lambda part: part.write_text(page))


if __name__ == "__main__":
    main()
