"""One run: a copy of a published script, mended for today's PyG, with its loss or with ours.

What a script needs to run at all is mended alike for every loss, by other values of names that it
imports. The swap is that of docs/swap.md. `plan.md` has the details.
"""

import importlib
import importlib.util
import io
import multiprocessing
import os
import re
import runpy
import shutil
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import torch_geometric
from torch_geometric.loader import DataLoader

from experiments.common import results
from experiments.common.results import Config, Run


class Script(NamedTuple):
    file: str
    options: str  # those of its go.sh
    edits: dict[str, str]  # patterns of lines, and what stands there instead


SCRIPTS = {
    "GraphCL": Script(
        "gsimclr.py",
        "--lr 0.01 --local --num-gc-layers 3 --aug random4",
        {r"epochs = \d+": "epochs = {epochs}", r"log_interval = \d+": "log_interval = {epochs}"},
    ),
    "SimGRACE": Script(
        "simgrace.py",
        "--lr 0.01 --local --num-gc-layers 5 --eta 1.0 --device cpu --epochs {epochs}",
        {},
    ),
}
FOLDER = "unsupervised_TU"  # of the scripts in both repositories
BEFORE, AFTER, PGCL, ROUNDED = "its own loss", "InfoNCE", "PGCLLoss", "its own loss * (1 + 1e-15)"
LOSSES = {  # as docs/swap.md writes them
    AFTER: 'InfoNCE.like("{script}")',
    PGCL: "PGCLLoss(model.embedding_dim, temperature=0.2, consistency_weight=6).to(device)",
}
UNUSED = ("pandas", "seaborn", "torch_sparse")  # imported by the scripts, and not used
FIRST = 20  # steps in float64


class Enough(Exception):
    """The losses of the first steps are there."""


def edited(text: str, edits: dict[str, str]) -> str:
    """The text with other lines; each pattern must match one line."""
    for line, other in edits.items():
        text, count = re.subn(rf"(?m)^( *){line}$", rf"\g<1>{other}", text)
        if count != 1:
            raise ValueError(f"the script has {count} lines like {line!r}, and should have one")
    return text


def swapped(text: str, config: Config) -> str:
    """The script after the swap of the guide: two new lines and a changed one."""
    row = config["row"]
    if row not in LOSSES:
        rounded = {r"(.*model\.loss_cal\(.*\))": r"\2 * (1 + 1e-15)"}
        return edited(text, rounded if row == ROUNDED else {})
    edits = {
        r"(model = .*)": rf"\2\n\g<1>model.loss = {LOSSES[row].format(**config)}",
        r"(.*model\.loss)_cal(\(.*\))": r"\2\3",
    }
    return f"from pgcl_losses import {row}\n{edited(text, edits)}"


def copied(config: Config, checkout: Path, data: Path, work: Path) -> int:
    """Fill the folder ``work`` with the script and its set; the number of lines of the swap."""
    shutil.copytree(checkout / FOLDER, work, ignore=shutil.ignore_patterns("data", "__pycache__"))
    name, script = config["dataset"], SCRIPTS[config["script"]]
    shutil.copytree(data / name / "raw", work / "data" / name / name / "raw")
    (work / "logs").mkdir(exist_ok=True)
    sets, main = work / "aug.py", work / script.file
    sets.write_text(sets.read_text().replace(".keys:", ".keys():"))
    edits = {line: other.format(**config) for line, other in script.edits.items()}
    before = edited(main.read_text(), edits)
    after = swapped(before, config)
    main.write_text(after)
    return len({*after.splitlines()} - {*before.splitlines()})


def mended(config: Config) -> Iterator[tuple[Any, str, Any]]:
    """Names of torch and PyG, and what the scripts expect there."""
    read = torch_geometric.io.read_tu_data

    def with_float_features(*where):
        data, slices, _ = read(*where)
        data.x = data.x.float()  # in float64 a script would stop at a mask of float32
        return data, slices

    yield torch_geometric.io, "read_tu_data", with_float_features
    yield torch_geometric.data, "DataLoader", DataLoader
    yield torch, "load", partial(torch.load, weights_only=False)
    if "eps" in config:
        yield torch.optim, "Adam", partial(torch.optim.Adam, eps=config["eps"])


def follow(values: dict[str, float]) -> None:
    """Note what the script's own evaluation returns; its encoder casts the features."""
    module = importlib.import_module("evaluate_embedding")
    evaluate = module.evaluate_embedding

    def noted(*args):
        of = evaluate(*args)
        values["validation"], values["accuracy"] = (round(100 * float(v), 3) for v in of)
        return of

    module.evaluate_embedding = noted
    encoder = importlib.import_module("gin").Encoder
    forward = encoder.forward
    encoder.forward = lambda self, x, *rest: forward(self, x.to(torch.get_default_dtype()), *rest)


def forget(names: set[str], below: Path | None = None) -> None:
    """Unload modules of these names, and those of a folder."""
    for name, module in list(sys.modules.items()):
        file = Path(getattr(module, "__file__", None) or "")
        if name in names or (below and file.is_relative_to(below)):
            del sys.modules[name]


def training(config: Config, checkout: Path, data: Path) -> Run:
    """Run the script in this process, which is afterwards as it was before."""
    double = config["dtype"] == "float64"
    losses, times, values = [], [], {}
    backward, script = torch.Tensor.backward, SCRIPTS[config["script"]]

    def watched(loss, *args, **options):
        losses.append(loss.item())
        times.append(time.perf_counter())
        backward(loss, *args, **options)
        if double and len(losses) == FIRST:
            raise Enough

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        work = Path(folder).resolve() / "copy"
        lines = copied(config, checkout, data, work)
        options = f"{script.options} --DS {config['dataset']} --seed {config['seed']}"
        patches = [
            *mended(config),
            (torch.Tensor, "backward", watched),
            (sys, "argv", [script.file, *options.format(**config).split()]),
            (sys, "path", [str(work), *sys.path]),
        ]
        for owner, name, value in patches:
            stack.enter_context(mock.patch.object(owner, name, value))
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        stack.callback(os.chdir, Path.cwd())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        for redirected in (redirect_stdout, redirect_stderr):  # each loss, and PyG's progress
            stack.enter_context(redirected(io.StringIO()))
        absent = {name for name in UNUSED if importlib.util.find_spec(name) is None}
        for name in absent:
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].SparseTensor = None
        stack.callback(forget, absent, below=work)
        os.chdir(work)
        torch.set_default_dtype(getattr(torch, config["dtype"]))
        follow(values)
        forget(absent - {"torch_sparse"})  # scikit-learn would ask pandas
        with suppress(Enough):
            runpy.run_path(script.file, run_name="__main__")
    if not double:
        starts = times[:: len(times) // config["epochs"]]  # the first step of each epoch
        values["epoch_seconds"] = round(float(np.median(np.diff(starts))), 3)
        losses = [round(loss, 6) for loss in losses]
    return {"config": config, **values, "lines": lines, "losses": losses}


def run(config: Config, checkout: Path, data: Path) -> Run:
    """`training` in a process that has run nothing else."""
    context = multiprocessing.get_context("spawn")
    with results.ProcessPoolExecutor(1, context, results.limit_threads, (1,)) as pool:
        return pool.submit(training, config, checkout, data).result()
