"""Time our losses beside the lines of published scripts that they replace; write JSON.

python -m benchmarks.scripts
python -m benchmarks.scripts --only losses --sizes 128 --compile-at --rounds 5 --output /tmp/s.json

- `losses`: losses of two views, at some sizes also compiled (torch.compile needs a C++ compiler).
- `retrieval`: few queries against many keys, as of users against all items.
- `temperatures`: a temperature of 0.01, at which most losses are near 0, beside 0.2.
- `tables`: many queries against a table of few keys, as of prototypes.
- `labels`: classes as labels, beside two views without.
- `positives`: listed positives that some queries have far more of than others.
- `lists`: listed negatives, of which each query has two.
- `score_mods`: functions of the scores of negatives, beside the same loss without.
- `masks`: such a function beside a script that keeps a mask of all pairs.
- `looks`: `repulsion` beside a step of the loss that it looks at.
- `memory`: how much a process grows, and what its tensors hold, by option.

Steps are value and gradient. Ratios are to the script's own lines, and to our loss, both eager; at
temperatures, to the same loss at 0.2; with labels, positives and looks, to the first step.
"""

import itertools
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses import InfoNCE, PGCLLoss, repulsion

from . import fresh, measure
from .measure import Loss, Row, Step, count

DIM, KEY_DIM, LABEL_DIM, TAU = 96, 64, 32, 0.2
SECONDS_PER_LOSS = 5.0
LINES, OURS, COMPILED = "the script's lines", "our loss", ", compiled"
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


def pygcl(z1: Tensor, z2: Tensor) -> Tensor:
    """PyGCL's InfoNCE of both branches with intra-view negatives: its masks and its operations."""
    num, losses = len(z1), []
    for anchor, other in ((z1, z2), (z2, z1)):
        pos_mask = torch.eye(num, device=z1.device)
        neg_mask = torch.cat([1 - pos_mask, 1 - pos_mask], dim=1)
        pos_mask = torch.cat([pos_mask, torch.zeros_like(pos_mask)], dim=1)
        sim = F.normalize(anchor) @ F.normalize(torch.cat([other, anchor])).T / TAU
        exp_sim = torch.exp(sim) * (pos_mask + neg_mask)
        log_prob = sim - torch.log(exp_sim.sum(dim=1, keepdim=True))
        losses.append(-((log_prob * pos_mask).sum(dim=1) / pos_mask.sum(dim=1)).mean())
    return (losses[0] + losses[1]) * 0.5


# The lines of a script, and our loss of the same value.
SCRIPTS: dict[str, tuple[Loss, Loss]] = {
    "NT-Xent": (nt_xent, InfoNCE(temperature=TAU)),
    "GraphCL": (loss_cal, InfoNCE(**ONE_WAY, decoupled=True)),
    "CLIP": (clip, InfoNCE(temperature=TAU, negatives="cross")),
    "PyGCL's InfoNCE": (pygcl, InfoNCE(temperature=TAU)),
}
# The same lines beside a loss that does more.
BESIDE = {"PGCLLoss in place of PyGCL's InfoNCE": (pygcl, PGCLLoss(DIM, temperature=TAU))}


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
    for (script, pair), num in itertools.product((SCRIPTS | BESIDE).items(), args.sizes):
        losses = dict(zip((LINES, OURS), pair, strict=True))
        if num in args.compile_at:
            torch.compiler.reset()  # compile each size as if it were the only one
            losses |= {name + COMPILED: torch.compile(loss) for name, loss in losses.items()}
        sets = measure.sets_of(num, num, dim=DIM, device=args.device)
        with measure.on_threads(1):
            yield cell(args, losses, sets, "losses", f"N={num} D={DIM} threads=1", script)


