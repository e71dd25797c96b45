"""Every example and every benchmark runs, on little."""

import csv
import json
import math
import re
from argparse import Namespace
from functools import partial
from pathlib import Path

import networkx as nx
import pytest
import torch
from helpers.scripts import run, script_here
from helpers.tu_sets import write_tu_set
from torch_geometric.nn import GIN

from benchmarks import gpu, measure, scripts
from benchmarks.grace import loss_of_the_script as grace_loss
from pgcl_losses import InfoNCE


@pytest.fixture
def printed_by(monkeypatch, capsys):
    """Runs an example in this process and returns what it prints."""

    def call(script, *arguments):
        script_here(monkeypatch, f"examples/{script}.py", *arguments)
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize(("swap", "loss"), [([], "InfoNCE"), (["--pgcl"], "PGCL")])
def test_graphcl_swap(swap, loss, tmp_path, printed_by):
    write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * 10)
    given = (*swap, "--dataset=TINY", f"--root={tmp_path}", "--epochs=1")
    line = rf"{loss}, 20 graphs: linear probe \d\.\d+ untrained, \d\.\d+ after\n"
    assert re.fullmatch(line, printed_by("graphcl_swap", *given))


def test_tu_graphs(tmp_path, printed_by):
    write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * 15)
    output = tmp_path / "encoder.pt"
    given = ("--dataset=TINY", f"--root={tmp_path}", "--epochs=6", f"--output={output}")
    first, *epochs = printed_by("tu_graphs", *given, "--loss=PGCL").splitlines()
    assert re.fullmatch(r"TINY: 30 graphs, linear probe \d\.\d+ untrained", first)
    assert [epoch[:18] for epoch in epochs] == [f"Epoch: {n:03d}, Loss: " for n in range(1, 7)]
    assert ["Linear probe" in epoch for epoch in epochs] == [False] * 4 + [True] * 2
    state = torch.load(output, weights_only=True)
    encoder = torch.nn.ModuleDict({"gin": GIN(1, 32, 3, norm="batch_norm", jk="cat")})
    encoder.load_state_dict(state)


def test_compare(tmp_path, printed_by):
    write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * 20)
    given = ("--dataset=TINY", f"--root={tmp_path}", "--seeds=3", "--epochs=1", "--labels=8")
    printed = printed_by("compare", *given, "--temperatures", "0.2", "0.5")
    accuracy, best = r"(\d+\.\d) ± \d+\.\d\n", r", temperature 0\.[25]: "
    lines = f"TINY: accuracy in % with 8 labels, 3 seeds\nuntrained: {accuracy}"
    lines += "".join(f"{loss}{best}{accuracy}" for loss in ("InfoNCE", "PGCL"))
    lines += r"PGCL minus InfoNCE: ([+-]\d+\.\d) \(95 % interval ([+-]\d+\.\d) to ([+-]\d+\.\d)\)\n"
    _, info_nce, pgcl, gain, low, high = map(float, re.fullmatch(lines, printed).groups())
    assert gain == pytest.approx(pgcl - info_nce, abs=0.11)
    assert low <= gain <= high


def write_edges(folder, networks):
    """A file for each network, with separators of both kinds."""
    folder.mkdir()
    for number, network in enumerate(networks):
        text = "\n".join(f"node{a}{', '[number % 2]}node{b}" for a, b in network.edges)
        (folder / f"{number:02d}.txt").write_text(text)


