"""The tables of the committed runs."""

from collections.abc import Collection
from itertools import accumulate
from pathlib import Path

from scipy import stats

from docs.tables import markdown
from experiments.common import results
from experiments.common.tables import DOCS, RESULTS, difference, sourced, spread

from .train import INFO_NCE, PGCL, UNTRAINED

RUNS = Path(__file__).parent / "results.jsonl"
SAMPLES = Path(__file__).parent / "negatives.jsonl"
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


def samples(every_run: Collection[results.Run], dataset: str) -> str:
    """All nodes as negatives, and samples of nodes in as many steps or in as much time."""
    runs = [run for run in every_run if run["config"]["dataset"] == dataset]
    arms: dict[tuple[int, int], dict[str, dict[int, float]]] = {}  # by nodes and steps
    for run in runs:
        config = run["config"]
        arm = arms.setdefault((config["batch"], config["steps"]), {"probe": {}, "one_shot": {}})
        for measure, values in arm.items():
            values[config["seed"]] = run[measure]
    every, tests = max(arms), []
    for arm in arms.keys() - {every}:
        values, others = arms[arm]["probe"], arms[every]["probe"]
        deltas = [values[seed] - others[seed] for seed in others]
        tests.append((float(stats.ttest_1samp(deltas, 0).pvalue), arm))
    tests.sort()
    holm = accumulate(((len(tests) - n) * p for n, (p, _) in enumerate(tests)), max)
    adjusted = {arm: f"{min(1.0, p):.2g}" for (_, arm), p in zip(tests, holm, strict=True)}
    lines = [
        [
            f"{'all' if arm == every else 'a sample of'} {arm[0]:,} nodes, {arm[1]} steps",
            spread(values["probe"].values()),
            difference(values["probe"], arms[every]["probe"]),
            adjusted.get(arm, ""),
            spread(values["one_shot"].values()),
        ]
        for arm, values in sorted(arms.items(), reverse=True)
    ]
    head = ["negatives", "linear probe", "minus all nodes", "p by Holm", "1 label per class"]
    return sourced(markdown(head, lines), runs)


def pages() -> dict[Path, dict[str, str]]:
    """The tables by page, from the committed runs."""
    runs, of_samples = (results.read(path).values() for path in (RUNS, SAMPLES))
    return {
        RESULTS: {"nodes": sourced(table(runs), runs)},
        DOCS / "large_graphs.md": {
            f"samples_{dataset}": samples(of_samples, dataset) for dataset in ("Photo", "DBLP")
        },
    }
