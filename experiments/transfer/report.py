"""Makes the tables on molecules in docs/results.md anew from the runs kept beside this file.

python -m experiments.transfer.report
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from experiments.shelf import results
from experiments.shelf.rows import INFO_NCE, PGCL
from experiments.shelf.tables import difference, fill, spread

from .finetune import score
from .rows import MASKING, NONE

# What the paper reports, in the order of its table.
SETS = ("BBBP", "Tox21", "SIDER", "ToxCast", "ClinTox", "BACE", "MUV")
PAPER = {
    NONE: (65.8, 74.0, 57.3, 63.4, 58.0, 70.1, 71.8),
    INFO_NCE: (69.7, 73.9, 60.5, 62.4, 75.9, 75.4, 69.8),
    PGCL: (69.8, 75.6, 61.6, 66.4, 69.4, 79.3, 71.2),
}
ROWS = (NONE, MASKING, INFO_NCE, PGCL)
PAIRS = ((PGCL, INFO_NCE), (PGCL, NONE), (INFO_NCE, NONE), (MASKING, NONE))
HERE = Path(__file__).parent
KEPT = HERE / "results.jsonl", HERE / "pretraining.jsonl"
PAGE = HERE.parents[1] / "docs" / "results.md"

Scores = dict[str, dict[str, dict[int, float]]]  # set -> row -> seed -> ROC-AUC


def scores_of(runs: Iterable[results.Run]) -> Scores:
    scores: Scores = {name: {} for name in SETS}
    settings: dict[tuple[str, str], str] = {}
    for run in runs:
        config = run["config"]
        name = {name.lower(): name for name in SETS}[config["dataset"].partition(".")[0]]
        row = config["pretraining"]["row"] if config["pretraining"] else NONE
        setting = results.key(config | {"seed": None})
        if settings.setdefault((name, row), setting) != setting:
            raise ValueError(f"{name}, {row}: runs of two settings, {setting} is one of them")
        scores[name].setdefault(row, {})[config["seed"]] = score(run)
    return {name: rows for name, rows in scores.items() if rows}


def ranked(
    origin: str, rows: dict[str, dict[str, list[float]]], names: Iterable[str]
) -> Iterator[str]:
    """Lines of rows against sets, with mean and mean rank over the sets that all rows have."""
    whole = [name for name in names if all(name in sets for sets in rows.values())]
    means = {row: np.array([np.mean(sets[name]) for name in whole]) for row, sets in rows.items()}
    for row, sets in rows.items():
        ranks = 1 + sum(other > means[row] for other in means.values())
        cells = [spread(sets[name]) if name in sets else "" for name in names]
        cells += [f"{means[row].mean():.1f}", f"{np.mean(ranks):.1f}"]
        yield f"| {origin}{row} | {' | '.join(cells)} |"


def comparison(scores: Scores) -> str:
    """What the paper reports, and what came out here."""
    paper = {
        row: {name: [value] for name, value in zip(SETS, values, strict=True) if name in scores}
        for row, values in PAPER.items()
    }
    here = {
        row: {name: list(rows[row].values()) for name, rows in scores.items() if row in rows}
        for row in ROWS
    }
    lines = [f"| | {' | '.join(scores)} | mean | mean rank |"]
    lines.append("| --- |" + " --- |" * (len(scores) + 2))
    lines += [*ranked("paper: ", paper, scores), *ranked("", here, scores)]
    return "\n".join(lines)


def differences(scores: Scores) -> str:
    lines = [f"| | {' | '.join(scores)} |", "| --- |" + " --- |" * len(scores)]
    for one, other in PAIRS:
        cells = []
        for rows in scores.values():
            both = [rows.get(row, {}) for row in (one, other)]
            seeds = both[0].keys() & both[1].keys()
            single = [f"{both[0][seed] - both[1][seed]:+.1f}" for seed in seeds]
            cells.append(single[0] if len(single) == 1 else difference(*both))
        lines.append(f"| {one} minus {other} | {' | '.join(cells)} |")
    return "\n".join(lines)


def settings(runs: Iterable[results.Run]) -> str:
    """How each set was fine-tuned."""
    configs: dict[str, list[results.Config]] = {}
    for run in runs:
        name = run["config"]["dataset"].partition(".")[0]
        configs.setdefault(name, []).append(run["config"])
    there = {name: configs[name.lower()] for name in SETS if name.lower() in configs}
    rows = {
        "seeds": [len({config["seed"] for config in of_set}) for of_set in there.values()],
        "epochs": [of_set[0]["epochs"] for of_set in there.values()],
        "batch size": [of_set[0]["batch_size"] for of_set in there.values()],
    }
    lines = [f"| | {' | '.join(there)} |", "| --- |" + " --- |" * len(there)]
    lines += [f"| {about} | {' | '.join(map(str, values))} |" for about, values in rows.items()]
    return "\n".join(lines)


def pretrained(runs: Iterable[results.Run]) -> str:
    lines = ["| | molecules | epochs | loss | molecules per second |", "| --- |" + " --- |" * 4]
    for run in sorted(runs, key=lambda run: ROWS.index(run["config"]["row"])):
        config, history = run["config"], run["history"]
        losses = ", ".join(f"{epoch['loss']:.2f}" for epoch in history)
        speed = f"{np.mean([epoch['molecules_per_second'] for epoch in history]):.0f}"
        cells = [config["row"], config["molecules"], len(history), losses, speed]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def filled(page: str, tuned: list[results.Run], encoders: list[results.Run]) -> str:
    """The page of results with the tables of these runs."""
    scores = scores_of(tuned)
    tables = {
        "transfer": comparison(scores),
        "transfer_differences": differences(scores),
        "transfer_settings": settings(tuned),
        "transfer_pretraining": pretrained(encoders),
    }
    return fill(page, tables)


if __name__ == "__main__":
    runs = [list(results.read(path).values()) for path in KEPT]
    for path, of_file in zip(KEPT, runs, strict=True):
        if not of_file:
            sys.exit(f"experiments.transfer.report: {path} has no runs")
    page = filled(PAGE.read_text(), *runs)
    results.write(PAGE, lambda part: part.write_text(page))
