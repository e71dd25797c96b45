"""Time InfoNCE beside the lines of published scripts that it replaces; write JSON.

python -m benchmarks.scripts
python -m benchmarks.scripts --only losses --sizes 128 --compile-at --rounds 5 --output /tmp/s.json

- `losses`: losses of two views, at some sizes also compiled (torch.compile needs a C++ compiler).
- `retrieval`: few queries against many keys, as of users against all items.

Steps are value and gradient. Ratios are to the script's own lines, and to InfoNCE, both eager.
"""

import itertools
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses import InfoNCE

from . import measure
from .measure import Loss, Row, count

DIM, KEY_DIM, TAU = 96, 64, 0.2
SECONDS_PER_LOSS = 5.0
LINES, OURS, COMPILED = "the script's lines", "InfoNCE", ", compiled"
ONE_WAY: dict[str, Any] = {"temperature": TAU, "negatives": "cross", "queries": "first"}


def nt_xent(z1: Tensor, z2: Tensor) -> Tensor:
    """NT-Xent in the lines of SimCLR's scripts."""
    z = F.normalize(torch.cat([z1, z2]))
    logits = z @ z.T / TAU
    logits.fill_diagonal_(-torch.inf)
    positives = torch.arange(len(z), device=z.device).roll(len(z1))
    return F.cross_entropy(logits, positives)


def loss_cal(x: Tensor, x_aug: Tensor) -> Tensor:
    """GraphCL's `loss_cal`, with the operations of its code."""
    own, norms = range(len(x)), torch.einsum("i,j->ij", x.norm(dim=1), x_aug.norm(dim=1))
    sim = torch.exp(torch.einsum("ik,jk->ij", x, x_aug) / norms / TAU)
    pos = sim[own, own]
    return -torch.log(pos / (sim.sum(dim=1) - pos)).mean()


def clip(z1: Tensor, z2: Tensor) -> Tensor:
    """CLIP's lines: the mean of both directions."""
    logits = F.normalize(z1) @ F.normalize(z2).T / TAU
    own = torch.arange(len(z1), device=z1.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


SCRIPTS: dict[str, dict[str, Loss]] = {
    "NT-Xent": {LINES: nt_xent, OURS: InfoNCE(temperature=TAU)},
    "GraphCL": {LINES: loss_cal, OURS: InfoNCE(**ONE_WAY, decoupled=True)},
    "CLIP": {LINES: clip, OURS: InfoNCE(temperature=TAU, negatives="cross")},
}


def over_all_keys(own: Tensor, num_keys: int) -> dict[str, Loss]:
    """Losses of queries [B, D] over all keys [N, D]; the positives of queries are ``own`` [B]."""

    def lines(queries: Tensor, keys: Tensor) -> Tensor:
        return F.cross_entropy(F.normalize(queries) @ F.normalize(keys).T / TAU, own)

    labels = own, torch.arange(num_keys, device=own.device)
    return {LINES: lines, OURS: partial(InfoNCE(**ONE_WAY), labels=labels)}


def cell(args: Namespace, losses: dict[str, Loss], sets: list[Tensor], *where: str) -> list[Row]:
    steps = {name: measure.step_of(loss, *sets) for name, loss in losses.items()}
    return measure.compare(where, steps, args, LINES, OURS, seconds=SECONDS_PER_LOSS)


def two_views(args: Namespace) -> Iterator[list[Row]]:
    threads_used = sorted({1, torch.get_num_threads()})
    for script, num, threads in itertools.product(SCRIPTS, args.sizes, threads_used):
        losses = dict(SCRIPTS[script])
        if num in args.compile_at and threads == 1:
            torch.compiler.reset()  # compile each size as if it were the only one
            losses |= {name + COMPILED: torch.compile(loss) for name, loss in losses.items()}
        sets = measure.sets_of(num, num, dim=DIM, device=args.device)
        with measure.on_threads(threads):
            yield cell(args, losses, sets, "losses", f"N={num} D={DIM} threads={threads}", script)


def retrieval(args: Namespace) -> Iterator[list[Row]]:
    for num, num_keys in args.retrieval or [(512, 8192), (2048, 30000)]:
        losses = over_all_keys(torch.randint(num_keys, (num,), device=args.device), num_keys)
        sets = measure.sets_of(num, num_keys, dim=KEY_DIM, device=args.device)
        size = f"B={num} N={num_keys} D={KEY_DIM} threads=1"
        with measure.on_threads(1):
            yield cell(args, losses, sets, "retrieval", size, "cross-entropy over all keys")


BENCHMARKS = {"losses": two_views, "retrieval": retrieval}

if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=41)
    parser.add_argument("--only", choices=BENCHMARKS, help="one of them instead of both")
    sizes, compiled = [128, 256, 512], [256, 512]
    parser.add_argument("--sizes", type=count, nargs="+", default=sizes, help="N, for losses")
    parser.add_argument("--compile-at", type=count, nargs="*", default=compiled, metavar="N")
    pair = {"metavar": ("QUERIES", "KEYS"), "help": "instead of 512 of 8192 and 2048 of 30000"}
    parser.add_argument("--retrieval", type=count, nargs=2, action="append", **pair)
    args = parser.parse_args()

    torch.manual_seed(0)
    chosen = [args.only] if args.only else BENCHMARKS
    tables = itertools.chain.from_iterable(BENCHMARKS[name](args) for name in chosen)
    measure.report("scripts", args, tables)
