"""Compare our losses with those of other libraries: values, time and memory of a step.

`benchmarks/peers.py` says how to install the libraries. What is not installed is left out.

python -m benchmarks.libraries --output benchmarks/results/libraries.json
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

from experiments.common.arguments import count
from pgcl_losses import InfoNCE

from . import measure, peers

Loss = peers.Loss
DIM = 128
TAU = 0.2
CLASSES = 8
CHECKED = 48  # N, of values
SECONDS_PER_RIVAL = 10.0


def views(num: int, device: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return list(torch.randn(2, num, DIM, dtype=dtype, device=device).requires_grad_().unbind())


class Rival(NamedTuple):
    """A loss, and the bytes that it takes for each of N x N pairs (0 if they are few)."""

    make: Callable[[], Loss]
    needs: int = 0


Rivals = dict[str, Rival]  # the first one is ours, which the others are compared with


def two_views(z: Tensor) -> Rivals:
    return {
        "InfoNCE": Rival(partial(InfoNCE, temperature=TAU)),
        "lightly NTXentLoss": Rival(partial(peers.lightly_nt_xent, TAU), 80),
        "graphssl NTXentLoss": Rival(partial(peers.graphssl_nt_xent, TAU), 48),
        "pytorch-metric-learning SupConLoss": Rival(partial(peers.sup_con, TAU), 240),
    }


def decoupled(z: Tensor) -> Rivals:
    return {
        "InfoNCE": Rival(partial(InfoNCE, temperature=TAU, decoupled=True)),
        "lightly DCLLoss": Rival(partial(peers.lightly_dcl, TAU), 80),
    }


def two_modalities(z: Tensor) -> Rivals:
    by_torch = partial(peers.linear_cross_entropy, TAU)
    of_sentences = partial(peers.multiple_negatives_ranking, TAU)
    return {
        "InfoNCE": Rival(partial(InfoNCE, temperature=TAU, negatives="cross")),
        "torch linear_cross_entropy": Rival(by_torch, 24),
        "torch linear_cross_entropy, chunked": Rival(partial(by_torch, chunked=True)),
        "open_clip ClipLoss": Rival(partial(peers.clip, TAU), 24),
        "sentence-transformers MultipleNegativesRankingLoss": Rival(of_sentences, 48),
    }


def with_labels(z: Tensor) -> Rivals:
    """Classes of one size: NTXentLoss weighs all positives alike, InfoNCE all queries."""
    labels = torch.arange(len(z), device=z.device) % CLASSES
    theirs = partial(peers.nt_xent, TAU, labels=labels)
    return {
        "InfoNCE": Rival(lambda: partial(InfoNCE(temperature=TAU), items=labels)),
        "pytorch-metric-learning NTXentLoss": Rival(theirs),
    }


def memory_bank(z: Tensor, size: int) -> Rivals:
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
        "InfoNCE": Rival(ours),
        "lightly NTXentLoss": Rival(partial(peers.lightly_nt_xent, TAU, stored)),
    }


# What is compared, and at which N: by default at those that are asked for.
MODES: dict[str, tuple[Callable[[Tensor], Rivals], list[int]]] = {
    "two views": (two_views, []),
    "two views, decoupled": (decoupled, []),
    "two modalities": (two_modalities, []),
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
    for mode, (rivals, _) in MODES.items():
        leaves = views(CHECKED, args.device, torch.float64)
        (_, ours), *others = rivals(leaves[0]).items()
        expected = step(ours.make(), *leaves)
        for name, rival in others:
            if loss := peers.if_installed(name, rival.make):
                value, *gradients = (
                    ((own - theirs).norm() / theirs.norm()).item()
                    for own, theirs in zip(expected, step(loss, *leaves), strict=True)
                )
                row = partial(measure.row, "values", name, f"N={CHECKED} D={DIM}", mode)
                table.append(row("difference of the value", value))
                table.append(row("difference of the gradient", max(gradients)))
    return table


def times(mode: str, rivals: Rivals, leaves: list[Tensor], args: Namespace) -> list[dict[str, Any]]:
    """Time and memory of the losses that fit."""
    num, steps, table = len(leaves[0]), {}, []
    size = f"N={num} D={DIM}"
    for name, rival in rivals.items():
        needed = rival.needs * num**2
        if needed > measure.available_bytes(args.device):
            tqdm.write(f"{mode} {size}: {name} needs about {needed / 2**30:.0f} GiB")
        elif loss := peers.if_installed(name, rival.make):
            steps[name] = partial(step, loss, *leaves)
            steps[name]()  # memories get their buffers
            peak = measure.peak_mib(steps[name], args.device)
            table.append(measure.row("steps", name, size, mode, "peak MiB", peak))
    timed = measure.time_in_turn(steps, args.rounds, SECONDS_PER_RIVAL)
    return measure.rows("steps", size, mode, timed, next(iter(rivals))) + table


def step_times(args: Namespace) -> list[dict[str, Any]]:
    table = []
    for mode, (rivals, sizes) in MODES.items():
        for num in sizes or args.sizes:
            leaves = views(num, args.device)
            table += times(mode, rivals(leaves[0]), leaves, args)
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
    measure.report(args, (BENCHMARKS[name](args) for name in chosen))
