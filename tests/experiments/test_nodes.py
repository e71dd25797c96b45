"""Nodes of one graph: the program runs, resumes, and refuses what it cannot use."""

import json

import pytest
import torch
from helpers.graphs import ring_of_planetoid
from helpers.scripts import kept_here

from experiments.common import results
from experiments.common.rows import INFO_NCE, NODES, PGCL
from experiments.common.tables import fill
from experiments.nodes import __main__ as program
from experiments.nodes import data, report, train
from experiments.nodes.rows import RAW, RECOMMENDED, TRAINED


@pytest.fixture
def script(monkeypatch, capsys, tmp_path):
    return kept_here(program, results, monkeypatch, capsys, tmp_path)


@pytest.fixture
def planetoid(tmp_path):
    return ring_of_planetoid(tmp_path)


def test_the_script_resumes(planetoid, script):
    rows = ("untrained GCN", INFO_NCE, PGCL, RECOMMENDED, "Barlow Twins")
    given = ("--dataset=Ring", f"--root={planetoid.parent}", "--seeds=2", "--epochs=20")
    files = {file.name for file in planetoid.iterdir()}
    printed, output = script(*given, "--workers=1", "--rows", *rows)
    assert {file.name for file in planetoid.iterdir()} == files
    lines = output.read_text().splitlines()
    assert len(lines) == 2 * len(rows)
    for row in rows:
        assert f"| {row} | 2 | " in printed
    assert f"| minus {INFO_NCE} | seeds | probe | k-means, NMI |" in printed
    run = next(run for run in map(json.loads, lines) if "start" in run["config"].get("loss", {}))
    assert run["history"][0].keys() >= {"loss", "agreement", "mean_cosine"}

    output.write_text("\n".join([*lines[:-1], lines[-1][:40]]))
    again, _ = script(*given, "--workers=1", "--rows", *rows)
    assert output.read_text().splitlines()[:-1] == lines[:-1]
    assert again == printed


def test_the_synthetic_graph_has_classes():
    graph = data.block_model()
    source, target = graph.edge_index
    own = (graph.y[source] == graph.y[target]).double().mean()
    assert own == pytest.approx((3 + 2 / 7) / 5, abs=0.05)
    assert graph.num_edges / graph.num_nodes == pytest.approx(5, abs=0.4)
    assert graph.is_undirected()
    assert torch.equal(graph.x, data.block_model().x)
    assert graph.x.sum(1) == pytest.approx(torch.ones(graph.num_nodes))


def test_masking_hides_whole_columns_in_proportion():
    torch.manual_seed(0)
    x = torch.rand(5, 4000)
    masked = train.masked(train.sparse(x), 0.3).to_dense()
    columns = (masked == 0).all(0)
    assert columns.double().mean() == pytest.approx(0.3, abs=0.03)
    assert torch.equal(masked[:, ~columns], x[:, ~columns])


def test_configurations_of_rows():
    graph = data.Stored(None, "d", 2708)
    configs = {row: program.configuration("Cora", graph, {}, row, 0) for row in (RAW, *TRAINED)}
    assert len({results.key(config) for config in configs.values()}) == len(configs)
    assert configs[RAW] == {"dataset": "Cora", "data": "d", "seed": 0, "row": RAW}
    assert configs[PGCL]["loss"] == {"num_prototypes": 10, "consistency_weight": 6.0}
    assert configs[PGCL]["temperature"] == 0.4
    assert json.loads(json.dumps(configs)) == configs


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (["--rows", "PGCLL"], "--rows: 'PGCLL' is not one of"),
        (["--root=."], "--root holds no 'blocks', which is synthetic"),
        (["--dataset=../Cora", "--root=."], "--dataset must be the name of a set"),
        (["--dataset=Cora", "--root=."], "--root . has no Cora: ind.cora.x is in none of"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(script, capsys, given, wrong):
    with pytest.raises(SystemExit) as stopped:
        script(*given)
    assert wrong in f"{stopped.value} {capsys.readouterr().err}"


def test_a_set_with_parts_missing_or_damaged(planetoid, tmp_path):
    (planetoid / "ind.ring.graph").write_bytes(b"no graph")
    with pytest.raises(ValueError, match=r"Ring in .*ring cannot be read"):
        data.fetch("Ring", planetoid.parent, tmp_path / "cache")
    (planetoid / "ind.ring.graph").unlink()
    with pytest.raises(ValueError, match=r"ring has no ind.ring.graph"):
        data.fetch("Ring", planetoid.parent, tmp_path / "cache")


def test_the_page_has_the_tables_of_its_runs():
    page, runs = report.PAGE.read_text(), list(results.read(report.RUNS).values())
    assert fill(page, report.pages(runs)[report.PAGE]) == page
    for name, of_set in report.TABLES.items():
        assert f"<!-- {name} -->\n| loss | seeds | probe |" in page
        by_row = report.by_row(runs, *of_set)
        assert by_row.keys() >= {INFO_NCE, RECOMMENDED}
        assert all(run["config"]["dataset"] == of_set[0] for run in by_row[INFO_NCE].values())


def test_a_table_is_of_one_temperature():
    runs = list(results.read(report.RUNS).values())
    for temperature in (0.4, 0.9):
        by_row = report.by_row(runs, "CiteSeer", temperature)
        seen = {run["config"]["temperature"] for run in by_row[INFO_NCE].values()}
        assert seen == {temperature}


def test_the_sizes_that_k_goes_by(tmp_path):
    graph = data.fetch(data.SYNTHETIC, None, tmp_path)
    assert NODES[data.SYNTHETIC] == graph.nodes
