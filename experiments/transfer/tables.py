"""Tables that hold rows of pre-training against sets of molecules."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from experiments.common import results
from experiments.common.rows import INFO_NCE, PGCL
from experiments.common.tables import difference, spread

from .rows import MASKING, NONE, RECOMMENDED

SETS = ("BBBP", "Tox21", "SIDER", "ToxCast", "ClinTox", "BACE", "MUV")  # as in the paper's table
ROWS = (NONE, MASKING, INFO_NCE, PGCL, RECOMMENDED)
PAIRS = (
    *((PGCL, INFO_NCE), (PGCL, NONE), (INFO_NCE, NONE), (MASKING, NONE)),
    *((RECOMMENDED, INFO_NCE), (RECOMMENDED, PGCL), (RECOMMENDED, NONE)),
)

Scores = dict[str, dict[str, dict[int, float]]]  # set -> row -> seed -> score
OfRows = dict[str, dict[str, list[float]]]  # row -> set -> scores


def row_of(run: results.Run) -> str:
    pretraining = run["config"]["pretraining"]
    return pretraining["row"] if pretraining else NONE


def scores_of(runs: Iterable[results.Run], score: Callable[[results.Run], float | None]) -> Scores:
    """By set, row and seed; what has no such score is left out."""
    scores: Scores = {name: {} for name in SETS}
    settings: dict[tuple[str, str], str] = {}
    for run in runs:
        config, row = run["config"], row_of(run)
        name = {name.lower(): name for name in SETS}[config["dataset"].partition(".")[0]]
        setting = results.key(config | {"seed": None})
        if settings.setdefault((name, row), setting) != setting:
            raise ValueError(f"{name}, {row}: runs of two settings, {setting} is one of them")
        value = score(run)
        if value is not None:
            scores[name].setdefault(row, {})[config["seed"]] = value
    return {name: rows for name, rows in scores.items() if rows}


def of_rows(scores: Scores) -> OfRows:
    """The rows that there are."""
    found = {
        row: {name: list(rows[row].values()) for name, rows in scores.items() if row in rows}
        for row in ROWS
    }
    return {row: sets for row, sets in found.items() if sets}


def head(scores: Scores, *more: str) -> list[str]:
    names = [*scores, *more]
    return [f"| | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]


def ranked(origin: str, rows: OfRows, names: Iterable[str]) -> Iterator[str]:
    """Lines of rows against sets, with mean and mean rank over the sets that all rows have."""
    whole = [name for name in names if all(name in sets for sets in rows.values())]
    means = {row: np.array([np.mean(sets[name]) for name in whole]) for row, sets in rows.items()}
    for row, sets in rows.items():
        ranks = 1 + sum(other > means[row] for other in means.values())
        cells = [spread(sets[name]) if name in sets else "" for name in names]
        cells += [f"{means[row].mean():.1f}", f"{np.mean(ranks):.1f}"] if whole else ["", ""]
        yield f"| {origin}{row} | {' | '.join(cells)} |"


def comparison(scores: Scores, paper: OfRows | None = None) -> str:
    """What came out here, below what the paper reports."""
    lines = head(scores, "mean", "mean rank")
    if paper:
        lines += ranked("paper: ", paper, scores)
    return "\n".join([*lines, *ranked("", of_rows(scores), scores)])


def differences(scores: Scores, pairs: Iterable[tuple[str, str]] = PAIRS) -> str:
    """Of the pairs that some set has."""
    lines = head(scores)
    for one, other in pairs:
        cells = []
        for rows in scores.values():
            both = [rows.get(row, {}) for row in (one, other)]
            seeds = both[0].keys() & both[1].keys()
            single = [f"{both[0][seed] - both[1][seed]:+.1f}" for seed in seeds]
            cells.append(single[0] if len(single) == 1 else difference(*both))
        if any(cells):
            lines.append(f"| {one} minus {other} | {' | '.join(cells)} |")
    return "\n".join(lines)
