"""PGCL with DistributedDataParallel on synthetic clusters: the same training on 1 or 2 processes.

Each process encodes its portion of a batch of 256, and PGCLLoss computes one loss over the batch:
the printed losses are the same for 1 and 2 processes, up to rounding. Each process uses the GPU of
its local rank (nccl), or a CPU (gloo). Rank 0 saves the state_dict of encoder and loss. One process
takes five seconds on a CPU:

    python examples/distributed.py
    torchrun --nproc-per-node=2 examples/distributed.py --output checkpoint.pt

Purity is the fraction of samples whose class is the most frequent one at their prototype.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from pgcl_losses import PGCLLoss

BATCH, CLASSES, SIGNAL, NOISE, FEATURES, DIM = 256, 4, 8, 24, 64, 32  # BATCH: of all processes

parser = argparse.ArgumentParser(description="PGCL on one process or many.")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--steps", type=int, default=16, help=f"batches of {BATCH} in an epoch")
parser.add_argument("--output", type=Path, help="new file for the state_dict")
args = parser.parse_args()
if min(args.epochs, args.steps) < 1:
    parser.error("--epochs and --steps must be 1 or more")
if args.output and (args.output.exists() or not args.output.parent.is_dir()):
    parser.error(f"--output must be a new file in an existing folder, but it is {args.output}")

# torchrun sets these variables.
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if BATCH % world_size:
    raise SystemExit(f"the number of processes must divide {BATCH}, but it is {world_size}")
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
if world_size > 1:
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")


class SyntheticClusters:
    """Gaussian clusters with noise through one random layer; the same on all processes."""

    def __init__(self, num_samples):
        centers = 1.2 * torch.randn(CLASSES, SIGNAL)
        self.weight = torch.randn(SIGNAL + NOISE, FEATURES) / (SIGNAL + NOISE) ** 0.5
        self.labels = torch.randint(CLASSES, (num_samples,))
        self.signal = centers[self.labels] + torch.randn(num_samples, SIGNAL)

    def views(self):
        """Two views of every sample, other ones in each call: [2, num_samples, FEATURES]."""
        signal = self.signal + 0.3 * torch.randn(2, *self.signal.shape)
        noise = torch.randn(2, len(self.signal), NOISE)
        return torch.tanh(torch.cat([signal, noise], dim=2) @ self.weight)


class Model(nn.Module):
    """Encoder and loss in one: DistributedDataParallel then synchronises the prototypes as well."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, DIM))
        self.pgcl = PGCLLoss(DIM)

    def forward(self, view1, view2):
        return self.pgcl(self.encoder(view1), self.encoder(view2))


def train(loader):
    total = torch.zeros((), device=device)
    for view1, view2 in loader:
        loss = wrapped(view1.to(device), view2.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    if world_size > 1:
        # The mean over processes is the loss of the whole batch.
        distributed.all_reduce(total)
    return total.item() / world_size / len(loader)


@torch.no_grad()
def test(view, labels):
    nearest = model.pgcl.prototypes.assign(model.encoder(view.to(device))).cpu()
    counts = nn.functional.one_hot(nearest).T @ nn.functional.one_hot(labels)  # [K, CLASSES]
    return counts.max(dim=1).values.sum().item() / len(labels)


torch.manual_seed(0)  # the same on all processes, which then draw the same
data = SyntheticClusters(args.steps * BATCH)
test_view, _ = data.views()
model = Model().to(device)
wrapped = DistributedDataParallel(model) if world_size > 1 else model
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for epoch in range(1, args.epochs + 1):
    views = TensorDataset(*data.views())
    # The parts of all processes make up the batch that one process would take.
    sampler = DistributedSampler(views, world_size, rank)
    sampler.set_epoch(epoch)
    loss = train(DataLoader(views, BATCH // world_size, sampler=sampler))
    if rank == 0:
        purity = test(test_view, data.labels)
        print(f"Epoch: {epoch:03d}, Loss: {loss:.6f}, Purity: {purity:.3f}", flush=True)
if rank == 0 and args.output:
    torch.save(model.state_dict(), args.output)
if world_size > 1:
    distributed.barrier()  # rank 0 may still be at work
    del wrapped  # it keeps threads of gloo running, which can abort Python's exit
    distributed.destroy_process_group()
