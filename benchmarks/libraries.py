"""Compare our losses with those of other libraries: values, time and memory of a step.

`benchmarks/peers.py` says how to install the libraries. What is not installed is left out.

python -m benchmarks.libraries --output benchmarks/results/libraries.json
python -m benchmarks.libraries --only steps --sizes 256 --rounds 5 --output /tmp/steps.json

- `values`: relative differences of value and gradient in float64, where both are defined alike.
- `steps`: value and gradient of each loss as people call it; the ratio is to our time. In lightly's
  memory bank queries are one view, in all others both.
"""

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from experiments.common.arguments import count
from pgcl_losses import InfoNCE

from . import measure, peers

Loss = peers.Loss
DIM = 128
TAU = 0.2
CLASSES = 10
BATCH = 256  # graphs, with a memory
SECONDS_PER_RIVAL = 10.0


def views(num: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.randn(2, num, DIM, dtype=dtype, device=device).requires_grad_().unbind())


def unit(num: int, device: str, dtype: torch.dtype = torch.float32) -> Tensor:
    return F.normalize(torch.randn(num, DIM, dtype=dtype, device=device), dim=1)


class Alike(NamedTuple):
    """Two losses that are defined alike with these graphs, and what else they depend on."""

    ours: Loss
    theirs: Loss
    num: int = 48
    temperature: tuple[Tensor, ...] = ()


def two_views(device: str) -> Alike:
    return Alike(InfoNCE(temperature=TAU), peers.lightly_nt_xent(TAU))


def decoupled(device: str) -> Alike:
    of_queries = InfoNCE(temperature=TAU, reduction="none")
    return Alike(lambda z1, z2: of_queries(z1, z2).expm1().log().mean(), peers.lightly_dcl(TAU))


def memory_bank(device: str) -> Alike:
    stored = unit(64, device, torch.float64)
    ours = InfoNCE(temperature=TAU, negatives="cross", memory_size=64, dim=DIM).to(stored)
    ours.remember(stored)

    first, second = (peers.lightly_nt_xent(TAU, stored) for _ in range(2))  # a call changes them

    def theirs(z1: Tensor, z2: Tensor) -> Tensor:
        return (first(z1, z2) + second(z2, z1)) / 2

    return Alike(ours, theirs, num=1)


def cross_batch(loss: str, device: str) -> Alike:
    stored = unit(64, device, torch.float64)
    ours = InfoNCE(temperature=TAU, memory_size=64, dim=DIM).to(stored)
    ours.remember(stored)
    return Alike(ours, peers.cross_batch_memory(stored, 2 * 48, TAU, loss))


def one_positive(device: str) -> Alike:
    return Alike(InfoNCE(temperature=TAU), peers.sup_con(TAU))


def labelled(device: str) -> Alike:
    labels = torch.arange(48, device=device) % 6
    ours = InfoNCE(temperature=TAU)
    return Alike(partial(ours, items=labels), peers.nt_xent(TAU, labels=labels))


def modalities(device: str) -> Alike:
    temperature = torch.tensor(TAU, dtype=torch.float64, device=device, requires_grad=True)
    ours = InfoNCE(temperature=temperature, negatives="cross")
    return Alike(ours, peers.clip(temperature), temperature=(temperature,))


# Each with where both are defined alike.
VALUES: dict[str, tuple[Callable[[str], Alike], str]] = {
    "lightly NTXentLoss": (two_views, "two views"),
    "lightly DCLLoss": (decoupled, "log(e^l - 1) of our losses"),
    "lightly NTXentLoss, memory bank": (memory_bank, "one graph, mean of both orders"),
    "pytorch-metric-learning SupConLoss": (one_positive, "one positive for each query"),
    "pytorch-metric-learning NTXentLoss": (labelled, "labels, classes of one size"),
    "pytorch-metric-learning CrossBatchMemory(NTXentLoss)": (
        partial(cross_batch, "NTXentLoss"),
        "labels that never recur",
    ),
    "pytorch-metric-learning CrossBatchMemory(SupConLoss)": (
        partial(cross_batch, "SupConLoss"),
        "labels that never recur",
    ),
    "open_clip ClipLoss": (modalities, "negatives='cross', temperature 1 / logit_scale"),
}


def value_differences(args: Namespace) -> list[dict[str, Any]]:
    table = []
    for name, (make, where) in VALUES.items():
        alike = peers.if_installed(name, partial(make, args.device))
        if alike is None:
            continue
        leaves = (*views(alike.num, args.device, torch.float64), *alike.temperature)
        of_both = []
        for loss in (alike.theirs, alike.ours):
            value = loss(*leaves[:2])
            of_both.append((value.detach(), *torch.autograd.grad(value, leaves)))
        value, *gradients = (
            ((ours - theirs).norm() / theirs.norm()).item()
            for theirs, ours in zip(*of_both, strict=True)
        )
        row = partial(measure.row, "values", name, f"N={alike.num} D={DIM}", where)
        table.append(row("difference of the value", value))
        table.append(row("difference of the gradient", max(gradients)))
    return table


class Rival(NamedTuple):
    """A loss, and the bytes that it takes (0 if that is little)."""

    make: Callable[[], Loss]
    needs: float = 0


