"""Every example and every benchmark runs, on little."""

import csv
import json
import math
import os
import re
import subprocess
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path

import networkx as nx
import pytest
import torch
from helpers.node_sets import write_photo
from helpers.scripts import ROOT, run, script_here
from helpers.tu_sets import write_tu_set
from torch_geometric.data import Data
from torch_geometric.typing import WITH_PYG_LIB, WITH_TORCH_SPARSE
from torch_geometric.utils import to_undirected

from benchmarks import measure, nodes, peers, scripts
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


def rings_and_stars():
    """Graphs of two classes, as users may have them: with features, classes and names."""
    networks = [f(n) for n in range(5, 25) for f in (nx.cycle_graph, nx.star_graph)]
    return [
        Data(
            x=torch.ones(len(network), 2, dtype=torch.long),
            edge_index=to_undirected(torch.tensor([*network.edges]).T),
            y=torch.tensor([number % 2]),
            name=f"graph {number}",
            pos=torch.zeros(len(network), 3),
        )
        for number, network in enumerate(networks)
    ]


@pytest.mark.parametrize("is_own", [False, True])
def test_compare(is_own, tmp_path, printed_by):
    write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * 20)
    torch.save(rings_and_stars(), tmp_path / "TINY.pt")
    file, of_set = (f"--graphs={tmp_path / 'TINY.pt'}",), ("--dataset=TINY", f"--root={tmp_path}")
    given = *(file if is_own else of_set), "--seeds=3", "--epochs=2", "--labels=8"
    printed = printed_by("compare", *given, "--temperatures", "0.2", "0.5")
    accuracy, best = r"(\d+\.\d) ± \d+\.\d\n", r", temperature 0\.[25]: "
    name = tmp_path / "TINY.pt" if is_own else "TINY"
    lines = f"{name}: accuracy in % with 8 labels, 3 seeds\nuntrained: {accuracy}"
    lines += "".join(f"{loss}{best}{accuracy}" for loss in ("InfoNCE", "PGCL"))
    interval = r"([+-]\d+\.\d) \(95 % interval ([+-]\d+\.\d) to ([+-]\d+\.\d)\)\n"
    lines += f"PGCL minus InfoNCE: {interval}half of the graphs, oracle minus InfoNCE: {interval}"
    lines += r"InfoNCE\(temperature=0\.[25]\), 80 embeddings in 2 classes\n"
    lines += r"49% of the negatives have the query's class, and get \d+% of the push\.\n"
    lines += r"temperature .*\nof the push .*\n"
    _, info_nce, pgcl, *gains = map(float, re.fullmatch(lines, printed).groups())
    assert gains[0] == pytest.approx(pgcl - info_nce, abs=0.11)
    for gain, low, high in (gains[:3], gains[3:]):
        assert low <= gain <= high


@pytest.mark.parametrize("labels", [1, 19, 1000])
def test_labels_that_the_probe_cannot_use_are_an_error(labels, tmp_path, printed_by, capsys):
    """Each half has 20 graphs of two classes, of which the probe trains on 2 to 18."""
    write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * 20)
    with pytest.raises(SystemExit, match=r"^2$"):
        printed_by("compare", "--dataset=TINY", f"--root={tmp_path}", f"--labels={labels}")
    expected = f"--labels {labels} must leave a graph of each class .* 40 graphs in 2 classes: "
    assert re.search(expected, capsys.readouterr().err)


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


def test_cluster_graphs_of_a_file(tmp_path, printed_by):
    graphs = rings_and_stars()
    torch.save(graphs[4:], tmp_path / "a.pt")
    torch.save(graphs[:4], tmp_path / "b.pt")
    files = f"--graphs={tmp_path / 'a.pt'}", f"--new={tmp_path / 'b.pt'}"
    given = *files, f"--output={tmp_path / 'out'}", "--clusters=2", "--restarts=1", "--epochs=10"
    printed = printed_by("cluster_graphs", *given)
    assert "Labels: NMI 1.000, ARI 1.000, accuracy 1.000" in printed
    with (tmp_path / "out" / "clusters.csv").open() as file:
        rows = [*csv.DictReader(file)]
    names = [f"graph {number}" for number in [*range(4, 40), *range(4)]]
    assert [row["graph"] for row in rows] == names
    assert [row["trained"] for row in rows] == ["True"] * 36 + ["False"] * 4


