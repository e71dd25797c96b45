"""The swap in scripts of the authors' shape: it changes three lines, and no loss."""

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers.scripts import main_here
from helpers.tu_sets import write_tu_set

from experiments.graphcl import __main__ as program
from experiments.graphcl import report, study

# Scripts of our own, with the names and the order of calls of those of GraphCL and SimGRACE, and
# with what they use of older versions of PyG.
SETS = """
import torch
from torch_geometric.data import InMemoryDataset
from torch_geometric.io import read_tu_data


class TUDataset_aug(InMemoryDataset):
    raw_dir = property(lambda self: f"{self.root}/{self.name}/raw")
    processed_dir = property(lambda self: f"{self.root}/{self.name}/processed")
    raw_file_names = property(lambda self: [f"{self.name}_A.txt"])
    processed_file_names = "data.pt"

    def __init__(self, root, name):
        self.name = name
        super().__init__(root)
        self.data, self.slices = torch.load(self.processed_paths[0])

    def process(self):
        data, slices = read_tu_data(self.raw_dir, self.name)
        torch.save((data, slices), self.processed_paths[0])

    def get(self, idx):
        graph = super().get(idx).clone()
        graph.x[torch.tensor([0])] = torch.zeros(1, graph.x.shape[1], dtype=torch.float32)
        return graph

    def count_keys(self):
        count = 0
        for key in self.data.keys:
            count += len(key) > 0
        return count
"""
ENCODER = """
import torch
from torch_geometric.nn import GINConv, global_add_pool


class Encoder(torch.nn.Module):
    def __init__(self, num_features, dim):
        super().__init__()
        self.conv = GINConv(torch.nn.Linear(num_features, dim))

    def forward(self, x, edge_index, batch):
        return global_add_pool(self.conv(x, edge_index).tanh(), batch)
"""
EVALUATION = """
import pandas
import seaborn


def evaluate_embedding(embeddings, labels):
    assert embeddings.shape == (24, 6) and labels.shape == (24,)
    return 0.25, 0.75
"""
ARGUMENTS = """
import argparse


def arg_parse():
    parser = argparse.ArgumentParser()
    for name in ("DS", "lr", "num-gc-layers", "seed", "aug", "eta", "device", "epochs"):
        parser.add_argument(f"--{name}")
    parser.add_argument("--local", action="store_true")
    return parser.parse_args()
"""
TRAINING = """
import torch
from torch_sparse import SparseTensor
from torch_geometric.data import DataLoader

from arguments import arg_parse
from aug import TUDataset_aug as TUDataset
from evaluate_embedding import evaluate_embedding
from gin import Encoder


class Model(torch.nn.Module):
    def __init__(self, num_features):
        super().__init__()
        self.embedding_dim = 6
        self.encoder = Encoder(num_features, 6)
        self.proj_head = torch.nn.Linear(6, 6)

    def loss_cal(self, x, y):
        x, y = (torch.nn.functional.normalize(z) for z in (x, y))
        logits = x @ y.T / 0.2
        others = logits.masked_fill(torch.eye(len(x), dtype=bool), -torch.inf)
        return (others.logsumexp(1) - logits.diagonal()).mean()


if __name__ == '__main__':
    args = arg_parse()
    torch.manual_seed(int(args.seed))
    EPOCHS
    device = torch.device('cpu')
    dataset = TUDataset(f"data/{args.DS}", name=args.DS)
    assert dataset.count_keys() == 3
    model = Model(dataset.num_features).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=float(args.lr))
    for epoch in range(1, epochs + 1):
        for data in DataLoader(dataset, batch_size=8):
            optimizer.zero_grad()
            z = model.encoder(data.x, data.edge_index, data.batch)
            noisy = z + 0.1 * torch.randn(z.shape)
            loss = model.loss_cal(model.proj_head(z), model.proj_head(noisy))
            loss.backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
        if epoch % log_interval == 0:
            graphs = next(iter(DataLoader(dataset, batch_size=24)))
            z = model.encoder(graphs.x, graphs.edge_index, graphs.batch)
            evaluate_embedding(z.detach().numpy(), graphs.y.numpy())
    assert len(optimizer.param_groups[0]["params"]) == len([*model.parameters()])
"""
EPOCHS = {"GraphCL": ("20", "10"), "SimGRACE": ("int(args.epochs)", "epochs")}


