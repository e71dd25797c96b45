"""Cells of the pages against the records, by lines that share nothing with the reports.

A difference with its sign turned, the wrong half or the wrong row would be another number.
"""

import itertools
import json
import re
from statistics import mean

import pytest
from helpers.scripts import ROOT

from experiments.common.tables import holm


def runs_of(file, **wanted):
    """Runs of a record by the values of their configuration."""
    lines = (ROOT / "experiments" / file).read_text().splitlines()
    runs = [json.loads(line) for line in lines]
    return [run for run in runs if all(run["config"].get(k) == v for k, v in wanted.items())]


def cell(page, marker, row, column):
    """The first number of a cell."""
    text = (ROOT / "docs" / page).read_text().partition(f"<!-- {marker} -->\n")[2]
    lines = [line.strip("|").split("|") for line in text.partition("\n\n")[0].splitlines()]
    head, *rows = ([part.strip(" *") for part in line] for line in lines if len(line) > 1)
    (found,) = [r[head.index(column)] for r in rows if r[0] == row]
    return float(re.match(r"[+-]?[\d.]+", found)[0])


def by_seed(runs, value, seeds):
    """Where a seed ran twice, the later run counts."""
    return {r["config"]["seed"]: value(r) for r in runs if r["config"]["seed"] in seeds}


def minus(ours, others):
    return mean([ours[seed] - others[seed] for seed in ours.keys() & others.keys()])


def one_shot(run):
    return run["held_out"]["labels_1"]


def test_few_labels():
    file, seeds = "few_labels/MSRC_21.jsonl", range(610, 620)
    of_pgcl = {"temperature": 0.5, "consistency_weight": 0.3, "num_prototypes": 10}
    pgcl = runs_of(file, row="PGCL", predictions="plain", **of_pgcl)
    info_nce = runs_of(file, row="InfoNCE", temperature=1.0)
    found = minus(*(by_seed(of, one_shot, seeds) for of in (pgcl, info_nce)))
    where = "results.md", "few labels", "MSRC_21, 1 label per class", "PGCL minus InfoNCE"
    assert cell(*where) == pytest.approx(found, abs=0.051)
    assert found < -10


def test_false_negatives():
    file, seeds = "false_negatives/MSRC_9-masks.jsonl", range(410, 420)
    of_rows = []
    for row in ("oracle", "InfoNCE", "PGCL"):
        means = {}
        for tau in (0.2, 0.5, 1.0, 2.0, 4.0):
            runs = runs_of(file, row=row, temperature=tau, **{"trained on": "half"})
            means[tau] = mean(by_seed(runs, one_shot, range(400, 405)).values())
        best = max(means, key=means.get)
        runs = runs_of(file, row=row, temperature=best, **{"trained on": "half"})
        of_rows.append(by_seed(runs, one_shot, seeds))
    oracle, info_nce, pgcl = of_rows
    for name, row in (("oracle", oracle), ("PGCL", pgcl)):
        shown = cell("results.md", "at best", "MSRC_9", f"{name} minus InfoNCE")
        assert shown == pytest.approx(minus(row, info_nce), abs=0.051)
    assert minus(pgcl, info_nce) < -3


def test_clusters():
    """NMI by k-means: each loss in the setting that is best over five sets."""
    sets = {"digits": 10, "MSRC_9": 8, "MUTAG": 2, "PTC_MR": 2, "PROTEINS": 2}
    every = runs_of("clusters/results.jsonl")

    def nmi(name, row, tau, space, half, seeds):
        wanted = {"dataset": name, "row": row, "temperature": tau}
        if row == "PGCL":
            wanted["num_prototypes"] = 10
        runs = [r for r in every if wanted.items() <= r["config"].items()]
        return by_seed(runs, lambda run: run["clusters"][space][half]["nmi"], seeds)

    of_rows = []
    for row in ("PGCL", "InfoNCE"):
        spaces = "embeddings", "standardised", "projections"
        settings = {
            (tau, space): [
                value
                for name in sets
                for value in nmi(name, row, tau, space, "development", range(110, 114)).values()
            ]
            for tau, space in itertools.product((0.2, 0.5, 1.0, 2.0, 4.0), spaces)
        }
        settings = {setting: values for setting, values in settings.items() if values}
        best = max(settings, key=lambda setting: mean(settings[setting]))
        of_rows.append(nmi("MSRC_9", row, *best, "held_out", range(200, 220)))
    shown = cell("results.md", "clusters", "MSRC_9", "PGCL, k-means minus InfoNCE, k-means")
    assert shown == pytest.approx(minus(*of_rows), abs=0.051)
    assert shown < -4


def test_table_1():
    """Of each loss the temperature with the best mean of three measures, by two seeds."""
    of_rows = []
    for row in ("PGCL", "InfoNCE"):
        runs = runs_of("tu_sets/results.jsonl", dataset="PTC_MR", row=row)
        runs = [r for r in runs if r["config"].get("num_prototypes", 10) == 10]
        runs = [r for r in runs if r["config"]["batch_size"] == 128]
        means = {}
        for tau in (0.2, 0.5, 1.0, 2.0):
            at = [r for r in runs if r["config"]["temperature"] == tau]
            at = [r for r in at if r["config"]["seed"] in (100, 101)]
            means[tau] = mean(r[m] for r in at for m in ("svm", "labels_5", "labels_1"))
        best = max(means, key=means.get)
        at = [r for r in runs if r["config"]["temperature"] == best]
        of_rows.append(by_seed(at, lambda run: run["svm"], range(10)))
    shown = cell("published_code.md", "table 1", "PTC_MR", "PGCL minus InfoNCE")
    assert shown == pytest.approx(minus(*of_rows), abs=0.051)
    assert shown < -2