@pytest.mark.parametrize(
    ("content", "got"),
    [
        (None, "No such file"),
        ([object()], "Weights only load failed"),
        ([Data(edge_index=torch.zeros(2, 0, dtype=torch.long), y=1)] * 3, "NoneType"),
        ([Data(x=torch.ones(2, 1), y=torch.tensor([1, 2]))] * 3, "scalar"),
        (torch.ones(3), "x"),
        ([Data(x=torch.ones(2), edge_index=torch.zeros(2, 0, dtype=torch.long), y=1)], "[N, F]"),
        ([Data(x=torch.ones(2, 1), edge_index=torch.full((2, 1), 7), y=1)] * 3, "ValueError"),
        (b"", "EOFError"),
    ],
)
@pytest.mark.parametrize("script", ["compare", "cluster_graphs"])
def test_a_file_without_graphs_is_an_error(script, content, got, tmp_path, printed_by, capsys):
    file = tmp_path / "graphs.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    output = [f"--output={tmp_path / 'out'}"] if script == "cluster_graphs" else []
    with pytest.raises(SystemExit, match=r"^2$"):
        printed_by(script, f"--graphs={file}", *output)
    message = " ".join(capsys.readouterr().err.split())
    assert f"{file} must be a list of PyG's Data with x" in message
    assert got in message


@pytest.mark.parametrize(
    ("graphs", "new", "message"),
    [
        (rings_and_stars()[:2], None, "a list of 3 graphs or more, but has 2"),
        ([*rings_and_stars()[:3], *[Data(x=torch.ones(2, 1))]], None, "the same number of feat"),
        (rings_and_stars(), [Data(x=torch.ones(2, 1))], "2 features, as those that train, but"),
    ],
)
def test_graphs_that_do_not_fit_are_an_error(graphs, new, message, tmp_path, printed_by, capsys):
    torch.save(graphs, tmp_path / "a.pt")
    torch.save(new, tmp_path / "b.pt")
    files = [f"--graphs={tmp_path / 'a.pt'}", *([f"--new={tmp_path / 'b.pt'}"] if new else [])]
    with pytest.raises(SystemExit, match=r"^2$"):
        printed_by("cluster_graphs", *files, f"--output={tmp_path / 'out'}")
    assert message in " ".join(capsys.readouterr().err.split())


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
        ("examples/ddp.py", "--checkpoint=new --epochs=0", "--epochs must be 1 or more"),
        (
            "examples/ddp.py",
            "--checkpoint=there",
            "--checkpoint there is not a file of this script",
        ),
        ("examples/ddp.py", "--checkpoint=no/new", "must be in a folder that can be written, but"),
        ("examples/ddp.py", "--checkpoint=/proc/new", "a folder that can be written, but .*proc/"),
        ("examples/ddp.py", "--checkpoint=new --root=there", "--root must be a folder with PROT"),
        ("examples/nodes.py", "--epochs=0", "--epochs must be 1 or more"),
        ("examples/ddp.py", "--checkpoint=new --batch-size=1", "--batch-size 2 or more and a mult"),
        ("examples/ddp.py", "--checkpoint=new --lr=-1", "--lr must be above 0"),
        ("examples/ddp.py", "--checkpoint=.", "--checkpoint the name of a file"),
        ("examples/graphcl_swap.py", "--epochs=-1", "--epochs must be 0 or more"),
        ("examples/nodes.py", "--temperature=0", "--temperature above 0"),
        ("examples/nodes.py", "--temperature=inf", "--temperature above 0"),
        ("examples/nodes.py", "--root=there", "--root must be a folder with Cora, or where PyG"),
        ("examples/graphcl_swap.py", "--root=there", "--root must be a folder with MUTAG, or wh"),
        ("examples/compare.py", "--root=there", "--root must be a folder with MUTAG, or where"),
        ("examples/compare.py", "--seeds=1", "--seeds must be 2 or more, --epochs 0 or more"),
        ("examples/compare.py", "--epochs=-1", "--epochs 0 or more, and --temperatures above 0"),
        ("examples/compare.py", "--temperatures 1 0", "--temperatures above 0"),
        ("examples/compare.py", "--temperatures nan", "--temperatures above 0"),
        ("examples/molecules.py", "--epochs=0", "--epochs and --width must be 1 or more"),
        ("examples/molecules.py", "--root=there", "--root must be a folder with the sets, or wh"),
        ("docs/programs/draw.py", "--output=there", "--output there is there already"),
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


