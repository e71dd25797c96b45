"""The synthetic grid: its runs, its page, what is compared."""

import shutil

import numpy as np
import pytest
from helpers.scripts import ROOT, main_here, threads_for_processes

from experiments.common import results
from experiments.common.losses import FirstInfoNCE
from experiments.common.rows import INFO_NCE
from experiments.synthetic import __main__ as program
from experiments.synthetic import clusters, settings
from pgcl_losses import SinkhornPrototypes

FAMILY = {
    "num_prototypes": (10, 20),
    "negative_ranks": (2, 8),
    "soft_clusters": True,
    "start_from_rows": True,
    "lead_epochs": 1,
}


def test_pages_and_pictures_are_made_from_the_committed_runs(tmp_path, monkeypatch):
    """Nothing is missing in the file of runs, and page and pictures are those of its runs."""
    kept = program.RUNS
    missing = {results.key(config) for config in settings.wanted(3)} - {*results.read(kept)}
    assert not missing
    page, images, output = (tmp_path / name for name in ("where_it_helps.md", "images", "runs"))
    images.mkdir()
    shutil.copy(ROOT / "docs" / page.name, page)
    shutil.copy(kept, output)
    monkeypatch.setattr(program, "DOCS", tmp_path)
    monkeypatch.setattr(program, "RUNS", output)
    threads_for_processes(monkeypatch, results)
    main_here(monkeypatch, program, "--workers=1")
    assert page.read_text() == (ROOT / "docs" / page.name).read_text()
    assert output.read_bytes() == kept.read_bytes()
    drawn = {path.name for path in images.iterdir()}
    assert drawn == {f"synthetic-{name}.png" for name in program.PICTURES}
    for name in drawn:
        assert f"(images/{name})" in page.read_text()


@pytest.mark.filterwarnings("ignore:PGCLLoss. consistency_weight")  # 0 in the first epoch
def test_runs():
    rows = (INFO_NCE, "PGCL", "consistency alone")
    config = {**clusters.DEFAULTS, "epochs": 2, "warm_up_epochs": 2, "duplicates": 8, "seed": 0}
    runs = [clusters.run({**config, "row": row}) for row in rows]
    assert all(40 < run["accuracy"] < 100 for run in runs)
    assert all(0 < run["effective_negatives"] <= 1 for run in runs)
    fractions = [run["gradient_share"] for run in runs]
    assert fractions[0] == 0 < fractions[1] < fractions[2] == 1
    del runs[1]["seconds"]
    again = clusters.run(runs[1]["config"])
    assert again == {**runs[1], "seconds": again["seconds"]}


def test_a_run_with_all_options():
    config = {**clusters.DEFAULTS, **FAMILY, "epochs": 3, "row": "PGCL", "seed": 0}
    first, again = (clusters.run(config) for _ in range(2))
    assert first == {**again, "seconds": first["seconds"]}
    assert 40 < first["accuracy"] < 100
    assert 0 < first["agreement"] < 1


def test_initial_data_and_encoder_do_not_depend_on_the_loss():
    config = {**clusters.DEFAULTS, "epochs": 0, "seed": 0}
    losses = ({"row": INFO_NCE}, {"row": "PGCL"}, {"row": "PGCL", **FAMILY, "lead_epochs": 0})
    accuracies = {clusters.run({**config, **loss})["accuracy"] for loss in losses}
    assert len(accuracies) == 1


def test_options_reach_the_loss():
    config = {**clusters.DEFAULTS, **FAMILY, "row": "PGCL"}
    pgcl = clusters.build(config)
    for name in ("num_prototypes", "negative_ranks", "soft_clusters"):
        assert getattr(pgcl, name) == config[name]
    steps = clusters.TRAIN // config["batch_size"]
    assert clusters.build(config | {"freeze_epochs": 2}).freeze_steps == 2 * steps


@pytest.mark.parametrize(
    ("options", "starts"),
    [
        ({}, []),
        ({"lead_epochs": 1}, [8]),
        ({"start_from_rows": True}, [0]),
        ({"start_from_rows": True, "lead_epochs": 1}, [0, 8]),
    ],
)
def test_prototypes_are_initialised_from_embeddings(monkeypatch, options, starts):
    """Before training and after InfoNCE, from one embedding of each sample, or the last ones."""
    calls = []
    start = SinkhornPrototypes.start_from_

    forwards, forward = [], FirstInfoNCE.next_loss

    def spy(self, embeddings):
        calls.append((len(forwards), len(embeddings)))
        return start(self, embeddings)

    def counted(self, views):
        loss = forward(self, views)
        forwards.append(self)
        return loss

    monkeypatch.setattr(FirstInfoNCE, "next_loss", counted)
    monkeypatch.setattr(SinkhornPrototypes, "start_from_", spy)
    config = {**clusters.DEFAULTS, "batch_size": 512, "epochs": 2, "row": "PGCL", "seed": 0}
    clusters.run({**config, **options})
    assert calls == [(step, clusters.TRAIN) for step in starts]


def test_info_nce_ignores_options_of_pgcl():
    plain = {"row": INFO_NCE, "classes": 10}
    assert settings.complete(plain | FAMILY) == settings.complete(plain)


def test_differences_are_from_info_nce_in_the_same_setting():
    accuracies = {
        (4, INFO_NCE, 10): 90.0,
        (4, "PGCL", 20): 92.0,
        (40, INFO_NCE, 10): 50.0,
        (40, "PGCL", 20): 47.0,
    }
    runs = settings.Grid(
        {
            "config": {
                **clusters.DEFAULTS,
                "classes": classes,
                "row": row,
                "num_prototypes": prototypes,
                "seed": seed,
            },
            "accuracy": accuracy + seed,
        }
        for (classes, row, prototypes), accuracy in accuracies.items()
        for seed in range(2)
    )
    assert runs.mean("accuracy", classes=4, num_prototypes=20) == 92.5
    assert runs.gain(classes=4, num_prototypes=20) == 2.0
    assert runs.gain(classes=40, num_prototypes=20) == -3.0
    assert np.isnan(runs.gain(classes=10, num_prototypes=20))
