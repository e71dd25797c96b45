"""One batch made of the batches of many processes, with gradient to every rank's rows.

Each rank holds its own queries against the rows of all ranks, and takes of the loss

    num_ranks * (sum over its own queries) / (number of all queries),

so that the mean over ranks, which is what DistributedDataParallel takes of gradients, is the loss
of the whole batch. The gradient of a row comes from the queries of all ranks: they are summed on
the rank that the row came from.
"""

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from pgcl_losses.reduction import reduce


class Ranks(NamedTuple):
    """The processes that share a batch, or the only one."""

    counts: Sequence[int]  # how many graphs each rank holds
    rank: int = 0
    group: ProcessGroup | None = None

    def starts(self) -> list[int]:
        """Where each rank's graphs begin among those of all."""
        return [0, *itertools.accumulate(self.counts[:-1])]

    def mine(self) -> slice:
        """This rank's graphs among those of all."""
        start = self.starts()[self.rank]
        return slice(start, start + self.counts[self.rank])

    def own(self, of_all: Tensor) -> Tensor:
        """This rank's part of what there is for all, ``[V, N, ...] -> [V, n, ...]``."""
        return of_all if len(self.counts) == 1 else of_all[:, self.mine()]

    def gather(self, views: Tensor) -> Tensor:
        """The rows of all ranks, in the order of ranks: ``[V, n, D] -> [V, N, D]``."""
        if len(self.counts) == 1:
            return views
        gathered: Tensor = _Gather.apply(views, self)  # type: ignore[no-untyped-call]  # torch's gap
        return gathered

    def average_gradient(self, shared: Tensor) -> Tensor:
        """The same tensor; what is the same on all ranks gets the mean of their gradients."""
        if len(self.counts) > 1 and shared.requires_grad:
            shared.register_hook(self._average)  # type: ignore[no-untyped-call]  # as above
        return shared

    def _average(self, d_shared: Tensor) -> Tensor:
        total = d_shared.clone(memory_format=torch.contiguous_format)
        with _named("all-reduce of the prototypes' gradient", self.group):
            distributed.all_reduce(total, group=self.group)
        return total.div_(len(self.counts))

    def reduce(self, losses: Tensor, reduction: str) -> Tensor:
        """This rank's share of the loss of both views of all ranks, from its own rows' losses."""
        if len(self.counts) == 1 or reduction == "none":
            return reduce(losses, reduction)
        scale = len(self.counts) / (2 * sum(self.counts) if reduction == "mean" else 1)
        return losses.sum() * scale


