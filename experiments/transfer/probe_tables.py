"""Tables of frozen encoders, over seeds of pre-training."""

from collections.abc import Callable, Iterable
from functools import partial

from experiments.common.results import Run
from experiments.common.rows import INFO_NCE, PGCL
from experiments.common.tables import SEEDS, markdown, spread

from .probe import value
from .probe_run import ALL
from .rows import RECOMMENDED
from .tables import ROWS, Scores, comparison, differences, minus, of_rows, scores_of

LABELS = ("10", "100", ALL)


def over_pretraining(run: Run) -> Run:
    """The run without the seed in its pre-training, which is the seed of the run."""
    config, pretraining = run["config"], run["config"]["pretraining"]
    return run | {"config": config | {"pretraining": pretraining and pretraining | {"seed": None}}}


def tables(runs: Iterable[Run]) -> dict[str, str]:
    runs = [over_pretraining(run) for run in runs]

    def scores(labels: str, name: str) -> Scores:
        return scores_of(runs, partial(value, labels=labels, name=name))

    tables = {}
    for labels in LABELS:
        auc = scores(labels, "auc")
        tables[f"probe_{labels}"] = comparison(auc)
        tables[f"probe_{labels}_differences"] = differences(auc)
    tables["probe_precision"] = precision(partial(scores, name="ap"), runs)
    tables["probe_clusters"] = clusters(scores("", "nmi"), scores("", "ari"))
    return tables


def conclusions(runs: Iterable[Run]) -> str:
    """PGCL, also after InfoNCE, minus InfoNCE by labels, on the sets with three pre-trainings."""
    runs = [over_pretraining(run) for run in runs]
    lines = []
    for row in (PGCL, RECOMMENDED):
        for labels in LABELS:
            scores = scores_of(runs, partial(value, labels=labels, name="auc"))
            scores = {
                name: rows for name, rows in scores.items() if len(rows.get(row, {})) >= SEEDS
            }
            lines.append([f"{row}, {labels} labels", *minus(scores, row, INFO_NCE)])
    return markdown(["minus InfoNCE, points of ROC-AUC", *scores], lines)


def precision(scores: Callable[[str], Scores], runs: list[Run]) -> str:
    """Average precision by labels, and that of chance."""
    chance = scores_of(runs, lambda run: run["chance"])
    firsts = (next(iter(next(iter(rows.values())).values())) for rows in chance.values())
    lines = [["chance", *(f"{first:.1f}" for first in firsts)]]
    for labels in LABELS:
        for row, sets in of_rows(scores(labels)).items():
            cells = (spread(sets[name]) if name in sets else "" for name in chance)
            lines.append([f"{row}, {labels} labels", *cells])
    return markdown(["pre-training", *chance], lines)


def clusters(nmi: Scores, ari: Scores) -> str:
    lines = []
    for row in ROWS:
        if any(row in rows for rows in nmi.values()):
            both = (scores[name].get(row, {}) for name in nmi for scores in (nmi, ari))
            lines.append([row, *(spread([*seeds.values()]) if seeds else "" for seeds in both)])
    names = (f"{name}, {score}" for name in nmi for score in ("NMI", "ARI"))
    return markdown(["pre-training", *names], lines)
