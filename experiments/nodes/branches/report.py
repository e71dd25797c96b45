"""Makes the tables of docs/real_graphs.md anew from the runs kept beside this file.

python -m experiments.nodes.branches.report
"""

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from experiments.shelf import results
from experiments.shelf.tables import fill, paired, spread

from .measure import NAMES
from .rows import INFO_NCE, ROWS, UNTRAINED
from .train import SETTING, configuration

HERE = Path(__file__).parent
DEVELOPMENT, HELD_OUT = HERE / "development.jsonl", HERE / "held_out.jsonl"
PAGE = HERE.parents[2] / "docs" / "real_graphs.md"

Setting = tuple[str, int]  # the set, and the nodes of a batch
Seeds = Mapping[int, results.Run]


class Record:
    """Finished runs, by setting, row and length."""

    def __init__(self, runs: Collection[results.Run]) -> None:
        self.of: dict[str, dict[int, results.Run]] = {}
        self.settings: list[Setting] = []
        for run in runs:
            config = dict(run["config"])
            if not results.agrees(config, SETTING):
                continue
            setting = config["dataset"], config["batch"]
            if setting not in self.settings:
                self.settings.append(setting)
            seed = config.pop("seed")
            config.pop("data")
            self.of.setdefault(results.key(config), {})[seed] = run

    def seeds(self, setting: Setting, row: str, length: int) -> Seeds:
        """The runs of a row by seed."""
        config = {"dataset": setting[0], "batch": setting[1], **SETTING}
        config = json.loads(json.dumps(configuration(config, row, length)))
        return self.of.get(results.key(config), {})

    def gains(
        self, setting: Setting, row: str, length: int, measure: str, base: str = INFO_NCE
    ) -> tuple[dict[int, float], dict[int, float]]:
        """A measure by seed, of a row and of the one it is compared with."""
        rows = (self.seeds(setting, name, length) for name in (row, base))
        ours, theirs = ({seed: run[measure] for seed, run in of.items()} for of in rows)
        return ours, theirs


def p_value(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float:
    """Of a paired t-test, two-sided."""
    both = sorted(ours.keys() & theirs.keys())
    test = stats.ttest_rel([ours[seed] for seed in both], [theirs[seed] for seed in both])
    return float(test.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (Holm, 1979)."""
    order = np.argsort(p_values)
    count = len(p_values)
    adjusted, largest = [0.0] * count, 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def table(record: Record, setting: Setting, length: int, rows: Sequence[str] = ()) -> str:
    """Markdown: InfoNCE's values, and the differences of all other rows from them."""
    head = f"| | seeds | {' | '.join(NAMES.values())} |"
    lines = [head, "| --- | --- |" + " --- |" * len(NAMES)]
    base = record.seeds(setting, INFO_NCE, length)
    means = [spread([run[name] for run in base.values()]) for name in NAMES]
    lines.append(f"| {INFO_NCE} | {len(base)} | {' | '.join(means)} |")
    for row in rows or ROWS:
        of_row = record.seeds(setting, row, 0 if row == UNTRAINED else length)
        both = of_row.keys() & base.keys()
        if row == INFO_NCE or not both:
            continue
        cells = []
        for name in NAMES:
            ours, theirs = ({seed: of[seed][name] for seed in both} for of in (of_row, base))
            delta = paired(ours, theirs)
            mean = np.mean([ours[seed] - theirs[seed] for seed in both])
            cells.append(f"{mean:+.1f}" if delta is None or len(both) < 3 else str(delta))
        lines.append(f"| {row} | {len(both)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def tables(record: Record, lengths: Sequence[int]) -> dict[str, str]:
    """All tables of a record, by setting and length."""
    return {
        f"{dataset}, {batch}, {length}": table(record, (dataset, batch), length)
        for dataset, batch in record.settings
        for length in lengths
    }


def main() -> None:
    page = PAGE.read_text()
    for file in (DEVELOPMENT, HELD_OUT):
        runs = results.read(file).values()
        if not runs:
            sys.exit(f"experiments.nodes.branches.report: {file} has no runs")
        page = fill(page, tables(Record(runs), [100, 200, 400]))
    results.write(PAGE, lambda part: part.write_text(page))


if __name__ == "__main__":
    main()
