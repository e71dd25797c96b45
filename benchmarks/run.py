"""Measure these losses and what people use instead; prints a table and writes JSON.

python -m benchmarks.run                      # everything
python -m benchmarks.run --only step --rounds 5 --output /tmp/step.json
python -m benchmarks.run --only engines --sizes 128 512 --modes prototype
python -m benchmarks.run --only variants
"""

import argparse
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import ot
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from experiments.common.arguments import count
from pgcl_losses import (
    InfoNCE,
    PGCLLoss,
    PrototypeReweightedNCE,
    SinkhornPrototypes,
    sinkhorn,
)
from pgcl_losses.sinkhorn import balance

from . import measure, peers

DIM = 128
NUM_PROTOTYPES = 10
EPSILONS = [0.05, 0.02, 0.01, 0.005, 0.002, 0.001]
SECONDS_PER_RIVAL = 3.0
PYGCL = "PyGCL's InfoNCE itself"
MODES = {
    "prototype": {"weighting": "prototype"},
    "sample": {"weighting": "sample"},
    "uniform": {"weighting": "uniform", "exclude_same_cluster": False},
}
# Prototypes, in all or of each head, and options; the first one is what the others are held to.
VARIANTS: dict[str, tuple[int | tuple[int, ...], dict[str, Any]]] = {
    "prototype, K=10": (NUM_PROTOTYPES, MODES["prototype"]),
    "uniform": (NUM_PROTOTYPES, MODES["uniform"]),
    "sample": (NUM_PROTOTYPES, MODES["sample"]),
    "cross": (NUM_PROTOTYPES, {"negatives": "cross"}),
    "K=1000": (1000, {}),
    "temperature=0.05": (NUM_PROTOTYPES, {"temperature": 0.05}),
    "temperature=0.02": (NUM_PROTOTYPES, {"temperature": 0.02}),
    "temperature=0.01": (NUM_PROTOTYPES, {"temperature": 0.01}),
    "heads (10, 42, 84)": ((10, 42, 84), {}),
    "soft clusters": (NUM_PROTOTYPES, {"soft_clusters": True}),
    "negative_ranks=(2, 8)": (NUM_PROTOTYPES, {"negative_ranks": (2, 8)}),
}

Loss = Callable[[Tensor, Tensor], Tensor]


def cosines(n: int, k: int, device: str) -> Tensor:
    scores = F.normalize(torch.randn(n, 96)) @ F.normalize(torch.randn(k, 96)).T
    return scores.to(device)


def sinkhorn_times(args: argparse.Namespace) -> list[dict[str, Any]]:
    table = []
    for n, k in ((128, 10), (4096, 100), (16384, 1000)):
        scores = cosines(n, k, args.device)
        uniform = scores.new_full((n,), 1 / n), scores.new_full((k,), 1 / k)
        rivals: dict[str, Callable[[], Any]] = {
            "pgcl_losses.sinkhorn": lambda s=scores: sinkhorn(s),
            "the same within PGCLLoss": lambda s=scores: balance(s, 0.05, 3),
            "division loop (SwAV's)": lambda s=scores: peers.division_loop(s),
            "division loop, shortest": lambda s=scores: peers.shortest_division_loop(s),
            "log domain": lambda s=scores: peers.log_domain_loop(s),
            "POT": lambda s=scores, u=uniform: ot.bregman.sinkhorn_knopp(
                *u, -s, reg=0.05, numItermax=3, stopThr=0, warn=False
            ),
        }
        times = measure.time_in_turn(rivals, args.rounds)
        size = f"N={n} K={k}"
        against = "division loop (SwAV's)", "division loop, shortest"
        table += measure.rows("sinkhorn", size, "3 iterations", times, *against)

    n, k = 4096, 100
    scores = cosines(n, k, args.device)
    ours: dict[str, Callable[[], Any]] = {
        f"epsilon={epsilon}": partial(sinkhorn, scores, epsilon=epsilon) for epsilon in EPSILONS
    }
    times = measure.time_in_turn(ours, args.rounds)
    table += measure.rows("sinkhorn", f"N={n} K={k}", "by epsilon", times, "epsilon=0.05")
    return table


