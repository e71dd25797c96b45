"""PGCL with Lightning on two processes: metrics are logged, and training resumes from a checkpoint.

The loss is part of the LightningModule. Therefore the optimizer and the checkpoint contain its
prototypes, and DistributedDataParallel synchronises them. PGCLLoss computes one loss over the
graphs of both processes. The graphs are PyG's FakeDataset. The first command takes half a minute on
two CPU cores, and the second one continues from its last epoch:

    python examples/lightning_ddp.py --epochs 10
    python examples/lightning_ddp.py --epochs 20 --resume runs/last.ckpt

The folder runs/logs has a metrics.csv of each run.
"""

import argparse
from pathlib import Path

import lightning  # pip install -e '.[test]'
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch_geometric.datasets import FakeDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool

from pgcl_losses import PGCLLoss, diagnostics
from pgcl_losses.adapters.pyg import EdgePerturb, NodeDrop

parser = argparse.ArgumentParser(description="PGCL with Lightning on several processes.")
parser.add_argument("--graphs", type=int, default=1024)
parser.add_argument("--batch-size", type=int, default=128, help="of all processes together")
parser.add_argument("--processes", type=int, default=2)
parser.add_argument("--epochs", type=int, default=10, help="including those before --resume")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--root", type=Path, default="runs", help="folder of last.ckpt and the logs")
parser.add_argument("--resume", type=Path, help="checkpoint to continue from")
args = parser.parse_args()
if args.batch_size % args.processes:
    parser.error(f"--processes must divide {args.batch_size}, but it is {args.processes}")
if args.resume and not args.resume.is_file():
    parser.error(f"--resume must be a checkpoint, but {args.resume} is not a file")
last = args.root / "last.ckpt"
if last.exists() and not (args.resume and args.resume.samefile(last)):
    parser.error(f"{last} is there already: --resume it, or choose another --root")

CHANNELS, HIDDEN, DIM = 8, 64, 32


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gin = GIN(CHANNELS, HIDDEN, num_layers=3, norm="batch_norm")

    def forward(self, data):
        nodes = self.gin(data.x, data.edge_index)
        return global_add_pool(nodes, data.batch, data.num_graphs)  # [num_graphs, HIDDEN]


class Contrast(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), MLP([HIDDEN, DIM, DIM], norm=None)
        self.augment1, self.augment2 = NodeDrop(0.2), EdgePerturb(0.2)
        self.pgcl = PGCLLoss(DIM, consistency_weight=1, temperature=0.5)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)  # the prototypes are among them

    def on_train_start(self):
        self.print(f"Epochs before: {self.current_epoch}, steps before: {self.global_step}")

    def training_step(self, data, batch_idx):
        # Each process draws its own augmentations, and a resumed training draws the same ones.
        number = self.global_step * self.trainer.world_size + self.global_rank
        torch.manual_seed(args.seed + 1 + number)
        views = self.augment1(data), self.augment2(data)
        terms = self.pgcl.terms(*(self.head(self.encoder(view)) for view in views))
        log = {"on_step": False, "on_epoch": True, "sync_dist": True, "batch_size": data.num_graphs}
        self.log("loss", terms.loss, **log)
        if batch_idx == 0:  # once in an epoch, because diagnostics wait for the device
            numbers = diagnostics(terms, self.pgcl.prototypes.weight)
            self.log_dict({f"diagnostics/{name}": n for name, n in numbers.items()}, **log)
        return terms.loss

    def on_train_epoch_end(self):
        metrics = self.trainer.callback_metrics  # means over the epoch and over the processes
        loss, agreement = metrics["loss"], metrics["diagnostics/agreement"]
        epoch = self.current_epoch + 1
        self.print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Agreement: {agreement:.3f}")


lightning.seed_everything(args.seed)  # all processes make the same graphs and the same model
graphs = FakeDataset(args.graphs, avg_num_nodes=20, num_channels=CHANNELS)
trainer = lightning.Trainer(
    accelerator="cpu",  # or "gpu"
    devices=args.processes,
    strategy="ddp",
    max_epochs=args.epochs,
    logger=CSVLogger(args.root, name="logs"),
    callbacks=[ModelCheckpoint(args.root, filename="last", enable_version_counter=False)],
    log_every_n_steps=1,
    enable_progress_bar=False,
)
loader = DataLoader(graphs, args.batch_size // args.processes, shuffle=True)
trainer.fit(Contrast(), loader, ckpt_path=args.resume)
