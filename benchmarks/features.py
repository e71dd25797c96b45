"""Check which options our losses and others have, and what they do with extreme input.

It prints the table of docs/features.md. Losses that are not installed are left out:
`benchmarks/peers.py` says how to install them. The limit on memory is one of Linux. A step of
100,000 graphs takes minutes, for each loss that can do it. With `--largest 4096` it takes one
minute.

    python -m benchmarks.features
"""

import argparse
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, distributed, multiprocessing, nn
from torch.nn.parallel import DistributedDataParallel

from experiments.common.arguments import count
from pgcl_losses import InfoNCE, PGCLLoss

from . import measure, peers, ranks

Loss = peers.Loss
Maker = Callable[[float], Loss]  # from a temperature


def pgcl(temperature: float | Tensor, **options: Any) -> PGCLLoss:
    return PGCLLoss(32, temperature=temperature, **options)


def info_nce(temperature: float | Tensor, **options: Any) -> InfoNCE:
    return InfoNCE(temperature=temperature, **options)


def weighted(items1: Tensor, items2: Tensor) -> Loss:
    """torch's cross entropy, whose targets are probabilities: those of one item are alike."""
    return peers.linear_cross_entropy(positives=items1.unsqueeze(1) == items2)


MAKERS: dict[str, Maker] = {
    "PGCLLoss": pgcl,
    "InfoNCE": info_nce,
    "PyGCL InfoNCE": peers.pygcl_info_nce,
    "pytorch-metric-learning NTXentLoss": peers.nt_xent,
    "lightly NTXentLoss": peers.lightly_nt_xent,
    "open_clip ClipLoss": peers.clip,
    "torch linear_cross_entropy": partial(peers.linear_cross_entropy, chunked=True),
    "graphssl NTXentLoss": peers.graphssl_nt_xent,
    "sentence-transformers MultipleNegativesRankingLoss": peers.multiple_negatives_ranking,
}


def installed() -> dict[str, Maker]:
    return {
        name: make
        for name, make in MAKERS.items()
        if peers.if_installed(name, partial(make, 0.2)) is not None
    }


