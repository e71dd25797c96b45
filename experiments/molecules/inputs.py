"""Options and runs of the programs that compare encoders, `finetune` and `probe`."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from experiments.common import results
from experiments.common.arguments import checked, count, device, file, parser_of

from .data import labelled
from .model import checkpoint

Runs = dict[tuple[str, Path], dict[int, results.Run]]  # by encoder and set, then by seed
encoder_file = checked(
    lambda text: None if text == "none" else Path(text),
    "'none' or an existing file",
    lambda path: path is None or path.is_file(),
)


class Encoder(NamedTuple):
    """An encoder in the configuration of a run."""

    name: str  # in the printed table
    file: Path | None
    pretraining: dict[str, Any] | None
    seed: int


def comparison_parser(program: str, description: str | None) -> argparse.ArgumentParser:
    parser = parser_of(f"molecules.{program}", description)
    add = parser.add_argument
    add("--csv", type=file, nargs="+", required=True, help="tables of SMILES and labels")
    add("--encoders", type=encoder_file, nargs="+", default=[None], help="'none', or files")
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=count, default=2, help="runs at a time")
    add("--output", type=Path, default=Path(f"runs/molecules/{program}.jsonl"))
    return parser


def origin(file: Path) -> dict[str, Any]:
    """The configuration of an encoder's pre-training, from its file."""
    return checkpoint(file)["config"]


def complete(
    args: argparse.Namespace,
    encoders: list[Encoder],
    setting: dict[str, Any],
    run: Callable[..., results.Run],
) -> Runs:
    """Run what --output lacks, and return the runs of these sets and encoders."""
    jobs = {}
    for path in args.csv:
        here = {"dataset": path.name, "data": labelled(path).digest, **setting}
        for name, encoder, pretraining, seed in encoders:
            config = {**here, "pretraining": pretraining, "seed": seed}
            jobs[name, path, seed] = config, path, encoder, args.device
    done = results.complete(args.output, jobs.values(), run, args.workers)
    runs: Runs = {}
    for (name, path, seed), of_job in zip(jobs, done, strict=True):
        runs.setdefault((name, path), {})[seed] = of_job
    return runs
