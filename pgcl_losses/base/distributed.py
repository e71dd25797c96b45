"""What the processes that compute one loss exchange, and what they agree on before.

Each process gathers the embeddings of all processes, and computes the losses of its own queries
against all of them. An all-reduce adds up these losses, so that every process returns the loss of
the whole batch, and calls backward on it. The gradient of an embedding is then the sum over the
(equal) losses of all processes. DistributedDataParallel takes the mean of the gradients, and so
arrives at the gradient of one loss.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from pgcl_losses.base.modes import is_transformed

_MOST_SETS = 64  # of so many sets, at most, processes exchange the lengths
_SAMPLE = 1 << 14  # how many numbers of a tensor processes compare; larger tensors are sampled
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by their bytes


class Span(NamedTuple):
    """Consecutive embeddings: the positions from ``start`` to ``stop`` - 1.

    This is not a slice, because torch.compile would make the ends of a slice constants.
    """

    start: int
    stop: int


class Processes(NamedTuple):
    """The processes that hold one batch, and how many embeddings each of them has.

    It may be a single process.
    """

    counts: Sequence[Sequence[int]]  # [set][rank] how many embeddings the rank has
    rank: int = 0
    group: ProcessGroup | None = None

    def num_ranks(self) -> int:
        """How many processes hold the batch."""
        return len(self.counts[0])

    def lengths(self) -> tuple[int, ...]:
        """How many embeddings each set has, over all processes."""
        return tuple([sum(counts) for counts in self.counts])

    def check_not_empty(self, call: str = "forward") -> "Processes":
        """Raise an error if a set has no embedding on any process.

        ``call``: the method that got the sets, whose names the message shows.
        """
        for number, counts in enumerate(self.counts, 1):
            if not any(counts):
                name = f"z{number}" if call.endswith("forward") else "embeddings"
                where = " on every rank" if self.num_ranks() > 1 else ""
                raise ValueError(f"{name} must not be empty{where}, but got 0 embeddings")
        return self

    def gather(self, own: Tensor) -> Tensor:
        """Gather the concatenated sets from all processes, ``[m, ...] -> [M, ...]``.

        Within each set the embeddings are in the order of ranks. The backward sums the gradient
        over ranks.
        """
        if self.num_ranks() == 1:
            return own
        gathered: Tensor = _Gather.apply(own, self)  # type: ignore[no-untyped-call]  # torch has no type there
        return gathered

    def own(self, gathered: Tensor) -> Tensor:
        """Pick this process's part, ``[M, ...] -> [m, ...]``: the inverse of :meth:`gather`."""
        if self.num_ranks() == 1:
            return gathered
        return torch.cat([gathered[slice(*part)] for part in self.own_spans()])

    def own_spans(self) -> list[Span]:
        """Where this process's embeddings of each set lie among the gathered embeddings."""
        spans, first = [], 0
        for counts in self.counts:
            start = first + sum(counts[: self.rank])
            spans.append(Span(start, start + counts[self.rank]))
            first += sum(counts)
        return spans

    def positions_of_own(self, device: torch.device) -> Tensor:
        """The positions ``[m]`` of this process's embeddings among the gathered embeddings."""
        return torch.cat([torch.arange(x.start, x.stop, device=device) for x in self.own_spans()])

    def add(self, values: Tensor, name: str) -> Tensor:
        """Sum a tensor over all processes, without gradient. ``name`` describes it in an error."""
        if self.num_ranks() == 1:
            return values
        total = values.clone(memory_format=torch.contiguous_format)
        with _named(f"all-reduce of {name}", self.group):
            distributed.all_reduce(total, group=self.group)
        return total

    def sum_of(
        self, losses: Tensor, count: Tensor | int, error: Exception | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum losses (with gradient), a count and how many processes have an error, at once."""
        number = count.to(losses) if isinstance(count, Tensor) else losses.new_full((), count)
        each = torch.stack([losses, number, losses.new_full((), error is not None)])
        losses, number, failures = _Sum.apply(each, self).unbind()  # type: ignore[no-untyped-call]  # torch has no type there
        return losses, number.detach(), failures.detach()

    def raise_on_all(self, failures: Tensor, error: Exception | None, call: str) -> None:
        """Raise an error on all processes if some of them have one. This reads ``failures``.

        ``error``: the error of this process. ``call``: what failed, for the message.
        """
        if not bool(failures > 0):
            return
        if error is not None and int(failures) == self.num_ranks():
            raise error
        problem = {} if error is None else {"problem": f"{type(error).__name__}: {error}"}
        raise ValueError(differences({"call": call, **problem}, self.group)) from error

    def average_gradient(self, value: Tensor) -> Tensor:
        """Return the same tensor, after a hook that averages its gradient over ranks.

        The gradient of prototypes or of a temperature is then the same on all ranks, as on one
        process that has the whole batch.
        """
        if self.num_ranks() > 1 and value.requires_grad:
            name, num_ranks = "the gradient of prototypes or temperature", self.num_ranks()
            value.register_hook(lambda d_value: self.add(d_value, name).div_(num_ranks))  # type: ignore[no-untyped-call]  # torch has no type there
        return value

    def temperature(self, value: float | Tensor, dtype: torch.dtype) -> float | Tensor:
        """Return a temperature: a number unchanged, a tensor in ``dtype``.

        The gradient of a tensor is averaged over ranks, as by :meth:`average_gradient`.
        """
        if not isinstance(value, Tensor):
            return value
        return self.average_gradient(value.to(dtype, copy=True))


def agree(
    call: str,
    sets: Sequence[Any],
    check: Callable[[], Mapping[str, object]],
    claims: Mapping[str, object],
    group: ProcessGroup | None,
) -> Processes:
    """Check the inputs of a call on all processes, and return the processes that hold its sets.

    Processes that compute different things would wait for each other for ever. So before they
    exchange embeddings, they exchange what they claim: the call, ``claims``, and what ``check``
    returns. Claims that are tensors are compared by a checksum. If the claims differ, or if
    ``check`` raises an error on one process, all processes raise an error.

    ``sets``: the arguments by position; Tensors, if ``check`` raises no error.
    """
    error, state, lengths = None, {}, []
    try:
        claims = {"call": call, **claims, **check()}
        if len(sets) > _MOST_SETS:
            raise ValueError(
                f"several processes take {_MOST_SETS} sets at most, but got {len(sets)}"
            )
        if is_transformed(*sets):
            raise ValueError(
                "torch.func and forward mode differentiate the loss of one process alone: make the "
                "loss with gather=False, or call backward"
            )
    except Exception as raised:
        # All processes raise an error anyway, so no state is compared.
        error, claims = raised, {"call": call, "problem": f"{type(raised).__name__}: {raised}"}
    else:
        lengths = [len(part) for part in sets]
        state = {name: x for name, x in claims.items() if isinstance(x, Tensor)}
        claims = {
            **{name: described(x) for name, x in claims.items()},
            "views": len(sets),
            "dimension": sets[0].shape[-1],
            "dtype": str(sets[0].dtype),
            "requires_grad": any(part.requires_grad for part in sets),
        }
    # NCCL exchanges tensors on a GPU. Some of the inputs may be on a CPU, by mistake.
    devices = [x.device for x in [*state.values(), *sets] if isinstance(x, Tensor)]
    device = max(devices, key=lambda d: d.type != "cpu", default=torch.device("cpu"))
    lengths += [0] * (_MOST_SETS - len(lengths))
    own = torch.tensor([zlib.crc32(repr(claims).encode()), *lengths], device=device)
    own = torch.cat([checksum(state.values(), device).view(1), own])
    states, hashes, *counts = gathered(own, group, "batch sizes").T.tolist()
    if len(set(hashes)) > 1:
        raise ValueError(differences(claims, group)) from error
    if error is not None:
        raise error
    if len(set(states)) > 1:
        raise ValueError(
            "the prototypes, or other parameters or buffers of the loss, are not the same on "
            "all ranks: put the loss into the module that DistributedDataParallel wraps, or "
            "give all ranks one seed, one checkpoint and the same steps of an optimizer"
        )
    rank = distributed.get_rank(group)
    return Processes(counts[: len(sets)], rank, group).check_not_empty(call)


def described(claim: object) -> object:
    """Describe what processes compare of a tensor besides its values; other claims unchanged."""
    if not isinstance(claim, Tensor):
        return claim
    return f"{claim.dtype}{[*claim.shape]}, requires_grad={claim.requires_grad}"


def count_ranks(process_group: ProcessGroup | None) -> int:
    """How many processes there are; 1 if torch.distributed is not in use."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    num_ranks: int = distributed.get_world_size(process_group)
    return num_ranks


def checksum(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Compute a checksum from all bits of a sample of each tensor, on a device, without waiting.

    The sample is every n-th value of the tensor, and all values if there are fewer than
    `_SAMPLE`. A change of any value, or an exchange of two values, changes the result.
    """
    samples = [torch.zeros(1, dtype=torch.long, device=device)]
    for tensor in tensors:
        sample = tensor.detach().reshape(-1)[:: 1 + tensor.numel() // _SAMPLE]
        samples.append(sample.view(_INTEGERS[sample.element_size()]).to(device, torch.long))
    bits = torch.cat(samples) * 0x9E3779B97F4A7C1  # an odd number mixes the bits; overflow is meant
    odd = torch.arange(1, 2 * len(bits), 2, device=device)
    return ((bits ^ (bits >> 32)) * odd).sum()


def differences(claims: Mapping[str, object], group: ProcessGroup | None) -> str:
    """Exchange all claims; return a message on how ranks differ, the same on every rank."""
    by_rank: list[dict[str, object]] = [{} for _ in range(distributed.get_world_size(group))]
    distributed.all_gather_object(by_rank, dict(claims), group)
    names = sorted({name for claimed in by_rank for name in claimed})
    if "problem" in names:
        names = ["problem"]
    if len({claimed["call"] for claimed in by_rank}) > 1:  # then everything else differs as well
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
    # torch 2.13 renamed all_gather_into_tensor, and warns about the old name.
    gather = getattr(distributed, "all_gather_single", None)
    with _named(f"all-gather of {name}", group):
        (gather or distributed.all_gather_into_tensor)(by_rank, own.contiguous(), group)
    return by_rank.view(num_ranks, *own.shape)


class _Gather(torch.autograd.Function):
    """All-gather of embeddings, whose backward sums the gradient over ranks.

    The embeddings of each rank are padded to the largest rank, since an all-gather needs equal
    shapes.
    """

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
    """All-reduce of a sum, whose backward sums the gradient over ranks.

    Every process has the total and calls backward on it, and each total depends on each summand.
    """

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
    """A block in which an error of torch names the collective operation that failed."""
    try:
        yield
    except RuntimeError as error:
        rank, num_ranks = distributed.get_rank(group), distributed.get_world_size(group)
        raise RuntimeError(
            f"the {collective} failed on rank {rank} of {num_ranks}; has another rank died, or "
            f"does it not take part? ({error})"
        ) from error
