"""The loss of a batch of any size: its rows at once, or in chunks, each with its gradient.

A row is one query with all its keys, and rows are independent. So a large batch is cut: the losses
and the gradient of a chunk of rows are finished before the next chunk begins. No matrix of all
pairs exists, and the backward of a mean or a sum has nothing to compute again. A batch that fits
into one chunk is not cut, and its gradient is computed in the user's backward.
"""

import functools
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pgcl_losses.base.distributed import Processes, Span
from pgcl_losses.base.modes import can_be_read, is_eager, is_transformed
from pgcl_losses.base.normalize import full_precision
from pgcl_losses.base.warnings import warn
from pgcl_losses.pairs.lists import list_sums, plain_products, products_in_parts
from pgcl_losses.pairs.partners import find_partners, num_listed
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows, all_rows
from pgcl_losses.pairs.sums import (
    PLAIN,
    Passes,
    Sums,
    Total,
    Workspace,
    chunk_size,
    matrix_sums,
    raise_if_differentiated_twice,
    sums_in_place,
)
from pgcl_losses.pairs.two_views import blocks_of, losses_of_block

Engine = Literal["auto", "dense", "chunks", "fused"]
# A form computes with several numbers for each positive, of which a chunk counts so many, so that
# they stay in the cache of a CPU: with 2 it is a tenth to a third slower. On a GPU, where Python
# cannot read how many positives there are, 2 for each pair save a sixth to a half of the time.
_NUMBERS_OF_A_POSITIVE = 4
_NUMBERS_OF_ANY_PAIR = 2

LossesOfRows = tuple[Tensor, Tensor | None]  # [I], and which queries have positives; None: all


def row_losses(pairs: Pairs, rows: Rows, inputs: Inputs, sums: Sums) -> LossesOfRows:
    """Compute the losses ``[I]`` of some rows, and which queries have positives (None: all have).

    ``sums`` is one of the functions of `sums`, which says what can be differentiated how often.
    """
    partners = find_partners(pairs, rows, inputs.z, inputs.weights)
    x, log_s, log_count = sums(pairs, rows, inputs, partners)
    return pairs.form.losses(log_s, x, partners.positives, inputs.temperature, log_count)


def joined(results: Sequence[LossesOfRows], inputs: Inputs) -> tuple[Tensor, Tensor | int]:
    """Join rows: their losses ``[Q]``, and how many queries have positives."""
    losses = [losses for losses, _ in results]
    if len(results) != 1:
        # A process without queries takes part in the exchange of gradients, so it needs a graph.
        losses = [torch.cat([inputs.z[:0, 0] / inputs.temperature, *losses])]
    exist = [exist for _, exist in results if exist is not None]
    return losses[0], sum([x.sum() for x in exist]) if exist else len(losses[0])


def num_entries(pairs: Pairs, rows: Rows, z: Tensor) -> int:
    """Return how many numbers the rows take: of the matrix ``[I, K]`` and of positives."""
    num_rows, num_keys = rows.shape()
    is_matrix = pairs.negative_pairs is None
    if pairs.are_views():
        return num_rows * (num_keys if is_matrix else len(pairs.lengths))
    if not can_be_read(z):
        return num_rows * num_keys * (1 + _NUMBERS_OF_ANY_PAIR)
    most = num_rows * num_keys * (1 + _NUMBERS_OF_A_POSITIVE)  # each key may be a positive
    if is_matrix and most <= chunk_size(z.device):
        return most
    own = num_rows * num_keys if is_matrix else num_rows
    return own + _NUMBERS_OF_A_POSITIVE * num_listed(pairs, rows)


