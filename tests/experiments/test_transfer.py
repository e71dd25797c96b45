"""Transfer learning on molecules: training, tables and errors."""

import csv
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from helpers.scripts import ROOT, main_here, threads_for_processes
from rdkit import Chem
from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles
from torch_geometric.data import Batch
from torch_geometric.utils.smiles import from_smiles

from experiments.common import results
from experiments.common.tables import fill
from experiments.transfer import finetune, finetune_run, report, scaffold
from experiments.transfer import pretrain as program
from experiments.transfer.inputs import LabelledSet
from experiments.transfer.model import MASK, MaskedAtoms, MoleculeGIN, Tasks, encoder_of
from experiments.transfer.molecules import store
from experiments.transfer.smiles import synthetic

PRETRAIN = ("-m", "experiments.transfer.pretrain")
SMALL = ("--limit=24", "--batch-size=12", "--workers=1")
SCHEDULE = {"epochs": 2, "batch_size": 32}


@pytest.fixture
def threads(monkeypatch):
    """Threads in place of processes, which would import everything again."""
    threads_for_processes(monkeypatch, results)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """The molecules made in code, featurised once for all tests."""
    return tmp_path_factory.mktemp("molecules")


@pytest.fixture
def pretrain(threads, monkeypatch, cache):
    """Runs the program here."""

    def call(output, *arguments):
        given = (*SMALL, f"--cache={cache}", f"--output={output}", *arguments)
        main_here(monkeypatch, program, *given)

    return call


def tuned(dataset, row, values):
    pretraining = None if row == "no pre-training" else {"row": row}
    return [
        {
            "config": {"dataset": dataset, "pretraining": pretraining, "seed": seed, **SCHEDULE},
            "auc": {"valid": [1.0, 2.0, 2.0], "test": [0.0, value, 99.0]},
        }
        for seed, value in enumerate(values)
    ]


def test_killed_and_restarted_it_ends_with_the_same_weights(cache, tmp_path, pretrain):
    whole, stopped = tmp_path / "whole.pt", tmp_path / "stopped.pt"
    command = [sys.executable, *PRETRAIN, *SMALL, f"--cache={cache}", f"--output={stopped}"]
    process = subprocess.Popen([*command, "--epochs=400"], cwd=ROOT, start_new_session=True)
    while process.poll() is None and not stopped.exists():
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    done = len(torch.load(stopped, weights_only=True)["history"])
    assert 1 <= done < 400
    for path in (stopped, whole):
        pretrain(path, f"--epochs={done + 1}")
    assert len((tmp_path / "stopped.pt.jsonl").read_text().splitlines()) == 1
    first, second = (torch.load(path, weights_only=True) for path in (whole, stopped))
    assert [e["loss"] for e in first["history"]] == [e["loss"] for e in second["history"]]
    assert first["model"].keys() == second["model"].keys()
    assert all(torch.equal(first["model"][name], second["model"][name]) for name in first["model"])
    with pytest.raises(ValueError, match=r"is of another run, .*'lr': 0.001.* choose another"):
        pretrain(stopped, "--lr=0.1")


