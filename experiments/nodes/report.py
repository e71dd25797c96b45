"""The tables of the committed runs."""

from collections.abc import Collection
from pathlib import Path

from docs.programs.tables import markdown
from experiments.common import results
from experiments.common.tables import DOCS, RESULTS, difference, sourced, spread

from . import grace
from .train import INFO_NCE, PGCL, UNTRAINED

SAMPLES = Path(__file__).parent / "negatives.jsonl"
CONTRAST = Path(__file__).parent / "results.jsonl"
GRACE = Path(__file__).parent / "grace.jsonl"
MEASURES = {
    "labels_1": "1 label per class",
    "labels_5": "5 labels per class",
    "probe": "linear probe",
}
OLDER_NAMES = {"labels_1": "one_shot", "labels_5": "five_shot"}  # in the committed record


def table(runs: Collection[results.Run]) -> str:
    """One-shot accuracy in per cent and PGCL's differences in points, by set and batch size."""

    def seeds(measure: str, loss: str, **options: object) -> dict[int, float]:
        wanted = {"loss": loss, **options}.items()
        return {
            run["config"]["seed"]: run[measure if measure in run else OLDER_NAMES[measure]]
            for run in runs
            if all(run["config"].get(name) == value for name, value in wanted)
        }

    losses = [loss for loss in (UNTRAINED, INFO_NCE) if seeds("labels_1", loss)]
    configs = [run["config"] for run in runs if run["config"]["loss"] == INFO_NCE]
    lines = []
    for dataset, batch in dict.fromkeys((config["dataset"], config["batch"]) for config in configs):
        setting = {"dataset": dataset, "batch": batch}
        of_loss = {UNTRAINED: {"dataset": dataset}, INFO_NCE: setting}
        labels_1 = [seeds("labels_1", loss, **of_loss[loss]) for loss in losses]
        deltas = [
            difference(*(seeds(measure, loss, **setting) for loss in (PGCL, INFO_NCE)))
            for measure in MEASURES
        ]
        means = [spread(accuracies.values()) for accuracies in labels_1]
        lines.append([f"{dataset}, batches of {batch}", len(labels_1[-1]), *means, *deltas])
    head = [f"{loss}, {MEASURES['labels_1']}" for loss in losses]
    head += [f"PGCL minus InfoNCE, {name}" for name in MEASURES.values()]
    return markdown(["set", "seeds", *head], lines)


def samples(runs: Collection[results.Run]) -> str:
    """All nodes as negatives, and samples of nodes in as many steps or in as much time."""
    probes: dict[tuple[int, int], dict[int, float]] = {}  # by nodes and steps, then by seed
    for config, probe in ((run["config"], run["probe"]) for run in runs):
        probes.setdefault((config["batch"], config["steps"]), {})[config["seed"]] = probe
    every = probes[max(probes)]
    lines = [
        [f"{nodes:,}", steps, spread(accuracies.values()), difference(accuracies, every)]
        for (nodes, steps), accuracies in sorted(probes.items(), reverse=True)
    ]
    head = ["nodes in the loss", "steps", "linear probe", "minus all nodes"]
    return sourced(markdown(head, lines), runs)


def pages() -> dict[Path, dict[str, str]]:
    """The tables by page, from the committed runs."""
    runs = [run for run in results.read(SAMPLES).values() if run["config"]["dataset"] == "Photo"]
    of_grace, contrast = (results.read(path).values() for path in (GRACE, CONTRAST))
    return {
        DOCS / "large_graphs.md": {"samples": samples(runs)},
        RESULTS: {
            "grace": sourced(grace.table(of_grace), of_grace),
            "contrast after InfoNCE": sourced(table(contrast), contrast),
        },
    }
