"""Fills docs/results_molecules.md, and a table of docs/results.md, from the committed runs.

python -m experiments.transfer.report
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from experiments.common import results
from experiments.common.rows import INFO_NCE, PGCL
from experiments.common.tables import markdown, refill

from . import probe_tables
from .finetune import score
from .rows import NONE
from .tables import ROWS, SETS, comparison, differences, scores_of

# The paper's scores, in the order of its table.
PAPER = {
    NONE: (65.8, 74.0, 57.3, 63.4, 58.0, 70.1, 71.8),
    INFO_NCE: (69.7, 73.9, 60.5, 62.4, 75.9, 75.4, 69.8),
    PGCL: (69.8, 75.6, 61.6, 66.4, 69.4, 79.3, 71.2),
}
HERE = Path(__file__).parent
RECORDS = HERE / "results.jsonl", HERE / "pretraining.jsonl", HERE / "probes.jsonl"
DOCS = HERE.parents[1] / "docs"
PAGE, CONCLUSIONS = DOCS / "results_molecules.md", DOCS / "results.md"


def tuned(runs: Iterable[results.Run]) -> dict[str, str]:
    """Tables of fine-tuned encoders."""
    runs = list(runs)
    scores = scores_of(runs, score)
    paper = {
        row: {name: [value] for name, value in zip(SETS, values, strict=True) if name in scores}
        for row, values in PAPER.items()
    }
    return {
        "transfer": comparison(scores, paper),
        "transfer_differences": differences(scores),
        "transfer_settings": settings(runs),
    }


def settings(runs: Iterable[results.Run]) -> str:
    """How each set was fine-tuned."""
    configs: dict[str, list[results.Config]] = {}
    for run in runs:
        name = run["config"]["dataset"].partition(".")[0]
        configs.setdefault(name, []).append(run["config"])
    sets = {name: configs[name.lower()] for name in SETS if name.lower() in configs}
    lines = [
        ["seeds", *(len({config["seed"] for config in of_set}) for of_set in sets.values())],
        ["epochs", *(of_set[0]["epochs"] for of_set in sets.values())],
        ["batch size", *(of_set[0]["batch_size"] for of_set in sets.values())],
    ]
    return markdown(["fine-tuning", *sets], lines)


def pretrained(runs: Iterable[results.Run]) -> str:
    """Means over the seeds."""
    groups: dict[tuple[int, int, int], list[results.Run]] = {}
    for run in runs:
        config = run["config"]
        group = -config["molecules"], ROWS.index(config["row"]), config["epochs"]
        groups.setdefault(group, []).append(run)
    lines = []
    for (molecules, row, epochs), of_group in sorted(groups.items()):
        means = {
            name: np.mean([[epoch[name] for epoch in run["history"]] for run in of_group], axis=0)
            for name in ("loss", "molecules_per_second")
        }
        losses = ", ".join(f"{loss:.2f}" for loss in means["loss"])
        speed = f"{means['molecules_per_second'].mean():.0f}"
        lines.append([ROWS[row], -molecules, epochs, len(of_group), losses, speed])
    head = ["pre-training", "molecules", "epochs", "seeds", "loss", "molecules per second"]
    return markdown(head, lines)


def pages(
    of_tuning: list[results.Run],
    of_pretraining: list[results.Run],
    of_probes: list[results.Run],
) -> dict[Path, dict[str, str]]:
    """The tables of these runs, by page."""
    tables = tuned(of_tuning) | probe_tables.tables(of_probes)
    tables["transfer_pretraining"] = pretrained(of_pretraining)
    return {PAGE: tables, CONCLUSIONS: {"molecules": probe_tables.conclusions(of_probes)}}


if __name__ == "__main__":
    runs = [list(results.read(path).values()) for path in RECORDS]
    for path, of_file in zip(RECORDS, runs, strict=True):
        if not of_file:
            sys.exit(f"experiments.transfer.report: {path} has no runs")
    refill(pages(*runs))
