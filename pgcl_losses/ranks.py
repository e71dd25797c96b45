"""The processes that hold a batch together, by their rank, and what they exchange.

Every process gets the embeddings of all, computes its portion of the pairs, and adds its sums to
those of the others. So all have the loss of the whole batch, and each calls backward on it. The
gradient of an embedding is then the sum over the losses of all processes. DistributedDataParallel
takes the mean over them, which is the gradient of one loss.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


class Ranks(NamedTuple):
    """The processes that hold a batch together, or the only one."""

    counts: Sequence[int]  # how many graphs each rank holds
    rank: int = 0
    group: ProcessGroup | None = None

    def starts(self) -> list[int]:
        """Where each rank's graphs begin among those of all."""
        return [0, *itertools.accumulate(self.counts[:-1])]

    def own(self, of_all: Tensor) -> Tensor:
        """This rank's portion of a tensor of all ranks, ``[V, N, ...] -> [V, n, ...]``."""
        if len(self.counts) == 1:
            return of_all
        start = self.starts()[self.rank]
        return of_all[:, start : start + self.counts[self.rank]]

    def of_sets(self, lengths: Sequence[int], device: torch.device) -> "tuple[Ranks, ...]":
        """The same processes, for sets of which this one holds so many embeddings."""
        if len(self.counts) == 1:
            return tuple([self._replace(counts=(length,)) for length in lengths])
        mine = torch.tensor(lengths, device=device)
        of_ranks = mine.new_empty(len(self.counts) * len(lengths))
        with named("all-gather of lengths", self.group):
            all_gather(of_ranks, mine, self.group)
        by_set = of_ranks.view(len(self.counts), -1).T.tolist()
        for a, counts in enumerate(by_set, 1):
            if sum(counts) == 0:
                raise ValueError(f"z{a} must not be empty on every rank")
        return tuple([self._replace(counts=counts) for counts in by_set])

    def gather(self, views: Tensor) -> Tensor:
        """The views of all ranks, in the order of ranks: ``[V, n, D] -> [V, N, D]``."""
        if len(self.counts) == 1:
            return views
        gathered: Tensor = _Gather.apply(views, self)  # type: ignore[no-untyped-call]  # torch has no type there
        return gathered

    def add(self, values: Tensor, name: str) -> Tensor:
        """The sum over ranks of a tensor that each of them has."""
        if len(self.counts) == 1:
            return values
        total = values.clone(memory_format=torch.contiguous_format)
        with named(f"all-reduce of {name}", self.group):
            distributed.all_reduce(total, group=self.group)
        return total

    def add_logs(self, logs: Tensor) -> Tensor:
        """Logs ``[M]`` of each rank's sums -> of their total, the same bits on all ranks."""
        if len(self.counts) == 1:
            return logs
        of_ranks = logs.new_empty(len(self.counts) * len(logs))
        with named("all-gather of sums over pairs", self.group):
            all_gather(of_ranks, logs.contiguous(), self.group)
        return of_ranks.view(len(self.counts), -1).logsumexp(0)

    def average_gradient(self, value: Tensor) -> Tensor:
        """The same tensor, equal on all ranks: its gradient is the mean over ranks."""
        if len(self.counts) > 1 and value.requires_grad:
            value.register_hook(self._average)  # type: ignore[no-untyped-call]  # torch has no type there
        return value

    def temperature(self, value: float | Tensor, dtype: torch.dtype) -> float | Tensor:
        """A number, or a tensor in that dtype whose gradient is the mean over ranks."""
        if not isinstance(value, Tensor):
            return value
        return self.average_gradient(value.to(dtype, copy=True))

    def _average(self, d_value: Tensor) -> Tensor:
        return self.add(d_value, "the gradient of prototypes or temperature").div_(len(self.counts))


def count_ranks(process_group: ProcessGroup | None) -> int:
    """How many processes there are; 1 where torch.distributed is not in use."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    num_ranks: int = distributed.get_world_size(process_group)
    if num_ranks < 1:
        raise ValueError("process_group does not contain this process: it has no loss to compute")
    return num_ranks


def all_gather(of_ranks: Tensor, mine: Tensor, group: ProcessGroup | None) -> None:
    # torch 2.13 gave this and its converse new names, and warns of the old ones.
    if hasattr(distributed, "all_gather_single"):
        distributed.all_gather_single(of_ranks, mine, group)
    else:
        distributed.all_gather_into_tensor(of_ranks, mine, group)


def _reduce_scatter(mine: Tensor, of_ranks: Tensor, group: ProcessGroup | None) -> None:
    if hasattr(distributed, "reduce_scatter_single"):
        distributed.reduce_scatter_single(mine, of_ranks, group=group)
    else:
        distributed.reduce_scatter_tensor(mine, of_ranks, group=group)


class _Gather(torch.autograd.Function):
    """All-gather, and reduce-scatter backward; ranks with fewer graphs are padded for both."""

    @staticmethod
    def forward(ctx: Any, views: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        num_views, num_graphs, dim = views.shape
        most = max(ranks.counts)
        mine = views.new_zeros(num_views, most, dim)
        mine[:, :num_graphs] = views
        of_ranks = views.new_empty(len(ranks.counts) * num_views, most, dim)
        with named("all-gather of embeddings", ranks.group):
            all_gather(of_ranks, mine, ranks.group)
        by_rank = zip(of_ranks.view(-1, *mine.shape), ranks.counts, strict=True)
        return torch.cat([own[:, :count] for own, count in by_rank], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor) -> tuple[Tensor, None]:
        ranks: Ranks = ctx.ranks
        num_views, _, dim = d_gathered.shape
        counts, most = list(ranks.counts), max(ranks.counts)
        d_ranks = d_gathered.new_zeros(len(counts) * num_views, most, dim)
        d_mine = d_ranks.new_empty(num_views, most, dim)
        by_rank = d_gathered.tensor_split(ranks.starts()[1:], dim=1)
        padded = d_ranks.view(-1, *d_mine.shape)
        for d_padded, d_own, count in zip(padded, by_rank, counts, strict=True):
            d_padded[:, :count] = d_own
        with named("reduce-scatter of the embeddings' gradient", ranks.group):
            _reduce_scatter(d_mine, d_ranks, ranks.group)
        return d_mine[:, : counts[ranks.rank]], None


@contextmanager
def named(collective: str, group: ProcessGroup | None) -> Iterator[None]:
    """A block whose error names the collective that failed."""
    try:
        yield
    except RuntimeError as error:
        rank, num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        raise RuntimeError(
            f"the {collective} failed on rank {rank} of {num_ranks}; has another rank died, or "
            f"does it not take part? ({error})"
        ) from error