def cut(pairs: Pairs, rows: Rows, z: Tensor) -> Iterator[Rows]:
    """Cut rows into chunks that take about as many numbers as a chunk should."""
    (start, stop), number = rows.queries, -(-num_entries(pairs, rows, z) // chunk_size(z.device))
    number = max(1, min(number, stop - start))
    edges = [start + (stop - start) * n // number for n in range(number + 1)]
    for edge in itertools.pairwise(edges):
        yield rows._replace(queries=Span(*edge))


def losses_of_chunks(
    pairs: Pairs,
    inputs: Inputs,
    own: list[Span] | None,
    passes: Passes,
    d_losses: Tensor,
    learns: Sequence[bool],
) -> tuple[Tensor, Tensor | int, Inputs | None]:
    """Compute the losses ``[Q]`` of queries chunk by chunk, how many have positives, the gradient.

    ``own``: the queries of this process; None: all queries. ``d_losses``: d loss / d losses, a
    scalar or ``[Q]``. ``learns``: which of the inputs have a gradient. The gradient is that of
    sum(d_losses * losses); None if no input has one.
    """
    z = inputs.z
    chunks = [chunk for rows in all_rows(pairs, own) for chunk in cut(pairs, rows, z)]
    shapes = [rows.shape() for rows in chunks]
    num_rows = [num for num, _ in shapes]
    # One tensor has the losses of all chunks. If each chunk left a tensor of its own behind, the
    # matrices that it frees could not be joined, and the memory of the process would grow.
    losses, exist = z.new_empty(sum(num_rows)), None
    num_exist = torch.zeros((), dtype=torch.long, device=z.device)
    gradient = inputs.map(torch.zeros_like) if any(learns) else None
    total = None if gradient is None else Total(gradient.z, pairs, inputs.temperature)
    # On a GPU, backward has a thread of its own, and each chunk would wait for it.
    is_here = torch.autograd.set_multithreading_enabled(False)
    with is_here, torch.set_grad_enabled(gradient is not None):
        leaves: list[Any] = [
            None if x is None else x.detach().requires_grad_(learns_x)
            for x, learns_x in zip(inputs, learns, strict=True)
        ]
        own_inputs, totals = Inputs(*leaves), list(gradient or ())
        if pairs.negative_pairs is None:
            # All chunks share a buffer: new memory pages for each would take a tenth of the time.
            buffer = z.new_empty(max(map(math.prod, shapes), default=0))
            sums: Sums = functools.partial(sums_in_place, space=Workspace(buffer, total, passes))
        else:
            of_list = list_sums(
                pairs, own_inputs, functools.partial(products_in_parts, total=total)
            )
            leaves.append(of_list.log_s.detach().requires_grad_(gradient is not None))
            totals.append(torch.zeros_like(leaves[-1]))
            sums = of_list._replace(log_s=leaves[-1]).pick
        d_of_chunks = d_losses.expand(len(losses)).split_with_sizes(num_rows)
        of_chunks = losses.split_with_sizes(num_rows)
        for rows, out, d in zip(chunks, of_chunks, d_of_chunks, strict=True):
            some, exist = row_losses(pairs, rows, own_inputs, sums)
            out.copy_(some.detach())
            if exist is not None:
                num_exist += exist.sum()
            if gradient is not None:
                add_gradients(some, d, leaves, totals)
        if gradient is not None and pairs.negative_pairs is not None:
            add_gradients(of_list.log_s, totals[-1], leaves[:-1], totals)
    if total is not None:
        total.divide()
    return losses, len(losses) if exist is None else num_exist, gradient


def add_gradients(losses: Tensor, d: Tensor, leaves: Sequence[Any], totals: Sequence[Any]) -> None:
    """Add the gradient of sum(d * losses) by each of ``leaves`` to the tensors in ``totals``."""
    pairs = [
        (x, total)
        for x, total in zip(leaves, totals, strict=False)
        if x is not None and x.requires_grad
    ]
    gradients = torch.autograd.grad(losses, [x for x, _ in pairs], d, allow_unused=True)
    for (_, total), gradient in zip(pairs, gradients, strict=True):
        if gradient is not None:  # embeddings have none: their gradient is already in the total
            total.add_(gradient)


class _Chunks(torch.autograd.Function):
    """The losses ``[Q]`` by chunks, or their sum; and how many queries have positives.

    The gradient of the sum is computed with the sum, in the forward; the backward multiplies it by
    a number. For the losses ``[Q]`` the backward computes the chunks again.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *differentiated, pairs, own, passes, is_sum = arguments
        inputs, learns = Inputs(*differentiated).map(Tensor.detach), ctx.needs_input_grad[:3]
        ctx.learns, ctx.rest = learns, None if is_sum else (pairs, own, passes)
        one, never = inputs.z.new_ones(()), (False,) * 3
        losses, count, gradient = losses_of_chunks(
            pairs, inputs, own, passes, one, learns if is_sum else never
        )
        ctx.save_for_backward(*(gradient if is_sum and gradient else inputs))
        count = count if isinstance(count, Tensor) else losses.new_full((), count)
        ctx.mark_non_differentiable(count)
        return losses.sum() if is_sum else losses, count

    @staticmethod
    def backward(ctx: Any, d: Tensor, _: Any) -> tuple[Any, ...]:
        raise_if_differentiated_twice()
        saved = Inputs(*ctx.saved_tensors)
        if ctx.rest is None:
            return *[None if x is None else x * d for x in saved], *[None] * 4
        with full_precision(d.device):
            pairs, own, passes = ctx.rest
            _, _, gradient = losses_of_chunks(pairs, saved, own, passes, d, ctx.learns)
        return *(gradient or saved), *[None] * 4


def loss_of_pairs(
    pairs: Pairs, inputs: Inputs, reduction: str, engine: str, processes: Processes
) -> Tensor:
    """Compute the mean or sum of the losses of queries that have positives, or all losses ``[Q]``.

    With several processes, each computes the losses of its own queries against the keys of all
    processes. The mean or the sum is taken over the queries of all processes.
    """
    own = processes.own_spans() if processes.num_ranks() > 1 else None
    is_dense = chooses_dense(engine, inputs, processes.num_ranks())
    is_sum, may_fail, error = reduction != "none", pairs.score_mod is not None, None
    try:
        losses, count = own_losses(pairs, inputs, own, is_sum, "dense" if is_dense else engine)
        if reduction == "mean" and own is None and isinstance(count, int):
            return losses.mean()
        losses = losses.sum() if is_sum else losses
    except Exception as raised:
        if own is None or not may_fail:
            raise
        # The user's function failed in this process, and others wait for its losses.
        error, losses, count = raised, inputs.z.new_zeros(()), 0
    if own is not None and (is_sum or may_fail):
        total = losses if is_sum else inputs.z.new_zeros(())
        total, count, failures = processes.sum_of(total, count, error)
        if may_fail:
            processes.raise_on_all(failures, error, "score_mod")
        losses = total if is_sum else losses
    if reduction == "mean":
        return losses / (count.clamp_min(1) if isinstance(count, Tensor) else count)
    return losses


def chooses_dense(engine: str, inputs: Inputs, num_ranks: int) -> bool:
    """Whether to compute one matrix in plain torch, and not chunks."""
    transformed = is_transformed(*inputs)
    if engine in ("auto", "fused"):
        return num_ranks == 1 and (torch.compiler.is_compiling() or transformed)
    if engine == "chunks" and transformed:
        raise ValueError(
            "engine='chunks' is for backward alone, but torch.func or forward mode differentiates "
            "the loss: choose engine='auto' or 'dense'"
        )
    if engine == "dense" and num_ranks > 1:
        raise ValueError(
            f"engine='dense' computes one matrix in one process, but {num_ranks} processes hold a "
            "batch together: choose engine='auto' or 'chunks', or gather=False"
        )
    return engine == "dense"


def own_losses(
    pairs: Pairs, inputs: Inputs, own: list[Span] | None, is_sum: bool, engine: str
) -> tuple[Tensor, Tensor | int]:
    """Compute the losses ``[Q]`` of this process, or maybe their sum; how many have positives."""
    is_dense = engine == "dense"
    if own is None and engine in ("auto", "chunks") and pairs.are_two_views():
        blocks = blocks_of(pairs, inputs)
        if sum([block.num_entries for block in blocks]) <= chunk_size(inputs.z.device):
            return joined([(losses_of_block(pairs, x, inputs), None) for x in blocks], inputs)
    inputs, rows = inputs.normalized(pairs), all_rows(pairs, own)
    if is_dense or (engine != "fused" and is_one_chunk(pairs, rows, inputs.z)):
        sums: Sums = matrix_sums if is_dense else sums_in_place
        if pairs.negative_pairs is not None:
            products = plain_products if is_dense else products_in_parts
            sums = list_sums(pairs, inputs, products).pick
        return joined([row_losses(pairs, some, inputs, sums) for some in rows], inputs)
    passes = passes_of(engine, pairs, inputs.z)
    if not is_sum and pairs.memory is not None:  # the backward reads it again
        pairs = pairs._replace(memory=pairs.memory.clone())
    if not isinstance(inputs.temperature, Tensor):
        inputs = inputs._replace(temperature=inputs.z.new_full((), inputs.temperature))
    chunks: tuple[Tensor, Tensor] = _Chunks.apply(*inputs, pairs, own, passes, is_sum)  # type: ignore[no-untyped-call]  # torch has no type there
    return chunks


def is_one_chunk(pairs: Pairs, rows: Sequence[Rows], z: Tensor) -> bool:
    """Whether the rows of a batch are few enough to be computed at once, and wait for a backward.

    With a memory they do not wait, because the same step overwrites the memory.
    """
    if pairs.memory is not None:
        return False
    return sum([num_entries(pairs, some, z) for some in rows]) <= chunk_size(z.device)


def passes_of(engine: str, pairs: Pairs, z: Tensor) -> Passes:
    """Choose the kernels of `fused`, where they can compute the pairs; else plain torch."""
    can_run = z.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if engine == "fused" and not can_run:
        raise ValueError(
            f"engine='fused' is for embeddings on a GPU, but they are on {z.device.type}: choose "
            "engine='auto'"
        )
    is_wanted = engine == "fused" or (engine == "auto" and z.is_cuda)
    if not (is_wanted and is_eager(z) and pairs.can_be_fused()):
        return PLAIN
    if engine == "auto" and not kernels_run_on(z.device):
        return PLAIN
    from pgcl_losses.pairs.fused import KERNELS

    return KERNELS


@functools.cache
def kernels_run_on(device: torch.device) -> bool:
    """Whether to use kernels by default: on GPUs of the kind on which their tests have run.

    They also need Triton, and Triton a C compiler.
    """
    is_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) == (9, 0)
    if not is_hopper:
        return False
    try:
        from pgcl_losses.pairs import fused

        fused.try_on(device)
    except Exception as error:  # whatever is missing, the loss does not need kernels
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        warn(f"large batches are slower, as Triton compiles no kernels here ({reason})")
        return False
    return True
