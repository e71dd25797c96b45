"""Nodes of one graph: both losses see the same views, and the program runs and resumes."""

import numpy as np
import pytest
import torch
from helpers.graphs import ring_of_planetoid
from helpers.scripts import kept_here
from scipy import sparse
from torch_geometric.nn import GCNConv

from experiments.common import results
from experiments.nodes import __main__ as program
from experiments.nodes import data, report, train
from experiments.nodes.train import INFO_NCE, LOSSES, PGCL, SETTING, UNTRAINED

CONFIG = {"dataset": "Photo", "seed": 3, "batch": 32, "steps": 6, **SETTING}


@pytest.fixture
def root(tmp_path):
    """A folder with a small graph of three classes under Photo's name, in its raw layout."""
    random = np.random.default_rng(0)
    labels = np.arange(120) % 3
    same = labels[:, None] == labels
    parts = {"labels": labels}
    for name, chances in {"adj": 0.01 + 0.1 * same, "attr": np.full((120, 40), 0.05)}.items():
        matrix = sparse.csr_matrix(random.random(chances.shape) < chances, dtype=float)
        fields = ("data", "indices", "indptr", "shape")
        parts |= {f"{name}_{field}": getattr(matrix, field) for field in fields}
    folder = tmp_path / "sets" / "Photo" / "raw"
    folder.mkdir(parents=True)
    np.savez(folder / data.SETS["Photo"][2], **parts)
    return folder.parents[1]


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    return kept_here(program, results, monkeypatch, capsys, tmp_path)


def test_the_program_runs_and_resumes(root, script):
    given = ("--dataset=Photo", f"--root={root}", "--batch", "32", "64", "--steps=4", "--workers=1")
    printed, output = script(*given, "--seeds=3")
    lines = output.read_text().splitlines()
    assert len(lines) == 3 * (1 + 2 * 2)
    head, _, *rows = printed.splitlines()
    assert head.startswith("| set | seeds | untrained, 1 label per class | InfoNCE, 1 label per")
    assert [row[:28] for row in rows] == [f"| Photo, batches of {n} | 3 |" for n in (32, 64)]
    output.write_text("\n".join(lines[:-1]) + "\n")
    assert script(*given, "--seeds=3")[0] == printed
    assert output.read_text().splitlines()[:-1] == lines[:-1]


def test_the_encoder_is_two_layers_of_gcn_conv(root):
    x, edge_index, _ = data.load("Photo", root / "Photo" / "raw")
    features, visible = train.sparse_if_faster(x), torch.rand(x.shape[1]) < 0.7
    assert features.layout == torch.sparse_csr
    encoder, expected = train.GCN(x.shape[1]), x * visible
    for layer, bias in zip(encoder.layers, encoder.biases, strict=True):
        conv = GCNConv(layer.in_features, layer.out_features)
        conv.lin.weight, conv.bias = layer.weight, bias
        expected = conv(expected, edge_index).relu()
    torch.testing.assert_close(encoder(features, edge_index, visible), expected)
    torch.testing.assert_close(encoder(x, edge_index, visible), expected)


def test_both_losses_see_the_same_and_prototypes_are_initialised_at_half(root, monkeypatch):
    steps, initialised = [], []
    views_of, start = train.views_of, train.weighted_negatives
    monkeypatch.setattr(train, "RECENT", 100)
    monkeypatch.setattr(train, "views_of", lambda *args: steps.append(views_of(*args)) or steps[-1])

    def watched(config, projections):
        pgcl = start(config, projections)
        initialised.append((len(steps), projections, pgcl, pgcl.prototypes.weight.clone()))
        return pgcl

    monkeypatch.setattr(train, "weighted_negatives", watched)
    for loss in (INFO_NCE, PGCL):
        config = {**CONFIG, "loss": loss, **LOSSES[loss], "num_prototypes": 4}
        train.run(config, root / "Photo" / "raw")
    torch.testing.assert_close(steps[:6], steps[6:], rtol=0, atol=0)
    assert not torch.equal(steps[0][0], steps[1][0])
    [(step, projections, pgcl, prototypes)] = initialised
    assert step == 6 + 3
    assert projections.shape == (100, train.WIDTH)
    assert torch.equal(pgcl.prototypes.weight, prototypes)  # fixed from then on


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (["--dataset=../Photo"], "--dataset: invalid choice: '../Photo'"),
        (["--dataset=Photo", "--root=."], "--root . has no Photo: amazon_electronics_photo.npz is"),
        (["--dataset=Photo", "--steps=1"], "--steps: must be a whole number, 2 or more"),
    ],
)
def test_invalid_options_are_errors_of_a_line(script, capsys, given, wrong):
    with pytest.raises(SystemExit) as stopped:
        script(*given)
    assert wrong in f"{stopped.value} {capsys.readouterr().err}"


def test_missing_or_damaged_files_are_errors(tmp_path, monkeypatch):
    folder = ring_of_planetoid(tmp_path)
    monkeypatch.setitem(data.SETS, "Ring", (data.Planetoid, "Ring", "ind.ring.graph"))
    assert data.raw_folder("Ring", folder.parent, tmp_path) == folder
    assert data.load("Ring", folder)[0].norm(dim=1).max() == pytest.approx(1)
    (folder / "ind.ring.x").unlink()
    with pytest.raises(ValueError, match=r"Ring in .* cannot be read \(FileNotFound.*ind\.ring\.x"):
        data.load("Ring", folder)


def test_the_record_has_the_runs_of_the_command(monkeypatch):
    given = "nodes --dataset Photo CS --batch 512 2048 --seeds 10"
    monkeypatch.setattr("sys.argv", given.split())
    args = program.parse()
    configs = [config for name in args.dataset for config in program.configurations(args, name)]
    wanted = {results.key(config) for config in configs if config["loss"] != UNTRAINED}
    assert results.read(report.RUNS).keys() == wanted
    [tables] = report.pages().values()
    assert tables["nodes"].count(" | 10 | ") == 4
