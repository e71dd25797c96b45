"""The losses of a large batch, cut into chunks of rows, each with its gradient.

A row is one query with all its keys, and rows are independent. So the losses and the gradient of a
chunk of rows are finished before the next chunk begins. No matrix of all pairs exists, and the
backward of a mean or a sum has nothing to compute again.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.base.distributed import Span
from pgcl_losses.base.modes import can_be_read
from pgcl_losses.base.normalize import full_precision
from pgcl_losses.pairs.forms import LossesOfRows
from pgcl_losses.pairs.partners import num_listed
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows
from pgcl_losses.pairs.sums import (
    Gradient,
    Passes,
    raise_if_differentiated_twice,
    row_losses,
    sums_in_place,
)

# On a CPU a chunk should stay in the cache. On other devices it is larger, since starting the
# operations of a chunk takes a millisecond, and a GPU computes 2^24 scores in half of it.
_CHUNK_SIZES = {"cpu": 1 << 21, "other": 1 << 26}
# A form computes with several numbers for each positive, of which a chunk counts so many, so that
# they stay in the cache of a CPU: with 2 it is a tenth to a third slower. On a GPU, where Python
# cannot read how many positives there are, 2 for each pair save a sixth to a half of the time.
_NUMBERS_OF_A_POSITIVE = 4
_NUMBERS_OF_ANY_PAIR = 2


def chunk_size(device: torch.device) -> int:
    """How many numbers a matrix of the loss has at most, in all engines but dense."""
    return _CHUNK_SIZES["cpu" if device.type == "cpu" else "other"]


def num_entries(pairs: Pairs, rows: Rows, z: Tensor) -> int:
    """Return how many numbers the rows take: of the matrix ``[I, K]`` and of positives."""
    num_rows, num_keys = rows.shape()
    if pairs.are_views():
        return num_rows * num_keys
    if not can_be_read(z):
        return num_rows * num_keys * (1 + _NUMBERS_OF_ANY_PAIR)
    most = num_rows * num_keys * (1 + _NUMBERS_OF_A_POSITIVE)  # each key may be a positive
    if most <= chunk_size(z.device):
        return most
    own = num_rows * num_keys if pairs.negative_pairs is None else num_rows
    return own + _NUMBERS_OF_A_POSITIVE * num_listed(pairs, rows)


def is_one_chunk(pairs: Pairs, rows: Iterable[Rows], z: Tensor) -> bool:
    """Whether all rows together take no more numbers than a chunk should."""
    return sum([num_entries(pairs, some, z) for some in rows]) <= chunk_size(z.device)


def cut(pairs: Pairs, rows: Iterable[Rows], z: Tensor) -> list[Rows]:
    """Cut rows into chunks that take about as many numbers as a chunk should."""
    chunks = []
    for some in rows:
        start, stop = some.queries
        number = -(-num_entries(pairs, some, z) // chunk_size(z.device))
        number = max(1, min(number, stop - start))
        edges = [start + (stop - start) * n // number for n in range(number + 1)]
        chunks += [some._replace(queries=Span(*edge)) for edge in itertools.pairwise(edges)]
    return chunks


def losses_by_chunks(
    pairs: Pairs, inputs: Inputs, rows: Sequence[Rows], passes: Passes, *, is_sum: bool
) -> tuple[Tensor, Tensor]:
    """Compute the losses ``[Q]`` of rows, or their sum, and how many queries have positives."""
    if not is_sum and pairs.memory is not None:  # the backward reads it again
        pairs = pairs._replace(memory=pairs.memory.clone())
    compute = partial(losses_of_chunks, pairs, rows, passes)
    return with_gradient(compute, inputs.as_tensors(), is_sum)


Tensors = Sequence[Tensor | None]  # the inputs, or the gradient by each of them
# The losses [Q], how many queries have positives, and the gradient of sum(d_losses * losses), which
# is None if no input learns.
LossesWithGradient = tuple[Tensor, Tensor, Tensors | None]
# Computes them from the inputs, from d_losses, a scalar or [Q], and from which inputs learn.
Compute = Callable[[Tensors, Tensor, Sequence[bool]], LossesWithGradient]


def with_gradient(compute: Compute, inputs: Tensors, is_sum: bool) -> tuple[Tensor, Tensor]:
    """Make what computes losses with their gradient one operation for autograd.

    Return the losses ``[Q]`` or their sum, and how many queries have positives.
    """
    if not torch.is_grad_enabled():  # which an operation does not know
        inputs = leaves_of(inputs, [False] * len(inputs))
    losses: tuple[Tensor, Tensor] = _WithGradient.apply(compute, is_sum, *inputs)  # type: ignore[no-untyped-call]  # torch has no type there
    return losses


class _WithGradient(torch.autograd.Function):
    """The gradient of a sum is computed with the sum, in the forward.

    The backward multiplies it by a number. For losses ``[Q]`` the backward computes again.
    """

    @staticmethod
    def forward(ctx: Any, compute: Compute, is_sum: bool, *inputs: Any) -> tuple[Tensor, Tensor]:
        inputs = tuple(None if x is None else x.detach() for x in inputs)
        ctx.learns, ctx.compute = ctx.needs_input_grad[2:], None if is_sum else compute
        learns = ctx.learns if is_sum else [False] * len(inputs)
        losses, count, gradient = compute(inputs, inputs[0].new_ones(()), learns)
        ctx.save_for_backward(*(gradient or inputs))
        ctx.mark_non_differentiable(count)
        return losses.sum() if is_sum else losses, count

    @staticmethod
    def backward(ctx: Any, d: Tensor, _: Any) -> tuple[Any, ...]:
        raise_if_differentiated_twice()
        if ctx.compute is None:
            return None, None, *[None if x is None else x * d for x in ctx.saved_tensors]
        with full_precision(d.device):
            return None, None, *ctx.compute(ctx.saved_tensors, d, ctx.learns)[2]


def leaves_of(inputs: Tensors, learns: Sequence[bool]) -> list[Any]:
    """Detach inputs, and let those that learn require grad."""
    each = zip(inputs, learns, strict=True)
    return [None if x is None else x.detach().requires_grad_(learns_x) for x, learns_x in each]


def for_each_chunk(
    chunks: Sequence[Rows],
    leaves: Tensors,
    d_losses: Tensor,
    losses_of: Callable[[Rows], LossesOfRows],
) -> LossesWithGradient:
    """Compute the losses ``[Q]`` and their gradient chunk by chunk.

    ``losses_of``: computes the losses of a chunk, which autograd differentiates by the ``leaves``
    that require grad. The gradient by a leaf is None if autograd finds none.
    """
    num_rows = [chunk.shape()[0] for chunk in chunks]
    # One tensor has the losses of all chunks. If each chunk left a tensor of its own behind, the
    # matrices that it frees could not be joined, and the memory of the process would grow.
    losses = d_losses.new_empty(sum(num_rows))
    count = torch.zeros((), dtype=torch.long, device=losses.device)
    d_of_chunks = d_losses.expand(len(losses)).split_with_sizes(num_rows)
    each = zip(chunks, losses.split_with_sizes(num_rows), d_of_chunks, strict=True)
    wanted = {n: x for n, x in enumerate(leaves) if x is not None and x.requires_grad}
    gradient: list[Tensor | None] = [None] * len(leaves)
    # On a GPU, backward has a thread of its own, and each chunk would wait for it.
    with torch.autograd.set_multithreading_enabled(False):
        for chunk, out, d in each:
            with torch.set_grad_enabled(len(wanted) > 0):
                values, exist = losses_of(chunk)
            out.copy_(values.detach())
            count += len(out) if exist is None else exist.sum()
            if not wanted:
                continue
            parts = torch.autograd.grad(values, [*wanted.values()], d, allow_unused=True)
            del values  # and its graph, which holds matrices, before the next chunk begins
            for n, part in zip(wanted, parts, strict=True):
                if part is not None:
                    total = gradient[n]
                    gradient[n] = (
                        part.clone(memory_format=torch.contiguous_format)
                        if total is None
                        else total.add_(part)
                    )
    return losses, count, gradient if wanted else None


def losses_of_chunks(
    pairs: Pairs,
    rows: Sequence[Rows],
    passes: Passes,
    inputs: Tensors,
    d_losses: Tensor,
    learns: Sequence[bool],
) -> LossesWithGradient:
    """Compute the losses of rows from matrices, a chunk at a time, with their gradient."""
    leaves: Any = Inputs(*leaves_of(inputs, learns))
    chunks = cut(pairs, rows, leaves.z)
    # All chunks share a matrix: new memory pages for each would take a tenth of the time.
    matrix = leaves.z.new_empty(max([math.prod(chunk.shape()) for chunk in chunks], default=0))
    # And they share the gradient by the embeddings, to which each adds its part.
    gradient = Gradient(pairs, leaves, learns, d_losses) if any(learns) else None
    sums = partial(sums_in_place, passes=passes, matrix=matrix, gradient=gradient)
    losses, count, others = for_each_chunk(
        chunks, leaves, d_losses, lambda chunk: row_losses(pairs, chunk, leaves, sums)
    )
    if gradient is None or others is None:
        return losses, count, None
    return losses, count, gradient.by_inputs(others[1:])
