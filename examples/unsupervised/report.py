"""Writes the tables of docs/results.md anew from the runs that are kept beside this script.

python examples/unsupervised/report.py
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import results
import table
from train import ROWS, SETTING, UNTRAINED, WL

HERE = Path(__file__).parent
RUNS, PAGE = HERE / "results.jsonl", HERE.parents[1] / "docs" / "results.md"


def of_setting(runs: Iterable[table.Run], setting: dict[str, Any]) -> dict[str, list[table.Run]]:
    """Data set -> its runs under one setting, and those that have none."""
    found: dict[str, list[table.Run]] = {}
    for run in runs:
        config = run["config"]
        if config["row"] in (WL, UNTRAINED) or setting.items() <= config.items():
            found.setdefault(config["dataset"], []).append(run)
    return found


def averages(sets: dict[str, list[table.Run]]) -> str:
    """Rows against sets, by the last epoch, with the mean and the mean rank over sets."""
    means = {
        name: {
            row: np.mean([table.last_epoch(run) for run in seeds.values()])
            for row, seeds in table.by_row(runs).items()
        }
        for name, runs in sets.items()
    }
    lines = [f"| | {' | '.join(sets)} | mean | mean rank |", "| --- |" + " --- |" * (len(sets) + 2)]
    for row in ROWS:
        if all(row in of_rows for of_rows in means.values()):
            values = [of_rows[row] for of_rows in means.values()]
            ranks = [
                sum(v > of_rows[row] for v in of_rows.values()) + 1 for of_rows in means.values()
            ]
            cells = [f"{value:.1f}" for value in [*values, np.mean(values), np.mean(ranks)]]
            lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(page: str, runs: Iterable[table.Run]) -> str:
    """The page with every table between its markers made anew."""
    sets = of_setting(runs, SETTING)
    tables = {name: table.comparison(of_set) for name, of_set in sets.items()}
    real = {name: of_set for name, of_set in sets.items() if name.isupper()}
    tables["averages"] = averages(real)
    for name, made in tables.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        page = re.sub(
            f"({re.escape(start)}).*?({end})",
            lambda m, made=made: f"{m[1]}{made}\n{m[2]}",
            page,
            flags=re.DOTALL,
        )
    return page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(), results.read(RUNS).values()))
