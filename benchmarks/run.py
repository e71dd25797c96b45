"""Measure the losses beside what people use instead; prints a table and writes JSON.

python benchmarks/run.py                      # everything, about a minute on two cores
python benchmarks/run.py --only step --rounds 5 --output /tmp/step.json
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import measure
import ot
import peers
import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses import PGCLLoss, sinkhorn


def cosines(n: int, k: int) -> Tensor:
    return F.normalize(torch.randn(n, 96)) @ F.normalize(torch.randn(k, 96)).T


def sinkhorn_times(rounds: int) -> list[dict[str, Any]]:
    table = []
    for n, k in ((128, 10), (4096, 100), (16384, 1000)):
        scores = cosines(n, k)
        uniform = torch.full((n,), 1 / n), torch.full((k,), 1 / k)
        rivals: dict[str, Callable[[], Any]] = {
            "pgcl_losses.sinkhorn": lambda s=scores: sinkhorn(s),
            "division loop (SwAV's)": lambda s=scores: peers.division_loop(s),
            "division loop, shortest": lambda s=scores: peers.shortest_division_loop(s),
            "log domain": lambda s=scores: peers.log_domain_loop(s),
            "POT": lambda s=scores, u=uniform: ot.bregman.sinkhorn_knopp(
                *u, -s, reg=0.05, numItermax=3, stopThr=0, warn=False
            ),
        }
        times = measure.time_in_turn(rivals, rounds)
        size = f"N={n} K={k}"
        table += measure.rows("sinkhorn", size, "3 iterations", times, "division loop (SwAV's)")
    return table


def step_times(rounds: int) -> list[dict[str, Any]]:
    """Forward and backward of the whole PGCL loss against InfoNCE alone."""
    z1, z2 = (torch.randn(128, 96, requires_grad=True) for _ in range(2))
    pgcl = PGCLLoss(96, 10)

    def stepping(loss_of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def step() -> None:
            z1.grad = z2.grad = pgcl.prototypes.weight.grad = None
            loss_of(z1, z2).backward()

        return step

    rivals = {
        "PGCLLoss": stepping(pgcl),
        "InfoNCE in PyGCL's form": stepping(peers.masked_info_nce),
    }
    try:
        from GCL.losses import InfoNCE  # optional: it has to be compiled
        from GCL.models import DualBranchContrast

        model = DualBranchContrast(InfoNCE(tau=0.2), mode="G2G", intraview_negs=True)
        rivals["PyGCL's InfoNCE itself"] = stepping(lambda a, b: model(g1=a, g2=b))
    except ImportError as error:
        print(f"PyGCL's InfoNCE itself is left out: {error}")
    times = measure.time_in_turn(rivals, rounds)
    size = "N=128 D=96 K=10"
    return measure.rows("step", size, "forward+backward", times, "InfoNCE in PyGCL's form")


BENCHMARKS = {"sinkhorn": sinkhorn_times, "step": step_times}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=BENCHMARKS, help="one of them instead of all")
    parser.add_argument("--rounds", type=int, default=21)
    here = Path(__file__).parent / "results" / "cpu.json"
    parser.add_argument("--output", type=Path, default=here)
    args = parser.parse_args()

    torch.manual_seed(0)
    print(measure.machine())
    table = []
    for name in [args.only] if args.only else BENCHMARKS:
        part = BENCHMARKS[name](args.rounds)
        measure.show(part)
        table += part
    measure.save(args.output, table)
    print(f"written to {args.output}")
