"""examples/compare.py: what it reads, what it compares, and what it says."""

import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.scripts import ROOT
from helpers.tu_sets import write_tu_set
from torch_geometric.data import Data
from torch_geometric.datasets import FakeDataset

from pgcl_losses import InfoNCE

SMALL = ("--seeds=3", "--epochs=1", "--temperatures", "0.2", "0.5")


@pytest.fixture
def compare(monkeypatch) -> Callable[..., dict[str, Any]]:
    """The names of the script, run with these arguments and up to its main."""

    def names(*given: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["compare.py", *given])
        return runpy.run_path(str(ROOT / "examples" / "compare.py"), run_name="compare")

    return names


def saved(folder: Path, unlabelled: int = 0, **changed: Any) -> str:
    """A file of 30 graphs, of which some have no label, and the last one differs."""
    graphs = list(FakeDataset(30, avg_num_nodes=9, num_channels=4, num_classes=2))
    graphs = [
        Data(x=graph.x, edge_index=graph.edge_index, y=i % 2) for i, graph in enumerate(graphs)
    ]
    for graph in graphs[:unlabelled]:
        graph.y = None
    for name, value in changed.items():
        graphs[-1][name] = value
    torch.save(graphs, folder / "graphs.pt")
    return str(folder / "graphs.pt")


def test_table_and_verdict(compare, capsys):
    compare(*SMALL)["main"]()
    first, _, header, _, *rows = capsys.readouterr().out.splitlines()
    assert first == "synthetic: 200 graphs, 200 with a label; 3 seeds"
    assert header == "| accuracy in % | linear probe | 1 label per class |"
    losses = ("InfoNCE",) * 2 + ("PGCL",) * 2
    names = "untrained", *(f"{loss} at temperature" for loss in losses)
    cell = r"\d+\.\d \((chosen|(chosen: )?[+-]\d+\.\d, [+-]\d+\.\d to [+-]\d+\.\d)\)"
    for name, row in zip(names, rows, strict=False):
        assert re.fullmatch(rf"\| {name}[ .\d]* \| {cell} \| {cell} \|", row), row
    assert sum(row.count("(chosen)") for row in rows[1:3]) == 2
    assert sum(row.count("(chosen: ") for row in rows[3:5]) == 2
    found = r"PGCL at temperature .* is (significantly (above|below)|not significantly different "
    found += r"from) InfoNCE at temp.*"
    said = rf"Verdict: {found} in the linear probe; {found} with 1 label per class\."
    assert re.fullmatch(said, rows[-1]), rows[-1]


@pytest.mark.parametrize("raw", ["", "raw"])
def test_a_folder_in_tu_layout_and_nothing_beside_its_text(compare, raw, tmp_path):
    write_tu_set(tmp_path / "TINY" / raw, "TINY", [0, 1] * 10)
    processed = tmp_path / "TINY" / "processed"
    processed.mkdir()
    for name in ("data.pt", "pre_transform.pt"):
        (processed / name).write_text("not to be read")
    graphs = compare()["read"](str(tmp_path / "TINY"))
    assert len(graphs) == 20
    if raw:
        names = compare(f"--root={tmp_path}")
        assert len(names["read"]("TINY")) == 20
        every, labelled, labels = names["prepared"](graphs)
        assert every[0].x.shape == (5, 1)  # of ones: the set has no features
        assert (len(labelled), labels.sum()) == (20, 10)


def test_graphs_without_a_label_train_and_do_not_evaluate(compare, capsys, tmp_path):
    compare(f"--dataset={saved(tmp_path, unlabelled=6)}", *SMALL[:2], "--temperatures=1")["main"]()
    printed = capsys.readouterr().out
    assert "graphs.pt: 30 graphs, 24 with a label; 3 seeds" in printed
    assert "InfoNCE at temperature 1 " in printed


class Harm:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("unlabelled", "changed", "said"),
    [
        (30, {}, "no graph has a label y: training needs none, the evaluation does"),
        (12, {}, "10 labelled graphs of each: 2 classes, the smallest of 9"),
        (0, {"y": torch.rand(2)}, "2 elements"),
        (0, {"x": torch.full((99, 4), torch.nan)}, "an x without NaN or inf"),
        (0, {"x": torch.ones(99, 3)}, "Sizes of tensors must match"),
        (0, {"edge_index": torch.tensor([[0], [99]])}, "contains larger indices"),
    ],
)
def test_graphs_that_cannot_be_compared(compare, unlabelled, changed, said, capsys, tmp_path):
    path = saved(tmp_path, unlabelled, **changed)
    with pytest.raises(SystemExit, match=r"^2$"):
        compare(f"--dataset={path}")["main"]()
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"error: --dataset {path} cannot be used (" in error
    assert said in error


def test_a_file_runs_no_code(compare, capsys, tmp_path):
    path = saved(tmp_path, harm=Harm(tmp_path / "done"))
    with pytest.raises(SystemExit, match=r"^2$"):
        compare(f"--dataset={path}")["main"]()
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"--dataset {path} holds more than Data of tensors, which could run code: save" in error
    assert not (tmp_path / "done").exists()


def test_a_folder_without_a_set_is_no_reason_for_a_download(compare, capsys, tmp_path):
    (tmp_path / "TINY_A.txt").write_text("1, 2\n")
    with pytest.raises(SystemExit, match=r"^2$"):
        compare(f"--dataset={tmp_path}")["main"]()
    assert "no NAME_A.txt with a NAME_graph_indicator.txt" in capsys.readouterr().err


def test_views_do_not_depend_on_what_a_loss_draws(compare):
    class Drawing(InfoNCE):
        def __init__(self) -> None:
            super().__init__(temperature=0.5)
            torch.rand(3)

        def forward(self, *views):
            torch.rand(5)
            return super().forward(*views)

    names = compare("--epochs=2")
    graphs, *_ = names["prepared"](names["read"]("synthetic"))
    losses = partial(InfoNCE, temperature=0.5), Drawing
    encoders = [names["trained"](graphs[:40], 16, 0, loss_of).state_dict() for loss_of in losses]
    torch.testing.assert_close(*encoders, rtol=0, atol=0)
    untrained = names["trained"](graphs, 16, 0, None).state_dict()
    assert not torch.equal(untrained["head.0.weight"], encoders[0]["head.0.weight"])


@pytest.mark.parametrize(
    ("differences", "said"),
    [
        ([2.0, 3.0, 4.0], "significantly above it"),
        ([-2.0, -3.0, -4.0], "significantly below it"),
        ([-0.1, 0.0, 0.1], "not significantly different from it"),
        # A variance of 4: 7.85 * 4 = 31.4, and two more.
        ([-2.0, 0.0, 2.0], "(inconclusive: a difference of 1 point needs about 34 seeds)"),
    ],
)
def test_verdict(compare, differences, said):
    found = compare("--seeds=3")["verdict"](np.array(differences), "it")
    assert found.endswith(said)


def test_interval_is_that_of_student(compare):
    # t at 97.5 % with 2 degrees of freedom: 4.303.
    found = compare()["interval"](np.array([1.0, 2.0, 3.0]))
    assert found == pytest.approx((2, 2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)
