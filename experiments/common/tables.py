"""Markdown tables of results, their statistics, and pages that hold them between markers."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from . import results


def spread(values: list[float]) -> str:
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}"


LEVEL = 0.05  # of significance, over all comparisons
MARGIN = 0.5  # of non-inferiority, in points below InfoNCE
SEEDS = 3  # of an interval; that of two is too wide to be of use


class Delta(NamedTuple):
    """A mean difference with its 95% interval and two-sided p-value, both of Student's t."""

    mean: float
    low: float
    high: float
    p: float = float("nan")

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


def paired(seeds: dict[int, float], others: dict[int, float]) -> Delta | None:
    """The difference over the seeds that both have, if they are three or more."""
    deltas = [seeds[seed] - others[seed] for seed in sorted(seeds.keys() & others.keys())]
    if len(deltas) < SEEDS:
        return None
    mean, error = float(np.mean(deltas)), float(stats.sem(deltas))
    student = stats.t(len(deltas) - 1)
    reach = error * float(student.ppf(0.975))
    p = 2 * float(student.sf(abs(mean) / max(error, 1e-12)))
    return Delta(mean, mean - reach, mean + reach, p)


def holm(deltas: list[Delta]) -> list[Delta]:
    """The differences that are significant after Holm's correction over all of them."""
    ordered = sorted(deltas, key=lambda delta: delta.p)
    allowed = (LEVEL / (len(ordered) - index) for index in range(len(ordered)))
    pairs = zip(ordered, allowed, strict=True)
    return [delta for delta, _ in itertools.takewhile(lambda pair: pair[0].p <= pair[1], pairs)]


def is_better(delta: Delta) -> bool:
    """Above InfoNCE: the 95% interval excludes 0."""
    return delta.low > 0


def is_worse(delta: Delta) -> bool:
    """Below InfoNCE: the 95% interval excludes 0."""
    return delta.high < 0


def is_met(delta: Delta) -> bool:
    """Non-inferior: the whole interval is above the margin."""
    return delta.low > -MARGIN


def is_missed(delta: Delta) -> bool:
    """Inferior: the whole interval is below the margin."""
    return delta.high < -MARGIN


def difference(seeds: dict[int, float], others: dict[int, float]) -> str:
    """A cell: `paired`; the mean alone of two seeds; empty for a row and itself."""
    if seeds is others:
        return ""
    both = seeds.keys() & others.keys()
    if len(both) == 2:
        mean = np.mean([seeds[seed] - others[seed] for seed in both])
        return f"{mean:+.1f} (two seeds, no interval)"
    return str(paired(seeds, others) or "")


def markdown(head: Sequence[object], lines: Iterable[Iterable[object]]) -> str:
    """A table, from its header cells and the cells of each line."""
    first, *others = (f"| {' | '.join(map(str, cells))} |" for cells in (head, *lines))
    return "\n".join([first, "|" + " --- |" * len(head), *others])


def fill(page: str, tables: dict[str, str]) -> str:
    """The page with new tables between their markers."""
    for name, table in tables.items():
        start, end = f"<!-- {name} -->\n", "<!-- end -->"
        page, count = re.subn(
            f"({re.escape(start)}).*?({end})",
            lambda m, table=table: f"{m[1]}{table}\n{m[2]}",
            page,
            flags=re.DOTALL,
        )
        if not count:
            raise ValueError(f"the page has no {start.strip()}")
    return page


def refill(pages: Mapping[Path, dict[str, str]]) -> None:
    """Write all pages with their new tables, or none if a marker is missing."""
    filled = {page: fill(page.read_text(), tables) for page, tables in pages.items()}
    for page, text in filled.items():
        results.write(page, lambda part, text=text: part.write_text(text))


def measures(
    rows: Mapping[str, Mapping[int, Mapping[str, Any]]], names: Mapping[str, str], base: str
) -> str:
    """Two tables of runs by loss and seed, a column for each measure: means, and differences from
    ``base``, paired by seed, of the losses with three seeds or more."""
    values = {
        row: {name: {seed: run[name] for seed, run in seeds.items()} for name in names}
        for row, seeds in rows.items()
    }
    means, deltas = [], []
    for row, of_row in values.items():
        means.append(
            [row, len(rows[row]), *(spread([*seeds.values()]) for seeds in of_row.values())]
        )
        both = len(rows[row].keys() & rows[base].keys()) if base in values else 0
        if row != base and both >= SEEDS:
            cells = (difference(seeds, values[base][name]) for name, seeds in of_row.items())
            deltas.append([row, both, *cells])
    columns = ["seeds", *names.values()]
    tables = [markdown(["loss", *columns], means)]
    if base in values:
        tables.append(markdown([f"minus {base}", *columns], deltas))
    return "\n\n".join(tables)
