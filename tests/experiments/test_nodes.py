"""Nodes of one graph: both losses see the same views, and the program runs and resumes."""

import copy
import pickle

import numpy as np
import pytest
import torch
from helpers.node_sets import write_photo
from helpers.scripts import main_here
from scipy import sparse
from torch_geometric.nn import GCNConv

from experiments.common import results
from experiments.nodes import __main__ as program
from experiments.nodes import data, domains, grace, train
from experiments.nodes.train import INFO_NCE, LOSSES, PGCL, SETTING

CONFIG = {"dataset": "Photo", "seed": 3, "batch": 32, "steps": 6, **SETTING}


@pytest.fixture
def root(tmp_path):
    """A folder with a small graph of three classes under Photo's name, in its raw layout."""
    folder = tmp_path / "sets" / "Photo" / "raw"
    write_photo(folder, num_nodes=120, num_classes=3)
    return folder.parents[1]


def test_the_program_runs_and_resumes(root, tmp_path, monkeypatch, capsys):
    output = tmp_path / "runs.jsonl"
    given = ["--dataset=Photo", f"--root={root}", "--batch", "32", "64", "--steps=4", "--workers=1"]
    given += ["--seeds=3", f"--output={output}"]
    main_here(monkeypatch, program, *given)
    lines, printed = output.read_text().splitlines(), capsys.readouterr().out
    assert len(lines) == 3 * (1 + 2 * 2)
    _, _, *rows = printed.splitlines()
    assert [row[:28] for row in rows] == [f"| Photo, batches of {n} | 3 |" for n in (32, 64)]
    output.write_text("\n".join(lines[:-1]) + "\n")
    main_here(monkeypatch, program, *given)
    assert capsys.readouterr().out.endswith(printed)
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
    for layout in (features, x):
        torch.testing.assert_close(encoder(layout, edge_index, visible), expected)


@pytest.mark.parametrize("loss", [INFO_NCE, PGCL])
def test_another_device_trains_the_same(loss, root):
    """On a CPU by another name."""
    config = {**CONFIG, "loss": loss, **LOSSES[loss], "num_prototypes": 4}
    x, edge_index, _ = data.load("Photo", root / "Photo" / "raw")
    trained = []
    for device in ({}, {"device": "cpu:0"}):
        torch.manual_seed(0)
        encoder = train.GCN(x.shape[1])
        train.train({**config, **device}, encoder, train.sparse_if_faster(x), edge_index)
        trained.append(encoder.state_dict())
    torch.testing.assert_close(*trained, rtol=1e-3, atol=1e-4)


def test_both_losses_see_the_same_and_prototypes_are_initialised_at_half(root, monkeypatch):
    steps, initialised = [], []
    views_of, start = train.views_of, train.weighted_negatives

    def watched(config, projections):
        initialised.append((len(steps), len(projections)))
        return start(config, projections)

    monkeypatch.setattr(train, "RECENT", 100)
    monkeypatch.setattr(train, "views_of", lambda *args: steps.append(views_of(*args)) or steps[-1])
    monkeypatch.setattr(train, "weighted_negatives", watched)
    for loss in (INFO_NCE, PGCL):
        config = {**CONFIG, "loss": loss, **LOSSES[loss], "num_prototypes": 4}
        train.run(config, root / "Photo" / "raw")
    torch.testing.assert_close(steps[:6], steps[6:], rtol=0, atol=0)
    assert not torch.equal(steps[0][0], steps[1][0])
    assert initialised == [(6 + 3, 100)]


def test_graces_loop_trains_all_losses_from_the_same_weights_on_the_same_views(
    root, tmp_path, monkeypatch, capsys
):
    steps, encoders = [], []
    views_of, gcn = grace.views_of, grace.GCN
    monkeypatch.setattr(grace, "views_of", lambda *args: steps.append(views_of(*args)) or steps[-1])

    def encoder_of(*sizes):
        encoder = gcn(*sizes)
        encoders.append([copy.deepcopy(encoder.state_dict()), encoder])
        return encoder

    monkeypatch.setattr(grace, "GCN", encoder_of)
    monkeypatch.setattr(
        results, "complete", lambda path, jobs, run, workers: [run(*j) for j in jobs]
    )
    given = ["--dataset=Photo", f"--root={root}", "--seeds", "5", "--epochs", "1", "3"]
    main_here(monkeypatch, grace, *given)
    num_losses = len(grace.LOSSES)
    assert len(steps) == 3 * num_losses
    for number in range(1, num_losses):
        torch.testing.assert_close(steps[3 * number : 3 * number + 3], steps[:3], rtol=0, atol=0)
        torch.testing.assert_close(encoders[number][0], encoders[0][0], rtol=0, atol=0)
    trained = [encoder.layers[0].weight.detach() for _, encoder in encoders]
    assert all(not torch.equal(weight, trained[0]) for weight in trained[1:])
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split(" | ")[0] for row in rows] == ["| Photo, 1 epochs", "| Photo, 3 epochs"]


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        ("--dataset=../Photo", "--dataset: invalid choice: '../Photo'"),
        ("--root=.", "--root . has no Photo: amazon_electronics_photo.npz is"),
        ("--steps=1", "--steps: must be a whole number, 2 or more"),
    ],
)
def test_invalid_options_are_errors(monkeypatch, capsys, given, wrong):
    with pytest.raises((SystemExit, ValueError)) as stopped:
        main_here(monkeypatch, program, "--dataset=Photo", given)
    assert wrong in f"{stopped.value} {capsys.readouterr().err}"