@pytest.fixture
def photo(tmp_path):
    """A folder with a small graph of two classes under Photo's name, in its raw layout."""
    write_photo(tmp_path / "Photo" / "raw", num_nodes=200, num_classes=2)
    return tmp_path


@pytest.mark.filterwarnings("ignore:Using 'NeighborSampler' without")
@pytest.mark.parametrize("batches", [[], ["--batch-size=50"]])
def test_nodes(batches, photo, printed_by):
    if batches and not (WITH_PYG_LIB or WITH_TORCH_SPARSE):
        pytest.skip("neither pyg-lib nor torch-sparse is installed")
    given = "--dataset=Photo", f"--root={photo}", "--epochs=30"
    first, last = printed_by("nodes", *given, *batches).splitlines()
    assert re.fullmatch(r"Photo: 200 nodes, accuracy of the probe \d+\.\d % untrained", first)
    line = r"Epoch: 030, Loss: (\d\.\d{4}), Accuracy: (\d+\.\d) %"
    loss, accuracy = map(float, re.fullmatch(line, last).groups())
    assert loss < math.log(2 * (50 if batches else 200) - 1)  # of equal embeddings
    assert accuracy > 80


def test_nodes_say_what_samples_neighbours(monkeypatch, capsys):
    for name in ("WITH_PYG_LIB", "WITH_TORCH_SPARSE"):
        monkeypatch.setattr(f"torch_geometric.typing.{name}", False)
    with pytest.raises(SystemExit, match=r"^2$"):
        script_here(monkeypatch, "examples/nodes.py", "--batch-size=50")
    assert "--batch-size needs pyg-lib or torch-sparse" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--pgcl"]])
def test_molecules(options, tmp_path, printed_by):
    """80 molecules of eight scaffolds, in the raw layout of BBBP."""
    rings = ("C1CC1", "C1CCC1", "C1CCCC1", "C1CCCCC1", "C1CCNC1", "C1CCNCC1", "C1CCSC1", "C1CCOC1")
    smiles = [f"{'C' * n}{ring}{end}" for n in range(1, 6) for ring in rings for end in ("", "O")]
    lines = [f"{n},name,{int(text[-1] == 'O')},{text}" for n, text in enumerate(smiles)]
    folder = tmp_path / "bbbp" / "raw"
    folder.mkdir(parents=True)
    (folder / "BBBP.csv").write_text("\n".join(["num,name,p_np,smiles", *lines, ""]))
    given = "--dataset=BBBP", "--pretrain", "BBBP", "bbbp", f"--root={tmp_path}", "--width=32"
    first, *_, last = printed_by("molecules", *given, "--epochs=2", *options).splitlines()
    assert re.fullmatch(r"BBBP: 80 molecules, ROC-AUC of the probe \d+\.\d % untrained", first)
    auc = re.fullmatch(r"Epoch: 002, Loss: \d\.\d{4}, ROC-AUC: (\d+\.\d) %", last)[1]
    assert float(auc) > 80  # whether a molecule is an alcohol


def test_graphs_and_texts(printed_by):
    printed = printed_by("graphs_and_texts")
    before, *_, after = map(float, re.findall(r"Retrieval accuracy: (\d\.\d+)", printed))
    assert before < 0.05
    assert after > 0.4
    *_, temperature = map(float, re.findall(r"Temperature: (\d\.\d+)", printed))
    assert 0 < temperature < 0.07


