"""PGCL on one process or many, the same training: synthetic clusters, DistributedDataParallel.

Each process encodes its own portion of a batch of 256. PGCLLoss computes one loss over the portions
of all: the printed losses are the same for 1 and 2 processes, up to rounding. Each process takes
the GPU of its local rank (nccl), or a CPU (gloo).

    python examples/distributed.py
    torchrun --nproc-per-node=2 examples/distributed.py

`purity` is the fraction of samples whose hidden class is the most frequent one at their prototype.
"""

import argparse
import os
import sys

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from tqdm import tqdm  # pip install -e '.[experiments]'

from pgcl_losses import PGCLLoss

BATCH, CLASSES, SIGNAL, NUISANCE, WIDTH, DIM = 256, 4, 8, 24, 64, 32  # BATCH: of all processes


class SyntheticClusters:
    """Samples with a hidden class, seen through one fixed random layer; alike on all processes."""

    def __init__(self, num_samples: int) -> None:
        random = torch.Generator().manual_seed(0)
        centers = 1.2 * torch.randn(CLASSES, SIGNAL, generator=random)
        mix = torch.randn(SIGNAL + NUISANCE, WIDTH, generator=random)
        self.mix = mix / (SIGNAL + NUISANCE) ** 0.5
        self.labels = torch.randint(CLASSES, (num_samples,), generator=random)
        self.signal = centers[self.labels] + torch.randn(num_samples, SIGNAL, generator=random)

    def views(self, epoch: int) -> tuple[Tensor, Tensor]:
        """Two views of every sample, drawn afresh for each epoch."""
        random = torch.Generator().manual_seed(1 + epoch)
        signal = self.signal.expand(2, -1, -1)
        signal = signal + 0.3 * torch.randn(signal.shape, generator=random)
        nuisance = torch.randn(2, len(self.signal), NUISANCE, generator=random)
        view1, view2 = torch.tanh(torch.cat([signal, nuisance], dim=2) @ self.mix)
        return view1, view2

    def batches(self, epoch: int, rank: int, num_ranks: int) -> DataLoader:
        """This process's portion of each batch of an epoch."""
        views = TensorDataset(*self.views(epoch))
        # The sampler deals one shuffled list to the processes in turns: step by step their portions
        # make up the batch that one process would take.
        sampler = DistributedSampler(views, num_ranks, rank)
        sampler.set_epoch(epoch)
        return DataLoader(views, BATCH // num_ranks, sampler=sampler)


def new_encoder() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 128), nn.ReLU(), nn.Linear(128, DIM))


class Model(nn.Module):
    """Encoder and loss in one: DistributedDataParallel then synchronises the prototypes as well."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = new_encoder()
        self.pgcl = PGCLLoss(DIM)

    def forward(self, view1: Tensor, view2: Tensor) -> Tensor:
        return self.pgcl(self.encoder(view1), self.encoder(view2))


@torch.no_grad()
def purity(encoder: nn.Module, pgcl: PGCLLoss, data: SyntheticClusters) -> float:
    view, _ = data.views(0)
    prototypes = pgcl.prototypes
    nearest = prototypes.assign(encoder(view.to(prototypes.weight.device))).cpu()
    members = nn.functional.one_hot(nearest).T @ nn.functional.one_hot(data.labels)
    return members.max(dim=1).values.sum().item() / len(data.labels)


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=16, help=f"batches of {BATCH} in an epoch")
    args = parser.parse_args()
    for name in ("epochs", "steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be 1 or more, but it is {getattr(args, name)}")
    return args


def report(epoch: int, loss: float, purity: float) -> str:
    return f"epoch {epoch + 1:2d}   loss {loss:.6f}   purity {purity:.3f}"


def train(args: argparse.Namespace, rank: int, num_ranks: int, device: torch.device) -> None:
    data = SyntheticClusters(args.steps * BATCH)
    torch.manual_seed(0)
    model = Model().to(device)
    loss_of = DistributedDataParallel(model) if num_ranks > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    with tqdm(total=args.epochs * args.steps, unit="step", disable=rank > 0) as progress:
        for epoch in range(args.epochs):
            mean = torch.zeros((), device=device)
            for view1, view2 in data.batches(epoch, rank, num_ranks):
                loss = loss_of(view1.to(device), view2.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                mean += loss.detach() / args.steps
                progress.update()
            if num_ranks > 1:
                # The loss of the whole batch is the mean of what the processes return.
                distributed.all_reduce(mean)
                mean /= num_ranks
            if rank == 0:
                reached = purity(model.encoder, model.pgcl, data)
                progress.write(report(epoch, mean.item(), reached))


def main() -> None:
    args = parse_args(argparse.ArgumentParser(description="PGCL on one process or many."))
    # torchrun sets these.
    rank, num_ranks, local_rank = (
        int(os.environ.get(name, default))
        for name, default in (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    )
    if BATCH % num_ranks:
        raise SystemExit(f"the number of processes must divide {BATCH}, but there are {num_ranks}")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    if num_ranks > 1:
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    train(args, rank, num_ranks, device)
    if num_ranks > 1:
        distributed.barrier()  # rank 0 is still at work
        distributed.destroy_process_group()
        # A thread of gloo that drops its last tensor while Python is torn down aborts it.
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
