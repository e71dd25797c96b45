"""Tables of runs, paired by seed, and pages that hold them between markers."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from docs.programs.tables import fill

from .results import Run, write

ROOT = Path(__file__).parents[2]
README, DOCS = ROOT / "README.md", ROOT / "docs"
NAMES = "false_negatives", "results", "published_code", "clusters", "choosing"
FALSE_NEGATIVES, RESULTS, PUBLISHED_CODE, CLUSTERS, CHOOSING = (DOCS / f"{n}.md" for n in NAMES)
OLDER = "0.1.0", "0.2.0"  # versions before the losses were rewritten


def spread(values: Iterable[float]) -> str:
    """Mean and standard deviation."""
    values = list(values)
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}" if values else ""


class Delta(NamedTuple):
    """A mean difference with its 95% interval, by Student's t."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:+.1f} ({self.low:+.1f} to {self.high:+.1f})"


def paired(seeds: Mapping[int, float], others: Mapping[int, float]) -> Delta | None:
    """The difference over the seeds that both have, if they are three or more."""
    deltas = [seeds[seed] - others[seed] for seed in sorted(seeds.keys() & others.keys())]
    if len(deltas) < 3:  # the interval of two is too wide to be of use
        return None
    mean = float(np.mean(deltas))
    reach = float(stats.sem(deltas) * stats.t(len(deltas) - 1).ppf(0.975))
    return Delta(mean, mean - reach, mean + reach)


def holm(p_values: Mapping[str, float], level: float = 0.05) -> set[str]:
    """The names that Holm's step-down correction rejects."""
    rejected: set[str] = set()
    for number, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        if p_values[name] > level / (len(p_values) - number):
            break
        rejected.add(name)
    return rejected


def significant_after_holm(
    pairs: Mapping[str, tuple[Mapping[int, float], Mapping[int, float]]],
) -> set[str]:
    """The names whose two rows of seeds differ after Holm's correction over all names."""
    p_values = {}
    for name, (ours, others) in pairs.items():
        seeds = sorted(ours.keys() & others.keys())
        test = stats.ttest_rel([ours[seed] for seed in seeds], [others[seed] for seed in seeds])
        p_values[name] = float(test.pvalue)
    return holm(p_values)


class Verdict(NamedTuple):
    """On which sets a difference has an interval above 0, below 0, or neither."""

    above: dict[str, Delta]
    below: dict[str, Delta]
    ties: list[str]

    @classmethod
    def of(cls, deltas: Mapping[str, Delta]) -> "Verdict":
        """Sort the sets by their intervals. One that touches 0 is a tie."""
        above = {name: delta for name, delta in deltas.items() if delta.low > 0}
        below = {name: delta for name, delta in deltas.items() if delta.high < 0}
        return cls(above, below, [name for name in deltas if name not in above | below])

    def __str__(self) -> str:
        above, below = (
            listed([f"{name} ({delta.mean:+.1f})" for name, delta in by_set.items()])
            for by_set in (self.above, self.below)
        )
        ties = listed(self.ties)
        return f"above on {above}, below on {below}, and not significantly different on {ties}"


def listed(names: Sequence[str]) -> str:
    """Names in a sentence: "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names) or "no set"


def difference(seeds: Mapping[int, float], others: Mapping[int, float]) -> str:
    """A cell: `paired`; the mean alone of fewer seeds; empty for a row and itself."""
    both = seeds.keys() & others.keys()
    if seeds is others or not both:
        return ""
    mean = np.mean([seeds[seed] - others[seed] for seed in both])
    return str(paired(seeds, others) or f"{mean:+.1f}")


def aligned(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table for a terminal."""
    cells = [head, *lines]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    padded = (map(str.ljust, line, widths) for line in cells)
    return "\n".join("  ".join(line).rstrip() for line in padded)


def made_by(runs: Iterable[Run]) -> str:
    """The versions and commits of the code that made the runs."""
    commits: dict[str, set[str]] = {}
    for versions in (run["versions"] for run in runs):
        commits.setdefault(versions["pgcl_losses"], set()).add(versions.get("commit", "")[:7])
    names = []
    for version, of in commits.items():
        known = ", ".join(sorted(of - {""}))
        names.append(f"{version} ({known})" if known else version)
    return f"version {', '.join(names)}"


def paragraph(text: str, indent: str = "") -> str:
    """A paragraph or an item of a list, in lines as long as those of the pages."""
    return "\n".join(textwrap.wrap(text, 140, subsequent_indent=indent, break_on_hyphens=False))


def sourced(table: str, runs: Iterable[Run]) -> str:
    """The table, and a sentence that says which code made its runs."""
    source = made_by(runs)
    link = ", see [older results](results.md#older-results)" if source.split()[1] in OLDER else ""
    return f"{table}\n\nRuns of {source}{link}"


def refill(pages: Mapping[Path, Mapping[str, str]]) -> None:
    """Write all pages with their new tables, or none if a marker is missing."""
    filled = {page: fill(page.read_text(), tables) for page, tables in pages.items()}
    for page, text in filled.items():
        write(page, lambda part, text=text: part.write_text(text))
