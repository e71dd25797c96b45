"""Tables of pre-trainings against sets of molecules."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from experiments.common import results
from experiments.common.rows import INFO_NCE, PGCL
from experiments.common.tables import difference, markdown, spread

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
    """By set, row and seed, of the runs that have the score."""
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
    """By row and set, of the rows that have scores."""
    by_row = {
        row: {name: list(rows[row].values()) for name, rows in scores.items() if row in rows}
        for row in ROWS
    }
    return {row: sets for row, sets in by_row.items() if sets}


def ranked(prefix: str, rows: OfRows, names: Iterable[str]) -> Iterator[list[str]]:
    """Rows against sets, with mean and mean rank over the sets that all rows have."""
    common = [name for name in names if all(name in sets for sets in rows.values())]
    means = {row: np.array([np.mean(sets[name]) for name in common]) for row, sets in rows.items()}
    for row, sets in rows.items():
        ranks = 1 + sum(other > means[row] for other in means.values())
        cells = [spread(sets[name]) if name in sets else "" for name in names]
        cells += [f"{means[row].mean():.1f}", f"{np.mean(ranks):.1f}"] if common else ["", ""]
        yield [prefix + row, *cells]


def comparison(scores: Scores, paper: OfRows | None = None) -> str:
    """The paper's scores, then ours."""
    lines = [*ranked("paper: ", paper or {}, scores), *ranked("", of_rows(scores), scores)]
    return markdown(["pre-training", *scores, "mean", "mean rank"], lines)


def differences(scores: Scores, pairs: Iterable[tuple[str, str]] = PAIRS) -> str:
    """Of the pairs that some set has."""
    lines = ([f"{one} minus {other}", *minus(scores, one, other)] for one, other in pairs)
    return markdown(["difference", *scores], [line for line in lines if any(line[1:])])


def minus(scores: Scores, one: str, other: str) -> Iterator[str]:
    """The cells of a difference, by set."""
    for rows in scores.values():
        ours, theirs = (rows.get(row, {}) for row in (one, other))
        single = [f"{ours[seed] - theirs[seed]:+.1f}" for seed in ours.keys() & theirs.keys()]
        yield single[0] if len(single) == 1 else difference(ours, theirs)