def test_cluster_graphs(tmp_path, printed_by):
    """Rings and stars are clusters of their own, also those that do not train."""
    write_edges(
        tmp_path / "a", [f(n) for f in (nx.cycle_graph, nx.star_graph) for n in range(8, 28)]
    )
    write_edges(tmp_path / "b", [nx.star_graph(9), nx.cycle_graph(9)])
    (tmp_path / "a" / ".hidden").write_text("no edge")
    folders = [f"--{name}={tmp_path / of}" for name, of in {"folder": "a", "new": "b"}.items()]
    given = *folders, f"--output={tmp_path / 'out'}", "--clusters=2", "--restarts=2", "--epochs=10"
    first, second, sizes, _ = printed_by("cluster_graphs", *given).splitlines()
    for number, line in enumerate((first, second)):
        assert re.fullmatch(rf"training {number}: 2 clusters, silhouette 0\.\d+", line)
    assert sizes == "2 clusters of 20 20 graphs"
    with (tmp_path / "out" / "clusters.csv").open() as file:
        rows = [*csv.DictReader(file)]
    assert [row["graph"] for row in rows] == [f"{n:02d}.txt" for n in [*range(40), 0, 1]]
    assert [row["trained"] for row in rows] == ["True"] * 40 + ["False"] * 2
    ring, star = rows[0]["cluster"], rows[20]["cluster"]
    assert [row["cluster"] for row in rows] == [ring] * 20 + [star] * 20 + [star, ring]
    assert all(0 <= float(row["distance"]) < 2 for row in rows)
    assert (tmp_path / "out" / "clusters.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_cluster_graphs_compares_clusters_with_labels(tmp_path, printed_by):
    given = f"--output={tmp_path / 'out'}", "--clusters=10", "--restarts=1", "--epochs=2"
    printed = printed_by("cluster_graphs", *given)
    for name, least in {"NMI": 0.3, "ARI": 0.2, "accuracy": 0.3}.items():
        assert float(re.search(rf"^Labels: .*{name} (0\.\d+)", printed, re.M)[1]) > least


def test_cluster_graphs_warns_of_one_cluster(tmp_path, printed_by):
    """Equal graphs have equal embeddings, and one graph that is another is the other cluster."""
    write_edges(tmp_path / "a", [nx.cycle_graph(6)] * 30 + [nx.star_graph(6)])
    given = f"--folder={tmp_path / 'a'}", f"--output={tmp_path / 'out'}", "--clusters=2"
    printed = printed_by("cluster_graphs", *given, "--restarts=1", "--epochs=1")
    assert "2 clusters of 30 1 graphs\n" in printed
    assert "Warning: one cluster has 30 of 31 graphs\n" in printed


@pytest.mark.parametrize(
    ("script", "given", "message"),
    [
        ("examples/cluster_graphs.py", "--output=there", "--output must be a new folder"),
        ("examples/cluster_graphs.py", "--output=new --restarts=0", "--restarts must be 1 or more"),
        ("examples/cluster_graphs.py", "--output=new --clusters=0", "--clusters 2 or more"),
        ("examples/cluster_graphs.py", "--output=new --folder=.", "a folder of 3 files .* has 1"),
        ("examples/tu_graphs.py", "--output=there", "--output must be a new file"),
        ("examples/distributed.py", "--steps=0", "--epochs and --steps must be 1 or more"),
        pytest.param(
            *("examples/lightning_ddp.py", "--processes=3"),
            "--processes must divide 128, but it is 3",
            marks=pytest.mark.lightning,
        ),
        ("examples/node_level.py", "--nodes=2000", "--nodes must be above .*, but it is 2000"),
        ("docs/draw.py", "--output=there", "--output there is there already: choose another"),
    ],
)
def test_an_invalid_option_is_an_error(script, given, message, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    Path("there").write_text("mine 1")
    with pytest.raises(SystemExit, match=r"^2$"):
        script_here(monkeypatch, script, *given.split())
    assert re.search(message, capsys.readouterr().err.splitlines()[-1])
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine 1"]


def test_pgcl_in_one_file(printed_by):
    untrained, *epochs = printed_by("pgcl_in_one_file", "--epochs=4").splitlines()
    before = re.fullmatch(r"Epoch: 000, Purity: (0\.\d+)", untrained)[1]
    line = r"Epoch: \d{3}, Loss: (\d+\.\d+), Purity: (0\.\d+)"
    numbers = [map(float, re.fullmatch(line, epoch).groups()) for epoch in epochs]
    losses, purities = zip(*numbers, strict=True)
    assert losses[-1] < losses[0]
    assert purities[-1] > 1.5 * float(before)


def test_node_level(printed_by):
    printed = printed_by("node_level", "--nodes=3000", "--batch-size=256", "--steps=3")
    line = r"^(\w+): linear probe (0\.\d+) untrained, (0\.\d+) trained$"
    (name1, *info_nce), (name2, *pgcl) = re.findall(line, printed, re.M)
    assert (name1, name2) == ("InfoNCE", "PGCL")
    assert info_nce[0] == pgcl[0]
    assert min(map(float, info_nce + pgcl)) > 0.2


def test_labels(printed_by):
    line = r"labels: accuracy (0\.\d+) untrained, (0\.\d+) trained"
    (untrained, without_labels), (same, with_labels) = re.findall(line, printed_by("labels"))
    assert untrained == same
    assert float(with_labels) > 1.5 * float(untrained)
    assert float(with_labels) > float(without_labels) - 0.02


def test_graphs_and_texts(printed_by):
    printed = printed_by("graphs_and_texts")
    before, *_, after = map(float, re.findall(r"Retrieval accuracy: (\d\.\d+)", printed))
    assert before < 0.05
    assert after > 0.4
    *_, temperature = map(float, re.findall(r"Temperature: (\d\.\d+)", printed))
    assert 0 < temperature < 0.07


@pytest.mark.parametrize(
    ("script", "measure", "untrained", "trained"),
    [("link_prediction", "AUC", 0.7, 0.8), ("users_and_items", "Recall@20", 0.1, 0.3)],
)
def test_links(script, measure, untrained, trained, printed_by):
    printed = printed_by(script, "--epochs=5")
    before, *_, after = map(float, re.findall(rf"{measure}: (\d\.\d+)", printed))
    assert before < untrained
    assert after > trained


def test_two_processes_train_as_one_does(tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    losses, checkpoints = [], []
    for command in ((), torchrun):
        output = tmp_path / f"{len(losses)}.pt"
        given = ("examples/distributed.py", "--epochs=3", "--steps=4", f"--output={output}")
        # On CPUs: two processes may not share a GPU.
        printed = run(*command, *given, CUDA_VISIBLE_DEVICES="")
        losses.append([float(x) for x in re.findall(r"^Epoch: \d+, Loss: ([\d.]+)", printed, re.M)])
        checkpoints.append(torch.load(output, weights_only=True))
    assert len(losses[0]) == 3
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    torch.testing.assert_close(*checkpoints, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.lightning
def test_lightning_resumes_from_its_checkpoint(tmp_path):
    """A training on two processes that was stopped ends as the training that was not stopped."""

    def train(folder, epochs, *given):
        """What the script prints, and the checkpoint that it leaves."""
        root = tmp_path / folder
        options = f"--root={root}", f"--epochs={epochs}", "--graphs=256", "--batch-size=64"
        printed = run("examples/lightning_ddp.py", *options, *given)
        return printed, torch.load(root / "last.ckpt", weights_only=True)

    line = r"^Epoch: (\d+), Loss: (\d+\.\d+), Agreement: (\d\.\d+)$"
    whole, expected = train("whole", 4)
    with pytest.raises(AssertionError, match=r"last\.ckpt is there already: --resume it"):
        train("whole", 4)
    first, stopped = train("stopped", 2)
    second, resumed = train("stopped", 4, f"--resume={tmp_path / 'stopped' / 'last.ckpt'}")
    assert "Epochs before: 0, steps before: 0\n" in first
    assert "Epochs before: 2, steps before: 8\n" in second
    epochs = re.findall(line, whole, re.M)
    assert [int(epoch) for epoch, *_ in epochs] == [1, 2, 3, 4]
    assert float(epochs[-1][1]) < float(epochs[0][1])
    assert re.findall(line, first + second, re.M) == epochs
    assert (stopped["global_step"], resumed["global_step"]) == (8, 16)
    name = "pgcl.prototypes.weight"
    assert not torch.equal(stopped["state_dict"][name], resumed["state_dict"][name])
    for part in ("state_dict", "optimizer_states"):
        torch.testing.assert_close(resumed[part], expected[part], rtol=0, atol=0)
    with (tmp_path / "stopped/logs/version_1/metrics.csv").open() as file:
        logged = list(csv.DictReader(file))
    assert [row["step"] for row in logged] == ["11", "15"]  # the last ones of both epochs
    numbers = [float(row[name]) for row in logged for name in ("loss", "diagnostics/entropy")]
    assert all(map(math.isfinite, numbers))


BENCHMARKS = {  # the module, its arguments, and some of the losses in the record
    "step": ("run", "--only=step", {"PGCLLoss", "pgcl_losses.InfoNCE"}),
    "options": ("run", "--only=options --options-at=16", {"num_prototypes=(10, 42, 84)"}),
    "contrast": ("run", "--only=contrast --sizes=16 --modes prototype --device=cpu", {"chunks"}),
    "scaling": ("scaling", "--num=200", set()),
    "libraries": ("libraries", "--sizes=16", {"InfoNCE"}),
    "scripts": (
        "scripts",
        "--sizes=16 --compile-at --retrieval 4 64 --cold=16 --listed=16",
        {scripts.LINES, scripts.OURS, "temperature=0.01"},
    ),
    "loop": ("loop", "", {"GraphCL's loss_cal", "InfoNCE", "PGCLLoss"}),
    "gpu": ("gpu", "--device=cpu --sizes=64 --compile-at", {*gpu.ENGINES, scripts.OURS, "labels"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_fills_its_record(name, tmp_path):
    module, given, expected = BENCHMARKS[name]
    output = tmp_path / "made" / "record.json"
    given += " --rounds=1"
    run("-m", f"benchmarks.{module}", *given.split(), f"--output={output}")
    record = json.loads(output.read_text())
    assert record["machine"]["torch"] == torch.__version__
    assert {row["provider"] for row in record["rows"]} >= expected
    largest = {"difference": 1e-12, "millionths": 100.0}  # of losses that are defined alike
    for row in record["rows"]:
        assert row["value"] < largest.get(re.match(r"\w+", row["metric"])[0], float("inf")), row
    if name == "contrast":
        picture = tmp_path / "batch-size.png"
        run("-m", "benchmarks.plot", str(output), f"--output={picture}")
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_records_of_another_machine_and_other_files_stay(tmp_path):
    path, machine = tmp_path / "figures.json", {"cpu": "mine", "torch": "2.13.0"}
    rows = {name: [{"benchmark": name, "value": 1}] for name in ("step", "contrast")}
    for table in (*rows.values(), rows["step"]):
        measure.save(path, table, machine)
    assert json.loads(path.read_text())["rows"] == rows["contrast"] + rows["step"]
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"measured elsewhere, with torch 2.13.0: choose another"):
        measure.save(path, rows["step"], machine | {"torch": "2.15.0"})
    assert path.read_bytes() == before
    path.write_text("to do: all")
    with pytest.raises(SystemExit, match=r"is no file of benchmarks: choose another --output"):
        measure.save(path, rows["step"], machine)
    assert path.read_text() == "to do: all"


def test_a_record_grows_until_all_jobs_are_done(tmp_path):
    args, ran = Namespace(device="cpu", output=tmp_path / "gpu.json", minutes=1.0), []

    def job(name):
        ran.append(name)
        return [measure.row("scripts", "our loss", "N=1", name, "milliseconds", 1.0)]

    jobs = [(("scripts", "N=1", name), partial(job, name)) for name in ("a", "b", "c")]
    measure.report_in_parts("gpu", args, jobs[:1])
    measure.report_in_parts("gpu", args, jobs[:2])
    args.minutes = 0.0
    measure.report_in_parts("gpu", args, jobs)
    assert ran == ["a", "b"]
    assert [row["mode"] for row in json.loads(args.output.read_text())["rows"]] == ran


LOSSES = {
    "GRACE": (grace_loss, InfoNCE(temperature=0.4)),
    **scripts.SCRIPTS,
    "retrieval": tuple(scripts.over_all_keys(torch.tensor([3, 0, 3, 4, 1]), 5).values()),
}


@pytest.mark.parametrize(("loss_of", "ours"), LOSSES.values(), ids=LOSSES)
def test_losses_of_benchmarks_are_info_nce(loss_of, ours):
    views = [torch.randn(5, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    value, expected = loss_of(*views), ours(*views)
    torch.testing.assert_close(value, expected)
    gradients, others = (torch.autograd.grad(loss, views) for loss in (value, expected))
    torch.testing.assert_close(gradients, others)
