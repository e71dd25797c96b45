"""Every script runs, on little."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.scripts import ROOT, run

from pgcl_losses.engine import ENGINE_CHOICES


def test_planted_clusters():
    printed = run("examples/planted_clusters.py", "--epochs=1", "--samples=256", "--seeds=1")
    assert "PGCL minus InfoNCE, purity" in printed
    assert "epoch   purity: InfoNCE   PGCL" in printed


@pytest.mark.parametrize("swap", [[], ["--pgcl"]], ids=["InfoNCE", "PGCL"])
def test_graphcl_swap(swap):
    # Two batches, the last one smaller than the number of prototypes.
    printed = run("examples/graphcl_swap.py", *swap, "--graphs=136", "--epochs=1")
    name = "PGCL" if swap else "InfoNCE"
    assert re.search(rf"^{name}: linear probe 0\.\d+ before training, 0\.\d+ after", printed)


def test_graphcl_swap_on_a_tu_set(tmp_path):
    raw = tmp_path / "TINY" / "raw"
    raw.mkdir(parents=True)
    paths = range(0, 60, 3)  # graphs of three nodes, whose numbers begin at 1; no features
    edges = [(i + a, i + b) for i in paths for a, b in ((1, 2), (2, 1), (2, 3), (3, 2))]
    (raw / "TINY_A.txt").write_text("".join(f"{a}, {b}\n" for a, b in edges))
    (raw / "TINY_graph_indicator.txt").write_text("".join(f"{i // 3 + 1}\n" for i in range(60)))
    (raw / "TINY_graph_labels.txt").write_text("0\n1\n" * 10)
    given = ("--pgcl", "--dataset=TINY", f"--root={raw.parents[1]}", "--epochs=1")
    assert "(TINY, 20 graphs, seed 0)" in run("examples/graphcl_swap.py", *given)


def test_node_level():
    small = ("--nodes=12000", "--contrast-nodes=256", "--steps=3")
    printed = run("examples/node_level.py", *small)
    before, after = re.findall(r"linear probe (0\.\d+), NMI of prototypes 0\.\d+", printed)
    assert float(before) > 0.2 < float(after)
    assert "matrix of a dense loss would take 0.00 GB, over every node 2.30 GB" in printed


def losses(*command: str) -> list[float]:
    """What one of the examples of many processes prints, on little; two may not share a GPU."""
    printed = run(*command, "--epochs=3", "--steps=4", CUDA_VISIBLE_DEVICES="")
    found = re.findall(r"^epoch +(\d+) +loss (\S+) +purity 0\.\d+", printed, flags=re.MULTILINE)
    assert [epoch for epoch, _ in found] == ["1", "2", "3"], printed
    return [float(loss) for _, loss in found]


@pytest.fixture(scope="module")
def losses_of_one_process():
    first, *_, last = found = losses("examples/distributed.py")
    assert last < first
    return found


def test_two_processes_train_as_one_does(losses_of_one_process):
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    found = losses(*torchrun, "examples/distributed.py")
    assert found == pytest.approx(losses_of_one_process, abs=1e-4)


@pytest.mark.parametrize("devices", [1, 2])
def test_lightning_trains_as_one_process_does(devices, losses_of_one_process):
    found = losses("examples/lightning_ddp.py", f"--devices={devices}")
    assert found == pytest.approx(losses_of_one_process, abs=1e-4)


@pytest.mark.parametrize("name", ["sinkhorn", "step"])
def test_benchmarks(name, tmp_path):
    output = tmp_path / "made" / "figures.json"
    printed = run("benchmarks/run.py", "--only", name, "--rounds=1", "--output", str(output))
    assert "pgcl_losses.sinkhorn" in printed or "PGCLLoss" in printed
    measured = json.loads(output.read_text())
    assert measured["machine"]["torch"]
    assert {row["benchmark"] for row in measured["rows"]} == {name}
    assert all(row["value"] > 0 for row in measured["rows"])


def test_engine_benchmark_and_its_plots(tmp_path):
    output = tmp_path / "figures.json"
    small = ("--only=engines", "--sizes=16", "--rounds=1", "--device=cpu")
    run("benchmarks/run.py", *small, "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    assert {row["mode"] for row in rows} == {"prototype", "sample", "uniform"}
    engines = set(ENGINE_CHOICES) - {"triton"}
    for metric in ("milliseconds", "ratio to GEMM limit", "peak MiB"):
        providers = {row["provider"] for row in rows if row["metric"] == metric}
        assert providers >= {*engines, "double loop, as published"}
    assert all(row["value"] > 0 for row in rows)

    run("benchmarks/plot.py", str(output), "--output", str(tmp_path / "images"))
    for name in ("time", "memory"):
        picture = tmp_path / "images" / f"engines-{name}.png"
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_benchmark_of_the_evaluation(tmp_path):
    output = tmp_path / "evaluation.json"
    run("benchmarks/evaluation.py", "--rounds=1", "--sizes=40", "--output", str(output))
    assert {row["benchmark"] for row in json.loads(output.read_text())["rows"]} == {"evaluation"}


def test_benchmark_of_pretraining(tmp_path):
    output = tmp_path / "pretraining.json"
    run("benchmarks/pretraining.py", "--rounds=1", "--molecules=8", "--output", str(output))
    assert {row["benchmark"] for row in json.loads(output.read_text())["rows"]} == {"pretraining"}


def test_benchmark_of_the_pipeline(tmp_path):
    output = tmp_path / "figures.json"
    run("benchmarks/pipeline.py", "--rounds=1", "--graphs=8", "--output", str(output))
    rows = json.loads(output.read_text())["rows"]
    assert {row["benchmark"] for row in rows} == {"augment", "pipeline", "epoch"}
    assert {row["provider"] for row in rows} >= {"NodeDrop and EdgePerturb", "PGCL"}
    assert all(row["value"] > 0 for row in rows)


@pytest.mark.skipif(not Path("/proc/net/dev").exists(), reason="no counter of the loopback's bytes")
def test_bytes_that_gloo_sends():
    printed = run("benchmarks/communication.py", "--ranks=2", "--rows=2048")
    ranks, measured, formula, *_ = printed.splitlines()[-1].split()
    assert int(ranks) == 2
    assert float(measured) == pytest.approx(float(formula), rel=0.2)  # others may talk meanwhile


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure on")
def test_gpu_benchmark_needs_one():
    result = subprocess.run(
        [sys.executable, "benchmarks/gpu.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "no CUDA device" in result.stderr
