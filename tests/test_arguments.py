"""What an option cannot be is an error of one line that names it, in every program."""

import re
import runpy
import sys
from functools import partial

import pytest
import torch
from helpers.scripts import ROOT, main_here

from benchmarks import gpu
from experiments.common import arguments

WRONG = {
    "experiments.synthetic": ["--seeds=0", "--workers=0"],
    "experiments.synthetic.recipe": ["--seeds=0", "--workers=0"],
    "experiments.synthetic.temperature": ["--workers=0"],
    "experiments.nodes": ["--seeds=0", "--epochs=0", "--workers=0", "--temperature=0"],
    "experiments.transfer.finetune": [
        *("--seeds=0", "--epochs=0", "--batch-size=0", "--workers=0", "--device=cuda"),
        *("--lr=0", "--lr=nan", "--dropout=1", "--csv=nowhere.csv"),
    ],
    "experiments.transfer.pretrain": [
        *("--epochs=0", "--batch-size=0", "--workers=0", "--limit=0", "--device=cuda:99"),
        *("--lr=-1", "--drop=20", "--freeze-epochs=-1", "--seed=-1", "--smiles=nowhere.smi"),
    ],
    "experiments.transfer.probe": ["--seeds=0", "--workers=0", "--device=gpu", "--csv=nowhere.csv"],
    "experiments.unsupervised": [
        *("--epochs=0", "--epochs=1.5", "--seeds=0", "--look-every=0", "--workers=0"),
        *("--batch-size=0", "--num-prototypes=0", "--freeze-epochs=-1", "--consistency-weight=-6"),
        *("--drop=20", "--drop=1.0", "--drop=-0.1", "--lr=-1", "--lr=0", "--lr=inf", "--lr=fast"),
    ],
    "experiments.unsupervised.recipe": ["--seeds=0", "--workers=0"],
    "benchmarks.communication": ["--ranks=1", "--num=0", "--dim=0", "--prototypes=0"],
    "benchmarks.features": ["--num=0", "--limit=0", "--largest=0"],
    "benchmarks.gpu": ["--device=cuda", "--rounds=0", "--sizes=0"],
    "benchmarks.libraries": ["--rounds=0", "--sizes=0"],
    "benchmarks.parts": ["--sizes=0"],
    "benchmarks.pipeline": ["--graphs=0"],
    "benchmarks.pretraining": ["--molecules=0", "--smiles=nowhere.smi"],
    "benchmarks.run": ["--rounds=0", "--device=cuda", "--sizes=0", "--variants-at=0"],
    "benchmarks.scaling": ["--num=0", "--ranks=0", "--counted=0"],
    "examples/compare.py": [
        *("--seeds=2", "--epochs=0", "--batch-size=5", "--labels=0", "--temperatures=0"),
        *("--temperatures=inf", "--temperatures=nan", "--dataset=nowhere.pt"),
    ],
    "examples/distributed.py": ["--epochs=0", "--steps=0"],
    "examples/graphcl_swap.py": ["--epochs=0", "--graphs=29"],
    "examples/lightning_ddp.py": ["--devices=0", "--devices=-1", "--devices=3", "--epochs=0"],
    "examples/node_level.py": ["--steps=0", "--nodes=2000", "--contrast-nodes=-1"],
    "examples/synthetic_clusters.py": [
        *("--epochs=0", "--seeds=0", "--samples=0", "--classes=1", "--prototypes=0"),
    ],
    "examples/tu_graphs.py": [
        *("--epochs=0", "--batch-size=0", "--temperature=0", "--temperature=nan"),
        *("--dataset=../MUTAG", "--dataset=data/MUTAG"),
    ],
}


@pytest.mark.filterwarnings("ignore")  # of a program run here and not by itself
@pytest.mark.parametrize(
    ("program", "given"), [(name, given) for name, wrong in WRONG.items() for given in wrong]
)
def test_what_is_wrong_is_said_in_a_line(program, given, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", [program, given])
    monkeypatch.syspath_prepend(ROOT / "examples")  # Python does so for a script
    start = partial(runpy.run_module, program)
    if program.endswith(".py"):
        start = partial(runpy.run_path, str(ROOT / program))
    with pytest.raises(SystemExit) as stopped:
        start(run_name="__main__")
    printed, errors = capsys.readouterr()
    assert (stopped.value.code, printed) == (2, "")
    name, _, value = given.partition("=")
    said = rf"error: (argument )?{name}:? must .+, but it is {re.escape(value)}$"
    assert re.search(said, errors.splitlines()[-1]), errors


def test_what_is_measured_on_a_gpu_needs_one(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(SystemExit, match=r"^2$"):
        main_here(monkeypatch, gpu)
    assert "argument --device: must be cpu or a CUDA device" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (arguments.count, "1", 1),
        (arguments.at_least(0), "0", 0),
        (arguments.fraction, "0", 0.0),
        (arguments.positive, "1e-9", 1e-9),
        (arguments.weight, "0", 0.0),
        (arguments.device, "cpu", "cpu"),
        (arguments.device, "cuda:1", "cuda:1"),
        (arguments.file, str(ROOT / "README.md"), ROOT / "README.md"),
    ],
)
def test_what_is_right_is_read(kind, text, value, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert kind(text) == value
