"""Cells of tables, and pages that hold tables between their markers."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from scipy import stats


def spread(values: list[float]) -> str:
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}"


class Delta(NamedTuple):
    """A mean difference with its 95% interval of Student's t."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


def paired(seeds: dict[int, float], others: dict[int, float]) -> Delta | None:
    """Over the seeds that both have, if there are two."""
    deltas = [seeds[seed] - others[seed] for seed in sorted(seeds.keys() & others.keys())]
    if len(deltas) < 2:
        return None
    mean, error = float(np.mean(deltas)), float(stats.sem(deltas))
    reach = error * float(stats.t.ppf(0.975, len(deltas) - 1))
    return Delta(mean, mean - reach, mean + reach)


def difference(seeds: dict[int, float], others: dict[int, float]) -> str:
    """A cell: `paired`, but for a row and itself."""
    return str((seeds is not others and paired(seeds, others)) or "")


def fill(page: str, tables: dict[str, str]) -> str:
    """The page with every table between its markers made anew."""
    for name, made in tables.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        page, found = re.subn(
            f"({re.escape(start)}).*?({end})",
            lambda m, made=made: f"{m[1]}{made}\n{m[2]}",
            page,
            flags=re.DOTALL,
        )
        if not found:
            raise ValueError(f"the page has no {start.strip()}")
    return page


def measures(
    rows: Mapping[str, Mapping[int, Mapping[str, Any]]], names: Mapping[str, str], base: str
) -> str:
    """Markdown: rows of runs by seed, a column for each measure; below, what each row has more than
    ``base`` by the same seed, if there are two seeds at least."""
    values = {
        row: {name: {seed: run[name] for seed, run in seeds.items()} for name in names}
        for row, seeds in rows.items()
    }
    head = [f"| | seeds | {' | '.join(names.values())} |", "| --- |" + " --- |" * (len(names) + 1)]
    means, deltas = list(head), [head[0].replace("| |", f"| minus {base} |", 1), head[1]]
    for row, of_row in values.items():
        cells = [str(len(rows[row])), *(spread(list(seeds.values())) for seeds in of_row.values())]
        means.append(f"| {row} | {' | '.join(cells)} |")
        both = len(rows[row].keys() & rows[base].keys()) if base in values else 0
        if row != base and both > 1:
            cells = [difference(seeds, values[base][name]) for name, seeds in of_row.items()]
            deltas.append(f"| {row} | {both} | {' | '.join(cells)} |")
    return "\n".join([*means, "", *deltas] if base in values else means)
