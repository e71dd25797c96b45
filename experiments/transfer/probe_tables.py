"""Tables of what frozen encoders are good for, over seeds of pre-training."""

from collections.abc import Callable, Iterable
from functools import partial

from experiments.common.results import Run
from experiments.common.rows import INFO_NCE, PGCL
from experiments.common.tables import SEEDS, spread

from .probe import value
from .probe_run import ALL
from .rows import RECOMMENDED
from .tables import ROWS, Scores, comparison, differences, head, of_rows, scores_of

LABELS = ("10", "100", ALL)


def over_pretraining(run: Run) -> Run:
    """The run, whose seed is that of its pre-training, so that nothing else tells seeds apart."""
    config, how = run["config"], run["config"]["pretraining"]
    return run | {"config": config | {"pretraining": how and how | {"seed": None}}}


def tables(runs: Iterable[Run]) -> dict[str, str]:
    runs = [over_pretraining(run) for run in runs]

    def scores(labels: str, name: str) -> Scores:
        return scores_of(runs, partial(value, labels=labels, name=name))

    made = {}
    for labels in LABELS:
        auc = scores(labels, "auc")
        made[f"probe_{labels}"] = comparison(auc)
        made[f"probe_{labels}_differences"] = differences(auc)
    made["probe_precision"] = precision(partial(scores, name="ap"), runs)
    made["probe_clusters"] = clusters(scores("", "nmi"), scores("", "ari"))
    return made


def conclusions(runs: Iterable[Run]) -> str:
    """Two settings of PGCL minus InfoNCE by labels, on the sets with three pre-trainings."""
    runs = [over_pretraining(run) for run in runs]
    lines = []
    for row in (PGCL, RECOMMENDED):
        for labels in LABELS:
            scores = scores_of(runs, partial(value, labels=labels, name="auc"))
            scores = {
                name: rows for name, rows in scores.items() if len(rows.get(row, {})) >= SEEDS
            }
            *top, line = differences(scores, [(row, INFO_NCE)]).splitlines()
            lines += [line.replace(f" minus {INFO_NCE}", f", {labels} labels")]
    top[0] = top[0].replace("| |", "| minus InfoNCE, points of ROC-AUC |", 1)
    return "\n".join([*top, *lines])


def precision(scores: Callable[[str], Scores], runs: list[Run]) -> str:
    """Average precision of the rows by labels, and that of chance."""
    chance = scores_of(runs, lambda run: run["chance"])
    lines = [*head(chance)]
    shares = [next(iter(rows.values())) for rows in chance.values()]
    lines.append(f"| chance | {' | '.join(f'{next(iter(s.values())):.1f}' for s in shares)} |")
    for labels in LABELS:
        for row, sets in of_rows(scores(labels)).items():
            cells = [spread(sets[name]) if name in sets else "" for name in chance]
            lines.append(f"| {row}, {labels} labels | {' | '.join(cells)} |")
    return "\n".join(lines)


def clusters(nmi: Scores, ari: Scores) -> str:
    names = [f"{name}, {score}" for name in nmi for score in ("NMI", "ARI")]
    lines = [f"| | {' | '.join(names)} |", "| --- |" + " --- |" * len(names)]
    for row in ROWS:
        if any(row in rows for rows in nmi.values()):
            both = [scores[name].get(row, {}) for name in nmi for scores in (nmi, ari)]
            cells = [spread(list(seeds.values())) if seeds else "" for seeds in both]
            lines.append(f"| {row} | {' | '.join(cells)} |")
    return "\n".join(lines)
