"""Every script runs, on little."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: str) -> str:
    result = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_planted_clusters():
    printed = run("examples/planted_clusters.py", "--epochs=1", "--samples=256", "--seeds=1")
    assert "PGCL minus InfoNCE, purity" in printed
    assert "epoch   purity: InfoNCE   PGCL" in printed


@pytest.mark.parametrize("name", ["sinkhorn", "step"])
def test_benchmarks(name, tmp_path):
    output = tmp_path / "made" / "figures.json"
    printed = run("benchmarks/run.py", "--only", name, "--rounds=1", "--output", str(output))
    assert "pgcl_losses.sinkhorn" in printed or "PGCLLoss" in printed
    measured = json.loads(output.read_text())
    assert measured["machine"]["torch"]
    assert {row["benchmark"] for row in measured["rows"]} == {name}
    assert all(row["value"] > 0 for row in measured["rows"])