def test_two_processes_pretrain_together(cache, tmp_path):
    """InfoNCE first, after which prototypes are initialised from embeddings of both."""
    output = tmp_path / "recipe.pt"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    given = [
        "--row=PGCL, recommended",
        "--limit=32",
        *SMALL[1:],
        f"--cache={cache}",
        f"--output={output}",
    ]
    done = subprocess.run(
        [*launcher, *PRETRAIN, *given, "--epochs=4"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("PGCL, recommended, 32 molecules, 4 epochs") == 1
    config = torch.load(output, weights_only=True)["config"]
    assert (config["processes"], config["start_steps"]) == (2, [3])


def test_encoders_are_tuned_compared_and_predict(cache, tmp_path, pretrain, monkeypatch, capsys):
    encoder = tmp_path / "masked.pt"
    pretrain(encoder, "--epochs=1", "--row=attribute masking", "--amp")
    table = tmp_path / "mine.csv"
    with (cache / "synthetic.smi").open() as file:
        smiles = [line.strip() for line in file][::12]
    with table.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "smi", "an acid, or not"])
        writer.writerow([0, "no molecule", 1])
        writer.writerows([i, s, int(s.startswith("O"))] for i, s in enumerate(smiles, 1))
        writer.writerow([len(smiles) + 1])  # truncated
    given = (
        *(
            f"--csv={table}",
            "--smiles-column=smi",
            '--label-columns="an acid, or not"',
            "--seeds=2",
        ),
        *("--epochs=1", f"--cache={cache}", "--encoders", "none", str(encoder)),
        *(f"--output={tmp_path / 'runs.jsonl'}", f"--predictions={tmp_path / 'predicted'}"),
    )
    main_here(monkeypatch, finetune, *given)
    printed = capsys.readouterr().out
    predicted = (tmp_path / "predicted" / "mine-masked.csv").read_text()
    with pytest.raises(ValueError, match=r"--predictions: .*csv exists: choose another"):
        main_here(monkeypatch, finetune, *given)
    assert (tmp_path / "predicted" / "mine-masked.csv").read_text() == predicted
    assert "94 molecules, 2 invalid lines left out" in printed
    assert "| no pre-training | none | 2 | " in printed
    assert "| attribute masking, 24 molecules x 1 | masked | 2 | " in printed
    assert len((tmp_path / "runs.jsonl").read_text().splitlines()) == 4
    with (tmp_path / "predicted" / "mine-masked.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["row"]) for row in rows] == list(range(1, 95))
    assert {row["part"] for row in rows} == {"train", "valid", "test"}
    assert all(0 <= float(row["an acid, or not"]) <= 1 for row in rows)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--smiles-column=structure",), r"has no column 'structure'; it has smiles, toxic, safe"),
        (("--label-columns=toxic,strange",), r"has no column 'strange'"),
        (("--label-columns=safe",), r"column 'safe': labels must be 0 and 1, but it has only 1"),
        (("--label-columns=empty",), r"column 'empty': .* but it has nothing"),
        (("--label-columns=words",), r"line 3, column 'words': .* 0, 1 or empty, but it is 'yes'"),
        (("--label-columns=toxic",), r"leaves 0 molecules to validate, without a"),
        (("--encoders=nowhere.pt",), r"--encoders: nowhere.pt is not a file"),
        (("--encoders", "a/PGCL.pt", "b/PGCL.pt"), r"two of a/PGCL.pt, b/PGCL.pt have the same"),
        ((f"--encoders={__file__}",), r"test_transfer.py is not a file of pretrain.py: "),
    ],
)
def test_tables_that_cannot_be_used(threads, tmp_path, monkeypatch, capsys, arguments, message):
    table = tmp_path / "mine.csv"
    table.write_text(
        "smiles,toxic,safe,empty,words\nCCO,0,1,,0\nc1ccccc1,1,1,,yes\nCCC,1,1,,1\nCC,0,,,1\n"
    )
    given = (f"--csv={table}", f"--cache={tmp_path}", *arguments)
    with pytest.raises(ValueError, match=message):
        main_here(monkeypatch, finetune, *given)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, ("touch " + str(tmp_path / "owned"),)

    path = tmp_path / "evil.pt"
    torch.save({"config": Evil()}, path)
    with pytest.raises(ValueError, match=r"evil.pt is not a file of pretrain.py: Weights only"):
        encoder_of(path)
    assert not (tmp_path / "owned").exists()


def test_training_on_few_molecules(tmp_path):
    """Fewer than a batch."""
    smiles, answers = synthetic()
    source = tmp_path / "few.smi"
    source.write_text("\n".join(smiles[::28]))
    parts = np.arange(40) % 5 // 3
    parts[parts == 1] = [1, 2] * 8
    with ThreadPoolExecutor(1) as pool:
        folder = store(source, None, tmp_path, pool).folder
    data = LabelledSet(["acid"], folder, answers[::28, :1], "", parts, "cpu")
    config = {"seed": 0, "epochs": 1, "batch_size": 32, "lr": 1e-3, "dropout": 0.0}
    one, two = (finetune_run.run(config | {"epochs": epochs}, data, None) for epochs in (1, 2))
    for score in ("auc", "ap"):
        assert two[score]["test"][0] == one[score]["test"][0]
    predictions = tmp_path / "few-none.csv"
    untrained = finetune_run.run(config | {"lr": 0.0}, data, None, predictions)
    assert untrained["auc"] != one["auc"]
    assert len(predictions.read_text().splitlines()) == 41


def test_scaffolds_stay_together():
    smiles, _ = synthetic()
    parts = scaffold.split(smiles)
    assert np.bincount(parts).tolist() == [896, 96, 128]
    frames = [set(), set(), set()]
    for text, part in zip(smiles, parts, strict=True):
        frames[part].add(MurckoScaffoldSmiles(mol=Chem.MolFromSmiles(text)))
    assert not frames[0] & frames[1] | frames[0] & frames[2] | frames[1] & frames[2]
    assert (scaffold.split(smiles) == parts).all()


