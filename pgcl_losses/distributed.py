"""What processes that compute one loss exchange, once they agree on what they compute.

Every process gets the embeddings of all, computes its portion of the pairs, and adds its sums to
those of the others. All have the loss of the whole batch, and each calls backward on it. The
gradient of an embedding is then the sum over the losses of all processes. DistributedDataParallel
takes the mean over them, which is the gradient of one loss.
"""

import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

_SAMPLE = 1 << 20  # numbers of a tensor that are compared: all but those of a large memory


class Processes(NamedTuple):
    """The processes that hold one batch, by rank, or a single process."""

    counts: Sequence[Sequence[int]]  # of each set, how many embeddings each rank holds
    rank: int = 0
    group: ProcessGroup | None = None

    def num_ranks(self) -> int:
        return len(self.counts[0])

    def lengths(self) -> tuple[int, ...]:
        """How many embeddings each set has, of all processes."""
        return tuple([sum(of_ranks) for of_ranks in self.counts])

    def hold_views(self) -> bool:
        """Whether all sets have one length, in each process."""
        first = self.counts[0]
        return all(a == b for of_set in self.counts for a, b in zip(of_set, first, strict=True))

    def of_sets(self, lengths: Sequence[int], device: torch.device) -> "Processes":
        """The same processes, for sets of which this one holds so many embeddings."""
        if self.num_ranks() == 1:
            return self._replace(counts=[(length,) for length in lengths])
        by_rank = gathered(torch.tensor(lengths, device=device), self.group, "lengths")
        return self._replace(counts=by_rank.T.tolist())

    def gather(self, own: Tensor) -> Tensor:
        """The sets of this process, one after the other, ``[m, ...]`` -> those of all ``[M, ...]``.

        In each set the embeddings are in the order of ranks.
        """
        if self.num_ranks() == 1:
            return own
        gathered: Tensor = _Gather.apply(own, self)  # type: ignore[no-untyped-call]  # torch has no type there
        return gathered

    def own(self, of_all: Tensor) -> Tensor:
        """The inverse of :meth:`gather`."""
        if self.num_ranks() == 1:
            return of_all
        parts = of_all.split_with_sizes([n for of_ranks in self.counts for n in of_ranks])
        return torch.cat(list(parts[self.rank :: self.num_ranks()]))

    def add(self, values: Tensor, name: str) -> Tensor:
        """The sum over processes of a tensor that each of them has."""
        if self.num_ranks() == 1:
            return values
        total = values.clone(memory_format=torch.contiguous_format)
        with _named(f"all-reduce of {name}", self.group):
            distributed.all_reduce(total, group=self.group)
        return total

    def own_slices(self) -> list[slice]:
        """Where this process's embeddings of each set lie among the embeddings of all."""
        starts = [sum(counts[: self.rank]) for counts in self.counts]
        before = itertools.accumulate(self.lengths(), initial=0)
        return [
            slice(first + start, first + start + counts[self.rank])
            for first, start, counts in zip(before, starts, self.counts, strict=False)
        ]

    def numbers_of_own(self, device: torch.device) -> Tensor:
        """The numbers of this process's embeddings among the embeddings of all, ``[m]``."""
        own = [torch.arange(x.start, x.stop, device=device) for x in self.own_slices()]
        return torch.cat(own)

    def sum_of(self, losses: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over processes of a sum of losses, with gradient, and of a count."""
        if self.num_ranks() == 1:
            return losses, count
        both = torch.stack([losses, count.to(losses)])
        losses, count = _Sum.apply(both, self).unbind()  # type: ignore[no-untyped-call]  # torch has no type there
        return losses, count

    def average_gradient(self, value: Tensor) -> Tensor:
        """The same tensor, whose gradient becomes the mean over ranks."""
        if self.num_ranks() > 1 and value.requires_grad:
            name, num_ranks = "the gradient of prototypes or temperature", self.num_ranks()
            value.register_hook(lambda d_value: self.add(d_value, name).div_(num_ranks))  # type: ignore[no-untyped-call]  # torch has no type there
        return value

    def temperature(self, value: float | Tensor, dtype: torch.dtype) -> float | Tensor:
        """A number, or a tensor in that dtype whose gradient is the mean over ranks."""
        if not isinstance(value, Tensor):
            return value
        return self.average_gradient(value.to(dtype, copy=True))


def count_ranks(process_group: ProcessGroup | None) -> int:
    """How many processes there are; 1 where torch.distributed is not in use."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    num_ranks: int = distributed.get_world_size(process_group)
    return num_ranks


def checksum(tensors: Iterable[Tensor]) -> int:
    """Of all bits of a sample of each tensor, the same for any strides and on any device."""
    value = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: 1 + len(flat) // _SAMPLE].contiguous().view(torch.uint8)
        # A copy, as FSDP cannot free a parameter whose memory numpy has had.
        value = zlib.crc32(sample.to("cpu", copy=True).numpy().tobytes(), value)
    return value


def differences(claims: Mapping[str, object], group: ProcessGroup | None) -> str:
    """What ranks disagree on; every rank gets the same message."""
    by_rank: list[dict[str, object]] = [{} for _ in range(distributed.get_world_size(group))]
    distributed.all_gather_object(by_rank, dict(claims), group)
    names = sorted({name for of_rank in by_rank for name in of_rank})
    if "problem" in names:
        names = ["problem"]
    if len({of_rank["call"] for of_rank in by_rank}) > 1:  # all else differs then
        names = ["call"]
    lines = ["the ranks of process_group cannot compute one loss, because they differ:"]
    for name in names:
        label, absent = ("", "ready") if name == "problem" else (f"{name}=", "absent")
        values = [of_rank.get(name, absent) for of_rank in by_rank]
        if any(value != values[0] for value in values):
            lines += [f"  rank {rank}: {label}{value}" for rank, value in enumerate(values)]
    return "\n".join(lines)


def gathered(own: Tensor, group: ProcessGroup | None, name: str) -> Tensor:
    """A tensor of each rank, ``[...] -> [ranks, ...]``."""
    num_ranks = distributed.get_world_size(group)
    of_ranks = own.new_empty(num_ranks * len(own), *own.shape[1:])
    # torch 2.13 gave this and its converse new names, and warns of the old ones.
    gather = getattr(distributed, "all_gather_single", None)
    with _named(f"all-gather of {name}", group):
        (gather or distributed.all_gather_into_tensor)(of_ranks, own.contiguous(), group)
    return of_ranks.view(num_ranks, *own.shape)


class _Gather(torch.autograd.Function):
    """All-gather, of ranks with fewer embeddings padded; its gradient is summed over ranks."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        of_ranks = [*zip(*processes.counts, strict=True)]  # of each rank, its sets' lengths
        padded = own.new_zeros(max(map(sum, of_ranks)), *own.shape[1:])
        padded[: len(own)] = own
        by_rank = zip(gathered(padded, processes.group, "embeddings"), of_ranks, strict=True)
        parts = [rows[: sum(lengths)].split_with_sizes(lengths) for rows, lengths in by_rank]
        return torch.cat([part for of_set in zip(*parts, strict=True) for part in of_set])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor) -> tuple[Tensor, None]:
        d_of_all = ctx.processes.add(d_gathered, "the gradient of embeddings")
        return ctx.processes.own(d_of_all), None


class _Sum(torch.autograd.Function):
    """All-reduce. The loss of each process depends on the numbers of all: so does the gradient."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        return processes.add(own, "losses")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_sum: Tensor) -> tuple[Tensor, None]:
        return ctx.processes.add(d_sum, "the gradient of the loss"), None


@contextmanager
def _named(collective: str, group: ProcessGroup | None) -> Iterator[None]:
    """A block whose error names the collective that failed."""
    try:
        yield
    except RuntimeError as error:
        rank, num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        raise RuntimeError(
            f"the {collective} failed on rank {rank} of {num_ranks}; has another rank died, or "
            f"does it not take part? ({error})"
        ) from error