def step(loss: Loss, *leaves: Tensor) -> None:
    torch.autograd.grad(loss(*leaves[:2]), leaves)


def timed(
    rivals: dict[str, Rival], leaves: list[Tensor], size: str, mode: str, args: Namespace
) -> list[dict[str, Any]]:
    """Time and memory of the losses that fit; the first one is what they are compared with."""
    steps, table = {}, []
    for name, rival in rivals.items():
        if rival.needs > measure.available_bytes(args.device):
            tqdm.write(f"{mode} {size}: {name} needs about {rival.needs / 2**30:.0f} GiB")
        elif loss := peers.if_installed(name, rival.make):
            steps[name] = partial(step, loss, *leaves)
            steps[name]()  # memories get their buffers
            peak = measure.peak_mib(steps[name], args.device)
            table.append(measure.row("steps", name, size, mode, "peak MiB", peak))
    times = measure.time_in_turn(steps, args.rounds, SECONDS_PER_RIVAL)
    return measure.rows("steps", size, mode, times, next(iter(rivals))) + table


def two_views_steps(num: int, args: Namespace) -> list[dict[str, Any]]:
    rivals = {
        "InfoNCE": Rival(partial(InfoNCE, temperature=TAU)),
        "lightly NTXentLoss": Rival(partial(peers.lightly_nt_xent, TAU), 80 * num**2),
        "lightly DCLLoss": Rival(partial(peers.lightly_dcl, TAU), 80 * num**2),
    }
    leaves = views(num, args.device)
    return timed(rivals, leaves, f"N={num} D={DIM}", "two views", args)


def label_steps(num: int, args: Namespace) -> list[dict[str, Any]]:
    labels = torch.randint(CLASSES, (num,), device=args.device)
    positives = (labels.unsqueeze(1) == labels).sum().item() * 4
    pairs = positives * (4 * num**2 - positives)  # each positive with each negative
    rivals = {
        "InfoNCE": Rival(lambda: partial(InfoNCE(temperature=TAU), items=labels)),
        "SupConLoss": Rival(partial(peers.sup_con, TAU, labels=labels), 240 * num**2),
        "NTXentLoss": Rival(partial(peers.nt_xent, TAU, labels=labels), 20 * pairs),
    }
    leaves, mode = views(num, args.device), f"labels, {CLASSES} classes"
    return timed(rivals, leaves, f"N={num} D={DIM}", mode, args)


def modality_steps(num: int, args: Namespace) -> list[dict[str, Any]]:
    temperature = torch.tensor(TAU, device=args.device, requires_grad=True)
    rivals = {
        "InfoNCE": Rival(partial(InfoNCE, temperature=temperature, negatives="cross")),
        "open_clip ClipLoss": Rival(partial(peers.clip, temperature), 24 * num**2),
    }
    leaves = [*views(num, args.device), temperature]
    mode = "two modalities, learnable temperature"
    return timed(rivals, leaves, f"N={num} D={DIM}", mode, args)


def filled(num: int, size: int, device: str) -> InfoNCE:
    """With a memory that training steps have filled."""
    loss = InfoNCE(temperature=TAU, memory_size=size, dim=DIM).to(device)
    for _ in range(math.ceil(size / (2 * num))):
        loss(*views(num, device))
    return loss


def memory_steps(num: int, size: int, args: Namespace) -> list[dict[str, Any]]:
    stored = unit(size, args.device)
    logits = 2 * num * (size + 2 * num)
    rivals = {
        "InfoNCE": Rival(partial(filled, num, size, args.device)),
        "lightly NTXentLoss": Rival(partial(peers.lightly_nt_xent, TAU, stored), 12 * logits),
    }
    # NTXentLoss takes 22 GiB at N=256 and B=4096.
    for name in ("SupConLoss", "NTXentLoss") if num <= 32 else ("SupConLoss",):
        make = partial(peers.cross_batch_memory, stored, 2 * num, TAU, name)
        rivals[f"CrossBatchMemory({name})"] = Rival(make, 60 * logits)
    leaves = views(num, args.device)
    return timed(rivals, leaves, f"N={num} D={DIM} B={size}", "memory", args)


def step_times(args: Namespace) -> list[dict[str, Any]]:
    table = []
    for num in args.sizes:
        table += two_views_steps(num, args)
        table += label_steps(num, args)
        table += modality_steps(num, args)
    table += memory_steps(32, 1024, args)
    for size in sorted({min(args.stored), max(args.stored)}):
        table += memory_steps(BATCH, size, args)
    return table


BENCHMARKS = {"values": value_differences, "steps": step_times}

if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21)
    parser.add_argument("--only", choices=BENCHMARKS, help="one of them instead of all")
    parser.add_argument("--sizes", type=count, nargs="+", default=[256, 1024], help="N, for steps")
    stored = [16384, 32768, 65536]
    parser.add_argument("--stored", type=count, nargs="+", default=stored, help="sizes of memories")
    args = parser.parse_args()

    torch.manual_seed(0)
    chosen = [args.only] if args.only else BENCHMARKS
    measure.report(args, (BENCHMARKS[name](args) for name in chosen))
