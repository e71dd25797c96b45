"""The map of planted classes: its runs, its page, what is compared."""

import shutil

import numpy as np
from helpers.scripts import ROOT, main_here, threads_for_processes

from experiments.map import __main__ as program
from experiments.map import places, planted
from experiments.shelf import results
from experiments.shelf.rows import INFO_NCE


def test_the_map_is_drawn_from_its_runs(tmp_path, monkeypatch):
    """Nothing is missing in the file of runs, and page and pictures are those of its runs."""
    kept = program.RUNS
    missing = {results.key(config) for config in places.wanted(3)} - {*results.read(kept)}
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
    assert drawn == {"map-grid.png", "map-knobs.png", "map-rule.png"}
    for name in drawn:
        assert f"(images/{name})" in page.read_text()


def test_runs_of_the_map():
    rows = (INFO_NCE, "PGCL", "consistency alone")
    config = {**planted.KNOBS, "epochs": 2, "warm_up_epochs": 2, "duplicates": 8, "seed": 0}
    runs = [planted.run({**config, "row": row}) for row in rows]
    assert all(40 < run["accuracy"] < 100 for run in runs)
    assert all(0 < run["effective_negatives"] <= 1 for run in runs)
    shares = [run["gradient_share"] for run in runs]
    assert shares[0] == 0 < shares[1] < shares[2] == 1
    del runs[1]["seconds"]
    again = planted.run(runs[1]["config"])
    assert again == {**runs[1], "seconds": again["seconds"]}


def test_gains_are_over_info_nce_at_the_same_place():
    accuracies = {
        (4, INFO_NCE, 10): 90.0,
        (4, "PGCL", 20): 92.0,
        (40, INFO_NCE, 10): 50.0,
        (40, "PGCL", 20): 47.0,
    }
    runs = places.Map(
        {
            "config": {
                **planted.KNOBS,
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
