"""What processes that compute one loss exchange, once they agree on what they compute.

Every process gets the embeddings of all processes, and computes the losses of its own queries
against all of them. The sum of these losses is added up over processes, so that all of them return
the loss of the whole batch, and each calls backward on it. The gradient of an embedding is then the
sum over the losses of all processes. DistributedDataParallel takes the mean of the gradients, which
is the gradient of one loss.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

_SAMPLE = 1 << 14  # numbers of a tensor that processes compare: all but those of a large memory


class Span(NamedTuple):
    """Embeddings that follow each other. Of a slice torch.compile would make a constant."""

    start: int
    stop: int

    def slice(self) -> slice:
        return slice(self.start, self.stop)

    def length(self) -> int:
        return self.stop - self.start


class Processes(NamedTuple):
    """The processes that hold one batch, by rank, or a single process."""

    counts: Sequence[Sequence[int]]  # how many embeddings of each set each rank holds
    rank: int = 0
    group: ProcessGroup | None = None

    def num_ranks(self) -> int:
        return len(self.counts[0])

    def lengths(self) -> tuple[int, ...]:
        """How many embeddings each set has, over all processes."""
        return tuple([sum(counts) for counts in self.counts])

    def check_not_empty(self) -> "Processes":
        """Raise an error if a set has no embedding on any process."""
        for number, length in enumerate(self.lengths(), 1):
            if length == 0:
                where = " on every rank" if self.num_ranks() > 1 else ""
                raise ValueError(f"z{number} must not be empty{where}, but it has 0 embeddings")
        return self

    def with_sets(self, lengths: Sequence[int], device: torch.device) -> "Processes":
        """The same processes, for sets of which this process holds so many embeddings each."""
        if self.num_ranks() == 1:
            return Processes([(length,) for length in lengths], self.rank, self.group)
        by_rank = gathered(torch.tensor(lengths, device=device), self.group, "lengths")
        return Processes(by_rank.T.tolist(), self.rank, self.group)

    def gather(self, own: Tensor) -> Tensor:
        """Concatenated sets of this process ``[m, ...]`` -> the sets of all processes ``[M, ...]``.

        Within each set the embeddings are in the order of ranks. The gradient is summed over ranks.
        """
        if self.num_ranks() == 1:
            return own
        gathered: Tensor = _Gather.apply(own, self)  # type: ignore[no-untyped-call]  # torch has no type there
        return gathered

    def own(self, gathered: Tensor) -> Tensor:
        """The inverse of :meth:`gather`: the part of this process."""
        if self.num_ranks() == 1:
            return gathered
        return torch.cat([gathered[part.slice()] for part in self.own_spans()])

    def own_spans(self) -> list[Span]:
        """Where this process's embeddings of each set lie among the embeddings of all."""
        spans, first = [], 0
        for counts in self.counts:
            start = first + sum(counts[: self.rank])
            spans.append(Span(start, start + counts[self.rank]))
            first += sum(counts)
        return spans

    def numbers_of_own(self, device: torch.device) -> Tensor:
        """The numbers of this process's embeddings among the embeddings of all, ``[m]``."""
        return torch.cat([torch.arange(x.start, x.stop, device=device) for x in self.own_spans()])

    def add(self, values: Tensor, name: str) -> Tensor:
        """The sum over processes of a tensor that each of them has, without gradient."""
        if self.num_ranks() == 1:
            return values
        total = values.clone(memory_format=torch.contiguous_format)
        with _named(f"all-reduce of {name}", self.group):
            distributed.all_reduce(total, group=self.group)
        return total

    def sum_of(self, losses: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """The sums over processes of a sum of losses, with gradient, and of a count."""
        if self.num_ranks() == 1:
            return losses, count
        both = torch.stack([losses, count.to(losses)])
        losses, count = _Sum.apply(both, self).unbind()  # type: ignore[no-untyped-call]  # torch has no type there
        return losses, count.detach()

    def average_gradient(self, value: Tensor) -> Tensor:
        """The same tensor, whose gradient becomes the mean over ranks."""
        if self.num_ranks() > 1 and value.requires_grad:
            name, num_ranks = "the gradient of prototypes or temperature", self.num_ranks()
            value.register_hook(lambda d_value: self.add(d_value, name).div_(num_ranks))  # type: ignore[no-untyped-call]  # torch has no type there
        return value

    def temperature(self, value: float | Tensor, dtype: torch.dtype) -> float | Tensor:
        """The number, or a tensor in this dtype whose gradient becomes the mean over ranks."""
        if not isinstance(value, Tensor):
            return value
        return self.average_gradient(value.to(dtype, copy=True))


@dataclass
class Agreement:
    """A block in which a process checks its input; when it ends, all processes agree or fail.

    Processes that compute different things would wait for each other for ever. So they first
    exchange what they claim: the call, options, and whatever the block adds to ``claims``. If these
    differ, if the states differ, or if the block of any process raises an error, then all raise
    one. After the block, ``processes`` are those that hold the sets of this call.
    """

    claims: dict[str, object]
    sets: Sequence[Any]  # Tensors, once they are checked
    state: Mapping[str, Tensor]  # the parameters and buffers of the module that is called
    num_ranks: int = 1
    group: ProcessGroup | None = None
    processes: Processes = field(init=False)

    def __enter__(self) -> "Agreement":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and (self.num_ranks == 1 or not isinstance(error, Exception)):
            return  # Python raises it again
        if self.num_ranks == 1:
            self.processes = Processes([(len(part),) for part in self.sets]).check_not_empty()
            return
        if error is not None:
            claims = {"call": self.claims["call"], "problem": f"{type(error).__name__}: {error}"}
        else:
            claims = {
                **self.claims,
                **{name: described(x) for name, x in self.state.items()},
                "views": len(self.sets),
                "dimension": self.sets[0].shape[-1],
                "dtype": str(self.sets[0].dtype),
                "requires_grad": any(part.requires_grad for part in self.sets),
            }
        # NCCL needs a GPU, and a part of a wrong input may be on a CPU.
        devices = [x.device for x in [*self.state.values(), *self.sets] if isinstance(x, Tensor)]
        device = max(devices, key=lambda d: d.type != "cpu", default=torch.device("cpu"))
        # The problem of a process is an error of all anyway: its state is not compared.
        length, state = 0, list[Tensor]()
        if error is None:
            length, state = len(self.sets[0]), [*self.state.values()]
        lengths = agree(claims, state, length, device, self.group)
        if error is None:
            rank = distributed.get_rank(self.group)
            counts = [lengths] * len(self.sets)
            self.processes = Processes(counts, rank, self.group).check_not_empty()


def agree(
    claims: Mapping[str, object],
    state: Iterable[Tensor],
    length: int,
    device: torch.device,
    group: ProcessGroup | None,
) -> list[int]:
    """Raise an error on all processes if their claims or states differ; return all lengths."""
    own = [length, zlib.crc32(repr(claims).encode()), checksum(state)]
    by_rank = gathered(torch.tensor(own, device=device), group, "batch sizes")
    lengths, hashes, states = by_rank.T.tolist()
    if len(set(hashes)) > 1:
        raise ValueError(differences(claims, group))
    if len(set(states)) > 1:
        raise ValueError(
            "the prototypes, or other parameters or buffers of the loss, are not the same on "
            "all ranks: put the loss into the module that DistributedDataParallel wraps, or "
            "give all ranks one seed, one checkpoint and the same steps of an optimizer"
        )
    return list(lengths)


def described(tensor: Tensor) -> str:
    """What processes compare of a tensor besides its numbers."""
    return f"{tensor.dtype}{[*tensor.shape]}, requires_grad={tensor.requires_grad}"


def count_ranks(process_group: ProcessGroup | None) -> int:
    """How many processes there are; 1 where torch.distributed is not in use."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    num_ranks: int = distributed.get_world_size(process_group)
    return num_ranks


def checksum(tensors: Iterable[Tensor]) -> int:
    """A number that depends on all bits of a sample of each tensor, for any strides and device."""
    value = 0
    for tensor in tensors:
        flat = tensor.detach().reshape(-1)
        sample = flat[:: 1 + len(flat) // _SAMPLE].contiguous().view(torch.uint8)
        # It is copied, as FSDP cannot free a parameter whose memory numpy has held.
        value = zlib.crc32(sample.to("cpu", copy=True).numpy().tobytes(), value)
    return value


def differences(claims: Mapping[str, object], group: ProcessGroup | None) -> str:
    """A message that says what ranks disagree on, the same on every rank."""
    by_rank: list[dict[str, object]] = [{} for _ in range(distributed.get_world_size(group))]
    distributed.all_gather_object(by_rank, dict(claims), group)
    names = sorted({name for claimed in by_rank for name in claimed})
    if "problem" in names:
        names = ["problem"]
    if len({claimed["call"] for claimed in by_rank}) > 1:  # all else differs then
        names = ["call"]
    lines = ["the ranks of process_group cannot compute one loss, because they differ:"]
    for name in names:
        label, absent = ("", "ready") if name == "problem" else (f"{name}=", "absent")
        values = [claimed.get(name, absent) for claimed in by_rank]
        if any(value != values[0] for value in values):
            lines += [f"  rank {rank}: {label}{value}" for rank, value in enumerate(values)]
    return "\n".join(lines)


def gathered(own: Tensor, group: ProcessGroup | None, name: str) -> Tensor:
    """All-gather a tensor that has the same shape on each rank, ``[...] -> [ranks, ...]``."""
    num_ranks = distributed.get_world_size(group)
    by_rank = own.new_empty(num_ranks * len(own), *own.shape[1:])
    # torch 2.13 gave this and its converse new names, and warns of the old ones.
    gather = getattr(distributed, "all_gather_single", None)
    with _named(f"all-gather of {name}", group):
        (gather or distributed.all_gather_into_tensor)(by_rank, own.contiguous(), group)
    return by_rank.view(num_ranks, *own.shape)


class _Gather(torch.autograd.Function):
    """All-gather, in which ranks with fewer embeddings are padded; its gradient is summed."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        lengths_by_rank = [*zip(*processes.counts, strict=True)]  # the lengths of each rank's sets
        padded = own.new_zeros(max(map(sum, lengths_by_rank)), *own.shape[1:])
        padded[: len(own)] = own
        by_rank = gathered(padded, processes.group, "embeddings")
        parts = [
            embeddings[: sum(lengths)].split_with_sizes(lengths)
            for embeddings, lengths in zip(by_rank, lengths_by_rank, strict=True)
        ]
        return torch.cat([part for one_set in zip(*parts, strict=True) for part in one_set])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_gathered: Tensor) -> tuple[Tensor, None]:
        d_sum = ctx.processes.add(d_gathered, "the gradient of embeddings")
        return ctx.processes.own(d_sum), None


class _Sum(torch.autograd.Function):
    """All-reduce. The losses of all processes depend on each summand, so gradients are summed."""

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
    """A block whose error names the collective operation that failed."""
    try:
        yield
    except RuntimeError as error:
        rank, num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        raise RuntimeError(
            f"the {collective} failed on rank {rank} of {num_ranks}; has another rank died, or "
            f"does it not take part? ({error})"
        ) from error
