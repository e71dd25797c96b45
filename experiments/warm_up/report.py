"""Tables of PGCL after a warm-up, from the records beside this file."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from docs.programs.tables import markdown
from experiments.common import results
from experiments.common.graphs import INFO_NCE
from experiments.common.pictures import curves
from experiments.common.results import Config
from experiments.common.tables import (
    DOCS,
    README,
    RESULTS,
    Delta,
    Verdict,
    difference,
    listed,
    paired,
    paragraph,
    significant_after_holm,
    sourced,
    spread,
)

from . import choice, study
from .choice import LONGER, chosen

WORST_LONGER = -2.0  # points on MSRC_21 after longer trainings
TODAY, FORM = "PGCL from the first step on", "warm-up, then PGCL"
Seeds = dict[int, float]


class Results:
    """One-shot accuracy on the held-out half of a set."""

    def __init__(self, name: str) -> None:
        self.name, self.form = name, chosen(name)
        self.runs = [r for r in choice.runs_of(name) if r["config"]["seed"] in study.SEEDS]

    def of(self, config: Config, measure: str = "labels_1") -> Seeds:
        return study.values(self.runs, config, "held_out", measure)

    def info_nce(self) -> Seeds:
        return self.of(study.info_nce(self.name))

    def ours(self) -> Seeds:
        return self.of(self.form)

    def today(self) -> Seeds:
        return self.of(study.pgcl(self.name, 10))

    def compared(self) -> dict[str, Config]:
        """InfoNCE, PGCL from the first step on, and the form."""
        configs = study.info_nce(self.name), study.pgcl(self.name, 10), self.form
        return dict(zip((INFO_NCE, TODAY, FORM), configs, strict=True))


def trained() -> list[Results]:
    """The sets that have been confirmed, in the groups of the plan."""
    order = (*study.CHOOSE_ON, *study.EXPLORED, *study.NEW)
    return [of for of in map(Results, order) if of.ours() and of.info_nce()]


def significant(every: Iterable[Results]) -> set[str]:
    """The sets where the form differs from InfoNCE after Holm's correction."""
    return significant_after_holm({of.name: (of.ours(), of.info_nce()) for of in every})


def group_of(name: str) -> str:
    if name in study.CHOOSE_ON:
        return "chose"
    return "new" if name in study.NEW else "explored"


def table(every: Sequence[Results]) -> str:
    """What the form and PGCL from the first step on gain over InfoNCE."""
    after_holm, lines = significant(every), []
    for of in every:
        rows = of.info_nce(), of.today(), of.ours()
        mark = "yes" if of.name in after_holm else "no"
        deltas = [difference(row, rows[0]) for row in rows[1:]]
        means = [spread(row.values()) for row in rows]
        lines.append([of.name, group_of(of.name), len(rows[0]), *means, *deltas, mark])
    minus = [f"{row} minus InfoNCE" for row in (TODAY, FORM)]
    head = ["set", "group", "seeds", "InfoNCE", TODAY, FORM, *minus, "significant after Holm"]
    return sourced(markdown(head, lines), [run for of in every for run in of.runs])


def label(config: Config) -> str:
    """A candidate in words."""
    if "num_prototypes" not in config:
        return "InfoNCE"
    start = f"warm-up, {config['form']}" if "form" in config else TODAY
    return f"{start}, K={config['num_prototypes']}"


def candidates() -> str:
    """Accuracy of all candidates on the development halves, and their distances."""
    by_set, distances = [], choice.distances()
    for name in study.CHOOSE_ON:
        by_set.append(choice.means(choice.runs_of(name), study.candidates(name)))
    lines = []
    best = label(chosen(study.CHOOSE_ON[0]))
    for number, config in enumerate(study.candidates(study.CHOOSE_ON[0])):
        name = label(config)
        of_candidate = distances[:, number]
        means = [f"{of_set[number]:.1f}" for of_set in by_set]
        cells = [*means, f"{of_candidate.mean():.1f}", f"{of_candidate.max():.1f}"]
        lines.append([f"**{name}**" if name == best else name, *cells])
    return markdown(["", *study.CHOOSE_ON, "mean distance", "worst distance"], lines)


def controls(every: Sequence[Results]) -> str:
    """The form, its placebo, and temperatures alone, minus InfoNCE, over the same seeds."""
    lines = []
    for of in every:
        if of.name not in study.CHOOSE_ON:
            continue
        few = {seed: value for seed, value in of.ours().items() if seed in study.FEW}
        placebo = of.of(of.form | {"part": study.PLACEBO})
        cells = [difference(row, of.info_nce()) for row in (few, placebo)]
        cells.append(difference(few, placebo))
        for config in study.schedules(of.name):
            cells.append(difference(of.of(config), of.info_nce()))
        lines.append([of.name, *cells])
    temperatures = [
        f"InfoNCE, {config['first']:g} then {config['temperature']:g}"
        for config in study.schedules(study.CHOOSE_ON[0])
    ]
    return markdown(
        ["minus InfoNCE", FORM, "clusters permuted", "real minus permuted", *temperatures], lines
    )


