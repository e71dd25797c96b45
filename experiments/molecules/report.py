"""Table II and the frozen probe, from the records beside this file."""

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from docs.tables import markdown
from examples.molecules import at_best_epoch
from experiments.common.results import Run, read
from experiments.common.tables import REPRODUCE, RESULTS, difference, sourced, spread

from .model import INFO_NCE, NONE, PGCL

SETS = ("BBBP", "Tox21", "SIDER", "ToxCast", "ClinTox", "BACE", "MUV")
PAPER = {  # Table II
    NONE: (65.8, 74.0, 57.3, 63.4, 58.0, 70.1, 71.8),
    "GraphCL": (69.7, 73.9, 60.5, 62.4, 75.9, 75.4, 69.8),
    PGCL: (69.8, 75.6, 61.6, 66.4, 69.4, 79.3, 71.2),
}

Scores = dict[str, dict[str, dict[int, float]]]  # by row, set and seed


def scores_of(runs: Iterable[Run], score: Callable[[Run], float]) -> Scores:
    names = {name.lower(): name for name in SETS}
    scores: Scores = {}
    for run in runs:
        config = run["config"]
        row = config["pretraining"]["row"] if config["pretraining"] else NONE
        name = names[config["dataset"].partition(".")[0]]
        scores.setdefault(row, {}).setdefault(name, {})[config["seed"]] = score(run)
    return scores


def table_2(scores: Scores) -> str:
    """The paper's scores above ours."""
    lines = [[f"{row}, paper", *values, f"{np.mean(values):.1f}"] for row, values in PAPER.items()]
    for row in (NONE, INFO_NCE, PGCL):
        of_sets = [[*scores[row][name].values()] for name in SETS]
        mean = np.mean([np.mean(of_set) for of_set in of_sets])
        lines.append([row, *map(spread, of_sets), f"{mean:.1f}"])
    return markdown(["ROC-AUC in %", *SETS, "mean"], lines)


def minus(scores: Scores, one: str, other: str, sets: Iterable[str]) -> list[str]:
    return [difference(scores[one][name], scores[other][name]) for name in sets]


def differences(scores: Scores) -> str:
    line = [f"{PGCL} minus {INFO_NCE}", *minus(scores, PGCL, INFO_NCE, SETS)]
    return markdown(["points of ROC-AUC", *SETS], [line])


def frozen(runs: list[Run]) -> str:
    """Differences of the frozen probe, by the number of labels."""
    sets = SETS[:-1]  # MUV has one seed
    lines = []
    for labels in ("10", "100", "all"):
        scores = scores_of(runs, lambda run, labels=labels: run["auc"][labels])
        line = f"{PGCL} minus {INFO_NCE}, {labels} labels"
        lines.append([line, *minus(scores, PGCL, INFO_NCE, sets)])
    return markdown(["points of ROC-AUC", *sets], lines)


def pages() -> dict[Path, dict[str, str]]:
    """The tables by page and marker."""
    folder = Path(__file__).parent
    tuned = read(folder / "results.jsonl").values()
    probed = list(read(folder / "probes.jsonl").values())
    scores = scores_of(tuned, lambda run: at_best_epoch(run["auc"]))
    return {
        REPRODUCE: {
            "table 2": sourced(table_2(scores), tuned),
            "table 2 differences": differences(scores),
        },
        RESULTS: {"molecules": sourced(frozen(probed), probed)},
    }