def views(num: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(2, num, 32).to(dtype).requires_grad_().unbind()


def is_finite(loss: Loss, z1: Tensor, z2: Tensor) -> bool:
    """The value and its gradient."""
    value = loss(z1, z2)
    gradients = torch.autograd.grad(value, (z1, z2), allow_unused=True)
    return all(bool(t.isfinite().all()) for t in (value, *gradients) if t is not None)


def one_graph(make: Maker) -> bool:
    return is_finite(make(0.2), *views(1))


def zero_row(make: Maker) -> bool:
    z1, z2 = (view.detach().clone() for view in views())
    z1[3] = 0
    return is_finite(make(0.2), z1.requires_grad_(), z2.requires_grad_())


def cold(make: Maker) -> bool:
    return is_finite(make(0.01), *views())


def half(make: Maker) -> bool:
    """As exact as rounding the input to float16 allows."""
    torch.manual_seed(0)
    loss = make(0.2)
    rounded = views(dtype=torch.float16)
    exact = loss(*(view.detach().double().float() for view in rounded))
    return abs(loss(*rounded).item() - exact.item()) < 1e-4 * abs(exact.item())


def learnable(make: Maker) -> bool:
    temperature = torch.tensor(0.2, requires_grad=True)
    (gradient,) = torch.autograd.grad(make(temperature)(*views()), temperature)
    return bool(gradient.isfinite()) and gradient.item() != 0


def remembers(make: Maker) -> bool:
    """The loss of a batch depends on the batch before."""
    values = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.randn(2, 64, 32, requires_grad=True)
        torch.manual_seed(0)  # of random initialisations
        loss = make(0.2)
        loss(*before)
        values.append(loss(*views()).item())
        if not is_finite(loss, *views()):
            return False
    return values[0] != values[1]


def attracts(make: Callable[[Tensor], Loss]) -> bool:
    """With one label for two samples, the gradient draws them together."""
    labels = torch.arange(64)
    one_label = labels.clone()
    one_label[1] = 0
    z1, z2 = views()
    pulls = []
    for given in (labels, one_label):
        torch.manual_seed(0)
        (gradient, _) = torch.autograd.grad(make(given)(z1, z2), (z1, z2))
        pulls.append((gradient[0] @ z1[1]).item())
    return pulls[1] < pulls[0]


def as_clip(make: Maker) -> bool:
    """A query's negatives are of the other modality alone."""
    z1, z2 = views()
    logits = F.normalize(z1) @ F.normalize(z2).T / 0.2
    own = torch.arange(len(logits))
    clip = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    return torch.allclose(make(0.2)(z1, z2), clip, rtol=1e-4)


def unequal(make: Callable[[Tensor, Tensor], Loss]) -> bool:
    """Two sets, of which the second has two embeddings of each item."""
    items = torch.arange(64)
    loss = make(items, items.repeat(2))
    (z1, _), (z2, _) = views(), views(128)
    gradients = torch.autograd.grad(loss(z1, z2), (z1, z2))
    return is_finite(loss, z1, z2) and all(bool(g.any()) for g in gradients)


def of_nearest(make: Maker) -> float:
    """The derivative of the loss by the cosine of two graphs that nearly coincide in both views."""
    torch.manual_seed(0)
    num = 12
    graphs = torch.randn(num, 32)
    embeddings = graphs + 0.5 * torch.randn(2, num, 32)
    embeddings[:, 1] = embeddings[:, 0] + 0.2 * torch.randn(2, 32)
    embeddings = F.normalize(embeddings, dim=-1).requires_grad_()
    (gradient,) = torch.autograd.grad(make(0.2)(*embeddings), embeddings)
    # Along column j of the inverse an embedding changes its cosine with embedding j alone.
    inverse = torch.linalg.pinv(embeddings.detach().flatten(0, 1))  # [D, 2N]
    by_cosine = (gradient.flatten(0, 1) @ inverse).view(2, num, 2, num)
    return by_cosine[:, 0, :, 1].trace().item()


def nearest_to_info_nce(named: tuple[str, Maker]) -> str:
    name, make = named
    ratio = round(of_nearest(make) / of_nearest(info_nce), 2)
    return f"{name}: {ratio + 0.0:.2f}"  # no -0.00


class Model(nn.Module):
    """Encoder and loss in one, for DistributedDataParallel."""

    def __init__(self, make: Maker) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(32, 32)
        self.loss = make(0.2)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        return self.loss(self.encoder(x1), self.encoder(x2))


def value_and_gradients(model: nn.Module, x1: Tensor, x2: Tensor) -> list[Tensor]:
    value = model(x1, x2)
    value.backward()
    return [value.detach(), *(parameter.grad for parameter in model.parameters())]


def half_of_a_batch(make: Maker) -> list[Tensor]:
    """Value and gradients of one of two processes, with its half of the graphs."""
    halves = [view.detach().chunk(2)[distributed.get_rank()] for view in views()]
    value, *gradients = value_and_gradients(DistributedDataParallel(Model(make)), *halves)
    distributed.all_reduce(value)
    return [value / 2, *gradients]


def two_processes(make: Maker) -> str:
    """Whether the mean over processes is what one process has with the whole batch."""
    expected = value_and_gradients(Model(make), *(view.detach() for view in views()))
    seen = ranks.on_ranks(half_of_a_batch, 2, make)
    value, *gradients = map(partial(torch.allclose, rtol=1e-4, atol=1e-6), seen, expected)
    if all(gradients):
        return "yes" if value else "the gradient alone"
    return "the value alone" if value else "no"


def step(loss: Loss, z1: Tensor, z2: Tensor) -> None:
    torch.autograd.grad(loss(z1, z2), (z1, z2))


def largest_within(make: Maker, limit: float, sizes: list[int]) -> str:
    """The largest batch that this process, which gets so many MiB more, can do a step of."""
    loss = make(0.2)
    step(loss, *views())  # what it starts once is not part of a step
    status = Path("/proc/self/status").read_text()
    (used,) = [int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:")]
    most = int(used * 1024 + limit * measure.MIB)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    for size in sorted(sizes, reverse=True):
        try:
            peak = measure.peak_mib(partial(step, loss, *views(size)), "cpu")
            return f"{size:,} ({peak:.0f} MiB)"
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
                raise
    return f"not {min(sizes)}"


def largest(make: Maker, limit: float, sizes: list[int]) -> str:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        return alone.submit(largest_within, make, limit, sizes).result()


def peak(make: Maker, num: int) -> str:
    return f"{measure.peak_mib(partial(step, make(0.2), *views(num)), 'cpu'):.0f}"


Check = Callable[[Any], bool | str]
Columns = dict[str, Any]
PGCL, INFO_NCE, PYGCL, METRIC_LEARNING, LIGHTLY, CLIP, TORCH, _, SENTENCES = MAKERS
OPTIONS: dict[str, tuple[Check, Columns]] = {
    "past batches as negatives": (
        remembers,
        {
            PGCL: partial(pgcl, memory_size=128),
            INFO_NCE: partial(info_nce, memory_size=128, dim=32),
            METRIC_LEARNING: lambda tau: peers.cross_batch_memory(torch.randn(128, 32), 128, tau),
            LIGHTLY: lambda tau: peers.lightly_nt_xent(tau, torch.randn(128, 32)),
        },
    ),
    "labels: samples of one label are positives": (
        attracts,
        {
            PGCL: lambda labels: partial(pgcl(0.2), items=labels),
            INFO_NCE: lambda labels: partial(info_nce(0.2), items=labels),
            PYGCL: lambda labels: peers.pygcl_info_nce(labels=labels),
            METRIC_LEARNING: lambda labels: peers.nt_xent(labels=labels),
            TORCH: lambda labels: weighted(labels, labels),
        },
    ),
    "two modalities: the loss of CLIP": (
        as_clip,
        {
            PGCL: partial(
                pgcl,
                negatives="cross",
                weighting="uniform",
                exclude_same_cluster=False,
                consistency_weight=0,
            ),
            INFO_NCE: partial(info_nce, negatives="cross"),
            PYGCL: partial(peers.pygcl_info_nce, intraview=False),
            METRIC_LEARNING: lambda tau: peers.nt_xent_across(tau, *torch.arange(64).repeat(2, 1)),
            **{name: MAKERS[name] for name in (CLIP, TORCH, SENTENCES)},
        },
    ),
    "sets of different lengths": (
        unequal,
        {
            INFO_NCE: lambda *items: partial(info_nce(0.2, negatives="cross"), items=items),
            METRIC_LEARNING: lambda *items: peers.nt_xent_across(0.2, *items),
            TORCH: weighted,
        },
    ),
    "hard negatives: weight of a close pair, relative to InfoNCE": (
        nearest_to_info_nce,
        {
            INFO_NCE: ("hardness", partial(info_nce, hardness=1.0)),
            PYGCL: ("HardnessInfoNCE", partial(peers.pygcl_info_nce, loss="HardnessInfoNCE")),
            METRIC_LEARNING: ("hard mining", partial(peers.mined, strategies=("all", "hard"))),
        },
    ),
    "likely false negatives: the same weight": (
        nearest_to_info_nce,
        {
            PGCL: ("clusters", partial(pgcl, num_prototypes=4, consistency_weight=0)),
            INFO_NCE: ("debias", partial(info_nce, debias=0.1)),
            PYGCL: ("DebiasedInfoNCE", partial(peers.pygcl_info_nce, loss="DebiasedInfoNCE")),
            METRIC_LEARNING: (
                "semi-hard mining",
                partial(peers.mined, strategies=("easy", "semihard")),
            ),
            LIGHTLY: ("DCLLoss", peers.lightly_dcl),
        },
    ),
}
CHECKS: dict[str, Check] = {
    "one graph in the batch: finite": one_graph,
    "an embedding of zeros: finite value and gradient": zero_row,
    "temperature 0.01 in float32: finite": cold,
    "float16 embeddings: as exact as float32": half,
    "learnable temperature": learnable,
    "2 processes: value and gradient of one": two_processes,
}


def answer(check: Check, make: Any) -> str:
    try:
        said = check(make)
    except Exception as error:  # whatever a peer raises is its answer
        return type(error).__name__
    return said if isinstance(said, str) else "yes" if said else "no"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num", type=count, default=256, help="N, to measure memory")
    parser.add_argument("--limit", type=count, default=4096, help="MiB for the largest batch")
    parser.add_argument("--largest", type=count, default=100_000, help="no larger batch is tried")
    args = parser.parse_args()
    makers = installed()
    sizes = [args.largest, *(2**power for power in range(6, 30) if 2**power < args.largest)]
    checks = CHECKS | {
        f"peak memory of a step at N={args.num}, D=32, MiB": partial(peak, num=args.num),
        f"largest N of a step in {args.limit} MiB, D=32": partial(
            largest, limit=args.limit, sizes=sizes
        ),
    }
    print(f"| | {' | '.join(makers)} |")
    print("| --- |" + " --- |" * len(makers))
    for about, (check, having) in OPTIONS.items():
        answers = [answer(check, having[name]) if name in having else "no" for name in makers]
        print(f"| {about} | {' | '.join(answers)} |")
    for about, check in checks.items():
        print(f"| {about} | {' | '.join(answer(check, make) for make in makers.values())} |")


if __name__ == "__main__":
    main()
