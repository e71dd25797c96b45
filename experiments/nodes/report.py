"""The tables of the committed runs."""

from collections.abc import Collection
from pathlib import Path

from docs.programs.tables import markdown
from experiments.common import results
from experiments.common.tables import DOCS, RESULTS, difference, sourced, spread

from . import grace
from .train import INFO_NCE, PGCL

SAMPLES = Path(__file__).parent / "negatives.jsonl"
CONTRAST = Path(__file__).parent / "results.jsonl"
GRACE = Path(__file__).parent / "grace.jsonl"
MEASURES = {
    "one_shot": "1 label per class",
    "probe": "linear probe",
}


def table(runs: Collection[results.Run]) -> str:
    """Accuracy of InfoNCE in % and PGCL's differences in points, by set and batch size."""

    def seeds(measure: str, **wanted: object) -> dict[int, float]:
        found = [run for run in runs if wanted.items() <= run["config"].items()]
        return {run["config"]["seed"]: run[measure] for run in found}

    settings = {(run["config"]["dataset"], run["config"]["batch"]): None for run in runs}
    lines = []
    for dataset, batch in settings:
        line = [f"{dataset}, batches of {batch:,}"]
        for measure in MEASURES:
            both = [seeds(measure, dataset=dataset, batch=batch, loss=x) for x in (PGCL, INFO_NCE)]
            line += [spread(both[1].values()), difference(*both)]
        lines.append([*line, str(len(both[1]))])
    head = [f"{x}, {name}" for name in MEASURES.values() for x in ("InfoNCE", "PGCL minus InfoNCE")]
    return sourced(markdown(["set", *head, "seeds"], lines), runs)


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
            "contrast after InfoNCE": table(contrast),
        },
    }