def ddp_in(folder):
    """The command of examples/ddp.py with all of its files in a folder."""
    write_tu_set(folder / "TINY" / "raw", "TINY", [0, 1] * 20)
    files = f"--root={folder}", f"--checkpoint={folder / 'last.pt'}"
    options = "--dataset=TINY", "--batch-size=16", "--epochs=8", "--precision=float32"
    return "examples/ddp.py", *options, *files


def ended_in(folder, *start):
    """What examples/ddp.py prints, its checkpoint and its log."""
    # On CPUs: two processes may not share a GPU.
    printed = run(*start, *ddp_in(folder), CUDA_VISIBLE_DEVICES="")
    log = [json.loads(line) for line in (folder / "last.pt.jsonl").read_text().splitlines()]
    return printed, torch.load(folder / "last.pt", weights_only=True), log


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    return ended_in(tmp_path_factory.mktemp("ddp"))


def test_two_processes_train_as_one_does(ended, tmp_path):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    results = ended, ended_in(tmp_path, *torchrun)
    losses = [[line["loss"] for line in log] for _, _, log in results]
    assert [line["epoch"] for line in ended[2]] == [*range(1, 9)]
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    torch.testing.assert_close(*(state["model"] for _, state, _ in results), rtol=1e-3, atol=1e-3)
    for printed, _, log in results:
        epochs = re.findall(r"^Epoch: \d+, Loss: (\d+\.\d+)$", printed, re.M)
        assert [*map(float, epochs)] == pytest.approx([line["loss"] for line in log], abs=1e-6)
        assert re.search(r"^TINY: 40 graphs, linear probe [01]\.\d{4}$", printed, re.M)
        assert all(0 <= line["largest_cluster"] <= 1 for line in log)


def test_ddp_says_how_large_a_batch_may_be(tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match=r"^2$"):
        script_here(monkeypatch, *ddp_in(tmp_path), "--batch-size=42")
    assert "--batch-size must be at most 40" in capsys.readouterr().err
    assert not (tmp_path / "last.pt").exists()


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_ddp_trains_for_few_steps(epochs, tmp_path, printed_by):
    """Two steps an epoch; a tenth of ten steps is one."""
    _, *command = ddp_in(tmp_path)
    printed = printed_by("ddp", *command, f"--epochs={epochs}")
    assert len(re.findall(r"^Epoch: \d+, Loss: \d", printed, re.M)) == epochs


@pytest.mark.parametrize("content", [torch.ones(2), [1], {"model": 1}])
def test_a_file_of_something_else_is_no_checkpoint(content, tmp_path, printed_by, capsys):
    _, *command = ddp_in(tmp_path)
    torch.save(content, tmp_path / "last.pt")
    with pytest.raises(SystemExit, match=r"^2$"):
        printed_by("ddp", *command)
    assert "last.pt is not a file of this script" in capsys.readouterr().err


def test_what_a_killed_save_left_goes_and_other_files_stay(ended, tmp_path, printed_by, capsys):
    _, *command = ddp_in(tmp_path)
    part = tmp_path / "last.pt.part"
    part.write_text("half of a file")
    with pytest.raises(SystemExit, match=r"^2$"):
        printed_by("ddp", *command)
    assert "last.pt.part is there: remove it" in capsys.readouterr().err
    assert part.read_text() == "half of a file"
    torch.save(ended[1], tmp_path / "last.pt")
    assert "linear probe" in printed_by("ddp", *command)
    assert not part.exists()


@pytest.mark.slow
def test_a_training_that_was_killed_ends_as_one_that_was_not(ended, tmp_path, printed_by):
    command, checkpoint = ddp_in(tmp_path), tmp_path / "last.pt"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment) as process:
        while not checkpoint.exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.kill()
    done = len(torch.load(checkpoint, weights_only=True)["log"])
    assert 1 <= done < 8
    printed, resumed, log = ended_in(tmp_path)
    _, expected, expected_log = ended
    assert re.search(r"Epoch: (\d+)", printed)[1] == f"{done + 1:03d}"
    for name in ("model", "optimizer"):
        of_both = (state[name] for state in (resumed, expected))
        tensors = [of.get("state", of) for of in of_both]
        torch.testing.assert_close(*tensors, rtol=0, atol=0)
    assert resumed["schedule"] == expected["schedule"]
    assert json.dumps(log) == json.dumps(expected_log)
    before = checkpoint.read_bytes()
    with pytest.raises(SystemExit, match=r"^2$"):
        printed_by("ddp", *command[1:], "--seed=1")
    assert checkpoint.read_bytes() == before


