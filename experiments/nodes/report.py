"""The table of the committed runs."""

from collections.abc import Collection
from pathlib import Path

from docs.tables import markdown
from experiments.common import results
from experiments.common.tables import RESULTS, difference, sourced, spread

from .train import INFO_NCE, PGCL, UNTRAINED

RUNS = Path(__file__).parent / "results.jsonl"
MEASURES = {
    "one_shot": "1 label per class",
    "five_shot": "5 labels per class",
    "probe": "linear probe",
}


def table(runs: Collection[results.Run]) -> str:
    """One-shot accuracy in per cent and PGCL's differences in points, by set and batch size."""

    def seeds(measure: str, loss: str, **options: object) -> dict[int, float]:
        wanted = {"loss": loss, **options}.items()
        return {
            run["config"]["seed"]: run[measure]
            for run in runs
            if all(run["config"].get(name) == value for name, value in wanted)
        }

    losses = [loss for loss in (UNTRAINED, INFO_NCE) if seeds("one_shot", loss)]
    configs = [run["config"] for run in runs if run["config"]["loss"] == INFO_NCE]
    lines = []
    for dataset, batch in dict.fromkeys((config["dataset"], config["batch"]) for config in configs):
        setting = {"dataset": dataset, "batch": batch}
        of_loss = {UNTRAINED: {"dataset": dataset}, INFO_NCE: setting}
        one_shot = [seeds("one_shot", loss, **of_loss[loss]) for loss in losses]
        deltas = [
            difference(*(seeds(measure, loss, **setting) for loss in (PGCL, INFO_NCE)))
            for measure in MEASURES
        ]
        means = [spread(accuracies.values()) for accuracies in one_shot]
        lines.append([f"{dataset}, batches of {batch}", len(one_shot[-1]), *means, *deltas])
    head = [f"{loss}, {MEASURES['one_shot']}" for loss in losses]
    head += [f"PGCL minus InfoNCE, {name}" for name in MEASURES.values()]
    return markdown(["set", "seeds", *head], lines)


def pages() -> dict[Path, dict[str, str]]:
    """The tables by page, from the committed runs."""
    runs = results.read(RUNS).values()
    return {RESULTS: {"nodes": sourced(table(runs), runs)}}
