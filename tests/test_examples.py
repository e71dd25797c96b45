"""Every script runs, on little."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.scripts import ROOT, run
from helpers.tu_sets import write_tu_set
from torch_geometric.nn import GIN

from benchmarks import gpu, measure, peers
from pgcl_losses import InfoNCE


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda s: s.stem)
def test_the_line_of_an_import_that_fails_names_the_extra(script):
    """A traceback shows it."""
    first_lines: dict[str, str] = {}
    for line in script.read_text().splitlines():
        if found := re.match(r"(?:import|from) (\w+)", line):
            first_lines.setdefault(found[1], line)
    for package in ("sklearn", "torch_geometric", "tqdm"):
        assert "# pip install -e '.[" in first_lines.get(package, "# pip install -e '.["), package


@pytest.mark.parametrize("swap", [[], ["--pgcl"]], ids=["InfoNCE", "PGCL"])
def test_graphcl_swap(swap, tmp_path):
    given = ("--dataset=TINY", f"--root={tmp_path}", "--epochs=1")
    for graphs in (20, 30):  # no file of the first run is read in the second
        write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * (graphs // 2))
        printed = run("examples/graphcl_swap.py", *swap, *given)
        name = "PGCL" if swap else "InfoNCE"
        scores = r"linear probe \d\.\d+ untrained, \d\.\d+ after"
        assert re.fullmatch(rf"{name}, {graphs} graphs: {scores}\n", printed)
    assert [path.name for path in (tmp_path / "TINY").iterdir()] == ["raw"]


def error_of(*command: str) -> str:
    """The last line of a script that exits with an error in its arguments."""
    command = (sys.executable, *command)
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    return result.stderr.splitlines()[-1]


@pytest.mark.parametrize("script", ["graphcl_swap", "tu_graphs"])
def test_the_name_of_a_set_is_no_path(script, tmp_path):
    given = f"--dataset={tmp_path / 'TINY'}", f"--root={tmp_path / 'data'}"
    assert "--dataset must be the name of a set" in error_of(f"examples/{script}.py", *given)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("loss", ["InfoNCE", "PGCL"])
def test_tu_graphs(tmp_path, loss):
    write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * 15)
    output = tmp_path / "encoder.pt"
    given = ("--dataset=TINY", f"--root={tmp_path}", "--epochs=6", f"--output={output}")
    printed = run("examples/tu_graphs.py", *given, f"--loss={loss}")
    first, *epochs = printed.splitlines()
    assert re.fullmatch(r"TINY: 30 graphs, linear probe \d\.\d+ untrained", first)
    numbers = [int(number) for number in re.findall(r"^Epoch: (\d+), Loss: \d", printed, re.M)]
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert ["Linear probe" in epoch for epoch in epochs] == [False] * 4 + [True] * 2
    assert [path.name for path in (tmp_path / "TINY").iterdir()] == ["raw"]
    GIN(1, 32, num_layers=3, norm="batch_norm", jk="cat").load_state_dict(
        {name.removeprefix("gin."): x for name, x in torch.load(output, weights_only=True).items()}
    )


@pytest.mark.parametrize(
    ("script", "given"),
    [("distributed", "--steps=0"), ("node_level", "--nodes=2000"), ("tu_graphs", "--epochs=0")],
)
def test_an_option_out_of_range_is_an_error(script, given):
    name, _, value = given.partition("=")
    assert re.search(
        rf"{name} must be .*, but it is {value}$", error_of(f"examples/{script}.py", given)
    )


@pytest.mark.parametrize("script", ["tu_graphs", "distributed"])
def test_a_file_stays(script, tmp_path):
    output = tmp_path / "encoder.pt"
    output.write_text("mine")
    assert "--output must be a new file" in error_of(f"examples/{script}.py", f"--output={output}")
    assert output.read_text() == "mine"


def test_node_level():
    printed = run("examples/node_level.py", "--nodes=3000", "--batch-size=256", "--steps=3")
    line = r"^(\w+): linear probe (0\.\d+) untrained, (0\.\d+) trained$"
    (name1, *info_nce), (name2, *pgcl) = re.findall(line, printed, re.M)
    assert (name1, name2) == ("InfoNCE", "PGCL")
    assert info_nce[0] == pgcl[0]
    assert min(map(float, info_nce + pgcl)) > 0.2


def test_labels():
    printed = run("examples/labels.py")
    line = r"labels: accuracy (0\.\d+) untrained, (0\.\d+) trained"
    (untrained, without_labels), (same, with_labels) = re.findall(line, printed)
    assert untrained == same
    assert float(untrained) < float(without_labels) < float(with_labels)
    assert float(with_labels) > 1.5 * float(untrained)


def test_graphs_and_texts():
    printed = run("examples/graphs_and_texts.py")
    before, *_, after = map(float, re.findall(r"Retrieval accuracy: (\d\.\d+)", printed))
    assert before < 0.05
    assert after > 0.4
    *_, temperature = map(float, re.findall(r"Temperature: (\d\.\d+)", printed))
    assert 0 < temperature < 0.07


def losses(output: Path, *command: str) -> list[float]:
    """Of a short training by distributed.py, on CPUs: two processes may not share a GPU."""
    given = ("examples/distributed.py", "--epochs=3", "--steps=4", f"--output={output}")
    printed = run(*command, *given, CUDA_VISIBLE_DEVICES="")
    epochs = re.findall(r"^Epoch: (\d+), Loss: (\S+), Purity: 0\.\d+", printed, flags=re.MULTILINE)
    assert [int(number) for number, _ in epochs] == [1, 2, 3], printed
    return [float(loss) for _, loss in epochs]


def test_two_processes_train_as_one_does(tmp_path):
    first, *_, last = of_one = losses(tmp_path / "1.pt")
    assert last < first
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    of_two = losses(tmp_path / "2.pt", *torchrun)
    assert of_two == pytest.approx(of_one, abs=1e-4)
    checkpoints = [torch.load(tmp_path / f"{n}.pt", weights_only=True) for n in (1, 2)]
    torch.testing.assert_close(*checkpoints, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "provider"),
    [("step", "PGCLLoss"), ("options", "num_prototypes=(10, 42, 84)")],
)
def test_benchmarks(name, provider, tmp_path):
    output = tmp_path / "made" / "figures.json"
    small = ("--only", name, "--rounds=1", "--options-at=16")
    printed = run("-m", "benchmarks.run", *small, "--output", str(output))
    assert provider in printed
    measured = json.loads(output.read_text())
    assert measured["machine"]["torch"]
    assert {row["benchmark"] for row in measured["rows"]} == {name}
    assert all(row["value"] > 0 for row in measured["rows"])


def test_figures_of_another_machine_stay(tmp_path):
    path, machine = tmp_path / "figures.json", {"cpu": "mine", "torch": "2.13.0"}
    rows = {name: [{"benchmark": name, "value": 1}] for name in ("step", "contrast")}
    for table in rows.values():
        measure.save(path, table, machine)
    measure.save(path, rows["step"], machine)
    assert json.loads(path.read_text())["rows"] == rows["contrast"] + rows["step"]
    before = path.read_bytes()
    with pytest.raises(SystemExit, match=r"measured elsewhere, with torch 2.13.0: choose another"):
        measure.save(path, rows["step"], machine | {"torch": "2.15.0"})
    assert path.read_bytes() == before
    path.write_text("to do: all")
    command = [sys.executable, "-m", "benchmarks.run", "--only=step", f"--output={path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == f"{path} is no file of benchmarks: choose another --output\n"
    assert path.read_text() == "to do: all"


@pytest.mark.parametrize(
    "script",
    [("-m", "benchmarks.plot", "benchmarks/results/contrast.json"), ("docs/draw.py",)],
    ids=["plot", "draw"],
)
def test_pictures_go_into_a_new_folder(tmp_path, script):
    command = [sys.executable, *script, f"--output={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"--output {tmp_path} is there already: choose another folder" in result.stderr


def test_benchmark_of_the_contrast_and_its_plots(tmp_path):
    output = tmp_path / "figures.json"
    small = ("--only=contrast", "--sizes=16", "--rounds=1", "--device=cpu")
    run("-m", "benchmarks.run", *small, "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    assert {row["mode"] for row in rows} == {"prototype", "sample", "uniform"}
    for metric in ("milliseconds", "ratio to GEMM limit", "peak MiB"):
        providers = {row["provider"] for row in rows if row["metric"] == metric}
        assert providers >= {"dense", "blocks", "double loop, as published"}
    assert all(row["value"] > 0 for row in rows)

    run("-m", "benchmarks.plot", str(output), "--output", str(tmp_path / "images"))
    for name in ("engines-time", "engines-memory"):
        picture = tmp_path / "images" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_benchmark_of_many_processes(tmp_path):
    output = tmp_path / "scaling.json"
    small = ("--num=200", "--rounds=1")
    run("-m", "benchmarks.scaling", *small, "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    assert {row["benchmark"] for row in rows} == {"scaling"}
    assert {row["mode"] for row in rows} == {"PGCLLoss", "contrast"}
    assert all(row["value"] > 0 for row in rows)


def test_benchmark_of_other_libraries(tmp_path):
    output = tmp_path / "libraries.json"
    small = ("--rounds=1", "--sizes=16")
    run("-m", "benchmarks.libraries", *small, "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    assert {row["benchmark"] for row in rows} == {"values", "steps"}
    assert all(row["value"] < 1e-12 for row in rows if row["metric"].startswith("difference"))


def test_benchmark_on_a_gpu_tries_itself_on_a_cpu(tmp_path):
    output = tmp_path / "gpu.json"
    small = ("--device=cpu", "--sizes=64", "--rounds=1", "--precisions=highest")
    run("-m", "benchmarks.gpu", *small, "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    providers = {row["provider"] for row in rows if row["benchmark"] == "gpu"}
    assert providers == {*gpu.ENGINES, "linear_cross_entropy", "linear_cross_entropy, chunked"}
    assert all(row["value"] < 100 for row in rows if row["metric"].startswith("millionths"))


@pytest.mark.parametrize("num", [1, 5, 300])  # of chunks: one, and three of different lengths
def test_info_nce_by_chunks(num):
    views = [torch.randn(num, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    expected, value = InfoNCE(temperature=0.1)(*views), peers.chunked_info_nce(*views, 0.1)
    torch.testing.assert_close(value, expected)
    gradients, others = (torch.autograd.grad(loss, views) for loss in (value, expected))
    torch.testing.assert_close(gradients, others)