def test_sets_of_planetoid_are_read_and_a_missing_file_is_an_error(tmp_path, monkeypatch):
    """A ring of 560 nodes, of which PyG takes 500 for validation, in Planetoid's raw layout."""
    monkeypatch.setitem(data.SETS, "Ring", (data.Planetoid, "Ring", "ind.ring.graph"))
    folder = tmp_path / "ring"
    folder.mkdir()
    x, y = sparse.csr_matrix(np.ones((560, 12), np.float32)), np.eye(2, dtype=int)[[0, 1] * 280]
    parts = {"x": x[:10], "allx": x[:520], "tx": x[520:]}
    parts |= {"y": y[:10], "ally": y[:520], "ty": y[520:]}
    parts["graph"] = {node: [(node + 1) % 560, (node - 1) % 560] for node in range(560)}
    for name, part in parts.items():
        (folder / f"ind.ring.{name}").write_bytes(pickle.dumps(part))
    (folder / "ind.ring.test.index").write_text("\n".join(map(str, range(520, 560))))
    assert data.raw_folder("Ring", tmp_path, tmp_path) == folder
    features, edge_index, labels = data.load("Ring", folder)
    torch.testing.assert_close(features.norm(dim=1), torch.ones(560))
    assert edge_index.shape == (2, 1120)
    assert labels.tolist() == [0, 1] * 280
    (folder / "ind.ring.x").unlink()
    with pytest.raises(ValueError, match=r"Ring in .* cannot be read \(FileNotFound.*ind\.ring\.x"):
        data.load("Ring", folder)


@pytest.fixture
def short(monkeypatch):
    monkeypatch.setattr(domains, "TRAINING", domains.TRAINING | {"steps": 4, "batch": 64})
    monkeypatch.setattr(domains, "CLASSES", domains.CLASSES | {"Photo": 3})
    monkeypatch.setattr(domains, "MANY", 8)


def test_clusters_of_nodes_by_all_methods(root, short):
    folder = root / "Photo" / "raw"
    settings = {row: (next(domains.candidates(row, 3)), "") for row in domains.TEMPERATURES}
    configs = list(domains.deciding(["Photo"], [0], settings))
    assert len(configs) == 4
    spaces = [set(domains.run(config, folder)["clusters"]) for config in configs]
    both = {domains.EMBEDDINGS, domains.PROJECTIONS}
    few, many = both | {domains.ASSIGN}, both | {domains.ASSIGN, domains.GROUPS}
    assert sorted(map(len, spaces)) == [2, 2, 3, 4]
    assert few in spaces
    assert many in spaces


def test_without_a_head_prototypes_are_among_the_embeddings(root, short):
    folder = root / "Photo" / "raw"
    settings = {row: (next(domains.candidates(row, 3)), "") for row in domains.TEMPERATURES}
    configs = list(domains.deciding(["Photo"], [0], settings, **domains.WITHOUT_HEAD))
    assert [config["row"] for config in configs] == ["untrained", "InfoNCE", "prototypes"]
    assert [config.get("head", True) for config in configs] == [True, False, False]
    for config in configs[1:]:
        embeddings, projections, _, _ = domains.trained(config, folder)
        assert torch.equal(embeddings, projections)
    both = [config.get("head", True) for config in domains.explaining(["Photo"], settings)]
    assert both == [True, False] * 3


def test_prototypes_begin_where_info_nce_ends(root, short, monkeypatch):
    """After the warm-up they are the centres of clusters, and all losses see the same views."""
    calls, folder = [], root / "Photo" / "raw"
    views_of, start = domains.views_of, domains.SinkhornPrototypes.start_from_

    def noted(config, step, *given):
        calls.append(step)
        return views_of(config, step, *given)

    def started(self, embeddings):
        calls.append(len(embeddings))
        return start(self, embeddings)

    monkeypatch.setattr(domains, "views_of", noted)
    monkeypatch.setattr(domains.SinkhornPrototypes, "start_from_", started)
    for setting in domains.candidates(domains.PROTOTYPES, 3):
        domains.trained(domains.config_of("Photo", setting, 0), folder)
        assert calls == ([0, 1, 120, 2, 3] if setting["warm_up"] else [0, 1, 2, 3])
        calls.clear()


def test_domains_are_drawn_and_an_old_picture_stays(root, short, monkeypatch, tmp_path):
    setting = next(domains.candidates(domains.PROTOTYPES, 3))
    config = domains.config_of("Photo", setting, 0)
    domains.picture(config, root / "Photo" / "raw").savefig(tmp_path / "nodes.png")
    assert (tmp_path / "nodes.png").stat().st_size > 0
    given = ["confirm", "--dataset=Photo", f"--root={root}", f"--picture={tmp_path / 'nodes.png'}"]
    with pytest.raises(ValueError, match="must be a new file in an existing folder"):
        main_here(monkeypatch, domains, *given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["choose", "--dataset=Photo"], "choose trains on Cora and CiteSeer: leave --dataset out"),
        (["explain", "--seeds=1"], "are of confirm, but the part is explain"),
        (["without_head", "--picture=nodes.png"], "but the part is without_head"),
        (["confirm", "--picture=no folder/nodes.png"], "in an existing folder"),
    ],
)
def test_an_option_without_effect_is_an_error(given, message, monkeypatch):
    with pytest.raises(ValueError, match=message):
        main_here(monkeypatch, domains, *given)


def test_agreement_of_clusters_and_classes():
    labels = np.array([0, 0, 1, 1])
    assert domains.agreement(labels, 1 - labels) == {"nmi": 100, "ari": 100, "largest": 50}
    assert domains.agreement(labels, np.zeros(4, int))["nmi"] == 0
