"""Every script runs, on little."""

import json
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.scripts import ROOT, run
from helpers.tu_sets import write_tu_set

from benchmarks import features, gpu, measure, peers, pipeline
from pgcl_losses import InfoNCE


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda s: s.stem)
def test_the_line_of_an_import_that_fails_names_the_extra(script):
    """A traceback shows it."""
    first_lines: dict[str, str] = {}
    for line in script.read_text().splitlines():
        if found := re.match(r"(?:import|from) (\w+)", line):
            first_lines.setdefault(found[1], line)
    for package in ("sklearn", "torch_geometric", "tqdm", "lightning"):
        assert "# pip install -e '.[" in first_lines.get(package, "# pip install -e '.["), package


def test_synthetic_clusters():
    printed = run("examples/synthetic_clusters.py", "--epochs=1", "--samples=256", "--seeds=1")
    assert "PGCL minus InfoNCE, purity" in printed
    assert "epoch   purity: InfoNCE   PGCL" in printed


@pytest.mark.parametrize("swap", [[], ["--pgcl"]], ids=["InfoNCE", "PGCL"])
def test_graphcl_swap(swap):
    # Two batches, the last one smaller than the number of prototypes.
    printed = run("examples/graphcl_swap.py", *swap, "--graphs=136", "--epochs=1")
    name = "PGCL" if swap else "InfoNCE"
    assert re.search(rf"^{name}: linear probe 0\.\d+ before training, 0\.\d+ after", printed)


def test_graphcl_swap_on_a_tu_set(tmp_path):
    given = ("--pgcl", "--dataset=TINY", f"--root={tmp_path}", "--epochs=1")
    for graphs in (20, 30):  # the set that is there, not one that was read before
        write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * (graphs // 2))
        printed = run("examples/graphcl_swap.py", *given)
        assert f"(TINY, {graphs} graphs, seed 0)" in printed
    assert [path.name for path in (tmp_path / "TINY").iterdir()] == ["raw"]


def test_graphcl_swap_takes_no_path_for_a_name(tmp_path):
    given = [f"--dataset={tmp_path / 'TINY'}", f"--root={tmp_path / 'data'}"]
    command = [sys.executable, "examples/graphcl_swap.py", *given]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "--dataset must be the name of a set" in result.stderr
    assert not any(tmp_path.iterdir())


def test_tu_graphs(tmp_path):
    write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * 15)
    printed = run("examples/tu_graphs.py", "--dataset=TINY", f"--root={tmp_path}", "--epochs=6")
    first, *epochs = printed.splitlines()
    assert re.fullmatch(r"TINY: 30 graphs, linear probe \d\.\d+ untrained", first)
    numbers = [int(number) for number in re.findall(r"^Epoch: (\d+), Loss: \d", printed, re.M)]
    assert numbers == [1, 2, 3, 4, 5, 6]
    assert ["Linear probe" in epoch for epoch in epochs] == [False] * 4 + [True] * 2
    assert [path.name for path in (tmp_path / "TINY").iterdir()] == ["raw"]


def test_node_level():
    small = ("--nodes=12000", "--contrast-nodes=256", "--steps=3")
    printed = run("examples/node_level.py", *small)
    before, after = re.findall(r"linear probe (0\.\d+), NMI of prototypes 0\.\d+", printed)
    assert float(before) > 0.2 < float(after)
    assert "matrix of a dense loss would take 0.00 GB, over every node 2.30 GB" in printed


def test_labels():
    printed = run("examples/labels.py")
    untrained, without_labels, with_labels = map(float, re.findall(r"0\.\d+", printed))
    assert untrained < without_labels < with_labels
    assert with_labels > 1.5 * untrained


def test_graphs_and_texts():
    retrieval, temperatures = run("examples/graphs_and_texts.py").splitlines()
    before, after = map(float, re.findall(r"0\.\d+", retrieval))
    assert before < 0.05
    assert after > 0.4
    before, after = map(float, re.findall(r"0\.\d+", temperatures))
    assert 0 < after < before


def losses(*command: str) -> list[float]:
    """What one of the examples of many processes prints, on little; two may not share a GPU."""
    printed = run(*command, "--epochs=3", "--steps=4", CUDA_VISIBLE_DEVICES="")
    epochs = re.findall(r"^epoch +(\d+) +loss (\S+) +purity 0\.\d+", printed, flags=re.MULTILINE)
    assert [number for number, _ in epochs] == ["1", "2", "3"], printed
    return [float(loss) for _, loss in epochs]


@pytest.fixture(scope="module")
def losses_of_one_process():
    first, *_, last = of_epochs = losses("examples/distributed.py")
    assert last < first
    return of_epochs


def test_two_processes_train_as_one_does(losses_of_one_process):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    of_two = losses(*torchrun, "examples/distributed.py")
    assert of_two == pytest.approx(losses_of_one_process, abs=1e-4)


