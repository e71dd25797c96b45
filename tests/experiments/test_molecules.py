"""Transfer learning on molecules: one run of all three programs, and what they are made of."""

import gzip
import json
import os
import re
from functools import partial

import numpy as np
import pytest
import torch
from helpers.scripts import main_here
from rdkit import Chem
from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles
from sklearn.metrics import roc_auc_score
from sklearn.preprocessing import normalize
from torch_geometric.data import Batch

from experiments.common import results
from experiments.molecules import data, finetune, pretrain, probe
from experiments.molecules.data import roc_auc
from experiments.molecules.model import ROWS, MoleculeGIN, checkpoint, encoder_of, train_epoch

RINGS = ("C1CC1", "C1CCC1", "C1CCCC1", "C1CCCCC1", "C1CCNC1", "C1CCNCC1", "C1CCSC1", "C1CCOC1")
SMILES = [f"{'C' * n}{ring}{end}" for n in range(1, 6) for ring in RINGS for end in ("", "O")]


@pytest.fixture
def table(tmp_path):
    """81 molecules of 9 scaffolds, and an invalid line."""
    lines = [f"{text},{int('O' in text)},{n % 3 and 1}" for n, text in enumerate(SMILES)]
    path = tmp_path / "mine.csv"
    header = 'smiles,"an acid, or not",two'
    path.write_text("\n".join([header, "no molecule,1,", *lines, "CCO,1"]) + "\n")
    return path


@pytest.fixture
def pretrained(monkeypatch, tmp_path):
    """Pre-trains on the molecules, in four batches an epoch, and returns the file."""
    smiles = tmp_path / "smiles.txt.gz"
    smiles.write_bytes(gzip.compress("\n".join([*SMILES, "", "C unused"]).encode()))

    def call(name, *arguments):
        path = tmp_path / f"{name}.pt"
        given = (f"--smiles={smiles}", "--limit=81", "--batch-size=20", f"--output={path}")
        main_here(monkeypatch, pretrain, *given, *arguments)
        return path

    return call


def test_encoders_are_pretrained_tuned_and_probed(pretrained, table, tmp_path, monkeypatch, capsys):
    files = [pretrained(f"{row[:4]}-3", f"--row={row}", "--epochs=1", "--seed=3") for row in ROWS]
    config = checkpoint(files[1])["config"]
    assert config.items() >= {"row": "PGCL", "molecules": 80, "seed": 3, "epochs": 1}.items()

    given = (f"--csv={table}", "--workers=1", "--encoders", "none", *map(str, files))
    output = tmp_path / "tuned.jsonl"
    tune = (*given, "--epochs=2", "--batch-size=16", "--seeds=2", f"--output={output}")
    for _ in range(2):
        main_here(monkeypatch, finetune, *tune)
    tuned = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(tuned) == 3 * 2  # once each
    assert tuned[-1]["config"]["pretraining"] == config
    assert all(len(run["auc"][part]) == 2 for run in tuned for part in ("valid", "test"))
    assert f"| mine.csv | {files[1]} | " in capsys.readouterr().out

    monkeypatch.setitem(probe.SETTING, "few", [4, 1000])
    output = tmp_path / "probed.jsonl"
    main_here(monkeypatch, probe, *given, "--seeds=2", f"--output={output}")
    probed = list(results.read(output).values())
    assert [run["config"]["seed"] for run in probed] == [0, 1, 3, 3]
    assert all(run["auc"]["1000"] is None and 0 <= run["auc"]["4"] <= 100 for run in probed)
    assert "| mine.csv | PGCL, 80 molecules x 1 | 1 | " in capsys.readouterr().out


def test_pretraining_depends_on_its_seed_alone_and_overwrites_nothing(pretrained):
    encoders = [checkpoint(pretrained(name))["encoder"] for name in ("one", "other")]
    assert all(torch.equal(weights, encoders[1][name]) for name, weights in encoders[0].items())
    with pytest.raises(ValueError, match=r"--output: .*one.pt is there already"):
        pretrained("one")


