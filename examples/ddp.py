"""Graphs on many GPUs: PGCL with DistributedDataParallel, mixed precision and exact resuming.

One process and many compute the same losses, up to rounding: a batch is divided among the processes
of torchrun, PGCLLoss computes one loss over all of its graphs, and the views of a graph depend on
seed, epoch and graph alone. Each process uses the GPU of its local rank (nccl), or a CPU (gloo).
PyG downloads the TU set unless it is in --root:

    python examples/ddp.py --dataset PROTEINS --checkpoint proteins.pt
    torchrun --nproc-per-node=2 examples/ddp.py --dataset PROTEINS --checkpoint proteins.pt

The file --checkpoint has the training after the last complete epoch. A file beside it that ends in
.jsonl has the loss and the diagnostics of each epoch, and one that ends in .part is a file that is
being written. If the training is killed, the same command continues it, and ends as if it had not
stopped. Only the linear probe at the end uses labels. On PROTEINS, which takes 95 seconds on two
cores, its accuracy was 0.745 and 0.748 (two machines).
"""

import argparse
import json
import os
from pathlib import Path

import torch
from sklearn.linear_model import LogisticRegression  # pip install -r requirements.txt
from sklearn.model_selection import cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler
from torch_geometric.datasets import TUDataset
from torch_geometric.loader import DataLoader
from torch_geometric.nn import GIN, MLP, global_add_pool
from torch_geometric.transforms import Constant
from tqdm import tqdm

from pgcl_losses import PGCLLoss, diagnostics
from pgcl_losses.adapters.pyg import EdgePerturb, NodeDrop

parser = argparse.ArgumentParser(description="PGCL on one process or many.")
parser.add_argument("--dataset", default="PROTEINS", help="a TU set")
parser.add_argument("--root", default="data", help="folder of TU sets")
parser.add_argument("--epochs", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=128, help="of all processes together")
parser.add_argument("--lr", type=float, default=2e-3, help="after the warm-up")
parser.add_argument("--precision", choices=["float32", "bfloat16", "float16"], default="bfloat16")
parser.add_argument("--workers", type=int, default=0, help="of each process, to make the views")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--checkpoint", type=Path, required=True, help="new, or of the same training")
args = parser.parse_args()

# torchrun sets these variables.
rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
if args.epochs < 1 or args.batch_size < 2 or args.batch_size % world_size:
    parser.error(
        f"--epochs must be 1 or more, --batch-size 2 or more and a multiple of {world_size}"
    )
if not 0 < args.lr < float("inf") or args.workers < 0 or not args.checkpoint.name:
    parser.error("--lr must be above 0, --workers 0 or more, and --checkpoint the name of a file")
if args.precision == "float16" and device.type == "cpu":
    parser.error("--precision float16 needs a GPU")
log_file = args.checkpoint.with_name(f"{args.checkpoint.name}.jsonl")
part_file = args.checkpoint.with_name(f"{args.checkpoint.name}.part")
here = "root", "workers", "checkpoint"  # may differ when the training continues
config = {name: value for name, value in vars(args).items() if name not in here}
state = {}
if args.checkpoint.exists():
    try:
        state = torch.load(args.checkpoint, map_location="cpu", weights_only=True)
        made_by = state["config"]
    except Exception:  # a file of something else can raise anything
        parser.error(f"--checkpoint {args.checkpoint} is not a file of this script")
    if made_by != config:
        parser.error(f"--checkpoint {args.checkpoint} is of another training: {made_by}")
elif log_file.exists():
    parser.error(f"--checkpoint {args.checkpoint} is new, but {log_file} is there: choose another")
if rank == 0:
    try:  # a checkpoint of this training may have a part beside it that a killed save left
        part_file.touch(exist_ok=bool(state))
        part_file.unlink()
    except FileExistsError:
        parser.error(f"--checkpoint is new, but {part_file} is there: remove it if it is of no use")
    except OSError as error:
        parser.error(f"--checkpoint must be in a folder that can be written, but {error}")
if world_size > 1:
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")

WIDTH, DIM, dtype = 64, 32, getattr(torch, args.precision)


class Views(Dataset):
    """Two views of each graph. Processes and workers of any number draw the same ones."""

    def __init__(self, graphs):
        self.graphs, self.epoch = graphs, 0
        self.augment1, self.augment2 = NodeDrop(0.2), EdgePerturb(0.2)

    def __len__(self):
        return len(self.graphs)

    def __getitem__(self, index):
        number = args.seed * args.epochs + self.epoch
        torch.default_generator.manual_seed(number * len(self) + index)
        graph = self.graphs[index]
        return self.augment1(graph), self.augment2(graph)


