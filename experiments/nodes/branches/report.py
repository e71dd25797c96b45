"""Makes the tables of docs/real_graphs.md anew from the runs kept beside this file.

python -m experiments.nodes.branches.report
"""

import itertools
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments.common import results
from experiments.common.tables import Delta, holm, is_met, is_missed, paired, refill, spread

from .measure import NAMES
from .rows import CANDIDATE, INFO_NCE, LENGTH, ROWS, TEMPERATURE, UNTRAINED
from .train import SETTING, configuration

HERE = Path(__file__).parent
RECORDS = {name: HERE / f"{name}.jsonl" for name in ("development", "held_out")}  # by their tables
LENGTHS = (100, 200, 400)
TEMPERATURES = (0.4, 0.8, 1.2, 2.0)
PRIMARY, NOT_INFERIOR = "one_shot", ("five_shot", "probe")
FEW = (PRIMARY, "five_shot")
DEVELOPMENT = [("Cora", 512), ("Cora", 4096), ("CiteSeer", 512), ("CiteSeer", 4096)]
DEVELOPMENT += [("DBLP", 512), ("DBLP", 2048)]  # sets and batches
HELD_OUT = [("Photo", 512), ("Photo", 2048), ("CS", 512), ("CS", 2048)]
PAGE = HERE.parents[2] / "docs" / "real_graphs.md"

Seeds = dict[int, results.Run]


class Setting(NamedTuple):
    """What rows are compared under."""

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
    """Markdown: InfoNCE's values, and the differences of all other rows from them."""
    base = record.seeds(setting, INFO_NCE, length)
    lines = [f"| {setting}, {length} steps | seeds | {' | '.join(NAMES.values())} |"]
    lines.append("| --- | --- |" + " --- |" * len(NAMES))
    means = [spread([run[name] for run in base.values()]) for name in NAMES]
    lines.append(f"| {INFO_NCE} | {len(base)} | {' | '.join(means)} |")
    for row in ROWS:
        of_row = record.seeds(setting, row, 0 if row == UNTRAINED else length)
        both = of_row.keys() & base.keys()
        if row != INFO_NCE and both:
            cells = [gain(of_row, base, name) for name in NAMES]
            lines.append(f"| {row} | {len(both)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gain(seeds: Seeds, others: Seeds, name: str) -> str:
    """A cell: the mean difference, with its interval from three seeds on."""
    mean = np.mean(
        [seeds[seed][name] - others[seed][name] for seed in seeds.keys() & others.keys()]
    )
    return str(paired(values(seeds, name), values(others, name)) or f"{mean:+.1f}")


def values(seeds: Seeds, name: str) -> dict[int, float]:
    return {seed: run[name] for seed, run in seeds.items()}


def described(record: Record) -> str:
    """One after the other, of each setting and length with InfoNCE and more."""
    return "\n\n".join(
        table(record, setting, length)
        for setting in record.settings
        for length in LENGTHS
        if record.seeds(setting, INFO_NCE, length)
        and any(record.seeds(setting, row, length) for row in ROWS if row != INFO_NCE)
    )


def all_measures(record: Record) -> str:
    """Markdown: InfoNCE's values and what the candidate has more, each at its temperature."""
    lines = [f"| {LENGTH} steps | seeds | {' | '.join(NAMES.values())} |"]
    lines.append("| --- | --- |" + " --- |" * len(NAMES))
    for sizes in HELD_OUT:
        base = runs_of(record, sizes, INFO_NCE).values()
        means = [spread([run[name] for run in base]) for name in NAMES]
        setting = f"{sizes[0]}, batches of {sizes[1]}"
        lines.append(f"| {setting}: InfoNCE | {len(base)} | {' | '.join(means)} |")
        deltas = [str(compared(record, sizes, name)) for name in NAMES]
        lines.append(f"| candidate minus InfoNCE | | {' | '.join(deltas)} |")
    return "\n".join(lines)


def choice(record: Record) -> str:
    """Markdown: what temperatures and length are chosen by, over the development settings."""
    small = [sizes for sizes in DEVELOPMENT if sizes[1] == 512]
    lines = {}
    for row, (length, settings) in itertools.product(
        (INFO_NCE, CANDIDATE), ((100, small), (200, small), (400, small), (200, DEVELOPMENT))
    ):
        cells = []
        for temperature in TEMPERATURES:
            runs = [record.seeds(Setting(*sizes, temperature), row, length) for sizes in settings]
            one, five = (means(runs, name) for name in FEW)
            cells.append(f"{one:.1f} / {five:.1f}" if all(runs) else "")
        lines[f"{row} | {len(settings)} | {length}"] = cells
    return by_temperature("1 / 5 labels per class | settings | steps", lines)


def tried(record: Record) -> str:
    """Markdown: every row minus InfoNCE at its temperature, a mean over development settings."""
    lines = {}
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
            lines[row] = cells
    return by_temperature("minus InfoNCE, 1 / 5 labels per class (settings)", lines)


def by_temperature(first: str, lines: dict[str, list[str]]) -> str:
    """Markdown: a column for each temperature, beside the first ones."""
    head = [*first.split(" | "), *(f"tau={temperature:g}" for temperature in TEMPERATURES)]
    made = [f"| {' | '.join(head)} |", "|" + " --- |" * len(head)]
    return "\n".join([*made, *(f"| {row} | {' | '.join(cells)} |" for row, cells in lines.items())])


def means(of_settings: Collection[Seeds], name: str) -> float:
    """The mean over settings of the mean over seeds."""
    of_seeds = [[run[name] for run in runs.values()] for runs in of_settings]
    return float(np.mean([np.mean(values or [np.nan]) for values in of_seeds]))


def decision(record: Record) -> str:
    """Markdown: the candidate minus InfoNCE on the held-out sets, each at its temperature."""
    primary = {sizes: compared(record, sizes, PRIMARY) for sizes in HELD_OUT}
    left = holm(list(primary.values()))
    head = " | ".join(NAMES[name] for name in (PRIMARY, *NOT_INFERIOR))
    lines = [f"| candidate minus InfoNCE, {LENGTH} steps | seeds | {head} |"]
    lines.append("| --- | --- | --- |" + " --- |" * len(NOT_INFERIOR))
    for (dataset, batch), delta in primary.items():
        significant = "significant" if delta in left else "not significant"
        cells = [f"{delta}, p = {delta.p:.2g}, {significant}"]
        others = [compared(record, (dataset, batch), name) for name in NOT_INFERIOR]
        cells += [f"{other}, margin {verdict(other)}" for other in others]
        of_rows = (runs_of(record, (dataset, batch), row) for row in (CANDIDATE, INFO_NCE))
        seeds = set.intersection(*map(set, of_rows))
        lines.append(f"| {dataset}, batches of {batch} | {len(seeds)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def runs_of(record: Record, sizes: tuple[str, int], row: str) -> Seeds:
    """At the temperature and length that the plan has fixed."""
    return record.seeds(Setting(*sizes, TEMPERATURE[row]), row, LENGTH)


def compared(record: Record, sizes: tuple[str, int], name: str) -> Delta:
    ours, theirs = (values(runs_of(record, sizes, row), name) for row in (CANDIDATE, INFO_NCE))
    delta = paired(ours, theirs)
    if delta is None:
        raise ValueError(f"{sizes}: fewer than three seeds")
    return delta


def verdict(delta: Delta) -> str:
    return "met" if is_met(delta) else "missed" if is_missed(delta) else "inconclusive"


# By record, and with the names of their places on the page.
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
    refill({PAGE: tables})


if __name__ == "__main__":
    main()