def retrieval(args: Namespace) -> Iterator[list[Row]]:
    for num, num_keys in args.retrieval or [(512, 8192), (8192, 8192), (2048, 30000)]:
        losses = over_all_keys(torch.randint(num_keys, (num,), device=args.device), num_keys)
        sets = measure.sets_of(num, num_keys, dim=KEY_DIM, device=args.device)
        size = f"B={num} N={num_keys} D={KEY_DIM} threads=1"
        with measure.on_threads(1):
            yield cell(args, losses, sets, "retrieval", size, "cross-entropy over all keys")


def tables(args: Namespace) -> Iterator[list[Row]]:
    """Each query has one positive in a table of K keys, and the others are its negatives."""
    for num, num_keys in args.tables or [(1000, 20), (4000, 20), (4000, 200)]:
        losses = over_all_keys(torch.randint(num_keys, (num,), device=args.device), num_keys)
        sets = measure.sets_of(num, num_keys, dim=DIM, device=args.device)
        where = ("tables", f"B={num} K={num_keys} D={DIM} threads=1", "a table of keys")
        with measure.on_threads(1):
            yield cell(args, losses, sets, *where)


def labels(args: Namespace) -> Iterator[list[Row]]:
    """Two views with C classes in random order, in each form, beside two views without labels."""
    for num, num_classes in itertools.product(args.labelled, (1, 2, 10, 100)):
        classes = (torch.arange(num) % num_classes)[torch.randperm(num)].to(args.device)
        views = measure.sets_of(num, num, dim=LABEL_DIM, device=args.device)
        losses: dict[str, Loss] = {"two views": InfoNCE(temperature=TAU)}
        for form in ("mean", "supcon", "sum"):
            loss = InfoNCE(temperature=TAU, over_positives=form)
            losses[f'over_positives="{form}"'] = partial(loss, labels=classes)
        if num_classes == 1:  # without negatives, the loss of the other forms is 0
            del losses['over_positives="mean"'], losses['over_positives="sum"']
        steps = {name: measure.step_of(loss, *views) for name, loss in losses.items()}
        where = ("labels", f"N={num} D={LABEL_DIM} threads=1", f"{num_classes} classes")
        with measure.on_threads(1):
            yield measure.compare(where, steps, args, "two views", seconds=SECONDS_PER_LOSS)


def positives(args: Namespace) -> Iterator[list[Row]]:
    """As many listed positives for all queries together, spread evenly or not."""
    num, number = args.spread, args.pairs
    key = torch.randint(1, 2 * num, (number,))
    by_rank = 1 / torch.arange(1, 2 * num + 1, dtype=torch.float64)
    queries = {
        "spread": torch.randint(2 * num, (number,)),
        "by Zipf's law": torch.multinomial(by_rank, number, replacement=True),
        "of one query": torch.zeros(number, dtype=torch.long),
    }
    views, steps = measure.sets_of(num, num, dim=LABEL_DIM, device=args.device), {}
    for name, query in queries.items():
        pairs = torch.stack([query, (query + key) % (2 * num)]).to(args.device)
        steps[name] = measure.step_of(partial(InfoNCE(temperature=TAU), positives=pairs), *views)
    where = ("positives", f"N={num} P={number:,} D={LABEL_DIM} threads=1", "listed positives")
    with measure.on_threads(1):
        yield measure.compare(where, steps, args, "spread", seconds=SECONDS_PER_LOSS)


def with_labels(**options: Any) -> Callable[[float, int], Loss]:
    """A loss with eight classes, by its temperature and the number of graphs."""

    def make(temperature: float, num: int) -> Loss:
        return partial(InfoNCE(temperature=temperature, **options), labels=torch.arange(num) % 8)

    return make


def with_memory(temperature: float, num: int) -> Loss:
    loss = InfoNCE(temperature=temperature, memory_size=4000, dim=DIM)
    loss.remember(torch.randn(4000, DIM))
    return loss


def unit_dot(temperature: float, num: int) -> Loss:
    loss = InfoNCE(temperature=temperature, similarity="dot")
    return lambda z1, z2: loss(F.normalize(z1), F.normalize(z2))


