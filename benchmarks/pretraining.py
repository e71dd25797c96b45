"""Measure how fast pre-training takes molecules, and which fraction of its time the loss takes.

It takes synthetic molecules, or the first ones of a file.

python -m benchmarks.pretraining --smiles zinc.smi.gz
python -m benchmarks.pretraining --rounds 1 --molecules 16 --output /tmp/pretraining.json
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch_geometric.data import Data
from torch_geometric.loader import DataLoader

from experiments.common.arguments import count, file
from experiments.common.rows import INFO_NCE, PGCL
from experiments.transfer.model import WIDTH, MoleculeGIN, pretraining
from experiments.transfer.molecules import graph_of
from experiments.transfer.smiles import lines, synthetic

from . import measure

STEP = "step, PGCL"


def step_times(graphs: list[Data], device: str, rounds: int) -> dict[str, list[float]]:
    """A batch collated, augmented twice, encoded, and its loss taken back to the weights."""

    def stepping(row: str):
        torch.manual_seed(0)
        config = {"row": row, "drop": 0.2, "freeze_epochs": 0}
        model = pretraining(config, MoleculeGIN(), 0).to(device)
        optimizer = torch.optim.Adam(model.parameters())

        def step() -> None:
            (batch,) = DataLoader(graphs, len(graphs))
            loss = model(batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

        return model, step

    model, pgcl = stepping(PGCL)
    _, info_nce = stepping(INFO_NCE)
    views = [torch.randn(len(graphs), WIDTH, device=device, requires_grad=True) for _ in range(2)]
    rivals = {
        STEP: pgcl,
        "step, InfoNCE": info_nce,
        "loss alone, PGCL": lambda: model.loss(*views).backward(),
    }
    return measure.time_in_turn(rivals, rounds)


def tables(args: argparse.Namespace) -> Iterator[list[dict[str, Any]]]:
    texts = lines(args.smiles) if args.smiles else iter(synthetic()[0])
    readable = filter(None, map(graph_of, texts))
    graphs = list(itertools.islice(readable, args.molecules))
    if not graphs:
        raise ValueError(f"{args.smiles}: none of its lines is a molecule")
    source = args.smiles.name if args.smiles else "synthetic"
    size = f"N={len(graphs)} V={sum(graph.num_nodes for graph in graphs)}"
    times = step_times(graphs, args.device, args.rounds)
    yield measure.rows("pretraining", size, source, times, STEP)
    print(f"{1e3 * len(graphs) / min(times[STEP]):.0f} molecules per second")


if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=7)
    parser.add_argument("--smiles", type=file, help="text or table of SMILES, may be gzipped")
    parser.add_argument("--molecules", type=count, default=256, help="in a batch")
    args = parser.parse_args()

    try:
        measure.report(args, tables(args))
    except ValueError as error:
        sys.exit(f"benchmarks.pretraining: {error}")