def test_nodes():
    file, column = "nodes/grace.jsonl", "PGCLLoss(dim), minus InfoNCE"
    of_rows = [
        by_seed(
            runs_of(file, dataset="CiteSeer", loss=loss),
            lambda run: run["probe after 200"],
            range(2, 12),
        )
        for loss in ("PGCLLoss(dim)", "InfoNCE")
    ]
    shown = cell("results.md", "grace", "CiteSeer, 200 epochs", column)
    assert shown == pytest.approx(minus(*of_rows), abs=0.051)
    assert shown < -5


def test_graphcl():
    wanted = {"script": "GraphCL", "dataset": "MUTAG", "dtype": "float32"}
    own, *others = (
        by_seed(
            runs_of("graphcl/record.jsonl", row=row, **wanted),
            lambda run: run["accuracy"],
            range(10),
        )
        for row in ("its own loss", "InfoNCE", "PGCLLoss")
    )
    for row, of_row in zip(("InfoNCE", "PGCLLoss"), others, strict=True):
        shown = cell("swap.md", "graphcl", "GraphCL, MUTAG", f"{row} minus its own loss")
        assert shown == pytest.approx(minus(of_row, own), abs=0.051)


def test_defaults():
    """The mean distance of InfoNCE at temperature 1 from its best of five temperatures."""
    distances, temperatures = [], (0.1, 0.2, 0.5, 1.0, 2.0)
    for name, epochs in (("digits", 20), ("MSRC_9", 60), ("ENZYMES", 40)):
        for measure in ("labels_1", "all"):
            means = {}
            for tau in temperatures:
                wanted = {"row": "InfoNCE", "temperature": tau, "epochs": epochs}
                runs = runs_of(f"few_labels/{name}.jsonl", **wanted)
                values = by_seed(runs, lambda r, m=measure: r["development"][m], (600, 601))
                means[tau] = mean(values.values())
            distances.append(max(means.values()) - means[1.0])
    for name, measure in itertools.product(
        ("Cora", "Photo"), ("1 label after 70", "probe after 70")
    ):
        means = {}
        for tau in temperatures:
            runs = runs_of("nodes/defaults.jsonl", dataset=name, loss=f"InfoNCE, tau {tau:g}")
            means[tau] = mean(by_seed(runs, lambda r, m=measure: r[m], (600, 601)).values())
        distances.append(max(means.values()) - means[1.0])
    shown = cell("choosing.md", "defaults", "InfoNCE, tau 1", "development sets")
    assert shown == pytest.approx(mean(distances), abs=0.051)


def test_holm_stops_at_the_first_that_is_not_significant():
    assert holm({"a": 0.01, "b": 0.02, "c": 0.03}) == {"a", "b", "c"}
    assert holm({"a": 0.016, "b": 0.026, "c": 0.001, "d": 0.9}) == {"a", "c"}
    assert holm({"a": 0.02, "b": 0.03, "c": 0.049}) == set()


def test_domains():
    """The settings of the sets that choose, and the differences on the set that does not."""
    file = "nodes/domains.jsonl"

    def best(row, *spaces):
        found = {}
        for run in runs_of(file, row=row):
            config = run["config"]
            if config["seed"] in (100, 101, 102):
                options = [config.get(x) for x in ("temperature", "balance_predictions", "warm_up")]
                for space in spaces:
                    values = found.setdefault((space, *options), [])
                    values.append(run["clusters"][space]["nmi"])
        assert all(len(values) == 6 for values in found.values())  # of two sets
        return max(found, key=lambda setting: mean(found[setting]))

    def of_photo(row, setting, **wanted):
        space, temperature, balanced, warm_up = setting
        more = {"balance_predictions": balanced, "warm_up": warm_up} if row == "prototypes" else {}
        runs = runs_of(file, dataset="Photo", row=row, temperature=temperature, **more, **wanted)
        return by_seed(runs, lambda run: run["clusters"][space]["nmi"], range(10))

    ours = best("prototypes", "assign")
    assign = of_photo("prototypes", ours, num_prototypes=8)
    kmeans = of_photo("prototypes", ("projections", *ours[1:]), num_prototypes=8)
    setting = best("InfoNCE", "embeddings", "projections")
    assert len(assign) == 10
    for column, other in (
        ("minus InfoNCE, k-means", of_photo("InfoNCE", setting)),
        ("minus k-means on the projections", kmeans),
    ):
        shown = cell("prototypes.md", "domains", "Photo", column)
        assert shown == pytest.approx(minus(assign, other), abs=0.051)

    def without_head(row, space, temperature):
        wanted = {"dataset": "Cora", "row": row, "temperature": temperature, "head": False}
        value = {
            run["config"]["seed"]: run["clusters"][space]["nmi"] for run in runs_of(file, **wanted)
        }
        return {seed: nmi for seed, nmi in value.items() if seed in range(300, 310)}

    found = [without_head("prototypes", "assign", ours[1])]
    found.append(without_head("InfoNCE", "embeddings", setting[1]))
    assert len(found[0]) == len(found[1]) == 10
    shown = cell("prototypes.md", "domains again", "Cora", "minus InfoNCE, k-means")
    assert shown == pytest.approx(minus(*found), abs=0.051)
