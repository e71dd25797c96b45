"""Fills docs/results_graphs.md, and two tables of docs/results.md, from the committed runs.

python -m experiments.unsupervised.report
"""

import sys
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common import results
from experiments.common.results import Run
from experiments.common.rows import INFO_NCE, PGCL
from experiments.common.tables import difference, markdown, refill, spread

from . import sensitivity, table
from .recipe import RUNS as MEASURED
from .recipe import tables as of_measures
from .train import ALL_ROWS, SETTING, SHORTER, UNTRAINED, WL

# The paper's accuracies of GraphCL and of PGCL.
PAPER = {
    "MUTAG": (86.8, 91.1),
    "PTC_MR": (58.4, 63.3),
    "PROTEINS": (74.4, 75.7),
    "NCI1": (77.9, 78.8),
    "COLLAB": (71.4, 76.0),
    "REDDIT-BINARY": (89.5, 91.5),
}
# Accuracies of the code published with the paper: best of 20 epochs, last epoch. From
# published_code.txt.
PUBLISHED_CODE = {
    "MUTAG": {
        UNTRAINED: ("86.4", "84.5"),
        INFO_NCE: ("91.1 ± 0.5", "85.6 ± 1.5"),
        PGCL: ("91.4 ± 0.4", "87.6 ± 3.2"),
    },
    "PTC_MR": {
        UNTRAINED: ("58.6", "56.9"),
        INFO_NCE: ("65.5 ± 1.3", "59.5 ± 2.0"),
        PGCL: ("65.3 ± 1.1", "59.5 ± 2.2"),
    },
    "PROTEINS": {
        UNTRAINED: ("", "72.2"),
        INFO_NCE: ("73.8", "72.5"),
        PGCL: ("73.6", "70.7"),
    },
}
# PGCL from the first step with K=N/3.
THIRD_OF_BATCH = SETTING | {"num_prototypes": 40, "consistency_weight": 1.0}
HERE = Path(__file__).parent
RUNS, PAPER_RUNS = HERE / "results.jsonl", HERE / "paper.jsonl"
DOCS = HERE.parents[1] / "docs"
PAGE, CONCLUSIONS = DOCS / "results_graphs.md", DOCS / "results.md"


def of_setting(runs: Iterable[Run], setting: dict[str, Any]) -> dict[str, list[Run]]:
    """Data set -> its runs in one setting, and those of rows without training.

    Of two runs that differ in ``look_every`` alone, the one evaluated more often comes last, and
    counts.
    """
    wanted = {name: value for name, value in setting.items() if name != "look_every"}
    sets: dict[str, list[Run]] = {}
    digests: dict[str, str] = {}
    for run in sorted(runs, key=lambda run: len(run["accuracy"])):
        config = run["config"]
        name, digest = config["dataset"], config.get("data")
        here = wanted | SHORTER.get(name, {})
        if config["row"] in (WL, UNTRAINED) or here.items() <= config.items():
            # The oldest records have no digest.
            if digest is not None and digests.setdefault(name, digest) != digest:
                raise ValueError(f"{name}: runs on two sets, {digests[name]} and {digest}")
            sets.setdefault(name, []).append(run)
    return sets


def averages(sets: dict[str, list[Run]]) -> str:
    """Last epochs of all losses on the sets that have all of them, with mean and mean rank."""
    means = {
        name: {
            row: np.mean([table.last_epoch(run) for run in seeds.values()])
            for row, seeds in table.by_row(runs).items()
        }
        for name, runs in sets.items()
    }
    complete = {name: of_set for name, of_set in means.items() if of_set.keys() == {*ALL_ROWS}}
    lines = []
    for row in ALL_ROWS:
        values = [of_set[row] for of_set in complete.values()]
        ranks = [sum(v > of_set[row] for v in of_set.values()) + 1 for of_set in complete.values()]
        lines.append([row, *(f"{v:.1f}" for v in [*values, np.mean(values), np.mean(ranks)])])
    return markdown(["loss", *complete, "mean", "mean rank"], lines)


def beside_the_paper(sets: dict[str, list[Run]]) -> str:
    """Best epochs of InfoNCE and PGCL, in the paper and here."""
    lines = []
    for name, (info_nce, pgcl) in PAPER.items():
        if name in sets:
            rows = table.by_row(sets[name])
            here, ours = (
                float(np.mean([table.best_epoch(run) for run in rows[row].values()]))
                for row in (INFO_NCE, PGCL)
            )
            values = info_nce, here, pgcl, ours, pgcl - ours
            lines.append([name, *(f"{value:.1f}" for value in values)])
    head = ["set", "GraphCL, paper", "InfoNCE, here", "PGCL, paper", "PGCL, here", "missing"]
    return markdown(head, lines)


