"""Pre-trains the encoder of molecules without labels, and saves it in one file.

python -m experiments.transfer.pretrain                              # synthetic molecules, a minute
python -m experiments.transfer.pretrain --smiles zinc.smi.gz --row PGCL --epochs 20
torchrun --nproc-per-node=2 -m experiments.transfer.pretrain --smiles zinc.smi.gz

If it is stopped, the same command resumes after the last complete epoch. The options of "PGCL,
recommended" are in rows.py.
"""

import argparse
import itertools
import os
import re
import sys
import time
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import rdkit
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler, Subset
from torch_geometric.loader import DataLoader
from tqdm import tqdm

from experiments.common import results
from experiments.common.arguments import at_least, count, device, file, fraction, positive
from experiments.common.rows import PGCL

from .model import MoleculeGIN, checkpoint, pretraining
from .molecules import Molecules, store, write_once
from .rows import PRETRAINED, is_first_info_nce, recommended_options
from .smiles import synthetic

NAME = "experiments.transfer.pretrain"
RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        f"python -m {NAME}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--smiles", type=file, help="text or table of SMILES, may be gzipped; default: synthetic")
    add("--smiles-column", help="of a table (default: smiles or mol)")
    add("--row", choices=PRETRAINED, default=PGCL)
    add("--limit", type=count, help="use only the first LIMIT molecules")
    add("--epochs", type=count, default=2)
    add("--batch-size", type=count, default=256, help="of each process")
    add("--lr", type=positive, default=1e-3)
    add(
        "--drop",
        type=fraction,
        default=0.2,
        help="fraction of nodes dropped, and of edges perturbed",
    )
    add(
        "--freeze-epochs",
        type=at_least(0),
        help="epochs with frozen prototypes (default: 1, or 0 if InfoNCE comes first)",
    )
    add("--seed", type=at_least(0), default=0)
    add("--amp", action="store_true", help="bfloat16 where that is safe")
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--workers", type=count, default=2, help="processes that read molecules")
    add("--cache", type=Path, default=Path("runs/molecules"))
    add("--output", type=Path, help="default: runs/transfer/ROW.pt, or ROW-SEED.pt")
    args = parser.parse_args()
    if args.freeze_epochs is None:
        args.freeze_epochs = 0 if is_first_info_nce(args.row) else 1
    if is_first_info_nce(args.row) and args.freeze_epochs:
        parser.error(f"argument --freeze-epochs: must be 0, as {args.row!r} begins with InfoNCE")
    if args.output is None:
        name = re.sub(r"\W+", "-", args.row.partition(" (")[0])
        name += f"-{args.seed}" if args.seed else ""
        args.output = Path("runs/transfer") / f"{name}.pt"
    return args


def stored(args: argparse.Namespace, pool: Executor) -> Molecules:
    source = args.smiles
    if source is None:
        source = args.cache / "synthetic.smi"
        write_once(source, "\n".join(synthetic()[0]) + "\n")
    return store(source, args.smiles_column, args.cache, pool)


def configuration(
    args: argparse.Namespace, digest: str, molecules: int, steps: int
) -> dict[str, Any]:
    """What identifies a run, but for its length.

    Rows whose schedule is in fractions of the run have its steps in the configuration.
    """
    names = ("row", "batch_size", "lr", "drop", "freeze_epochs", "seed", "amp")
    config = {name: getattr(args, name) for name in names}
    config |= {"smiles": digest, "molecules": molecules, "processes": WORLD}
    return config | recommended_options(args.row, steps)


def is_initialisation(step: int, config: dict[str, Any]) -> bool:
    """Whether the prototypes are initialised before this step, counted from 0."""
    return step in config.get("start_steps", [])


@torch.no_grad()
def initialise_prototypes(model: nn.Module, loader: DataLoader, batches: int) -> None:
    """Initialise the prototypes from projections of the epoch's first batches."""
    device = next(model.parameters()).device
    first = itertools.islice(loader, batches)
    projections = [z for batch in first for z in model.embeddings(batch.to(device))]
    model.loss.pgcl.prototypes.start_from_(torch.cat(projections))


