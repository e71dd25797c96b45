"""Losses that branch off from one InfoNCE run: the same batches and views for all."""

import itertools
import json

import numpy as np
import pytest
import torch
from helpers.graphs import ring_of_planetoid
from helpers.scripts import kept_here
from scipy import stats
from threadpoolctl import threadpool_limits
from torch_geometric.nn import GCNConv

from experiments.common import results, tables
from experiments.common.losses import Objective
from experiments.nodes.branches import __main__ as program
from experiments.nodes.branches import measure, report, rows, train
from experiments.nodes.branches.rows import CANDIDATE, INFO_NCE, ROWS, STOPPED, UNTRAINED
from experiments.nodes.data import block_model

CONFIG = {**train.SETTING, "dataset": "blocks", "data": "", "batch": 64, "seed": 3, "width": 8}


@pytest.fixture(autouse=True)
def one_thread():
    """Many threads beside other tests wait for each other."""
    with threadpool_limits(1):
        yield


@pytest.fixture(scope="module")
def graph(tmp_path_factory):
    blocks = block_model(150, 3)
    file = tmp_path_factory.mktemp("blocks") / "blocks.pt"
    torch.save((blocks.x, blocks.edge_index, blocks.y), file)
    return file


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # said once a process
@pytest.mark.parametrize("density", [0.05, 0.9])
def test_the_encoder_is_two_layers_of_gcn_conv(graph, density):
    known, _ = train.graph_of(graph)
    torch.manual_seed(0)
    x = torch.rand(known.x.shape) * (torch.rand(known.x.shape) < density)
    known = train.Graph(x, known.edge_index)
    assert (known.features[0].layout == torch.sparse_csr) == (density < 0.1)
    encoder = train.GCN(x.shape[1], 8)
    shown = torch.rand(x.shape[1]) < 0.7
    kept = torch.rand(known.edge_index.shape[1]) < 0.6
    view, x, edge_index = known.view(kept, shown), x * shown, known.edge_index[:, kept]
    for layer, bias in zip(encoder.layers, encoder.biases, strict=True):
        conv = GCNConv(layer.in_features, layer.out_features)
        conv.lin.weight, conv.bias = layer.weight, bias
        x = torch.relu(conv(x, edge_index))
    ours, weights = encoder(view), list(encoder.parameters())
    torch.testing.assert_close(ours, x, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(of.square().sum(), weights) for of in (ours, x)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


def test_a_branch_that_stays_info_nce_is_the_run_itself(graph, monkeypatch):
    monkeypatch.setitem(ROWS, "again InfoNCE", rows.Row({"hardness": 0.0}))
    wanted = [(INFO_NCE, 8), ("again InfoNCE", 8), ("K=20, lambda 0", 8), (STOPPED, 8)]
    results_of = {}
    for run in train.runs(CONFIG, graph, wanted):
        values = {name: run[name] for name in measure.NAMES}
        results_of[results.key(run["config"])] = values
    trunk, branch, other, stopped = (
        results_of[results.key(train.configuration(CONFIG, *each))] for each in wanted
    )
    assert trunk == branch != other
    assert stopped != trunk


def test_a_branch_by_itself_is_one_run_of_info_nce_and_pgcl(graph):
    row = rows.Row(rows.pgcl(5, 0.0, by_itself=True), 0.5)
    trunk = train.Run(CONFIG, train.graph_of(graph)[0])
    whole = Objective({"num_prototypes": 5, "consistency_weight": 0.0, "lead": 0.5}, 8, 0.4, 12)
    run = trunk.copy()
    torch.manual_seed(CONFIG["seed"])
    run.train(whole, 12, lambda step: None)
    trunk.train(Objective({}, 8, 0.4, 12), 6, lambda step: None)
    branch, objective = train.branched(trunk, row, 12)
    branch.train(objective, 12, lambda step: None)
    torch.testing.assert_close(branch.embeddings(), run.embeddings(), rtol=1e-4, atol=1e-5)


def test_views_do_not_depend_on_the_generator(graph):
    view, _ = train.graph_of(graph)
    run = train.Run(CONFIG, view)
    torch.manual_seed(1)
    first = run.views()
    torch.rand(7)
    torch.testing.assert_close(run.views(), first, rtol=0, atol=0)
    run.train(Objective({}, 8, 0.4, 1), 1, lambda step: None)
    assert run.views()[0].shape == (64, 8)
    assert not torch.equal(run.views()[0], first[0])


def test_the_script_resumes(tmp_path, monkeypatch, capsys):
    folder = ring_of_planetoid(tmp_path)
    script = kept_here(program, results, monkeypatch, capsys, tmp_path)
    given = ("--dataset=Ring", f"--root={folder.parent}", "--seeds", "0", "1", "--workers=1")
    given += ("--lengths", "4", "8", "--batch", "32", "--rows", UNTRAINED, INFO_NCE, "Barlow Twins")
    _, output = script(*given)
    lines = output.read_text().splitlines()
    assert len(lines) == 2 * (1 + 2 * 2)
    assert all("commit" in json.loads(line)["versions"] for line in lines)
    output.write_text("\n".join(lines[:-1]) + "\n")
    script(*given)
    assert output.read_text().splitlines()[:-1] == lines[:-1]
    record = report.Record(results.read(output).values())
    monkeypatch.setattr(report, "LENGTHS", (4, 8))
    text = report.described(record)
    assert text.count("| Ring, batches of 32, tau=0.4, ") == text.count("| Barlow Twins | 2 |") == 2


def test_the_decision_is_about_fixed_temperatures_and_length(monkeypatch):
    monkeypatch.setitem(rows.TEMPERATURE, INFO_NCE, 0.8)
    monkeypatch.setitem(rows.TEMPERATURE, CANDIDATE, 1.2)
    gains = {"one_shot": (2.0, 0.1, 2.0, 2.0), "five_shot": (0.0, -1.0, -0.4, 0.0)}
    runs = []
    for index, (dataset, batch) in enumerate(report.HELD_OUT):
        for row, temperature, seed in itertools.product(
            (INFO_NCE, CANDIDATE), report.TEMPERATURES, range(10)
        ):
            config = train.SETTING | {"dataset": dataset, "batch": batch, "seed": seed, "data": ""}
            noise = 0.3 * (-1) ** seed
            values = {
                name: 70 + (row == CANDIDATE) * (gains[name][index] if name in gains else 0) + noise
                for name in measure.NAMES
            }
            if temperature != rows.TEMPERATURE[row]:
                values = dict.fromkeys(values, 0.0)
            elif row == INFO_NCE:
                values = dict.fromkeys(values, 70.0)
            config = train.configuration(config | {"temperature": temperature}, row, rows.LENGTH)
            runs.append({"config": config, **values})
    lines = report.decision(report.Record(runs)).splitlines()[2:]
    assert ["not significant" in line for line in lines] == [False, True, False, False]
    assert "| Photo, batches of 512 | 10 | +2.0 (+1.8 to +2.2), p = " in lines[0]
    verdicts = [line.count("margin met") for line in lines]
    assert verdicts == [2, 1, 1, 2]
    assert "-1.0 (-1.2 to -0.8), margin missed" in lines[1]
    assert "-0.4 (-0.6 to -0.2), margin inconclusive" in lines[2]
    with pytest.raises(ValueError, match="fewer than three seeds"):
        report.decision(report.Record(runs[:2]))


def test_measures_of_separate_classes_are_perfect():
    labels = np.arange(240) % 3
    z = np.eye(3)[labels] + 0.01 * np.random.default_rng(0).standard_normal((240, 3))
    assert set(measure.measured(z, labels, 0).values()) == {100.0}


def test_few_labels_by_a_literal_loop():
    random = np.random.default_rng(1)
    labels, z = np.arange(90) % 3, measure.normalize(random.standard_normal((90, 4)))
    draws = measure.drawn(labels, 2, 5)
    right, count = 0, 0
    for known in draws:
        means = [z[of_class].mean(0) for of_class in known]
        for i in set(range(90)) - set(known.ravel()):
            cosines = [z[i] @ mean / np.linalg.norm(mean) for mean in means]
            right, count = right + (np.argmax(cosines) == labels[i]), count + 1
    assert measure.nearest_mean(z, labels, draws) == pytest.approx(right / count)


def test_p_values_of_pairs_and_holms_correction():
    ours, theirs = {0: 1.0, 1: 2.5, 2: 2.0, 9: 7.0}, {0: 0.5, 1: 1.0, 2: 1.9}
    expected = stats.ttest_1samp([0.5, 1.5, 0.1], 0).pvalue
    assert tables.paired(ours, theirs).p == pytest.approx(expected)
    deltas = [tables.Delta(1.0, 0.0, 2.0, p) for p in (0.04, 0.01, 0.03)]  # 0.06, 0.03, 0.06
    assert tables.holm(deltas) == [deltas[1]]


def test_the_page_has_the_tables_of_its_runs(tmp_path, monkeypatch):
    expected = {}
    for name in ("PAGE", "CONCLUSIONS"):
        original = getattr(report, name)
        page = tmp_path / original.name
        page.write_text(original.read_text())
        monkeypatch.setattr(report, name, page)
        expected[page] = original.read_text()
    report.main()
    assert {page: page.read_text() for page in expected} == expected
