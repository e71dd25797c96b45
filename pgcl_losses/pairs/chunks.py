"""The loss of a batch of any size: its rows at once, or in chunks, each with its gradient.

A row is one query with all its keys, and rows are independent. So a large batch is cut: the losses
and the gradient of a chunk of rows are finished before the next chunk begins. No matrix of all
pairs exists, and the backward of a mean or a sum has nothing to compute again. A batch that fits
into one chunk is not cut, and autograd differentiates it in the user's backward.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from pgcl_losses.base.distributed import Processes, Span
from pgcl_losses.base.modes import is_transformed
from pgcl_losses.base.normalize import full_precision
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows, all_rows, find_partners, num_entries
from pgcl_losses.pairs.sums import (
    Sums,
    Workspace,
    chunk_size,
    gradient_units,
    list_sums,
    matrix_sums,
    plain_products,
    products_in_parts,
    raise_if_differentiated_twice,
    sums_in_place,
)

Engine = Literal["auto", "dense", "chunks"]
LossesOfRows = tuple[Tensor, Tensor | None]  # [I], and which queries have positives; None: all


def row_losses(pairs: Pairs, rows: Rows, inputs: Inputs, sums: Sums) -> LossesOfRows:
    """Compute the losses ``[I]`` of some rows, and which queries have positives (None: all have).

    ``sums`` is one of the functions of `sums`, which says what can be differentiated how often.
    """
    partners = find_partners(pairs, rows, inputs.z, inputs.weights)
    x, log_s, log_count = sums(pairs, rows, inputs, partners)
    return pairs.form.losses(log_s, x, partners.weights, inputs.temperature, log_count)


def joined(results: Sequence[LossesOfRows], inputs: Inputs) -> tuple[Tensor, Tensor | int]:
    """Join rows: their losses ``[Q]``, and how many queries have positives."""
    losses = [losses for losses, _ in results]
    if len(results) != 1:
        # A process without queries takes part in the exchange of gradients, so it needs a graph.
        losses = [torch.cat([inputs.z[:0, 0] / inputs.temperature, *losses])]
    exist = [exist for _, exist in results if exist is not None]
    return losses[0], sum([x.sum() for x in exist]) if exist else len(losses[0])


def losses_of_chunks(
    pairs: Pairs, inputs: Inputs, own: list[Span] | None, d_losses: Tensor, totals: Inputs | None
) -> tuple[Tensor, Tensor | int]:
    """Compute the losses ``[Q]`` of queries chunk by chunk, and how many queries have positives.

    ``own``: the queries of this process; None: all queries. ``d_losses``: d loss / d losses, a
    scalar or ``[Q]``. ``totals``: to which the gradient of sum(d_losses * losses) is added; None:
    no gradient.
    """
    chunks = list(all_rows(pairs, chunk_size(inputs.z.device), own))
    shapes = [rows.shape() for rows in chunks]
    sizes = [num_rows for num_rows, _ in shapes]
    d_of_chunks = d_losses.expand(sum(sizes)).split_with_sizes(sizes)
    results, learns, d_z = [], totals is not None, None if totals is None else totals.z
    with torch.set_grad_enabled(learns):
        leaves = inputs.map(lambda x: x.detach().requires_grad_(learns))
        if totals is None or totals.temperature is None:  # it is a number
            leaves.temperature.requires_grad_(False)
        sums: Sums
        log_s = d_log_s = None
        if pairs.negative_pairs is not None:
            of_list = list_sums(pairs, leaves, partial(products_in_parts, d_z=d_z))
            log_s = of_list.log_s.detach().requires_grad_(learns)
            d_log_s, sums = torch.zeros_like(log_s), of_list._replace(log_s=log_s).pick
        else:
            # All chunks share a buffer: new memory pages for each would take a tenth of the time.
            buffer = inputs.z.new_empty(max(map(math.prod, shapes), default=0))
            sums = partial(sums_in_place, space=Workspace(buffer, d_z))
        for rows, d in zip(chunks, d_of_chunks, strict=True):
            losses, exist = row_losses(pairs, rows, leaves, sums)
            results.append((losses.detach(), exist))
            if totals is not None:
                add_gradients(losses, d, [*leaves, log_s], [*totals, d_log_s])
    if totals is not None and d_log_s is not None:
        add_gradients(of_list.log_s, d_log_s, leaves, totals)
    elif totals is not None:
        totals.z.div_(gradient_units(inputs.temperature)[1])
    return joined(results, inputs)


def add_gradients(losses: Tensor, d: Tensor, leaves: Sequence[Any], totals: Sequence[Any]) -> None:
    """Add the gradient of sum(d * losses) by each of ``leaves`` to the tensors in ``totals``."""
    pairs = [(x, total) for x, total in zip(leaves, totals, strict=True) if total is not None]
    gradients = torch.autograd.grad(losses, [x for x, _ in pairs], d, allow_unused=True)
    for (_, total), gradient in zip(pairs, gradients, strict=True):
        if gradient is not None:  # embeddings have none: their gradient is already in the total
            total.add_(gradient)


def zeros_for(inputs: Inputs, learns_temperature: bool) -> Inputs:
    """Zeros, to which the gradient of inputs is added; None for a temperature that is a number."""
    zeros = inputs.map(torch.zeros_like)
    return zeros if learns_temperature else zeros._replace(temperature=None)


class _Chunks(torch.autograd.Function):
    """The losses ``[Q]`` by chunks, or their sum; and how many queries have positives.

    The gradient of the sum is computed with the sum, in the forward; the backward multiplies it by
    a number. For the losses ``[Q]`` the backward computes the chunks again.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *differentiated, pairs, own, is_sum = arguments
        inputs, totals = Inputs(*differentiated).map(Tensor.detach), None
        if is_sum and any(ctx.needs_input_grad):
            totals = zeros_for(inputs, ctx.needs_input_grad[1])
        losses, count = losses_of_chunks(pairs, inputs, own, inputs.z.new_ones(()), totals)
        ctx.is_sum, ctx.rest = is_sum, (pairs, own)
        ctx.save_for_backward(*(inputs if totals is None else totals))
        count = count if isinstance(count, Tensor) else losses.new_full((), count)
        ctx.mark_non_differentiable(count)
        return losses.sum() if is_sum else losses, count

    @staticmethod
    def backward(ctx: Any, d: Tensor, _: Any) -> tuple[Any, ...]:
        raise_if_differentiated_twice()
        saved = Inputs(*ctx.saved_tensors)
        if ctx.is_sum:
            return *[None if x is None else x * d for x in saved], None, None, None
        (pairs, own), totals = ctx.rest, zeros_for(saved, ctx.needs_input_grad[1])
        with full_precision(d.device):
            losses_of_chunks(pairs, saved, own, d, totals)
        return *totals, None, None, None