def beside_the_published_code(runs: Iterable[Run]) -> str:
    """The paper, its code and ours, by the protocol of that code."""
    runs = list(runs)
    lines = []
    for name, published in PUBLISHED_CODE.items():
        paper = dict(zip((INFO_NCE, PGCL), map(str, PAPER[name]), strict=True))
        of_set = [run for run in runs if run["config"]["dataset"] == name]
        ours = table.cells_of_rows(of_set)
        for row in [*published, *(row for row in ours if row not in published)]:
            its_best, its_last = published.get(row, ("", ""))
            seeds, best, last, *fresh = ours.get(row, [""] * len(table.EVERY_EPOCH))
            lines.append(
                [name, row, seeds, paper.get(row, ""), its_best, best, its_last, last, *fresh]
            )
    head = ["set", "loss", "seeds", "paper", "best of 20 epochs, its code", "here"]
    head += ["last epoch, its code", "here", "best epoch on fresh folds", "minus InfoNCE"]
    return markdown(head, lines)


def third_of_batch(paper: dict[str, list[Run]], third: dict[str, list[Run]]) -> str:
    """Last epochs of PGCL with the paper's options and with K=N/3, against InfoNCE."""
    lines = []
    for name, runs in third.items():
        rows, third_rows = table.by_row(paper[name]), table.by_row(runs)
        if PGCL in third_rows:
            info_nce, pgcl, ours = (
                table.by_seed(seeds, table.last_epoch)
                for seeds in (rows[INFO_NCE], rows[PGCL], third_rows[PGCL])
            )
            cells = (spread([*seeds.values()]) for seeds in (info_nce, pgcl, ours))
            lines.append([name, len(ours), *cells, difference(ours, info_nce)])
    losses = "InfoNCE", "PGCL, K=10, lambda=6", "PGCL, K=40, lambda=1"
    return markdown(["set", "seeds", *losses, "minus InfoNCE"], lines)


def conclusions(sets: dict[str, list[Run]]) -> str:
    """Last epochs of four rows on the sets of the paper."""
    shown = (WL, UNTRAINED, INFO_NCE, PGCL)
    lines = []
    for name in PAPER:
        rows = table.by_row(sets[name])
        last = {row: table.by_seed(rows.get(row, {}), table.last_epoch) for row in shown}
        cells = (spread([*seeds.values()]) if seeds else "" for seeds in last.values())
        lines.append([name, len(last[PGCL]), *cells, difference(last[PGCL], last[INFO_NCE])])
    return markdown(["accuracy in %", "seeds", *shown, "PGCL minus InfoNCE"], lines)


def best_epochs(runs: Iterable[Run]) -> str:
    """The highest of 20 accuracies: the paper, its code and ours."""
    runs = list(runs)
    lines = []
    for name, published in PUBLISHED_CODE.items():
        ours = table.cells_of_rows(run for run in runs if run["config"]["dataset"] == name)
        seeds, best, *_, delta = ours[PGCL]
        its_best = published[PGCL][0], published[INFO_NCE][0]
        lines.append([name, seeds, PAPER[name][1], *its_best, best, ours[INFO_NCE][1], delta])
    head = ["best of 20 epochs, accuracy in %", "seeds", "PGCL, paper", "PGCL, its code"]
    head += ["InfoNCE, its code", "PGCL, here", "InfoNCE, here"]
    return markdown([*head, "PGCL minus InfoNCE on fresh folds"], lines)


def pages(
    runs: Collection[Run], paper_runs: Collection[Run], measured: Collection[Run]
) -> dict[Path, dict[str, str]]:
    """The tables of these runs, by page.

    ``paper_runs`` follow the paper's protocol; ``measured`` are those of recipe.py.
    """
    sets = of_setting(runs, SETTING)
    tables = {name: table.comparison(of_set) for name, of_set in sets.items()}
    real = {name: of_set for name, of_set in sets.items() if name.isupper()}
    tables["averages"] = averages(real)
    tables["recipe"] = third_of_batch(sets, of_setting(runs, THIRD_OF_BATCH))
    tables["paper"] = beside_the_paper(real)
    tables["protocol"] = beside_the_published_code(paper_runs)
    short = {"graphs": conclusions(real), "published code": best_epochs(paper_runs)}
    return {PAGE: tables | of_measures(measured), CONCLUSIONS: short}


def main() -> None:
    runs = list(results.read(RUNS).values())
    if not runs:
        sys.exit(f"experiments.unsupervised.report: {RUNS} has no runs")
    others = (results.read(path).values() for path in (PAPER_RUNS, MEASURED))
    refill(pages(runs, *others))
    sensitivity.draw(runs).savefig(DOCS / "images" / "sensitivity.png", dpi=160)


if __name__ == "__main__":
    main()