def plain(**options: Any) -> Callable[[float, int], Loss]:
    return lambda temperature, num: InfoNCE(temperature=temperature, **options)


def pgcl(**options: Any) -> Callable[[float, int], Loss]:
    return lambda temperature, num: PGCLLoss(DIM, temperature=temperature, **options)


# Losses by temperature and number of graphs: every form, and what changes the sum of negatives.
AT_LOW_TEMPERATURES: dict[str, Callable[[float, int], Loss]] = {
    "default options": plain(),
    'negatives="cross"': plain(negatives="cross"),
    "decoupled=True": plain(decoupled=True),
    "labels": with_labels(),
    'labels, over_positives="supcon"': with_labels(over_positives="supcon"),
    'labels, over_positives="sum"': with_labels(over_positives="sum"),
    'similarity="dot"': unit_dot,
    "hardness=1.0": plain(hardness=1.0),
    "debias=0.1": plain(debias=0.1),
    "memory of 4,000": with_memory,
    "PGCLLoss": pgcl(),
    'PGCLLoss, weighting="sample"': pgcl(weighting="sample"),
}


def temperatures(args: Namespace) -> Iterator[list[Row]]:
    """Views are aligned, as after training: at 0.01 most losses and derivatives are near 0."""
    for num, (name, make) in itertools.product(args.cold, AT_LOW_TEMPERATURES.items()):
        first, noise = torch.randn(2, num, DIM, device=args.device)
        views = [first.requires_grad_(), (first.detach() + 0.7 * noise).requires_grad_()]
        losses = {f"temperature={tau}": make(tau, num) for tau in (0.2, 0.01)}
        steps = {tau: measure.step_of(loss, *views) for tau, loss in losses.items()}
        where = ("temperatures", f"N={num} D={DIM} threads=1", name)
        with measure.on_threads(1):
            yield measure.compare(where, steps, args, next(iter(steps)), seconds=SECONDS_PER_LOSS)


def lists(args: Namespace) -> Iterator[list[Row]]:
    """Row i of both views are positives, and each embedding has two listed negatives."""
    loss = InfoNCE(temperature=TAU)
    for num in args.listed:
        views = measure.sets_of(num, num, dim=KEY_DIM, device=args.device)
        query = torch.arange(2 * num, device=args.device).repeat(2)
        shift = torch.randint(1, 2 * num, query.shape, device=args.device)
        given = partial(loss, negative_pairs=torch.stack([query, (query + shift) % (2 * num)]))
        where = ("lists", f"{2 * num:,} embeddings D={KEY_DIM} threads=1", "two listed negatives")
        with measure.on_threads(1):
            steps = {OURS: measure.step_of(given, *views)}
            yield measure.compare(where, steps, args, with_peak=steps, seconds=SECONDS_PER_LOSS)


def of_the_same_group(scores: Tensor, pair: Any) -> Tensor:
    return scores.masked_fill(pair.query != pair.key, -torch.inf)


def by_distance(scores: Tensor, pair: Any) -> Tensor:
    return scores + (pair.query - pair.key).abs().log1p()


def below_a_cosine(scores: Tensor, pair: Any) -> Tensor:
    return scores.masked_fill(scores * pair.temperature > 0.3, -torch.inf)


def margin(scores: Tensor, pair: Any) -> Tensor:
    return scores + 0.1 / pair.temperature


def ten_hardest(scores: Tensor, pair: Any) -> Tensor:
    negatives = scores.masked_fill(~pair.is_negative, -torch.inf)
    return scores.masked_fill(negatives < negatives.topk(10).values[:, -1:], -torch.inf)


# Functions of scores, by what they do.
SCORE_MODS = {
    "mask by metadata": of_the_same_group,
    "weight by metadata": by_distance,
    "mask by cosine": below_a_cosine,
    "margin": margin,
    "ten hardest": ten_hardest,
}


def groups(num: int, device: str) -> Tensor:
    return torch.randint(4, (num,), device=device).float()