def test_unmeasured_labels_have_no_gradient():
    torch.manual_seed(0)
    model = Tasks(MoleculeGIN(), 3)
    graphs = [from_smiles(text) for text in ("CCO", "CCN", "c1ccccc1", "CC=O")]
    for graph, label in zip(graphs, (0.0, 1.0, 1.0, 0.0), strict=True):
        graph.y = torch.tensor([[label, torch.nan, 1 - label]])
    before = [head.clone() for head in model.head.weight]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finetune_run.train_epoch(model, [Batch.from_data_list(graphs)], optimizer)
    changed = [not torch.equal(*pair) for pair in zip(before, model.head.weight, strict=True)]
    assert changed == [True, False, True]


def test_elements_of_masked_atoms_are_predicted():
    torch.manual_seed(0)
    batch = Batch.from_data_list([from_smiles("CCO"), from_smiles("c1ccccc1N")])
    model = MaskedAtoms(MoleculeGIN(), fraction=1.0)
    model.eval()
    nodes = model.encoder.nodes(torch.full_like(batch.x, MASK), batch.edge_index, batch.edge_attr)
    probabilities = model.head(nodes).softmax(1)
    right = [probabilities[i, element].log() for i, element in enumerate(batch.x[:, 0])]
    assert model(batch).item() == pytest.approx(-torch.stack(right).mean().item(), rel=1e-5)
    model.mask.p = 0.0
    nothing = model(batch)
    nothing.backward()
    assert nothing == 0
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_the_page_has_the_tables_of_its_runs():
    pages = report.pages(*(list(results.read(path).values()) for path in report.RECORDS))
    assert {*pages} == {report.PAGE, report.CONCLUSIONS}
    for path, tables in pages.items():
        assert fill(path.read_text(), tables) == path.read_text()
    assert "<!-- transfer -->\n| pre-training | BBBP " in report.PAGE.read_text()


def test_report_compares_the_epochs_with_the_best_validation_score():
    runs = tuned("bace.csv", "no pre-training", [70, 80, 90]) + tuned("bace.csv", "PGCL", [72, 82])
    runs += tuned("muv.csv.gz", "no pre-training", [60]) + tuned("muv.csv.gz", "PGCL", [59])
    runs += tuned("bace.csv", "InfoNCE (GraphCL)", [80, 81, 82])
    runs += tuned("muv.csv.gz", "InfoNCE (GraphCL)", [61])
    runs += tuned("bace.csv", "attribute masking", [1])
    tables = report.tuned(runs)
    *_, none, masking, info_nce, pgcl = tables["transfer"].splitlines()
    # MUV lacks a row, so that means and ranks are of BACE alone.
    assert none == "| no pre-training | 80.0 ± 10.0 | 60.0 | 80.0 | 2.0 |"
    assert masking == "| attribute masking | 1.0 |  | 1.0 | 4.0 |"
    assert info_nce == "| InfoNCE (GraphCL) | 81.0 ± 1.0 | 61.0 | 81.0 | 1.0 |"
    assert pgcl == "| PGCL | 77.0 ± 7.1 | 59.0 | 77.0 | 3.0 |"
    # Paired by seed: 2 twice; two pairs have no interval. Nothing is said of a row without runs.
    lines = tables["transfer_differences"].splitlines()
    assert lines[3] == "| PGCL minus no pre-training | +2.0 (two seeds, no interval) | -1.0 |"
    assert len(lines) == 2 + 4
    other = tuned("bace.csv", "PGCL", [72])
    other[0]["config"]["epochs"] = 3
    with pytest.raises(ValueError, match=r"^BACE, PGCL: runs of two settings, .*3"):
        report.tuned(runs + other)


def test_report_of_pretraining_has_means_over_seeds():
    def run(row, seed, molecules, losses):
        config = {"row": row, "seed": seed, "molecules": molecules, "epochs": 2}
        history = [{"loss": loss, "molecules_per_second": 10 * loss} for loss in losses]
        return {"config": config, "history": history}

    runs = [run("PGCL", 0, 10, [4.0, 2.0]), run("PGCL", 1, 10, [8.0, 4.0])]
    runs += [run("attribute masking", 0, 10, [1.0, 1.0]), run("PGCL", 0, 99, [1.0, 1.0])]
    assert report.pretrained(runs).splitlines()[2:] == [
        "| PGCL | 99 | 2 | 1 | 1.00, 1.00 | 10 |",
        "| attribute masking | 10 | 2 | 1 | 1.00, 1.00 | 10 |",
        "| PGCL | 10 | 2 | 2 | 6.00, 3.00 | 45 |",
    ]