class Model(torch.nn.Module):
    """Encoder, head and loss in one: DistributedDataParallel also synchronises the prototypes."""

    def __init__(self, num_features):
        super().__init__()
        # Layer normalisation of each node: batch normalisation would depend on the processes.
        norm = {"norm": "layer_norm", "norm_kwargs": {"mode": "node"}}
        self.gin = GIN(num_features, WIDTH, num_layers=3, jk="cat", **norm)
        self.head = MLP([WIDTH, WIDTH, DIM], norm=None)
        self.pgcl = PGCLLoss(DIM)

    def encode(self, data):
        return global_add_pool(self.gin(data.x, data.edge_index), data.batch, data.num_graphs)

    def forward(self, *views):
        return self.pgcl.terms(*(self.head(self.encode(view)) for view in views))


def train(epoch):
    """The mean loss of an epoch, and the diagnostics of its last batch."""
    views.epoch = epoch
    sampler.set_epoch(epoch)
    torch.manual_seed((args.seed * args.epochs + epoch) * world_size + rank)  # such as dropout
    total = torch.zeros((), device=device)
    for pair in tqdm(loader, disable=rank > 0, leave=False, unit="batch"):
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            terms = wrapped(*(view.to(device) for view in pair))
        optimizer.zero_grad()
        scaler.scale(terms.loss).backward()
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        total += terms.loss.detach()  # the same on all processes
    numbers = diagnostics(terms)
    return {**numbers, "epoch": epoch, "loss": total.item() / len(loader)}


@torch.no_grad()
def test():
    model.eval()
    z = torch.cat([model.encode(data.to(device)).cpu() for data in DataLoader(dataset, 256)])
    probe = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=1000))
    return cross_val_score(probe, z.numpy(), [data.y.item() for data in dataset], cv=10).mean()


def save():
    """Each file is written whole or not at all: the part is renamed when it is complete."""
    states = {name: part.state_dict() for name, part in parts.items()}
    torch.save({"config": config, "log": log, **states}, part_file)
    part_file.replace(args.checkpoint)
    part_file.write_text("".join(json.dumps(line) + "\n" for line in log))
    part_file.replace(log_file)


if rank > 0:
    distributed.barrier()  # rank 0 downloads
try:
    dataset = TUDataset(args.root, args.dataset)
except OSError as error:
    parser.error(f"--root must be a folder with {args.dataset}, or where PyG can store it: {error}")
if rank == 0 and world_size > 1:
    distributed.barrier()
if dataset.num_features == 0:
    dataset.transform = Constant()
views = Views(dataset)
# The parts of all processes make up the batch that one process would take.
sampler = DistributedSampler(views, world_size, rank, seed=args.seed, drop_last=True)
size = args.batch_size // world_size
loader = DataLoader(views, size, sampler=sampler, drop_last=True, num_workers=args.workers)
if len(loader) == 0:
    parser.error(f"--batch-size must be at most {len(dataset) // world_size * world_size}")

torch.manual_seed(args.seed)  # the same model on all processes
model = Model(dataset.num_features).to(device)
wrapped = DistributedDataParallel(model) if world_size > 1 else model
optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
steps = max(args.epochs * len(loader), 3)  # with fewer OneCycleLR cannot warm up
schedule = torch.optim.lr_scheduler.OneCycleLR(  # warm-up in a tenth of the steps, then a cosine
    optimizer, args.lr, steps, pct_start=max(0.1, 2 / steps), cycle_momentum=False
)
scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "float16")
parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler}
for name, part in parts.items():
    if state:
        part.load_state_dict(state[name])
log = state.get("log", [])
for epoch in range(len(log) + 1, args.epochs + 1):
    log.append(train(epoch))
    if rank == 0:
        print(f"Epoch: {epoch:03d}, Loss: {log[-1]['loss']:.6f}", flush=True)
        save()
if rank == 0:
    print(f"{args.dataset}: {len(dataset)} graphs, linear probe {test():.4f}")
if world_size > 1:
    distributed.barrier()  # rank 0 may still be at work
    del wrapped  # it keeps threads of gloo running, which can abort Python's exit
    distributed.destroy_process_group()
