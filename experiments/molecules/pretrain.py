"""Pre-train an encoder of molecules without labels, and save it in one file.

python -m experiments.molecules.pretrain --smiles zinc.smi.gz --row PGCL --epochs 20
"""

import argparse
from pathlib import Path

import torch
from torch_geometric.loader import DataLoader
from tqdm import tqdm

from experiments.common import results
from experiments.common.arguments import at_least, count, device, file, parser_of, program
from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pyg import ContrastiveModel, EdgePerturb, NodeDrop

from .data import graphs_of, smiles_of
from .model import PGCL, ROWS, WIDTH, MoleculeGIN, projected, train_epoch

# The fraction is of nodes dropped, and of edges perturbed.
SETTING = {"lr": 1e-3, "drop": 0.2, "freeze_epochs": 1}
TAU, LAMBDA = 0.2, 6.0  # the paper's


def parse() -> argparse.Namespace:
    parser = parser_of("molecules.pretrain", __doc__)
    add = parser.add_argument
    add("--smiles", type=file, required=True, help="text or a table of SMILES, may be gzipped")
    add("--limit", type=count, help="use only the first LIMIT lines")
    add("--row", choices=ROWS, default=PGCL)
    add("--epochs", type=count, default=2)
    add("--batch-size", type=count, default=256)
    add("--seed", type=at_least(0), default=0)
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--output", type=Path, help="default: runs/molecules/ROW-SEED.pt")
    return parser.parse_args()


def main() -> None:
    args = parse()
    output = args.output or Path(f"runs/molecules/{args.row}-{args.seed}.pt")
    if output.exists():
        raise ValueError(f"--output: {output} is there already, choose another")
    smiles = smiles_of(args.smiles)[: args.limit]
    graphs = graphs_of(args.smiles, smiles)
    config = SETTING | {name: getattr(args, name) for name in ("row", "batch_size", "seed")}
    config |= {
        "smiles": results.digest([smiles[line].encode() for line in graphs]),
        "molecules": len(graphs),
        "epochs": args.epochs,
        "code": results.code_of(__name__),  # runs on encoders of other code are other runs
    }
    drop_last = len(graphs) > args.batch_size  # a last batch of one would have no negatives
    loader = DataLoader([*graphs.values()], args.batch_size, shuffle=True, drop_last=drop_last)

    torch.manual_seed(args.seed)  # the same initial encoder for all rows
    encoder = MoleculeGIN(WIDTH)
    network = projected(encoder)  # before the loss, which draws prototypes
    frozen = config["freeze_epochs"] * len(loader)
    loss_of = InfoNCE(temperature=TAU)
    if args.row == PGCL:
        options = {"temperature": TAU, "consistency_weight": LAMBDA, "freeze_steps": frozen}
        loss_of = PGCLLoss(WIDTH, **options)
    augments = NodeDrop(config["drop"]), EdgePerturb(config["drop"])
    model = ContrastiveModel(network, *augments, loss_of).to(args.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(args.epochs):
        torch.manual_seed(args.seed * 1_000_003 + epoch)  # the same batches for all rows
        loss = train_epoch(model, tqdm(loader, unit="batch"), optimizer, args.device)
        print(f"Epoch: {epoch + 1:03d}, Loss: {loss:.3f}")
    state = {"encoder": encoder.state_dict(), "config": config}
    results.write(output, lambda part: torch.save(state, part))
    print(f"{args.row}, {len(graphs)} molecules, {args.epochs} epochs: {output}")


if __name__ == "__main__":
    program("molecules.pretrain", main)
