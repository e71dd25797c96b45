"""Transfer learning on molecules: one run of all three programs, and what they are made of."""

import gzip
import json
import os
import re

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
from experiments.molecules import finetune, molecules, pretrain, probe, scaffold
from experiments.molecules.model import MASK, ROWS, MaskedAtoms, MoleculeGIN, checkpoint, encoder_of
from experiments.molecules.ranking import roc_auc
from experiments.molecules.report import at_best_epoch

RINGS = ("C1CC1", "C1CCC1", "C1CCCC1", "C1CCCCC1", "C1CCNC1", "C1CCNCC1", "C1CCSC1", "C1CCOC1")
SMILES = [f"{'C' * n}{ring}{end}" for n in range(1, 6) for ring in RINGS for end in ("", "O")]


@pytest.fixture
def table(tmp_path):
    """81 molecules of 9 scaffolds, and an invalid line."""
    lines = [f'{text},{int("O" in text)},{n % 3 or ""},"a, b"' for n, text in enumerate(SMILES)]
    path = tmp_path / "mine.csv"
    header = 'smi,"an acid, or not",two,words'
    path.write_text("\n".join([header, "no molecule,1,,", *lines, "CCO,1"]) + "\n")
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
    run = json.loads(files[2].with_suffix(".json").read_text())
    assert run["config"].items() >= {"row": "PGCL", "molecules": 80, "seed": 3, "epochs": 1}.items()

    given = (f"--csv={table}", "--smiles-column=smi", '--label-columns="an acid, or not"')
    given += ("--workers=1", "--encoders", "none", *map(str, files))
    output = tmp_path / "tuned.jsonl"
    tune = (*given, "--epochs=2", "--batch-size=16", "--seeds=2", f"--output={output}")
    for _ in range(2):
        main_here(monkeypatch, finetune, *tune)
    tuned = [json.loads(line) for line in output.read_text().splitlines()]
    assert len(tuned) == 4 * 2  # once each
    assert tuned[-1]["config"]["pretraining"] == run["config"]
    assert all(len(run["auc"][part]) == 2 for run in tuned for part in ("valid", "test"))
    assert f"| mine.csv | {files[2]} | " in capsys.readouterr().out

    monkeypatch.setitem(probe.SETTING, "few", [4, 1000])
    output = tmp_path / "probed.jsonl"
    main_here(monkeypatch, probe, *given, "--seeds=2", f"--output={output}")
    probed = list(results.read(output).values())
    assert [run["config"]["seed"] for run in probed] == [0, 1, 3, 3, 3]
    assert all(run["auc"]["1000"] is None and 0 <= run["auc"]["4"] <= 100 for run in probed)
    assert "| mine.csv | PGCL, 80 molecules x 1 | 1 | " in capsys.readouterr().out


def test_a_stopped_pretraining_ends_with_the_same_weights(pretrained):
    files = [pretrained("whole", "--epochs=2")]
    files += [pretrained("stopped", f"--epochs={epochs}") for epochs in (1, 2)]
    whole, _, stopped = (checkpoint(file)["model"] for file in files)
    assert all(torch.equal(whole[name], stopped[name]) for name in whole)
    with pytest.raises(ValueError, match=r"--output: .*stopped.pt is of another run, .*'lr'"):
        pretrained("stopped", "--lr=0.1")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--smiles-column=A",), r"--smiles-column: .* has no column 'A', it has .'smi', 'an"),
        ((), r"line 3, column 'words': a label must be 0, 1 or empty, .* --label-columns names"),
        (("--label-columns=empty",), r"no task has both classes among the 61 molecules of the"),
        (("--smiles-column=words",), r"mine.csv: 82 of 82 lines are not molecules, the first is"),
        (("--encoders=nowhere.pt",), r"argument --encoders: must be 'none' or an existing file"),
        ((f"--encoders={__file__}",), r"test_transfer.py is not a file of experiments.molecules"),
    ],
)
def test_bad_input(table, monkeypatch, capsys, arguments, message):
    table.write_text(table.read_text().replace("two,words", "two,words,empty"))
    with pytest.raises((ValueError, SystemExit)) as error:
        main_here(monkeypatch, finetune, f"--csv={table}", "--smiles-column=smi", *arguments)
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
    parts = scaffold.split(smiles)
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
    with pytest.raises(ValueError, match=r"logits are nan, as training has diverged: .* --lr"):
        roc_auc(logits * np.nan, labels)
    assert at_best_epoch({"auc": {"valid": [1.0, 2.0, 2.0], "test": [7.0, 8.0, 9.0]}}) == 8.0


def test_unmeasured_labels_have_no_gradient():
    model = torch.nn.Sequential(MoleculeGIN(), torch.nn.Linear(300, 3))
    graphs = [molecules.graph_of(text) for text in ("CCO", "CCN", "c1ccccc1", "CC=O")]
    for graph, label in zip(graphs, (0.0, 1.0, 1.0, 0.0), strict=True):
        graph.y = torch.tensor([[label, torch.nan, 1 - label]])
    before = model[1].weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    finetune.train_epoch(model, [Batch.from_data_list(graphs)], optimizer)
    assert (model[1].weight != before).any(1).tolist() == [True, False, True]


def test_elements_of_masked_atoms_are_predicted():
    batch = Batch.from_data_list([molecules.graph_of("CCO"), molecules.graph_of("c1ccccc1N")])
    model = MaskedAtoms(MoleculeGIN(), fraction=1.0).eval()
    masked = torch.full_like(batch.x, MASK)
    nodes = model.encoder.nodes(masked, batch.edge_index, batch.edge_attr)
    logs = model.head(nodes).log_softmax(1)[range(batch.num_nodes), batch.x[:, 0].long()]
    assert model(batch).item() == pytest.approx(-logs.mean().item(), rel=1e-5)
    model.mask.p = 0.0
    assert model(batch) == 0


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
