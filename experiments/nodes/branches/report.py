"""Fills docs/real_graphs.md from the committed runs.

python -m experiments.nodes.branches.report
"""

import itertools
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import results
from experiments.common.tables import (
    Delta,
    holm,
    is_met,
    is_missed,
    markdown,
    paired,
    refill,
    spread,
)

from .measure import NAMES
from .rows import CANDIDATE, INFO_NCE, LENGTH, ROWS, TEMPERATURE, UNTRAINED
from .train import SETTING, configuration

HERE = Path(__file__).parent
RECORDS = {name: HERE / f"{name}.jsonl" for name in ("development", "held_out")}  # by their tables
LENGTHS = (100, 200, 400)
TEMPERATURES = (0.4, 0.8, 1.2, 2.0)
COLUMNS = [f"tau={temperature:g}" for temperature in TEMPERATURES]
PRIMARY, NOT_INFERIOR = "one_shot", ("five_shot", "probe")
FEW = (PRIMARY, "five_shot")
DEVELOPMENT = [("Cora", 512), ("Cora", 4096), ("CiteSeer", 512), ("CiteSeer", 4096)]
DEVELOPMENT += [("DBLP", 512), ("DBLP", 2048)]  # sets and batches
HELD_OUT = [("Photo", 512), ("Photo", 2048), ("CS", 512), ("CS", 2048)]
DOCS = HERE.parents[2] / "docs"
PAGE, CONCLUSIONS = DOCS / "real_graphs.md", DOCS / "results.md"

Seeds = dict[int, results.Run]


class Setting(NamedTuple):
    """Losses are compared in the same setting."""

    dataset: str
    batch: int
    temperature: float

    def __str__(self) -> str:
        return f"{self.dataset}, batches of {self.batch}, tau={self.temperature:g}"


class Record:
    """Finished runs, by setting, row and length."""

    def __init__(self, runs: Collection[results.Run]) -> None:
        self.of: dict[str, Seeds] = {}
        self.settings: list[Setting] = []
        for run in runs:
            config = dict(run["config"])
            setting = Setting(*(config[name] for name in Setting._fields))
            if setting not in self.settings:
                self.settings.append(setting)
            seed, _ = config.pop("seed"), config.pop("data")
            self.of.setdefault(results.key(config), {})[seed] = run
        self.settings.sort()

    def seeds(self, setting: Setting, row: str, length: int) -> Seeds:
        """The runs of a row by seed."""
        config = SETTING | setting._asdict()
        return self.of.get(results.key(configuration(config, row, length)), {})


def table(record: Record, setting: Setting, length: int) -> str:
    """InfoNCE's values, and the differences of all other rows from them."""
    base = record.seeds(setting, INFO_NCE, length)
    means = [spread([run[name] for run in base.values()]) for name in NAMES]
    lines = [[INFO_NCE, len(base), *means]]
    for row in ROWS:
        of_row = record.seeds(setting, row, 0 if row == UNTRAINED else length)
        both = of_row.keys() & base.keys()
        if row != INFO_NCE and both:
            lines.append([row, len(both), *(gain(of_row, base, name) for name in NAMES)])
    return markdown([f"{setting}, {length} steps", "seeds", *NAMES.values()], lines)


def gain(seeds: Seeds, others: Seeds, name: str) -> str:
    """A cell: the mean difference, with its interval from three seeds on."""
    mean = np.mean(
        [seeds[seed][name] - others[seed][name] for seed in seeds.keys() & others.keys()]
    )
    return str(paired(values(seeds, name), values(others, name)) or f"{mean:+.1f}")


def values(seeds: Seeds, name: str) -> dict[int, float]:
    return {seed: run[name] for seed, run in seeds.items()}


def described(record: Record) -> str:
    """A table for each setting and length that has InfoNCE and another row."""
    return "\n\n".join(
        table(record, setting, length)
        for setting in record.settings
        for length in LENGTHS
        if record.seeds(setting, INFO_NCE, length)
        and any(record.seeds(setting, row, length) for row in ROWS if row != INFO_NCE)
    )


def all_measures(record: Record) -> str:
    """InfoNCE's values and the candidate's differences, each at its temperature."""
    lines = []
    for sizes in HELD_OUT:
        base = runs_of(record, sizes, INFO_NCE).values()
        means = [spread([run[name] for run in base]) for name in NAMES]
        setting = f"{sizes[0]}, batches of {sizes[1]}"
        lines.append([f"{setting}: InfoNCE", len(base), *means])
        deltas = [compared(record, sizes, name) for name in NAMES]
        lines.append(["candidate minus InfoNCE", len(base), *deltas])
    return markdown([f"{LENGTH} steps", "seeds", *NAMES.values()], lines)


