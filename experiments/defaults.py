"""Choose the defaults of both losses by the rule of few_labels/plan.md, from the records.

python -m experiments.defaults
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from docs.programs.tables import markdown

from .common.graphs import INFO_NCE, PGCL
from .common.results import Run, read, tied
from .common.tables import CHOOSING, difference, paragraph
from .few_labels import study

NODES = Path(__file__).parent / "nodes" / "defaults.jsonl"
CHOOSE_ON = "digits", "MSRC_9", "ENZYMES", "Cora", "Photo"
CONFIRM_ON = "MSRC_21", "Letter-high"  # with all candidates
NODE_MEASURES = "1 label after 70", "probe after 70"
TEMPERATURES = 0.1, 0.2, 0.5, 1.0, 2.0  # of InfoNCE, on graphs and on nodes


class Options(NamedTuple):
    """A candidate. InfoNCE has a temperature alone."""

    temperature: float
    consistency_weight: float | None = None
    predictions: str | None = None
    num_prototypes: int | None = None

    def __str__(self) -> str:
        parts = [f"tau {self.temperature:g}"]
        if self.consistency_weight is not None:
            parts += [f"lambda {self.consistency_weight:g}", str(self.predictions)]
            parts += [f"K={self.num_prototypes}"]
        return ", ".join(parts)


PAPER = {INFO_NCE: Options(0.2), PGCL: Options(**study.PAPER)}
Distances = dict[tuple[str, str], dict[Options, float]]  # by set and measure


def options_of(config: Mapping[str, object]) -> Options:
    return Options(**{name: config[name] for name in Options._fields if name in config})


def candidates(loss: str) -> list[Options]:
    if loss == INFO_NCE:
        return [Options(tau) for tau in TEMPERATURES]
    return [Options(**options) for p in study.PREDICTIONS for options in study.grid(p)]


def distances(loss: str, sets: Iterable[str], half: str, of: Collection[Options]) -> Distances:
    """How many points the mean of each candidate is below the best of them."""
    found: Distances = {}
    for name in sets:
        seeds = study.CHOOSING_SEEDS
        runs = [run for run in runs_of(loss, name) if run["config"]["seed"] in seeds]
        for measure, value in measures_of(name, half).items():
            means = {options: np.mean([*by_seed(runs, options, value).values()]) for options in of}
            top = max(means.values())
            found[name, measure] = {options: float(top - mean) for options, mean in means.items()}
    return found


def runs_of(loss: str, name: str) -> list[Run]:
    """All runs of a loss on a set, with as many epochs as the set has."""
    if name in study.SETS:
        wanted = {"row": loss, "epochs": study.SETS[name].epochs}.items()
        runs = read(study.RECORDS / f"{name}.jsonl").values()
        return [run for run in runs if wanted <= run["config"].items()]
    runs = [run for run in read(NODES).values() if run["config"]["dataset"] == name]
    return [run for run in runs if run["config"]["loss"].startswith(loss)]


def by_seed(
    runs: Iterable[Run], options: Options, value: Callable[[Run], float]
) -> dict[int, float]:
    """A measure of the runs with these options; of a seed that ran twice, the later run."""
    runs = [run for run in runs if options_of(run["config"]) == options]
    return {run["config"]["seed"]: value(run) for run in runs}


def measures_of(name: str, half: str) -> dict[str, Callable[[Run], float]]:
    """One label per class and all labels, of a half of the graphs or of all nodes."""
    if name in study.SETS:
        return {m: lambda run, m=m: run[half][m] for m in ("labels_1", "all")}
    return {m: lambda run, m=m: run[m] for m in NODE_MEASURES}


class Summary(NamedTuple):
    mean: float
    worst: float
    where: str  # the set of the worst


def summary(found: Distances, options: Options) -> Summary:
    """The mean and the worst distance of a candidate."""
    by_set = {place: of[options] for place, of in found.items()}
    place = max(by_set, key=lambda place: by_set[place])
    return Summary(float(np.mean([*by_set.values()])), by_set[place], place[0])


def of_paper(options: Options, paper: Options) -> int:
    """How many values are the paper's."""
    return sum(a == b for a, b in zip(options, paper, strict=True))


def chosen(found: Distances, of: Collection[Options], paper: Options) -> Options:
    """The rule of the plan."""
    equal = tied({options: [by[options] for by in found.values()] for options in of})
    return max(equal, key=lambda o: (of_paper(o, paper), -summary(found, o).mean))


def choice(loss: str) -> Options:
    of = candidates(loss)
    return chosen(distances(loss, CHOOSE_ON, "development", of), of, PAPER[loss])


def table(choices: Mapping[str, Options]) -> str:
    """Mean and worst distance of some candidates, on development sets and on held-out sets."""
    lines = []
    for loss, best in choices.items():
        of = candidates(loss)
        development = distances(loss, CHOOSE_ON, "development", of)
        held_out = distances(loss, CONFIRM_ON, "held_out", of)
        ranked = sorted(of, key=lambda options: summary(development, options).mean)
        shown = ranked if loss == INFO_NCE else [*ranked[:4], best, PAPER[loss]]
        for options in dict.fromkeys(shown):
            cells = [
                f"{s.mean:.1f}, {s.worst:.1f} ({s.where})"
                for s in (summary(found, options) for found in (development, held_out))
            ]
            name = f"{loss}, {options}"
            lines.append([f"**{name}**" if options == best else name, *cells])
    head = "mean and worst distance in points", "development sets", "held-out sets"
    return markdown(head, lines)


def confirmation(choices: Mapping[str, Options]) -> str:
    """The selected options minus the paper's on held-out sets, over all seeds."""
    lines = []
    for name in (*study.SETS, "CiteSeer", "DBLP"):
        if name in CHOOSE_ON:
            continue
        cells = []
        for loss, best in choices.items():
            runs = runs_of(loss, name)
            for value in measures_of(name, "held_out").values():
                pair = (by_seed(runs, options, value) for options in (best, PAPER[loss]))
                cells.append(difference(*pair))
        lines.append([name, *cells])
    head = [f"{loss}, {words}" for loss in choices for words in ("1 label", "all labels")]
    return markdown(["selected minus the paper's", *head], lines)


def pages() -> dict[Path, dict[str, str]]:
    """Tables and a sentence by page and marker."""
    choices = {loss: choice(loss) for loss in (INFO_NCE, PGCL)}
    pgcl = choices[PGCL]
    chosen = (
        f"`PGCLLoss` has temperature {pgcl.temperature:g}, lambda {pgcl.consistency_weight:g}, "
        f"K={pgcl.num_prototypes} and {pgcl.predictions} predictions, and `InfoNCE` temperature "
        f"{choices[INFO_NCE].temperature:g}."
    )
    tables = {"defaults": table(choices), "confirmation": confirmation(choices)}
    return {CHOOSING: {**tables, "chosen": paragraph(chosen)}}


def main() -> None:
    for loss in (INFO_NCE, PGCL):
        of = candidates(loss)
        found = distances(loss, CHOOSE_ON, "development", of)
        print(f"\n{loss}: {chosen(found, of, PAPER[loss])}")
        for options in sorted(of, key=lambda options: summary(found, options).mean):
            cells = (f"{by[options]:6.1f}" for by in found.values())
            mean, worst, where = summary(found, options)
            print(f"{options!s:45} {mean:5.2f} {worst:5.1f} {where:8}", *cells)


if __name__ == "__main__":
    main()