def score_mods(args: Namespace) -> Iterator[list[Row]]:
    for num in args.modified:
        given = {"metadata": groups(num, args.device)}
        views = measure.sets_of(num, num, dim=DIM, device=args.device)
        steps = {"none": measure.step_of(InfoNCE(temperature=TAU), *views)}
        for name, function in SCORE_MODS.items():
            loss = partial(InfoNCE(temperature=TAU, score_mod=function), **given)
            steps[name] = measure.step_of(loss, *views)
        where = ("score_mods", f"N={num} D={DIM} threads=1", "default options")
        with measure.on_threads(1):
            yield measure.compare(where, steps, args, "none", seconds=SECONDS_PER_LOSS)


def masks(args: Namespace) -> Iterator[list[Row]]:
    """Negatives of the same group in the other view."""
    for num in args.masked:
        group, own = groups(num, args.device), torch.arange(num, device=args.device)
        others = (group.unsqueeze(1) != group).fill_diagonal_(False)

        def lines(z1: Tensor, z2: Tensor, others: Tensor = others, own: Tensor = own) -> Tensor:
            logits = F.normalize(z1) @ F.normalize(z2).T / TAU
            return F.cross_entropy(logits.masked_fill(others, -torch.inf), own)

        loss = partial(InfoNCE(**ONE_WAY, score_mod=of_the_same_group), metadata=group)
        views = measure.sets_of(num, num, dim=KEY_DIM, device=args.device)
        steps = {LINES: measure.step_of(lines, *views), OURS: measure.step_of(loss, *views)}
        where = ("masks", f"N={num:,} D={KEY_DIM} threads=1", "negatives of the same group")
        with measure.on_threads(1):
            yield measure.compare(where, steps, args, LINES, with_peak=steps, seconds=1.0)


def looks(args: Namespace) -> Iterator[list[Row]]:
    classes = torch.randint(10, (args.looked_at,), device=args.device)
    views = measure.sets_of(*[args.looked_at] * 2, dim=DIM, device=args.device)
    for name, loss in {"InfoNCE": InfoNCE(temperature=TAU), "PGCLLoss": PGCLLoss(DIM)}.items():
        look = partial(repulsion, loss, *views, classes=classes)
        steps = {"a step": measure.step_of(loss, *views), "repulsion": look}
        where = ("looks", f"N={args.looked_at:,} D={DIM} threads=1", name)
        with measure.on_threads(1):
            yield measure.compare(where, steps, args, "a step", seconds=SECONDS_PER_LOSS)


def in_memory(name: str, num: int) -> tuple[Loss, int]:
    """A loss of N graphs, by the name of its row, and the dimension of its embeddings."""
    group, numbers = groups(num, "cpu"), torch.arange(num)
    if name in ("a mask of all pairs", "the same mask by score_mod"):

        def lines(z1: Tensor, z2: Tensor) -> Tensor:
            others = (group.unsqueeze(1) != group).fill_diagonal_(False)
            logits = F.normalize(z1) @ F.normalize(z2).T / TAU
            return F.cross_entropy(logits.masked_fill(others, -torch.inf), numbers)

        loss = InfoNCE(**ONE_WAY, score_mod=of_the_same_group)
        ours = partial(loss, metadata=group)
        return (lines if name == "a mask of all pairs" else ours), KEY_DIM
    given = {
        "NT-Xent's lines": nt_xent,
        "default options": InfoNCE(),
        'negatives="cross"': InfoNCE(negatives="cross"),
        "labels": partial(InfoNCE(), labels=numbers),
        "2 classes": partial(InfoNCE(), labels=numbers % 2),
        "hardness=1.0": InfoNCE(hardness=1.0),
        "mask by metadata": partial(InfoNCE(score_mod=of_the_same_group), metadata=group),
        "PGCLLoss": PGCLLoss(DIM),
        'PGCLLoss, weighting="sample"': PGCLLoss(DIM, weighting="sample"),
    }
    return given[name], DIM


