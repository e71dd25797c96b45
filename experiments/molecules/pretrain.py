"""Pre-trains the encoder of molecules without labels, and saves it in one file.

python -m experiments.molecules.pretrain --smiles zinc.smi.gz --row PGCL --epochs 20

The same command resumes an interrupted run after its last complete epoch. Losses and speeds are
written beside the file, as one JSON line.
"""

import argparse
import json
import time
from pathlib import Path

import rdkit
import torch
from torch import nn
from torch_geometric.loader import DataLoader
from tqdm import tqdm

from experiments.common import results
from experiments.common.arguments import (
    at_least,
    count,
    device,
    file,
    fraction,
    parser_of,
    positive,
    program,
)

from .data import digest, graphs_of, smiles_of
from .model import PGCL, ROWS, MoleculeGIN, checkpoint, pretraining


def parse() -> argparse.Namespace:
    parser = parser_of("molecules.pretrain", __doc__)
    add = parser.add_argument
    add("--smiles", type=file, required=True, help="text or .csv of SMILES, may be gzipped")
    add("--smiles-column", help="of a table (default: smiles or mol)")
    add("--limit", type=count, help="use only the first LIMIT lines")
    add("--row", choices=ROWS, default=PGCL)
    add("--epochs", type=count, default=2)
    add("--batch-size", type=count, default=256)
    add("--lr", type=positive, default=1e-3)
    add("--drop", type=fraction, default=0.2, help="of nodes dropped, and of edges perturbed")
    add("--freeze-epochs", type=at_least(0), default=1, help="epochs with frozen prototypes")
    add("--seed", type=at_least(0), default=0)
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, help="default: runs/molecules/ROW-SEED.pt")
    return parser.parse_args()


def train_epoch(
    model: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer
) -> dict[str, float]:
    device = next(model.parameters()).device
    started, total, molecules = time.perf_counter(), 0.0, 0
    with tqdm(loader, unit="batch") as bar:
        for batch in bar:
            loss = model(batch.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
            molecules += batch.num_graphs
            bar.set_postfix(loss=f"{loss.item():.3f}")
    seconds = time.perf_counter() - started
    return {"loss": total / len(loader), "molecules_per_second": round(molecules / seconds, 1)}


def main() -> None:
    args = parse()
    file_name = f"{args.row.replace(' ', '-')}-{args.seed}.pt"
    output = args.output or Path("runs/molecules") / file_name
    smiles = smiles_of(args.smiles, args.smiles_column)[: args.limit]
    graphs = graphs_of(args.smiles, smiles)
    names = ("row", "batch_size", "lr", "drop", "freeze_epochs", "seed")
    config = {name: getattr(args, name) for name in names} | {
        "smiles": digest("\n".join(smiles[line] for line in graphs).encode()),
        "molecules": len(graphs),
    }
    drop_last = len(graphs) > args.batch_size  # a last batch of one would have no negatives
    loader = DataLoader([*graphs.values()], args.batch_size, shuffle=True, drop_last=drop_last)

    torch.manual_seed(args.seed)  # the same initial encoder for all rows
    encoder = MoleculeGIN()
    model = pretraining(config, encoder, len(loader)).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    history = []
    if output.exists():
        state = checkpoint(output)
        if state["config"] != config:
            raise ValueError(f"--output: {output} is of another run, {state['config']}")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        history = state["history"]
    for epoch in range(len(history), args.epochs):
        torch.manual_seed(args.seed * 1_000_003 + epoch)  # the same batches for all rows
        history.append(train_epoch(model, loader, optimizer))
        state = {"encoder": encoder.state_dict(), "model": model.state_dict()}
        state |= {"optimizer": optimizer.state_dict(), "config": config, "history": history}
        results.write(output, lambda part, state=state: torch.save(state, part))

    versions = {"rdkit": rdkit.__version__, **results.VERSIONS}
    run = {"config": config | {"epochs": len(history)}, "history": history, "versions": versions}
    record = output.with_suffix(".json")
    results.write(record, lambda part: part.write_text(json.dumps(run) + "\n"))
    print(f"{args.row}, {len(graphs)} molecules, {len(history)} epochs: {output}, {record}")


if __name__ == "__main__":
    program("molecules.pretrain", main)
