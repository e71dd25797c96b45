"""Compare the bytes that gloo really sends in a step over many processes with the formula.

Processes on this machine talk over the loopback interface. Its counter has the bytes of all
processes together, and of whatever else uses it (Linux).

    python -m benchmarks.communication --ranks 2 4 8
"""

import argparse
from pathlib import Path

import torch
from torch import distributed

from experiments.common.arguments import at_least, count
from pgcl_losses import PGCLLoss

from .ranks import on_ranks

STEPS = 5


def sent(num_ranks: int, num: int, dim: int, num_prototypes: int) -> float:
    """Bytes one process sends in a step with so many embeddings of each view, in float32."""
    others = num_ranks - 1
    views = 2 * num * dim * 4  # gathered forward, their gradients added backward
    sums = 2 * num * num_ranks * 4  # likewise
    reduced = num_prototypes * dim * 4 + sums + num_ranks * views
    return others * (views + sums + 2 / num_ranks * reduced + 3 * 8)


def loopback_bytes() -> int:
    (line,) = [one for one in Path("/proc/net/dev").read_text().splitlines() if " lo:" in one]
    return int(line.partition(":")[2].split()[8])  # transmitted


def measured_bytes(args: argparse.Namespace) -> float:
    """That one process sends in a step, on average."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    pgcl = PGCLLoss(args.dim, args.prototypes)
    torch.manual_seed(distributed.get_rank())
    z1, z2 = torch.randn(2, args.num, args.dim, requires_grad=True).unbind()
    pgcl(z1, z2).backward()
    distributed.barrier()
    before = loopback_bytes()
    distributed.barrier()
    for _ in range(STEPS):
        pgcl(z1, z2).backward()
    distributed.barrier()
    return (loopback_bytes() - before) / STEPS / distributed.get_world_size()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=at_least(2), nargs="+", default=[2, 3, 4, 8])
    parser.add_argument("--num", type=count, default=1024, help="graphs of each process")
    parser.add_argument("--dim", type=count, default=128)
    parser.add_argument("--prototypes", type=count, default=10)
    args = parser.parse_args()
    print("MiB that one process sends in a step")
    print("processes    measured   formula   ratio")
    for num_ranks in args.ranks:
        measured = on_ranks(measured_bytes, num_ranks, args)
        formula = sent(num_ranks, args.num, args.dim, args.prototypes)
        given, expected = measured / 2**20, formula / 2**20
        print(f"{num_ranks:5d}{given:16.3f}{expected:10.3f}{given / expected:8.3f}")
