"""Compare our losses with those of other libraries: values, time and memory of a step.

`benchmarks/peers.py` says how to install the libraries. What is not installed is left out.

python -m benchmarks.libraries
python -m benchmarks.libraries --only steps --sizes 256 --rounds 5 --output /tmp/steps.json

- `values`: relative differences of value and gradient in float64; the losses are defined alike.
- `steps`: value and gradient of the same losses in float32; the ratio is to our time.
"""

import itertools
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses import InfoNCE

from . import measure, peers
from .measure import Loss, Row, count
from .peers import TAU

DIM = 128
CLASSES = 8
CHECKED = 48  # N, of values
SECONDS_PER_LOSS = 10.0


class Entry(NamedTuple):
    """A loss, and the bytes that it stores for each of N x N pairs (0: none, or few pairs)."""

    make: Callable[[], Loss]
    needs: int = 0


Losses = dict[str, Entry]  # the first one is InfoNCE of this package


def two_views(z: Tensor) -> Losses:
    return {
        "InfoNCE": Entry(partial(InfoNCE, temperature=TAU)),
        "lightly NTXentLoss": Entry(peers.lightly_nt_xent, 80),
        "graphssl NTXentLoss": Entry(peers.graphssl_nt_xent, 48),
        "GRACE's lines": Entry(lambda: partial(peers.grace_in_batches, size=len(z)), 80),
        "GRACE's loss in batches of 512": Entry(lambda: peers.grace_in_batches, 80),
        "pytorch-metric-learning SupConLoss": Entry(
            partial(peers.metric_learning, "SupConLoss"), 240
        ),
    }


def decoupled(z: Tensor) -> Losses:
    return {
        "InfoNCE": Entry(partial(InfoNCE, temperature=TAU, decoupled=True)),
        "lightly DCLLoss": Entry(peers.lightly_dcl, 80),
    }


def two_modalities(z: Tensor) -> Losses:
    by_torch, of_sentences = peers.linear_cross_entropy, peers.multiple_negatives_ranking
    return {
        "InfoNCE": Entry(partial(InfoNCE, temperature=TAU, negatives="cross")),
        "torch linear_cross_entropy": Entry(by_torch, 24),
        "torch linear_cross_entropy, chunked": Entry(partial(by_torch, chunked=True)),
        "open_clip ClipLoss": Entry(peers.clip, 24),
        "sentence-transformers MultipleNegativesRankingLoss": Entry(of_sentences, 48),
    }


def with_labels(z: Tensor, name: str, needs: int, **options: Any) -> Losses:
    """Classes of one size: NTXentLoss is a mean over positives, InfoNCE over queries."""
    labels = torch.arange(len(z), device=z.device) % CLASSES
    ours, theirs = InfoNCE(temperature=TAU, **options), partial(peers.metric_learning, name, labels)
    return {
        "InfoNCE": Entry(lambda: partial(ours, labels=labels)),
        f"pytorch-metric-learning {name}": Entry(theirs, needs),
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
        "lightly NTXentLoss": Entry(partial(peers.lightly_nt_xent, stored)),
    }


supcon = partial(with_labels, name="SupConLoss", needs=240, over_positives="supcon")
nt_xent = partial(with_labels, name="NTXentLoss", needs=0)

# Losses to compare, and N; without N, that of --sizes.
MODES: dict[str, tuple[Callable[[Tensor], Losses], list[int]]] = {
    "two views": (two_views, []),
    "two views, decoupled": (decoupled, []),
    "two modalities": (two_modalities, []),
    f"SupCon, {CLASSES} classes": (supcon, []),
    f"labels, {CLASSES} classes": (nt_xent, [32]),
    "memory of 1,024": (partial(memory_bank, size=1024), [32]),
    "memory of 65,536": (partial(memory_bank, size=65536), [256]),
}


def values(args: Namespace) -> Iterator[list[Row]]:
    for mode, (losses, _) in MODES.items():
        views = measure.sets_of(CHECKED, CHECKED, dim=DIM, device=args.device, dtype=torch.float64)
        (_, ours), *others = losses(views[0]).items()
        for name, entry in others:
            if loss := peers.if_installed(name, entry.make):
                pair = (measure.step_of(made, *views) for made in (ours.make(), loss))
                row = partial(measure.row, "values", name, f"N={CHECKED} D={DIM}", mode)
                found = measure.differences(*pair).items()
                yield [row(f"difference of the {part}", error) for part, error in found]


def steps(args: Namespace) -> Iterator[list[Row]]:
    for mode, (losses, sizes) in MODES.items():
        for num in sizes or args.sizes:
            views = measure.sets_of(num, num, dim=DIM, device=args.device)
            entries = losses(views[0])
            made = {name: peers.if_installed(name, entry.make) for name, entry in entries.items()}
            made = {name: loss for name, loss in made.items() if loss}
            yield measure.compare(
                ("steps", f"N={num} D={DIM}", mode),
                {name: measure.step_of(loss, *views) for name, loss in made.items()},
                args,
                "InfoNCE",
                needs={name: entry.needs * num**2 for name, entry in entries.items()},
                with_peak=made,
                seconds=SECONDS_PER_LOSS,
            )


BENCHMARKS = {"values": values, "steps": steps}

if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21)
    parser.add_argument("--only", choices=BENCHMARKS, help="one of them instead of all")
    default = [256, 1024, 4096]
    parser.add_argument("--sizes", type=count, nargs="+", default=default, help="N, for steps")
    args = parser.parse_args()

    torch.manual_seed(0)
    chosen = [args.only] if args.only else BENCHMARKS
    tables = itertools.chain.from_iterable(BENCHMARKS[name](args) for name in chosen)
    measure.report("libraries", args, tables)
