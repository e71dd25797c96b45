"""What the processes that hold a batch together exchange, and what they must agree on before.

Every process gets the embeddings of all, computes its portion of the pairs, and adds its sums to
those of the others. So all have the loss of the whole batch, and each calls backward on it. The
gradient of an embedding is then the sum over the losses of all processes. DistributedDataParallel
takes the mean over them, which is the gradient of one loss.

Processes that differ would wait for each other for ever, or compute a wrong loss. So each compares
what it is about to do with the others, and if they differ, all raise the same error.
"""

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup


class Processes(NamedTuple):
    """The processes that hold a batch together, by their rank, or the only one."""

    counts: Sequence[Sequence[int]]  # of each set, how many embeddings each rank holds
    rank: int = 0
    group: ProcessGroup | None = None

    def num_ranks(self) -> int:
        return len(self.counts[0])

    def lengths(self) -> tuple[int, ...]:
        """How many embeddings each set has, of all processes."""
        return tuple([sum(of_ranks) for of_ranks in self.counts])

    def of_sets(self, lengths: Sequence[int], device: torch.device) -> "Processes":
        """The same processes, for sets of which this one holds so many embeddings."""
        if self.num_ranks() == 1:
            return self._replace(counts=[(length,) for length in lengths])
        by_rank = _gathered(torch.tensor(lengths, device=device), self.group, "lengths")
        counts = by_rank.T.tolist()
        for a, of_ranks in enumerate(counts, 1):
            if sum(of_ranks) == 0:
                raise ValueError(f"z{a} must not be empty on every rank")
        return self._replace(counts=counts)

    def gather(self, own: Tensor) -> Tensor:
        """The sets of this process, one after the other, ``[m, ...]`` -> those of all ``[M, ...]``.

        In each set the embeddings are in the order of ranks.
        """
        if self.num_ranks() == 1:
            return own
        gathered: Tensor = _Gather.apply(own, self)  # type: ignore[no-untyped-call]  # torch has no type there
        return gathered

    def own(self, of_all: Tensor) -> Tensor:
        """What :meth:`gather` made ``of_all`` of."""
        if self.num_ranks() == 1:
            return of_all
        return torch.cat(self.by_rank(of_all)[self.rank])

    def by_rank(self, of_all: Tensor) -> list[list[Tensor]]:
        """The sets of each rank."""
        lengths = [count for of_ranks in self.counts for count in of_ranks]
        parts = of_all.split_with_sizes(lengths)
        return [list(parts[rank :: self.num_ranks()]) for rank in range(self.num_ranks())]

    def add(self, values: Tensor, name: str) -> Tensor:
        """The sum over processes of a tensor that each of them has."""
        if self.num_ranks() == 1:
            return values
        total = values.clone(memory_format=torch.contiguous_format)
        with named(f"all-reduce of {name}", self.group):
            distributed.all_reduce(total, group=self.group)
        return total

    def largest(self, values: Tensor, name: str) -> Tensor:
        """The largest over processes of each number of a tensor that all of them have."""
        if self.num_ranks() > 1:
            with named(f"all-reduce of {name}", self.group):
                distributed.all_reduce(values, distributed.ReduceOp.MAX, group=self.group)
        return values

    def add_logs(self, logs: Tensor) -> Tensor:
        """Logs ``[M]`` of each process's sums -> of their total, the same bits on all ranks."""
        if self.num_ranks() == 1:
            return logs
        return _gathered(logs, self.group, "sums over pairs").logsumexp(0)

    def average_gradient(self, value: Tensor) -> Tensor:
        """The same tensor, equal on all ranks: its gradient is the mean over ranks."""
        if self.num_ranks() > 1 and value.requires_grad:
            value.register_hook(self._average)  # type: ignore[no-untyped-call]  # torch has no type there
        return value

    def temperature(self, value: float | Tensor, dtype: torch.dtype) -> float | Tensor:
        """A number, or a tensor in that dtype whose gradient is the mean over ranks."""
        if not isinstance(value, Tensor):
            return value
        return self.average_gradient(value.to(dtype, copy=True))

    def _average(self, d_value: Tensor) -> Tensor:
        name = "the gradient of prototypes or temperature"
        return self.add(d_value, name).div_(self.num_ranks())