def train_epoch(
    epoch: int,
    model: nn.Module,
    wrapped: nn.Module,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader,
    config: dict[str, Any],
) -> dict[str, float]:
    """Mean loss, and molecules of this process per second."""
    device = next(model.parameters()).device
    started, total, molecules = time.perf_counter(), 0.0, 0
    bar = tqdm(loader, desc=f"epoch {epoch + 1}", unit="batch", disable=RANK > 0)
    for step, batch in enumerate(bar, epoch * len(loader)):
        if is_initialisation(step, config):
            initialise_prototypes(model, loader, config["start_batches"])
        batch = batch.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=config["amp"]):
            loss = wrapped(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
        molecules += batch.num_graphs
        bar.set_postfix(loss=f"{loss.item():.3f}")
    seconds = time.perf_counter() - started
    return {"loss": total / len(loader), "molecules_per_second": round(molecules / seconds, 1)}


def resumed(
    path: Path, config: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer
) -> list[dict[str, float]]:
    """Load the state of this run from a file, and return its history."""
    if not path.exists():
        return []
    state = checkpoint(path)
    if state["config"] != config:
        raise ValueError(
            f"{path} is of another run, {state['config']}, not of {config}: choose another --output"
        )
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["history"]


def record(path: Path, config: dict[str, Any], history: list[dict[str, float]]) -> None:
    """Append the finished run, unless it is in the file."""
    run = {"config": config | {"epochs": len(history)}, "history": history}
    if results.key(run["config"]) not in results.read(path):
        versions = {"rdkit": rdkit.__version__, **results.VERSIONS}
        results.append(path, run | {"versions": versions})


def main() -> None:
    args = parse()
    # Before the processes are connected: it may take long.
    with results.processes(args.workers, args.cache) as pool:
        molecules = stored(args, pool)
    device = torch.device(args.device)
    if WORLD > 1:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    subset = Subset(molecules, range(min(args.limit or len(molecules), len(molecules))))
    sampler = DistributedSampler(subset, WORLD, RANK, seed=args.seed)
    loader = DataLoader(
        subset,
        args.batch_size,
        sampler=sampler,
        drop_last=len(sampler) > args.batch_size,  # a last batch of one would have no negatives
        num_workers=args.workers if device.type == "cuda" else 0,
    )
    steps = args.epochs * len(loader)
    config = configuration(args, molecules.digest[:12], len(subset), steps)

    torch.manual_seed(args.seed)
    model = pretraining(config, MoleculeGIN(), len(loader))
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    history = resumed(args.output, config, model, optimizer)
    records = args.output.with_name(f"{args.output.name}.jsonl")
    results.read(records)  # an invalid file is an error now, not after the training
    wrapped = DistributedDataParallel(model) if WORLD > 1 else model
    for epoch in range(len(history), args.epochs):
        sampler.set_epoch(epoch)
        # Every epoch has its own seed, so that a resumed run draws the same numbers.
        torch.manual_seed((args.seed * 1_000_003 + epoch) * WORLD + RANK)
        history.append(train_epoch(epoch, model, wrapped, optimizer, loader, config))
        if RANK == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            state |= {"config": config, "history": history}
            results.write(args.output, lambda part, state=state: torch.save(state, part))
    if RANK == 0:
        record(records, config, history)
        print(f"{args.row}, {len(subset)} molecules, {len(history)} epochs: {args.output}")
    if WORLD > 1:
        distributed.barrier()  # rank 0 is still writing
        distributed.destroy_process_group()
        # A thread of gloo that frees its last tensor at interpreter shutdown aborts the process.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    try:
        main()
    except (ValueError, results.Stopped) as error:
        sys.exit(f"{NAME}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"{NAME}: stopped; the same command resumes after the last complete epoch")