def write_checkout(folder: Path, name: str) -> Path:
    below = folder / name / study.FOLDER
    below.mkdir(parents=True)
    lines = "epochs = {}\n    log_interval = {}".format(*EPOCHS[name])
    files = {"aug": SETS, "gin": ENCODER, "arguments": ARGUMENTS, "evaluate_embedding": EVALUATION}
    files[Path(study.SCRIPTS[name].file).stem] = TRAINING.replace("EPOCHS", lines)
    for file, text in files.items():
        (below / f"{file}.py").write_text(text)
    return below.parent


@pytest.fixture
def given(tmp_path):
    """Options of the program: two checkouts and a set, all of them small."""
    write_tu_set(tmp_path / "sets" / "RINGS", "RINGS", [0, 1] * 12, node_types=2)
    checkouts = {name: write_checkout(tmp_path, name) for name in study.SCRIPTS}
    folders = [f"--{name.lower()}={folder}" for name, folder in checkouts.items()]
    places = {"root": "sets", "output": "runs.jsonl", "cache": "cache"}
    places = [f"--{name}={tmp_path / place}" for name, place in places.items()]
    return [*folders, *places, "--sets=RINGS", "--seeds=1", "--epochs=7"]


def state() -> list[object]:
    """What a run changes in its process, and puts back."""
    return [Path.cwd(), torch.get_default_dtype(), torch.load, torch.Tensor.backward]


def test_the_swap_changes_three_lines_and_no_loss(given, tmp_path, monkeypatch, capsys):
    before = state()
    main_here(monkeypatch, program, *given)
    assert state() == before
    assert not {"aug", "gin", "arguments", "evaluate_embedding"} & sys.modules.keys()
    text = (tmp_path / "runs.jsonl").read_text()
    runs = [json.loads(line) for line in text.splitlines()]
    assert len(runs) == 2 * 8
    for script in study.SCRIPTS:
        of = {"script": script, "dtype": "float32"}
        rows = {row: report.by_seed(runs, row=row, **of)[0] for row in report.ROWS}
        assert [run["lines"] for run in rows.values()] == [0, 3, 3]
        assert {run["accuracy"] for run in rows.values()} == {75}
        assert {len(run["losses"]) for run in rows.values()} == {7 * 3}
        assert rows[study.PGCL]["losses"][0] > rows[study.AFTER]["losses"][0]
        double = {"script": script, "dtype": "float64", "eps": 1e-8}
        pair = [report.by_seed(runs, row=row, **double)[0]["losses"] for row in report.ROWS[:2]]
        assert {*map(len, pair)} == {study.FIRST}
        assert pair[1] == pytest.approx(pair[0], rel=1e-9)
    printed = capsys.readouterr().out
    assert "| GraphCL, RINGS | 75.0 | +0.0 | +0.0 |" in printed
    main_here(monkeypatch, program, *given)
    assert capsys.readouterr().out.startswith("16 finished runs read")
    assert (tmp_path / "runs.jsonl").read_text() == text


def test_what_cannot_run_is_an_error_of_one_line(given, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="give --graphcl"):
        main_here(monkeypatch, program, *given[2:])
    with pytest.raises(ValueError, match=r"has no unsupervised_TU/simgrace\.py"):
        main_here(monkeypatch, program, f"--simgrace={tmp_path}", *given[2:])
    script = tmp_path / "GraphCL" / study.FOLDER / "gsimclr.py"
    script.write_text(script.read_text().replace("loss_cal", "loss_cl"))
    with pytest.raises(ValueError, match="0 lines like"):
        main_here(monkeypatch, program, given[0], *given[2:])