def count_ranks(process_group: ProcessGroup | None) -> int:
    """How many processes there are; 1 where torch.distributed is not in use."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    num_ranks: int = distributed.get_world_size(process_group)
    if num_ranks < 1:
        raise ValueError("process_group does not contain this process: it has no loss to compute")
    return num_ranks


def agreed_processes(
    num_sets: int,
    length: int,
    facts: Mapping[str, object],
    problem: Exception | None,
    state: Sequence[Tensor] | None,
    device: torch.device,
    group: ProcessGroup | None,
) -> Processes:
    """The processes of a group, with sets of one length each, if all of them want the same.

    ``facts``: what this rank is about to do, its call, options and properties of its input.
    ``problem``: an error that stops it. ``state``: tensors that must be the same on all ranks, or
    None if they are not compared this time.
    """
    claims = dict(facts) if problem is None else {"call": facts["call"]}
    claims["problem"] = "" if problem is None else f"{type(problem).__name__}: {problem}"
    summary = [length, zlib.crc32(repr(claims).encode()), int(state is not None)]
    header = torch.tensor(summary, device=device)
    counts, summaries, compares = _gathered(header, group, "batch sizes").T.tolist()
    if len(set(summaries)) > 1:
        raise ValueError(_differences(claims, group)) from problem
    if problem is not None:
        raise problem
    if state is not None and all(compares) and _differs(state, device, group):
        raise ValueError(
            "the prototypes, their step counter or queue, the memory or the temperature are not "
            "the same on all ranks: give all ranks one seed or put the loss into the module that "
            "DistributedDataParallel wraps, load one checkpoint on all ranks, and optimize the "
            "prototypes on all ranks"
        )
    if sum(counts) == 0:
        raise ValueError("the batch must not be empty on every rank")
    return Processes([counts] * num_sets, distributed.get_rank(group), group)


def _differs(tensors: Sequence[Tensor], device: torch.device, group: ProcessGroup | None) -> bool:
    """Whether any bit of tensors, whose shapes are the same, differs between ranks."""
    words = [tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in tensors]
    own = torch.cat([of_tensor.to(device) for of_tensor in words])
    largest = torch.stack([own, 255 - own])
    with named("all-reduce of the state", group):
        distributed.all_reduce(largest, distributed.ReduceOp.MAX, group=group)
    return not torch.equal(largest[0], 255 - largest[1])  # the largest and the smallest


def _differences(claims: Mapping[str, object], group: ProcessGroup | None) -> str:
    """What ranks disagree on; every rank gets the same message."""
    by_rank: list[dict[str, object]] = [{} for _ in range(distributed.get_world_size(group))]
    distributed.all_gather_object(by_rank, dict(claims), group)
    first_by_call = {of_rank["call"]: rank for rank, of_rank in reversed([*enumerate(by_rank)])}
    if len(first_by_call) > 1:
        in_order = sorted(first_by_call.items(), key=lambda pair: pair[1])
        calls = ", ".join(f"rank {rank} calls {call}" for call, rank in in_order)
        return f"{calls}: all ranks must make the same calls"
    names = sorted({name for of_rank in by_rank for name in of_rank})
    if any(of_rank["problem"] for of_rank in by_rank):
        names = ["problem"]
    lines = ["the ranks of process_group cannot compute one loss, because they differ:"]
    for name in names:
        values = [of_rank.get(name, "absent") for of_rank in by_rank]
        if any(value != values[0] for value in values):
            label = "" if name == "problem" else f"{name}="
            shown = [value if value != "" else "ready" for value in values]
            lines += [f"  rank {rank}: {label}{value}" for rank, value in enumerate(shown)]
    return "\n".join(lines)


def _gathered(own: Tensor, group: ProcessGroup | None, name: str) -> Tensor:
    """A tensor of each rank, ``[...] -> [ranks, ...]``."""
    num_ranks = distributed.get_world_size(group)
    of_ranks = own.new_empty(num_ranks * len(own), *own.shape[1:])
    # torch 2.13 gave this and its converse new names, and warns of the old ones.
    gather = getattr(distributed, "all_gather_single", None)
    with named(f"all-gather of {name}", group):
        (gather or distributed.all_gather_into_tensor)(of_ranks, own.contiguous(), group)
    return of_ranks.view(num_ranks, *own.shape)


class _Gather(torch.autograd.Function):
    """All-gather, and reduce-scatter backward; ranks with fewer embeddings are padded for both."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        padded = own.new_zeros(_longest(processes), *own.shape[1:])
        padded[: len(own)] = own
        by_rank = _gathered(padded, processes.group, "embeddings")
        starts = [0] * processes.num_ranks()
        parts = []
        for of_ranks in processes.counts:
            for rank, count in enumerate(of_ranks):
                parts.append(by_rank[rank, starts[rank] : starts[rank] + count])
                starts[rank] += count
        return torch.cat(parts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor) -> tuple[Tensor, None]:
        processes: Processes = ctx.processes
        d_by_rank = [torch.cat(sets) for sets in processes.by_rank(d_gathered)]
        longest, num_ranks = _longest(processes), processes.num_ranks()
        d_padded = d_gathered.new_zeros(num_ranks, longest, *d_gathered.shape[1:])
        for padded, d_own in zip(d_padded, d_by_rank, strict=True):
            padded[: len(d_own)] = d_own
        d_own = torch.empty_like(d_padded[0])
        scatter = getattr(distributed, "reduce_scatter_single", None)
        with named("reduce-scatter of the embeddings' gradient", processes.group):
            (scatter or distributed.reduce_scatter_tensor)(
                d_own, d_padded.flatten(0, 1), group=processes.group
            )
        return d_own[: len(d_by_rank[processes.rank])], None


def _longest(processes: Processes) -> int:
    """How many embeddings the rank with most of them holds, of all sets together."""
    longest: int = max([sum(of_rank) for of_rank in zip(*processes.counts, strict=True)])
    return longest


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