def loss_of_pairs(
    pairs: Pairs, inputs: Inputs, reduction: str, engine: str, processes: Processes
) -> Tensor:
    """Compute the mean or sum of the losses of queries that have positives, or all losses ``[Q]``.

    With several processes, each computes the losses of its own queries against the keys of all
    processes. The mean or the sum is taken over the queries of all processes.
    """
    own = processes.own_spans() if processes.num_ranks() > 1 else None
    transformed = is_transformed(*inputs)
    if engine == "auto":
        by_autograd = torch.compiler.is_compiling() or transformed
        engine = "dense" if own is None and by_autograd else "chunks"
    elif engine == "chunks" and transformed:
        raise ValueError(
            "engine='chunks' is for backward alone, but torch.func or forward mode differentiates "
            "the loss: choose engine='auto' or 'dense'"
        )
    elif engine == "dense" and own is not None:
        raise ValueError(
            f"engine='dense' computes one matrix in one process, but {processes.num_ranks()} "
            "processes hold a batch together: choose engine='auto' or 'chunks', or gather=False"
        )
    rows, is_dense = list(all_rows(pairs, None, own)), engine == "dense"
    if is_dense or is_one_chunk(pairs, rows, inputs.z.device):
        sums: Sums = matrix_sums if is_dense else sums_in_place
        if pairs.negative_pairs is not None:
            products = plain_products if is_dense else products_in_parts
            sums = list_sums(pairs, inputs, products).pick
        losses, count = joined([row_losses(pairs, some, inputs, sums) for some in rows], inputs)
        if reduction == "mean" and own is None and isinstance(count, int):
            return losses.mean()
        losses = losses if reduction == "none" else losses.sum()
    else:
        if reduction == "none" and pairs.memory is not None:  # the backward reads it again
            pairs = pairs._replace(memory=pairs.memory.clone())
        if not isinstance(inputs.temperature, Tensor):
            inputs = inputs._replace(temperature=inputs.z.new_full((), inputs.temperature))
        losses, count = _Chunks.apply(*inputs, pairs, own, reduction != "none")  # type: ignore[no-untyped-call]  # torch has no type there
    if reduction == "none":
        return losses
    if own is not None:
        losses, count = processes.sum_of(losses, count)
    if reduction == "sum":
        return losses
    return losses / (count.clamp_min(1) if isinstance(count, Tensor) else count)


def is_one_chunk(pairs: Pairs, rows: Sequence[Rows], device: torch.device) -> bool:
    """Whether the rows of a batch are few enough to be computed at once, and wait for a backward.

    With a memory they do not wait, because the same step overwrites the memory.
    """
    if pairs.memory is not None:
        return False
    return sum([num_entries(pairs, some) for some in rows]) <= chunk_size(device)