@pytest.mark.parametrize("devices", [1, 2])
def test_lightning_trains_as_one_process_does(devices, losses_of_one_process):
    of_lightning = losses("examples/lightning_ddp.py", f"--devices={devices}")
    assert of_lightning == pytest.approx(losses_of_one_process, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "provider"),
    [("sinkhorn", "epsilon=0.001"), ("step", "PGCLLoss"), ("variants", "heads (10, 42, 84)")],
)
def test_benchmarks(name, provider, tmp_path):
    output = tmp_path / "made" / "figures.json"
    small = ("--only", name, "--rounds=1", "--variants-at=16")
    printed = run("-m", "benchmarks.run", *small, "--output", str(output))
    assert provider in printed
    measured = json.loads(output.read_text())
    assert measured["machine"]["torch"]
    assert {row["benchmark"] for row in measured["rows"]} == {name}
    assert all(row["value"] > 0 for row in measured["rows"])


def test_figures_of_another_machine_stay(tmp_path):
    path, machine = tmp_path / "figures.json", {"cpu": "mine", "torch": "2.13.0"}
    rows = {name: [{"benchmark": name, "value": 1}] for name in ("step", "engines")}
    for table in rows.values():
        measure.save(path, table, machine)
    measure.save(path, rows["step"], machine)
    assert json.loads(path.read_text())["rows"] == rows["engines"] + rows["step"]
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
    [("-m", "benchmarks.plot", "benchmarks/results/cpu.json"), ("docs/draw.py",)],
    ids=["plot", "draw"],
)
def test_pictures_go_into_a_new_folder(tmp_path, script):
    command = [sys.executable, *script, f"--output={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert f"--output {tmp_path} is there already: choose another folder" in result.stderr


def test_benchmarks_of_engines_and_parts_and_their_plots(tmp_path):
    output = tmp_path / "figures.json"
    small = ("--only=engines", "--sizes=16", "--rounds=1", "--device=cpu")
    run("-m", "benchmarks.run", *small, "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    assert {row["mode"] for row in rows} == {"prototype", "sample", "uniform"}
    for metric in ("milliseconds", "ratio to GEMM limit", "peak MiB"):
        providers = {row["provider"] for row in rows if row["metric"] == metric}
        assert providers >= {"dense", "blocks", "double loop, as published"}
    assert all(row["value"] > 0 for row in rows)

    run("-m", "benchmarks.parts", "--sizes", "16", "--rounds=1", "--output", str(output))
    parts = [row for row in json.loads(output.read_text())["rows"] if row["benchmark"] == "parts"]
    fractions = [row["value"] for row in parts if row["metric"] == "fraction of the step"]
    assert all(fraction > 0 for fraction in fractions)
    assert sum(fractions) == pytest.approx(1, abs=1e-3)

    run("-m", "benchmarks.plot", str(output), "--output", str(tmp_path / "images"))
    for name in ("engines-time", "engines-memory", "parts"):
        picture = tmp_path / "images" / f"{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_benchmark_of_many_processes(tmp_path):
    output = tmp_path / "scaling.json"
    small = ("--num=2000", "--rounds=1", "--counted=2")
    run("-m", "benchmarks.scaling", *small, "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    assert {row["benchmark"] for row in rows} == {"scaling", "work"}
    assert {row["mode"] for row in rows} == {"PGCLLoss", "contrast"}
    (most,) = [row["value"] for row in rows if row["metric"] == "most to mean"]
    assert 1 <= most < 1.1
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


def test_benchmark_of_the_pipeline(tmp_path):
    output = tmp_path / "figures.json"
    run("-m", "benchmarks.pipeline", "--rounds=1", "--graphs=8", "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    assert {row["benchmark"] for row in rows} == {"pipeline", "epoch"}
    assert {row["provider"] for row in rows} >= {"PGCL", pipeline.PUBLISHED}
    assert all(row["value"] > 0 for row in rows)


@pytest.mark.parametrize("num", [1, 5, 300])  # of chunks: one, and three of different lengths
def test_a_rival_by_chunks_is_info_nce(num):
    views = [torch.randn(num, 8, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    expected, value = InfoNCE(temperature=0.1)(*views), peers.chunked_info_nce(*views, 0.1)
    torch.testing.assert_close(value, expected)
    gradients, others = (torch.autograd.grad(loss, views) for loss in (value, expected))
    torch.testing.assert_close(gradients, others)


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="no counter of the loopback's bytes")
def test_bytes_that_gloo_sends():
    printed = run("-m", "benchmarks.communication", "--ranks=2", "--num=2048")
    ranks, measured, formula, *_ = printed.splitlines()[-1].split()
    assert int(ranks) == 2
    assert float(measured) == pytest.approx(float(formula), rel=0.2)  # others may talk meanwhile


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the limit is one of Linux")
def test_features_that_need_processes():
    info_nce = features.info_nce
    assert features.two_processes(info_nce) == "yes"
    assert features.two_processes(partial(info_nce, gather=False)) == "no"
    dense = partial(info_nce, engine="dense")  # one matrix at N=8192 has 1024 MiB
    assert features.largest(dense, 512, [64, 8192]).startswith("64 (")
    assert features.largest(info_nce, 512, [64, 8192]).startswith("8,192 (")


@pytest.mark.parametrize("row", features.OPTIONS)
def test_features_that_options_switch_on(row):
    check, columns = features.OPTIONS[row]
    for name in {features.PGCL, features.INFO_NCE} & columns.keys():
        answer = features.answer(check, columns[name])
        assert answer == "yes" or float(answer.partition(": ")[2]) >= 0, (name, answer)
    assert features.answer(features.remembers, features.info_nce) == "no"
    assert features.answer(features.as_clip, features.info_nce) == "no"