def count_ranks(process_group: ProcessGroup | None) -> int:
    """How many processes there are; 1 where torch.distributed is not in use."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    num_ranks: int = distributed.get_world_size(process_group)
    if num_ranks < 1:
        raise ValueError("process_group does not contain this process: no loss to take part in")
    return num_ranks


def agree(
    num_rows: int,
    facts: Mapping[str, str],
    problem: Exception | None,
    state: Sequence[Tensor],
    device: torch.device,
    group: ProcessGroup | None,
) -> Ranks:
    """The ranks of a group, once it is sure that all of them want the same.

    Ranks that differ would wait for each other for ever, or compute something that is nobody's
    loss. So each tells what it is about to do (``facts``), what stops it (``problem``), and what
    must not have drifted apart (``state``); where they differ, all raise the same error.
    """
    told = {**facts, "problem": ""}
    if problem is not None:  # whoever has one tells no more
        told = {"problem": f"{type(problem).__name__}: {problem}"}
    promise = [num_rows, zlib.crc32(repr(told).encode())]
    mine = torch.cat([torch.tensor(promise, device=device), _fingerprint(state).to(device)])
    num_ranks, rank = distributed.get_world_size(group), distributed.get_rank(group)
    theirs = mine.new_empty(num_ranks * len(mine))
    with _named("all-gather of row counts", group):
        _all_gather(theirs, mine, group)
    counts, promises, states = theirs.view(num_ranks, -1).T.tolist()
    if len(set(promises)) > 1:
        raise ValueError(_differences(told, group)) from problem
    if problem is not None:
        raise problem
    if len(set(states)) > 1:
        raise ValueError(
            "the prototypes, or the counter or queue beside them, are not the same on all ranks: "
            "seed all ranks alike or put the loss into the module that DistributedDataParallel "
            "wraps, load one checkpoint on all ranks, and optimize the prototypes on all ranks"
        )
    if sum(counts) == 0:
        raise ValueError("z1 must not be empty on every rank")
    return Ranks(counts, rank, group)


def _all_gather(theirs: Tensor, mine: Tensor, group: ProcessGroup | None) -> None:
    # torch 2.13 gave this and its converse new names, and warns of the old ones.
    if hasattr(distributed, "all_gather_single"):
        distributed.all_gather_single(theirs, mine, group)
    else:
        distributed.all_gather_into_tensor(theirs, mine, group)


def _reduce_scatter(mine: Tensor, theirs: Tensor, group: ProcessGroup | None) -> None:
    if hasattr(distributed, "reduce_scatter_single"):
        distributed.reduce_scatter_single(mine, theirs, group=group)
    else:
        distributed.reduce_scatter_tensor(mine, theirs, group=group)


class _Gather(torch.autograd.Function):
    """All-gather, and reduce-scatter backward; ranks with fewer rows are padded for both."""

    @staticmethod
    def forward(ctx: Any, views: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        num_views, num_rows, dim = views.shape
        most = max(ranks.counts)
        mine = views.new_zeros(num_views, most, dim)
        mine[:, :num_rows] = views
        parts = views.new_empty(len(ranks.counts) * num_views, most, dim)
        with _named("all-gather of rows", ranks.group):
            _all_gather(parts, mine, ranks.group)
        by_rank = zip(parts.view(-1, *mine.shape), ranks.counts, strict=True)
        return torch.cat([part[:, :count] for part, count in by_rank], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor) -> tuple[Tensor, None]:
        ranks: Ranks = ctx.ranks
        num_views, _, dim = d_gathered.shape
        counts, most = list(ranks.counts), max(ranks.counts)
        parts = d_gathered.new_zeros(len(counts) * num_views, most, dim)
        d_mine = parts.new_empty(num_views, most, dim)
        d_rows = d_gathered.tensor_split(ranks.starts()[1:], dim=1)
        for part, d_part, count in zip(parts.view(-1, *d_mine.shape), d_rows, counts, strict=True):
            part[:, :count] = d_part
        with _named("reduce-scatter of the rows' gradient", ranks.group):
            _reduce_scatter(d_mine, parts, ranks.group)
        return d_mine[:, : counts[ranks.rank]], None


_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _fingerprint(tensors: Sequence[Tensor]) -> Tensor:
    """One number ``[1]`` that tells apart, most probably, what differs in any bit or in order."""
    sums = []
    for tensor in tensors:
        words = tensor.detach().contiguous().view(_WORDS[tensor.element_size()])
        sums.append(words.sum(-1, dtype=torch.int64).flatten())
    of_rows = torch.cat(sums)
    odd = torch.arange(1, 2 * len(of_rows), 2, device=of_rows.device)
    return (of_rows * odd).sum(0, keepdim=True)


def _differences(told: Mapping[str, str], group: ProcessGroup | None) -> str:
    """What ranks disagree on, in the same words on each of them."""
    by_rank: list[dict[str, str]] = [{} for _ in range(distributed.get_world_size(group))]
    distributed.all_gather_object(by_rank, dict(told), group)
    some_problem = any(facts["problem"] for facts in by_rank)
    keys = ["problem"] if some_problem else list(told)
    lines = ["the ranks of process_group have no loss in common, for they differ:"]
    for key in keys:
        values = [facts[key] for facts in by_rank]
        if len(set(values)) > 1:
            lines += [f"  rank {rank}: {value or 'ready'}" for rank, value in enumerate(values)]
    return "\n".join(lines)


@contextmanager
def _named(collective: str, group: ProcessGroup | None) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        rank, num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        raise RuntimeError(
            f"the {collective} failed on rank {rank} of {num_ranks}; has another rank died, or "
            f"does it not take part? ({error})"
        ) from error