def choice(record: Record) -> str:
    """Mean accuracies over the development settings, which choose temperatures and length."""
    small = [sizes for sizes in DEVELOPMENT if sizes[1] == 512]
    lines = []
    for row, (length, settings) in itertools.product(
        (INFO_NCE, CANDIDATE), ((100, small), (200, small), (400, small), (200, DEVELOPMENT))
    ):
        cells = []
        for temperature in TEMPERATURES:
            runs = [record.seeds(Setting(*sizes, temperature), row, length) for sizes in settings]
            one, five = (means(runs, name) for name in FEW)
            cells.append(f"{one:.1f} / {five:.1f}" if all(runs) else "")
        lines.append([row, len(settings), length, *cells])
    return markdown(["1 / 5 labels per class", "settings", "steps", *COLUMNS], lines)


def tried(record: Record) -> str:
    """Every row minus InfoNCE at its temperature, a mean over development settings."""
    lines = []
    for row in ROWS:
        cells = []
        for temperature in TEMPERATURES:
            gains = []
            for sizes in DEVELOPMENT:
                setting = Setting(*sizes, temperature)
                seeds, base = (record.seeds(setting, name, 200) for name in (row, INFO_NCE))
                both = seeds.keys() & base.keys()
                of_seeds = [[seeds[s][n] - base[s][n] for n in FEW] for s in both]
                gains += [np.mean(of_seeds, axis=0)] if both else []
            one, five = np.mean(gains, axis=0) if gains else (0, 0)
            cells.append(f"{one:+.1f} / {five:+.1f} ({len(gains)})" if gains else "")
        if row != INFO_NCE and any(cells):
            lines.append([row, *cells])
    return markdown(["minus InfoNCE, 1 / 5 labels per class (settings)", *COLUMNS], lines)


def means(of_settings: Collection[Seeds], name: str) -> float:
    """The mean over settings of the mean over seeds."""
    of_seeds = [[run[name] for run in runs.values()] for runs in of_settings]
    return float(np.mean([np.mean(values or [np.nan]) for values in of_seeds]))


def decision(record: Record) -> str:
    """The candidate minus InfoNCE on the held-out sets, each at its temperature."""
    primary = {sizes: compared(record, sizes, PRIMARY) for sizes in HELD_OUT}
    significant = holm(list(primary.values()))
    lines = []
    for (dataset, batch), delta in primary.items():
        verb = "significant" if delta in significant else "not significant"
        cells = [f"{delta}, p = {delta.p:.2g}, {verb}"]
        others = [compared(record, (dataset, batch), name) for name in NOT_INFERIOR]
        cells += [f"{other}, margin {verdict(other)}" for other in others]
        of_rows = (runs_of(record, (dataset, batch), row) for row in (CANDIDATE, INFO_NCE))
        seeds = set.intersection(*map(set, of_rows))
        lines.append([f"{dataset}, batches of {batch}", len(seeds), *cells])
    names = [NAMES[name] for name in (PRIMARY, *NOT_INFERIOR)]
    return markdown([f"candidate minus InfoNCE, {LENGTH} steps", "seeds", *names], lines)


def runs_of(record: Record, sizes: tuple[str, int], row: str) -> Seeds:
    """At the temperature and length that the plan fixes."""
    return record.seeds(Setting(*sizes, TEMPERATURE[row]), row, LENGTH)


def compared(record: Record, sizes: tuple[str, int], name: str) -> Delta:
    ours, theirs = (values(runs_of(record, sizes, row), name) for row in (CANDIDATE, INFO_NCE))
    delta = paired(ours, theirs)
    if delta is None:
        raise ValueError(f"{sizes}: fewer than three seeds")
    return delta


def verdict(delta: Delta) -> str:
    return "met" if is_met(delta) else "missed" if is_missed(delta) else "inconclusive"


# Name of the record -> functions, whose names are the markers on the page.
TABLES: dict[str, list[Callable[[Record], str]]] = {
    "development": [choice, tried],
    "held_out": [decision, all_measures, described],
}


def main() -> None:
    tables = {}
    for name, file in RECORDS.items():
        runs = results.read(file).values()
        if not runs:
            sys.exit(f"experiments.nodes.branches.report: {file} has no runs")
        record = Record(runs)
        tables |= {made.__name__: made(record) for made in TABLES[name]}
    refill({PAGE: tables, CONCLUSIONS: {"decision": tables["decision"]}})


if __name__ == "__main__":
    main()