def longer(every: Sequence[Results]) -> str:
    """The form minus InfoNCE after four times the epochs; no line if nothing has run so long."""
    lines = []
    for of in every:
        rows = of.of(study.info_nce(of.name, LONGER)), of.of(chosen(of.name, times=LONGER))
        if rows[0] and rows[1]:
            means = [spread(row.values()) for row in rows]
            epochs = f"{LONGER * study.SETS[of.name].epochs} epochs"
            lines.append([f"{of.name}, {epochs}", *means, difference(rows[1], rows[0])])
    return markdown(["1 label per class", "InfoNCE", FORM, f"{FORM} minus InfoNCE"], lines)


def others(every: Sequence[Results]) -> str:
    """Other lengths of the warm-up, and parts of PGCL after it, minus InfoNCE, on five seeds."""
    lines = []
    for of in every:
        changes = [{"fraction": fraction} for fraction in choice.FRACTIONS]
        changes += [{"part": part} for part in study.PARTS]
        rows = [of.of(of.form | change) for change in changes]
        if any(rows):
            same = {seed: value for seed, value in of.ours().items() if seed in study.FEWEST}
            lines.append([of.name, *(difference(row, of.info_nce()) for row in (same, *rows))])
    fractions = [f"{fraction:.0%} of the epochs" for fraction in choice.FRACTIONS]
    head = ["minus InfoNCE", f"{FORM}: 50% of the epochs", *fractions]
    return markdown([*head, *(f"{part} alone" for part in study.PARTS)], lines)


def second_encoder(every: Sequence[Results]) -> str:
    """The same comparison with a GAT, without and with normalisation."""
    lines = []
    for encoder, of in itertools.product((study.SECOND, study.FORMER_SECOND), every):
        rows = [of.of(config | {"encoder": encoder}) for config in of.compared().values()]
        if all(rows):
            deltas = [difference(row, rows[0]) for row in rows[1:]]
            means = (spread(row.values()) for row in rows)
            lines.append([f"{encoder}: {of.name}", *means, *deltas])
    head = ["1 label per class", INFO_NCE, TODAY, FORM]
    return markdown([*head, *(f"{row} minus InfoNCE" for row in (TODAY, FORM))], lines)


def at_best(every: Sequence[Results]) -> dict[str, list[tuple[Config, Seeds]]]:
    """InfoNCE and the form by set, each with the best of nine settings, where they have run."""
    pairs = {}
    for of in every:
        if of.name in study.CHOOSE_ON:
            best = choice.best(of.name)
            pairs[of.name] = [(best[row], of.of(best[row])) for row in (INFO_NCE, study.WARM_UP)]
    return {name: pair for name, pair in pairs.items() if all(seeds for _, seeds in pair)}


def tuned(every: Sequence[Results]) -> str:
    """What each loss has at its best, and the settings that development halves selected."""
    lines = []
    for name, ((of_info_nce, others), (of_pgcl, ours)) in at_best(every).items():
        lines.append(
            [
                name,
                f"{spread(others.values())} (tau={of_info_nce['temperature']:g})",
                f"{spread(ours.values())} (tau={of_pgcl['temperature']:g}, "
                f"K={of_pgcl['num_prototypes']})",
                difference(ours, others),
            ]
        )
    head = ["1 label per class", "InfoNCE at its best", f"{FORM} at its best"]
    return markdown([*head, f"{FORM} minus InfoNCE"], lines)


def deltas(
    every: Iterable[Results],
    config: Callable[[Results], Config] = lambda of: of.form,
    measure: str = "labels_1",
) -> dict[str, Delta]:
    """The form, or PGCL in another one, minus InfoNCE, on the sets that have the measure."""
    found = {
        of.name: paired(*(of.of(c, measure) for c in (config(of), study.info_nce(of.name))))
        for of in every
    }
    return {name: delta for name, delta in found.items() if delta is not None}


def placebo_minus_real(every: Iterable[Results]) -> float:
    """The mean over sets of the placebo minus the form."""
    means = []
    for of in every:
        placebo, real = of.of(of.form | {"part": study.PLACEBO}), of.ours()
        if placebo:
            means.append(np.mean([placebo[seed] - real[seed] for seed in placebo]))
    return float(np.mean(means))


