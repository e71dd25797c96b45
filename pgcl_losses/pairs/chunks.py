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
from pgcl_losses.base.modes import can_be_read, is_batched
from pgcl_losses.base.normalize import full_precision
from pgcl_losses.pairs.forms import LossesOfRows
from pgcl_losses.pairs.partners import find_partners, num_listed
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows
from pgcl_losses.pairs.sums import Gradient, Passes, raise_if_differentiated_twice

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
    return with_gradient(partial(losses_of_chunks, pairs, rows, passes), inputs, is_sum)


Tensors = Sequence[Tensor | None]  # the inputs, or the gradient by each of them
# The losses [Q], how many queries have positives, and the gradient of sum(d_losses * losses), which
# is None if no input learns.
LossesWithGradient = tuple[Tensor, Tensor, Tensors | None]
# Computes them from the inputs, from d_losses, a scalar or [Q], and from which inputs learn.
Compute = Callable[[Tensors, Tensor, Sequence[bool]], LossesWithGradient]


def with_gradient(
    compute: Compute, inputs: Sequence[Tensor | float | None], is_sum: bool
) -> tuple[Tensor, Tensor]:
    """Make what computes losses with their gradient one operation for autograd.

    Return the losses ``[Q]`` or their sum, and how many queries have positives. Numbers among the
    inputs become tensors; the first input is a tensor.
    """
    z: Any = inputs[0]
    tensors = [z.new_full((), x) if isinstance(x, (int, float)) else x for x in inputs]
    losses: tuple[Tensor, Tensor] = _WithGradient.apply(compute, is_sum, *tensors)  # type: ignore[no-untyped-call]  # torch has no type there
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
    chunks: Sequence[Rows], d_losses: Tensor, compute: Callable[[Rows, Tensor], LossesOfRows]
) -> tuple[Tensor, Tensor]:
    """Compute the losses ``[Q]`` chunk by chunk, and how many queries have positives.

    ``compute``: makes the losses of a chunk, given d loss / d losses of its rows.
    """
    num_rows = [chunk.shape()[0] for chunk in chunks]
    # One tensor has the losses of all chunks. If each chunk left a tensor of its own behind, the
    # matrices that it frees could not be joined, and the memory of the process would grow.
    losses = d_losses.new_empty(sum(num_rows))
    count = torch.zeros((), dtype=torch.long, device=losses.device)
    d_of_chunks = d_losses.expand(len(losses)).split_with_sizes(num_rows)
    each = zip(chunks, losses.split_with_sizes(num_rows), d_of_chunks, strict=True)
    # On a GPU, backward has a thread of its own, and each chunk would wait for it.
    with torch.autograd.set_multithreading_enabled(False):
        for chunk, out, d in each:
            values, exist = compute(chunk, d)
            out.copy_(values)
            count += len(out) if exist is None else exist.sum()
    return losses, count


def losses_of_chunks(
    pairs: Pairs,
    rows: Sequence[Rows],
    passes: Passes,
    inputs: Tensors,
    d_losses: Tensor,
    learns: Sequence[bool],
) -> LossesWithGradient:
    """Compute the losses of rows from matrices, a chunk at a time, with their gradient."""
    z: Any = inputs[0]
    chunks = cut(pairs, rows, z)
    # All chunks share a matrix: new memory pages for each would take a tenth of the time.
    matrix = z.new_empty(max([math.prod(chunk.shape()) for chunk in chunks], default=0))
    leaves = Inputs(z, *leaves_of(inputs[1:], learns[1:]))
    gradient = Gradient(pairs, leaves, learns, d_losses) if any(learns) else None

    def compute(chunk: Rows, d: Tensor) -> LossesOfRows:
        return losses_of_chunk(pairs, leaves, chunk, passes, matrix, d, gradient)

    losses, count = for_each_chunk(chunks, d_losses, compute)
    return losses, count, gradient.by_inputs() if gradient else None


def losses_of_chunk(
    pairs: Pairs,
    inputs: Inputs,
    rows: Rows,
    passes: Passes,
    matrix: Tensor,
    d: Tensor,
    gradient: Gradient | None,
) -> LossesOfRows:
    """Compute the losses ``[I]`` of a chunk, and add its gradient, from d loss / d losses ``[I]``.

    ``inputs``: those that learn require grad. ``matrix``: the memory for the scores.
    """
    z, tau, form = inputs.z, inputs.temperature, pairs.form
    with torch.set_grad_enabled(gradient is not None):  # weights of positives may learn
        partners = find_partners(pairs, rows, z, inputs.positive_weights)
    queries, keys = rows.embeddings(pairs, z)
    queries, sizes = queries / tau, [*map(len, keys)]
    scores = matrix[: len(queries) * sum(sizes)].view(len(queries), -1)  # [I, K]
    for some, out in zip(keys, scores.split_with_sizes(sizes, 1), strict=True):
        torch.mm(queries, some.T, out=out)
    # From here on the matrix holds powers.
    sums, powers = passes.sum_up(pairs, rows, scores, partners, tau, tau.requires_grad)
    x, log_s, log_count = sums
    if gradient is None:
        return form.losses(log_s, x, partners.positives, tau, log_count)
    leaves = [x.requires_grad_(), log_s.requires_grad_()]
    leaves += [leaf for leaf in inputs[1:] if leaf is not None and leaf.requires_grad]
    with torch.enable_grad():
        losses, exist = form.losses(log_s, x, partners.positives, tau, log_count)
        d_x, d_log_s, *d_others = torch.autograd.grad(losses, leaves, d, materialize_grads=True)
    d_scores, by_tau = passes.derivatives_by_scores(
        pairs, rows, partners, powers, d_log_s, d_x, gradient.scale, not is_batched(d)
    )
    gradient.add(rows, d_scores, by_tau)
    totals = [total for total in gradient.others if total is not None]
    for total, d_other in zip(totals, d_others, strict=True):
        total += d_other
    return losses.detach(), exist
