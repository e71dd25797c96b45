"""examples/compare.py: what it reads, and what it prints."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.scripts import ROOT, run
from helpers.tu_sets import write_tu_set
from torch_geometric.datasets import FakeDataset

SMALL = ("--seeds=3", "--epochs=1", "--labels=8", "--temperatures", "0.2", "0.5")
LOSSES = ("untrained", "InfoNCE, temperature 0.[25]", "PGCL, temperature 0.[25]")


def save_graphs(folder, **changed):
    graphs = list(FakeDataset(40, avg_num_nodes=9, num_channels=4, num_classes=2))
    for i, graph in enumerate(graphs):
        graph.y = torch.tensor([i % 2])
    for name, value in changed.items():
        graphs[0][name] = value
    torch.save([graph.to_dict() for graph in graphs], folder / "graphs.pt")
    return f"--dataset={folder / 'graphs.pt'}"


@pytest.mark.parametrize("kind", ["TU", "file"])
def test_prints_both_losses_and_their_difference(kind, tmp_path):
    if kind == "TU":
        write_tu_set(tmp_path / "TINY" / "raw", "TINY", [0, 1] * 20)
        given = ("--dataset=TINY", f"--root={tmp_path}")
    else:
        given = (save_graphs(tmp_path),)
    script = ("-W", "error::RuntimeWarning", "examples/compare.py")
    first, *lines, gain = run(*script, *given, *SMALL).splitlines()
    assert first.endswith(": accuracy in % with 8 labels, 3 seeds")
    for line, loss in zip(lines, LOSSES, strict=True):
        assert re.fullmatch(rf"{loss}: \d+\.\d ± \d+\.\d", line), line
    number = r"[+-]\d+\.\d"
    assert re.fullmatch(
        rf"PGCL minus InfoNCE: {number} \(95 % interval {number} to {number}\)", gain
    ), gain


class Harm:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_file_runs_no_code(tmp_path):
    dataset = save_graphs(tmp_path, harm=Harm(tmp_path / "done"))
    command = [sys.executable, "examples/compare.py", dataset, *SMALL]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert "UnpicklingError" in ended.stderr
    assert not (tmp_path / "done").exists()