MEMORY = {
    20_480: (
        *("default options", 'negatives="cross"', "labels", "2 classes", "hardness=1.0"),
        *("mask by metadata", "PGCLLoss", 'PGCLLoss, weighting="sample"', "repulsion"),
    ),
    20_000: ("a mask of all pairs", "the same mask by score_mod"),
    8_192: ("NT-Xent's lines", "default options"),
}


def memory_steps(name: str, num: int) -> tuple[Step, Step]:
    """A small step of a row of `MEMORY`, and the step itself, for a process of their own."""
    torch.manual_seed(0)
    steps: list[Step] = []
    for size in (64, num):
        if name == "repulsion":
            views = measure.sets_of(size, size, dim=DIM, device="cpu")
            steps.append(partial(repulsion, InfoNCE(), *views, classes=torch.arange(size) % 10))
            continue
        loss, dim = in_memory(name, size)
        steps.append(measure.step_of(loss, *measure.sets_of(size, size, dim=dim, device="cpu")))
    return steps[0], steps[1]


def memory(args: Namespace) -> Iterator[list[Row]]:
    for num, names in MEMORY.items():
        size = min(num, args.remembered)
        for name in names:
            row = partial(measure.row, "memory", name, f"N={size:,} threads=2", "a step")
            grown = fresh.grown_mib("benchmarks.scripts:memory_steps", name, size)
            yield [row("process MiB", grown)] if grown is not None else []
            yield [row("peak MiB", measure.peak_mib(memory_steps(name, size)[1], "cpu"))]


BENCHMARKS = {
    "losses": two_views,
    "retrieval": retrieval,
    "tables": tables,
    "labels": labels,
    "positives": positives,
    "temperatures": temperatures,
    "lists": lists,
    "score_mods": score_mods,
    "masks": masks,
    "looks": looks,
    "memory": memory,
}

if __name__ == "__main__":
    parser = measure.parser(__doc__, rounds=41)
    parser.add_argument("--only", choices=BENCHMARKS, help="one of them instead of all")
    sizes, compiled = [32, 128, 512, 1024, 4096], [512]
    cold = [128, 512, 1024]
    parser.add_argument("--sizes", type=count, nargs="+", default=sizes, help="N, for losses")
    parser.add_argument("--compile-at", type=count, nargs="*", default=compiled, metavar="N")
    pair = {"metavar": ("QUERIES", "KEYS"), "help": "instead of three sizes"}
    parser.add_argument("--retrieval", type=count, nargs=2, action="append", **pair)
    parser.add_argument("--cold", type=count, nargs="+", default=cold, help="N, for temperatures")
    parser.add_argument("--listed", type=count, nargs="+", default=[25000, 50000], help="N, lists")
    modified, masked = [128, 512, 2048], [20000]
    parser.add_argument("--modified", type=count, nargs="+", default=modified, help="N, score_mods")
    tables_pair = {"metavar": ("QUERIES", "KEYS"), "help": "instead of three tables"}
    parser.add_argument("--tables", type=count, nargs=2, action="append", **tables_pair)
    parser.add_argument("--labelled", type=count, nargs="+", default=[1000, 2000], help="N")
    parser.add_argument("--spread", type=count, default=1000, help="N, for positives")
    parser.add_argument("--pairs", type=count, default=100_000, help="P, for positives")
    parser.add_argument("--looked-at", type=count, default=10_000, help="N, for looks")
    parser.add_argument("--remembered", type=count, default=10**9, help="largest N, for memory")
    parser.add_argument("--masked", type=count, nargs="+", default=masked, help="N, for masks")
    args = parser.parse_args()

    torch.manual_seed(0)
    warnings.filterwarnings("ignore", "pgcl_losses: the prototypes have not moved")  # no optimizer
    chosen = [args.only] if args.only else BENCHMARKS
    tables = itertools.chain.from_iterable(BENCHMARKS[name](args) for name in chosen)
    measure.report("scripts", args, tables)