def refuted(every: Sequence[Results]) -> list[str]:
    """The reasons for which the plan calls the warm-up refuted."""
    reasons, of_sets = [], deltas(every)
    after_holm = significant(every)
    if below := [name for name in after_holm if of_sets[name].mean < 0]:
        reasons.append(f"below InfoNCE on {', '.join(below)}")
    if not [name for name in after_holm if of_sets[name].mean > 0]:
        reasons.append("above InfoNCE on no set")
    if placebo_minus_real(every) >= 0:
        reasons.append("the placebo is not below real clusters")
    for of in every:
        long = of.of(chosen(of.name, times=LONGER)), of.of(study.info_nce(of.name, LONGER))
        delta = paired(*long)
        if of.name == "MSRC_21" and delta is not None and delta.mean < WORST_LONGER:
            reasons.append(f"{delta} on {of.name} at {LONGER} times the length")
    return reasons


def collapse(every: Sequence[Results]) -> str:
    """Which share of the variance of projections is inside ten clusters, by k-means."""
    lines = []
    for of in every:
        runs = [results.matching(of.runs, config).values() for config in of.compared().values()]
        half = spread([100 * run["within_at_half"] for run in runs[0]])
        ends = [spread([100 * run["within"] for run in found]) for found in runs]
        lines.append([of.name, half, *ends, difference(of.today(), of.info_nce())])
    head = ["set", "InfoNCE, half of the epochs", "InfoNCE", TODAY, FORM]
    return markdown([*head, f"{TODAY} minus InfoNCE, accuracy"], lines)


def claim(every: Sequence[Results]) -> str:
    """What README says of PGCL as a user would write it."""
    today = Verdict.of(deltas(every, lambda of: study.pgcl(of.name, 10)))
    ours, reasons = Verdict.of(deltas(every)), refuted(every)
    (number,) = {of.form["num_prototypes"] for of in every}
    outcome = f"refuted, as it is {listed(reasons)}" if reasons else "not refuted"
    return paragraph(
        f"On most sets it does not. After a warm-up by `InfoNCE()` for half of the epochs, "
        f"`PGCLLoss(dim, {number})` is {ours}, against `InfoNCE()` for all epochs, with one label "
        f"per class (points of accuracy, {len(every)} sets, {len(study.SEEDS)} seeds). As a way to "
        f"be better than `InfoNCE`, the warm-up is {outcome}, by a plan that preceded the runs. "
        f"But it takes away most of what PGCL loses without it: from the first step on, "
        f"`PGCLLoss(dim)` is {today}."
    )


def further(every: Sequence[Results]) -> str:
    """The claim with other measures: each loss at its best, and all labels."""
    best = {
        name: delta
        for name, ((_, others), (_, ours)) in at_best(every).items()
        if (delta := paired(ours, others))
    }
    with_all = Verdict.of(deltas(every, measure="all"))
    return paragraph(
        f"Each at the best of nine settings, PGCL after a warm-up is {Verdict.of(best)}. With all "
        f"labels, it is {with_all}."
    )


def draw() -> Figure:
    """`within` and accuracy over the epochs, on two sets; whiskers are standard deviations."""
    figure, panels = plt.subplots(2, 2, figsize=(8, 5), layout="constrained", sharex="col")
    for of, (above, below) in zip(map(Results, choice.IN_DEPTH), panels.T, strict=True):
        tracks: dict[str, list[list[list[float]]]] = {}
        for row, config in of.compared().items():
            runs = results.matching(of.runs, config | {"track": True}).values()
            tracks[row] = [run["track"] for run in runs]
        epochs = [epoch for epoch, *_ in tracks[INFO_NCE][0]]
        for place, axes in enumerate((above, below), 1):
            scale = 100 if place == 1 else 1
            by_row = {
                row: [
                    [scale * point[place] for point in points]
                    for points in zip(*of_row, strict=True)
                ]
                for row, of_row in tracks.items()
            }
            curves(axes, epochs, by_row)
        above.set(title=of.name)
        below.set(xlabel="epochs")
    panels[0, 0].set(ylabel="variance within\nclusters, %")
    panels[1, 0].set(ylabel="accuracy, %,\n1 label per class")
    panels[1, 1].legend(frameon=False, fontsize="small")
    return figure


def pages() -> dict[Path, dict[str, str]]:
    """Tables by page and marker."""
    every = trained()
    tables = {
        "warm-up": table(every),
        "warm-up candidates": candidates(),
        "warm-up controls": controls(every),
        "warm-up longer": longer(every),
        "warm-up others": others(every),
        "warm-up encoder": second_encoder(every),
        "warm-up tuned": tuned(every),
        "warm-up claim": f"{claim(every)}\n\n{further(every)}",
    }
    of_clusters = {"warm-up collapse": collapse([of for of in every if of.today()])}
    return {RESULTS: tables, DOCS / "pgcl.md": of_clusters, README: {"claim": claim(every)}}