def train(loss: Loss, z1: Tensor, z2: Tensor, weight: Tensor) -> None:
    z1.grad = z2.grad = weight.grad = None
    loss(z1, z2).backward()


def step_times(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and backward of PGCLLoss against InfoNCE, ours and others'.

    Also on one thread: a small step waits for the other threads dozens of times, and if another
    program runs on their cores, the step consists of these waits.
    """
    table = []
    thread_counts = sorted({1, torch.get_num_threads()})
    for num, threads in itertools.product((128, 512), thread_counts):
        z1, z2 = (torch.randn(num, 96, device=args.device, requires_grad=True) for _ in range(2))
        pgcl = PGCLLoss(96, NUM_PROTOTYPES).to(args.device)
        leaves = z1, z2, pgcl.prototypes.weight
        losses: dict[str, Loss] = {
            "PGCLLoss": pgcl,
            "pgcl_losses.InfoNCE": InfoNCE(),
        }
        if theirs := peers.if_installed(PYGCL, peers.pygcl_info_nce):
            losses[PYGCL] = theirs
        rivals = {name: partial(train, loss, *leaves) for name, loss in losses.items()}
        with measure.on_threads(threads):
            times = measure.time_in_turn(rivals, args.rounds)
        size, mode = f"N={num} D=96 K={NUM_PROTOTYPES}", f"threads={threads}"
        table += measure.rows("step", size, mode, times, *[name for name in times if name == PYGCL])
    return table


def contrast_rivals(
    mode: str, clusters: tuple[Tensor, Tensor], prototypes: Tensor
) -> dict[str, tuple[Loss, float]]:
    """The losses for one mode and size, each with how many ``[2N, 2N]`` matrices it holds."""
    given: dict[str, Any] = {} if mode == "uniform" else {"clusters": clusters}
    if mode == "prototype":
        given["prototypes"] = prototypes
    num = len(clusters[0])
    dense = 5 if mode == "sample" else 4

    def ours(engine: str) -> PrototypeReweightedNCE:
        return PrototypeReweightedNCE(engine=engine, **MODES[mode])

    rivals: dict[str, tuple[Loss, float]] = {}
    for engine in ("dense", "blocks", "flex") if prototypes.is_cuda else ("dense", "blocks"):
        loss = ours(engine)
        needs = dense if engine == "dense" else 0
        rivals[engine] = (lambda a, b, loss=loss: loss(a, b, **given), needs)
    compiled = torch.compile(ours("dense"))
    rivals["torch.compile of dense"] = (lambda a, b: compiled(a, b, **given), dense)
    if mode == "prototype" and num <= 128:
        rivals["double loop, as published"] = (partial(peers.double_loop_pgcl, **given), 5)
    if mode == "uniform":
        rivals["InfoNCE, chunks as in Inf-CL"] = (peers.chunked_info_nce, 0)
        for name, make, matrices in (
            ("PyGCL's InfoNCE", peers.pygcl_info_nce, 7),
            ("lightly's NTXentLoss", peers.lightly_nt_xent, 5),
        ):
            if theirs := peers.if_installed(name, make):
                rivals[name] = (theirs, matrices)
        if num <= 256:  # 38 s at 512 on two cores
            # All positives times all negatives: a third axis, several times over.
            rivals["pytorch-metric-learning's NTXentLoss"] = (peers.nt_xent(), 5 * 2 * num)
    return rivals


def engine_cell(mode: str, num: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One mode at one size: every rival that fits, in time and memory."""
    benchmark, size = "engines", f"N={num} D={DIM} K={NUM_PROTOTYPES}"
    z1, z2 = (torch.randn(num, DIM, device=args.device, requires_grad=True) for _ in range(2))
    clusters = tuple(torch.randint(NUM_PROTOTYPES, (num,), device=args.device) for _ in range(2))
    prototypes = torch.randn(NUM_PROTOTYPES, DIM, device=args.device)
    torch.compiler.reset()  # one size after the other, as if each were the only one

    matrix = 4 * (2 * num) ** 2
    z = F.normalize(torch.cat([z1, z2]).detach())
    limit = peers.gemm_limit(z, block=2048 if matrix > 2**30 else 2 * num)
    steps: dict[str, Callable[[], Any]] = {"GEMM limit": limit}
    if 2 * matrix < measure.available_bytes(args.device):
        steps["three products as written"] = peers.three_products(z)
    table = []
    for name, (loss, matrices) in contrast_rivals(mode, clusters, prototypes).items():

        def step(loss: Loss = loss) -> None:
            torch.autograd.grad(loss(z1, z2), (z1, z2))

        needed, free = matrices * matrix, measure.available_bytes(args.device)
        reason = ""
        if needed > free:
            reason = f"needs about {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB may be used"
        else:
            try:
                step()  # compiles what compiles
                # What compiled code allocates can be seen on a GPU only.
                if args.device.startswith("cuda") or not name.startswith("torch.compile"):
                    peak = measure.peak_mib(step, args.device)
                    table.append(measure.row(benchmark, name, size, mode, "peak MiB", peak))
                steps[name] = step
            except RuntimeError as error:  # out of memory, or no compiler
                reason = str(error).partition("\n")[0]
        if reason:
            tqdm.write(f"{benchmark} {size} {mode}: {name} is left out: {reason}")
    times = measure.time_in_turn(steps, args.rounds, SECONDS_PER_RIVAL)
    return measure.rows(benchmark, size, mode, times, "GEMM limit") + table


def engine_times(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and backward of the reweighted contrast, on every engine and on others' code."""
    cells = [(mode, num) for num in args.sizes for mode in args.modes]
    table = []
    for mode, num in tqdm(cells, unit="cell"):
        table += engine_cell(mode, num, args)
    return table


def variant_times(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Forward and backward of the contrast by blocks, as one option after another is changed."""
    num = args.variants_at
    z1, z2 = (torch.randn(num, DIM, device=args.device, requires_grad=True) for _ in range(2))
    variants: dict[str, Callable[[], Any]] = {}
    for name, (num_prototypes, options) in VARIANTS.items():
        prototypes = SinkhornPrototypes(DIM, num_prototypes).to(args.device)
        with torch.no_grad():
            assignments = prototypes(z1, z2)
        loss = PrototypeReweightedNCE(engine="blocks", **options)
        given = {"assignments": assignments, "prototypes": prototypes.weight.detach()}

        def step(loss: Loss = loss, given: dict[str, Any] = given) -> None:
            torch.autograd.grad(loss(z1, z2, **given), (z1, z2))

        variants[name] = step
    times = measure.time_in_turn(variants, args.rounds)
    return measure.rows("variants", f"N={num} D={DIM}", "blocks", times, next(iter(VARIANTS)))


BENCHMARKS = {
    "sinkhorn": sinkhorn_times,
    "step": step_times,
    "engines": engine_times,
    "variants": variant_times,
}

if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=21)
    parser.add_argument("--only", choices=BENCHMARKS, help="one of them instead of all")
    sizes = [32, 128, 512, 2048, 4096, 8192, 16384]
    parser.add_argument("--sizes", type=count, nargs="+", default=sizes, help="N, for engines")
    parser.add_argument("--modes", choices=MODES, nargs="+", default=list(MODES))
    parser.add_argument("--variants-at", type=count, default=4096, help="N, for variants")
    args = parser.parse_args()

    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "PGCLLoss: the prototypes have not moved")  # no optimizer
    chosen = [args.only] if args.only else BENCHMARKS
    measure.report(args, (BENCHMARKS[name](args) for name in chosen))
