"""Compare our losses with those of other libraries: values, time and memory of a step.

`benchmarks/peers.py` says how to install the libraries. What is not installed is left out.

python -m benchmarks.libraries
python -m benchmarks.libraries --only steps --sizes 256 --rounds 5 --output /tmp/steps.json

- `values`: relative differences of value and gradient in float64; the losses are defined alike.
- `steps`: value and gradient of the same losses in float32; the ratio is to our time.
"""

from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from pgcl_losses import InfoNCE

from . import measure, peers
from .measure import count

Loss = peers.Loss
DIM = 128
TAU = 0.2
CLASSES = 8
CHECKED = 48  # N, of values
SECONDS_PER_LOSS = 10.0


def views(num: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.randn(2, num, DIM, dtype=dtype, device=device).requires_grad_().unbind())


class Entry(NamedTuple):
    """A loss, and the bytes that it stores for each of N x N pairs (0: none, or few pairs)."""

    make: Callable[[], Loss]
    needs: int = 0


Losses = dict[str, Entry]  # the first one is InfoNCE of this package


def two_views(z: Tensor) -> Losses:
    return {
        "InfoNCE": Entry(partial(InfoNCE, temperature=TAU)),
        "lightly NTXentLoss": Entry(partial(peers.lightly_nt_xent, TAU), 80),
        "graphssl NTXentLoss": Entry(partial(peers.graphssl_nt_xent, TAU), 48),
        "GRACE's loss in batches of 512": Entry(partial(partial, peers.grace_in_batches, TAU), 80),
        "pytorch-metric-learning SupConLoss": Entry(
            partial(peers.metric_learning, "SupConLoss", TAU), 240
        ),
    }


def decoupled(z: Tensor) -> Losses:
    return {
        "InfoNCE": Entry(partial(InfoNCE, temperature=TAU, decoupled=True)),
        "lightly DCLLoss": Entry(partial(peers.lightly_dcl, TAU), 80),
    }


def two_modalities(z: Tensor) -> Losses:
    by_torch = partial(peers.linear_cross_entropy, TAU)
    of_sentences = partial(peers.multiple_negatives_ranking, TAU)
    return {
        "InfoNCE": Entry(partial(InfoNCE, temperature=TAU, negatives="cross")),
        "torch linear_cross_entropy": Entry(by_torch, 24),
        "torch linear_cross_entropy, chunked": Entry(partial(by_torch, chunked=True)),
        "open_clip ClipLoss": Entry(partial(peers.clip, TAU), 24),
        "sentence-transformers MultipleNegativesRankingLoss": Entry(of_sentences, 48),
    }


def with_labels(z: Tensor) -> Losses:
    """Classes of one size: NTXentLoss is a mean over positives, InfoNCE over queries."""
    labels = torch.arange(len(z), device=z.device) % CLASSES
    theirs = partial(peers.metric_learning, "NTXentLoss", TAU, labels)
    return {
        "InfoNCE": Entry(lambda: partial(InfoNCE(temperature=TAU), items=labels)),
        "pytorch-metric-learning NTXentLoss": Entry(theirs),
    }


def supervised(z: Tensor) -> Losses:
    labels = torch.arange(len(z), device=z.device) % CLASSES
    theirs = partial(peers.metric_learning, "SupConLoss", TAU, labels)
    ours = InfoNCE(temperature=TAU, over_positives="supcon")
    return {
        "InfoNCE": Entry(lambda: partial(ours, items=labels)),
        "pytorch-metric-learning SupConLoss": Entry(theirs, 240),
    }


def memory_bank(z: Tensor, size: int) -> Losses:
    stored = F.normalize(torch.randn(size, DIM).to(z), dim=1)

    def ours() -> Loss:
        options: dict[str, Any] = {"negatives": "memory", "queries": "first", "memory_size": size}
        loss = InfoNCE(temperature=TAU, dim=DIM, **options).to(z)
        loss.remember(stored)

        def of_views(z1: Tensor, z2: Tensor) -> Tensor:
            value: Tensor = loss(z1, z2)
            loss.remember(z2.detach())
            return value

        return of_views

    return {
        "InfoNCE": Entry(ours),
        "lightly NTXentLoss": Entry(partial(peers.lightly_nt_xent, TAU, stored)),
    }


# Losses to compare, and N; without N, that of --sizes.
MODES: dict[str, tuple[Callable[[Tensor], Losses], list[int]]] = {
    "two views": (two_views, []),
    "two views, decoupled": (decoupled, []),
    "two modalities": (two_modalities, []),
    f"SupCon, {CLASSES} classes": (supervised, []),
    f"labels, {CLASSES} classes": (with_labels, [32]),
    "memory of 1,024": (partial(memory_bank, size=1024), [32]),
    "memory of 65,536": (partial(memory_bank, size=65536), [256]),
}


def step(loss: Loss, *leaves: Tensor) -> tuple[Tensor, ...]:
    """The value, and the gradient of each view."""
    value = loss(*leaves)
    return value.detach(), *torch.autograd.grad(value, leaves)


def value_differences(args: Namespace) -> list[dict[str, Any]]:
    table = []
    for mode, (losses, _) in MODES.items():
        leaves = views(CHECKED, args.device, torch.float64)
        (_, ours), *others = losses(leaves[0]).items()
        expected = step(ours.make(), *leaves)
        for name, entry in others:
            if loss := peers.if_installed(name, entry.make):
                value, *gradients = (
                    ((own - theirs).norm() / theirs.norm()).item()
                    for own, theirs in zip(expected, step(loss, *leaves), strict=True)
                )
                row = partial(measure.row, "values", name, f"N={CHECKED} D={DIM}", mode)
                table.append(row("difference of the value", value))
                table.append(row("difference of the gradient", max(gradients)))
    return table


def times(mode: str, losses: Losses, leaves: list[Tensor], args: Namespace) -> list[dict[str, Any]]:
    """Time and memory of the losses that fit into memory."""
    num, steps, table = len(leaves[0]), {}, []
    size = f"N={num} D={DIM}"
    for name, entry in losses.items():
        needed = entry.needs * num**2
        if needed > measure.available_bytes(args.device):
            tqdm.write(f"{mode} {size}: {name} needs about {needed / 2**30:.0f} GiB")
        elif loss := peers.if_installed(name, entry.make):
            steps[name] = partial(step, loss, *leaves)
            steps[name]()  # memories get their buffers
            peak = measure.peak_mib(steps[name], args.device)
            table.append(measure.row("steps", name, size, mode, "peak MiB", peak))
    timed = measure.time_in_turn(steps, args.rounds, SECONDS_PER_LOSS)
    return measure.rows("steps", size, mode, timed, next(iter(losses))) + table


def step_times(args: Namespace) -> list[dict[str, Any]]:
    table = []
    for mode, (losses, sizes) in MODES.items():
        for num in sizes or args.sizes:
            leaves = views(num, args.device)
            table += times(mode, losses(leaves[0]), leaves, args)
    return table


BENCHMARKS = {"values": value_differences, "steps": step_times}

if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21)
    parser.add_argument("--only", choices=BENCHMARKS, help="one of them instead of all")
    default = [256, 1024, 4096]
    parser.add_argument("--sizes", type=count, nargs="+", default=default, help="N, for steps")
    args = parser.parse_args()

    torch.manual_seed(0)
    chosen = [args.only] if args.only else BENCHMARKS
    measure.report("libraries", args, (BENCHMARKS[name](args) for name in chosen))