BENCHMARKS = {  # the module, its arguments, and some of the losses in the record
    "options": ("options", "--size=16", {"default", "num_prototypes=(10, 42, 84)"}),
    "libraries": ("libraries", "--sizes=16", {"InfoNCE"}),
    "heads": ("heads", "--sizes=600", {"our two modules", "novae's lines"}),
    "scripts": (
        "scripts",
        "--sizes=16 --compile-at --retrieval 4 64 --tables 8 4 --cold=16 --listed=16 --labelled=16 "
        "--spread=16 --pairs=50 --modified=16 --masked=16 --looked-at=16 --remembered=64",
        {scripts.LINES, scripts.OURS, "temperature=0.01", "two views", "spread", "repulsion"},
    ),
    "nodes": ("nodes", "--sets=Photo --root={}", {"GCN", nodes.OURS, "the script's loss"}),
    "loop": ("loop", "", {"GraphCL's loss_cal", "InfoNCE", "PGCLLoss"}),
    "gpu": (
        "gpu",
        "--device=cpu --sizes 64 32 --largest=96 --clip=64 --dims=16 --compile-at",
        {scripts.OURS, "cross-entropy", "labels"},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_fills_its_record(name, photo, tmp_path):
    module, given, expected = BENCHMARKS[name]
    output = tmp_path / "made" / "record.json"
    given = f"{given} --rounds=1".format(photo)
    run("-m", f"benchmarks.{module}", *given.split(), f"--output={output}")
    record = json.loads(output.read_text())
    assert record["machine"]["torch"] == torch.__version__
    assert {row["provider"] for row in record["rows"]} >= expected
    largest = {"difference": 1e-12, "millionths": 100.0}  # of losses that are defined alike
    for row in record["rows"]:
        bound = largest.get(re.match(r"\w+", row["metric"])[0], float("inf"))
        # The last digit of a gradient in bfloat16 is 4,000 millionths.
        assert row["value"] < (bound if row["mode"] != "bfloat16" else 1e4), row


def test_the_record_of_a_gpu_is_drawn(tmp_path):
    picture = tmp_path / "gpu.png"
    run("-m", "benchmarks.plot", "benchmarks/results/gpu.json", f"--output={picture}")
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


def test_a_record_whose_smaller_batch_is_slower_is_refused(tmp_path):
    def rows(*times):
        sizes = ("N=32 D=4", "N=128 D=4", "N=1,024 D=4")
        for size, took in zip(sizes, times, strict=True):
            yield [measure.row("contrast", "chunks", size, "uniform", "milliseconds", took)]

    args = Namespace(output=tmp_path / "contrast.json", rounds=3)
    measure.report("contrast", args, rows(1.2, 1.0, 9.0))
    before = args.output.read_bytes()
    with pytest.raises(SystemExit, match=r"uniform, chunks: 22 ms at N=32, but 1.2 at N=128: noth"):
        measure.report("contrast", args, rows(22.0, 1.2, 9.0))
    assert args.output.read_bytes() == before


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


PAIRS = torch.tensor([[0, 0, 1, 4, 4, 4], [1, 8, 0, 2, 9, 0]])
LOSSES = {
    "GRACE": (partial(peers.grace_in_batches, size=5, tau=0.4), InfoNCE(temperature=0.4)),
    "GRACE in batches": (partial(peers.grace_in_batches, size=2), InfoNCE(temperature=peers.TAU)),
    "MAGI": [
        lambda *z, loss=loss: loss(PAIRS, torch.cat(z))
        for loss in (nodes.magi, nodes.magi_by_queries)
    ],
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