@pytest.mark.parametrize(
    ("header", "encoder", "message"),
    [
        ("smi,a,b", "none", r"mine.csv has no column smiles or mol, it has .'smi', 'a', 'b'"),
        ("a,smiles,b", "none", r"mine.csv: 8\d of 82 lines are not molecules, the first is"),
        ("smiles,a,b\nCC,x,", "none", r"line 2, column 'a': a label must be 0, 1 or empty, but it"),
        ("smiles", "none", r"no task has both classes among the 61 molecules of the training part"),
        ("smiles,a,b", "nowhere.pt", r"argument --encoders: must be 'none' or an existing file"),
        ("smiles,a,b", __file__, r"test_molecules.py is not a file of experiments.molecules"),
    ],
)
def test_bad_input(table, monkeypatch, capsys, header, encoder, message):
    table.write_text("\n".join([header, *table.read_text().splitlines()[1:]]))
    with pytest.raises((ValueError, SystemExit)) as error:
        main_here(monkeypatch, finetune, f"--csv={table}", f"--encoders={encoder}")
    assert re.search(message, capsys.readouterr().err + str(error.value))


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'owned'}",)

    torch.save({"config": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(ValueError, match=r"evil.pt is not a file of .*pretrain: Weights only"):
        encoder_of(tmp_path / "evil.pt")
    assert not (tmp_path / "owned").exists()


def test_scaffold_split():
    """Against a literal one: groups in order, each to the first part that has room."""
    smiles = np.random.default_rng(0).choice(SMILES, 60).tolist()
    groups = {}
    for index, text in enumerate(smiles):
        frame = MurckoScaffoldSmiles(mol=Chem.MolFromSmiles(text), includeChirality=True)
        groups.setdefault(frame, []).append(index)
    train, valid, test = [], [], []
    for group in sorted(groups.values(), key=lambda group: (-len(group), -group[0])):
        if len(train) + len(group) > 48:
            (test if len(train) + len(valid) + len(group) > 54 else valid).extend(group)
        else:
            train.extend(group)
    parts = data.split(smiles)
    for number, part in enumerate((train, valid, test)):
        assert sorted(part) == np.flatnonzero(parts == number).tolist()


def test_roc_auc():
    random = np.random.default_rng(0)
    logits = random.normal(size=(40, 4)).round(1)  # with ties
    labels = random.choice([0, 1, np.nan], size=(40, 4))
    labels[labels[:, 2] == 0, 2] = np.nan  # a class alone: left out
    known = ~np.isnan(labels)
    scores = [roc_auc_score(labels[known[:, t], t], logits[known[:, t], t]) for t in (0, 1, 3)]
    assert roc_auc(logits, labels) == pytest.approx(100 * np.mean(scores))
    with pytest.raises(ValueError, match=r"logits are nan, as training has diverged"):
        roc_auc(logits * np.nan, labels)
    assert finetune.at_best_epoch({"valid": [1.0, 2.0, 2.0], "test": [7.0, 8.0, 9.0]}) == 8.0


def test_unmeasured_labels_have_no_gradient():
    model = torch.nn.Sequential(MoleculeGIN(), torch.nn.Linear(300, 3))
    graphs = [data.graph_of(text) for text in ("CCO", "CCN", "c1ccccc1", "CC=O")]
    for graph, label in zip(graphs, (0.0, 1.0, 1.0, 0.0), strict=True):
        graph.y = torch.tensor([[label, torch.nan, 1 - label]])
    before = model[1].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of = partial(finetune.loss_of_labels, model)
    train_epoch(loss_of, [Batch.from_data_list(graphs)], optimizer, "cpu")
    assert (model[1].weight != before).any(1).tolist() == [True, False, True]


def test_the_probe_of_all_labels_chooses_its_strength_by_validation():
    random = np.random.default_rng(0)
    z = normalize(random.normal(size=(300, 8)))
    labels = (z @ random.normal(size=(8, 3)) > 0).astype(float)
    train, valid, test = ((z[part], labels[part]) for part in np.split(np.arange(300), [180, 240]))
    weak, best = (probe.all_labels(train, valid, test, of) for of in ([1e-6], [1e-6, 100.0]))
    few = [probe.few_labels(train, test, count, draws=8, seed=0) for count in (10, 100)]
    assert 60 < few[0] < few[1] < best
    turned = valid[0], 1 - valid[1]
    assert probe.all_labels(train, turned, test, [1e-6, 100.0]) == weak < best
