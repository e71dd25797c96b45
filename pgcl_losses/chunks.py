"""The contrast of a batch of any size: chunks of rows, one after the other, each with its gradient.

A row is one query with all its keys, and rows are independent. So the scores, softmax, losses and
gradient of a chunk of rows are finished before the next chunk begins: no matrix of all pairs
exists, and the backward of a mean or a sum has nothing to compute again. `rows` decides which keys
of a row are negatives and positives. Here the matrix ``[I, K]`` of a chunk is computed once and in
place. The gradient of its log-sum-exp is a softmax, which is written by hand; autograd
differentiates the form, a function of ``[I]`` and ``[I, P]``.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from pgcl_losses._modes import is_transformed
from pgcl_losses._normalize import full_precision
from pgcl_losses.distributed import Processes, Span
from pgcl_losses.rows import (
    Inputs,
    Pairs,
    Rows,
    add_log_weights,
    all_rows,
    find_partners,
    log_count_of,
    log_sums_of_list,
    row_losses,
)

Engine = Literal["auto", "dense", "chunks"]

# How many pairs a chunk has. On a CPU its matrix then stays in the cache. On other devices chunks
# are larger, since launching an operation takes longer than computing a small matrix.
_CHUNK = 1 << 21
_CHUNK_ELSEWHERE = 1 << 24
# With listed negatives, a chunk computes only the scores of positives. We expect at most one
# positive in this many keys, so a chunk may have this many times as many pairs.
_POSITIVES = 16
# The embeddings of a list of pairs are gathered in parts of this many numbers (pairs times D).
_GATHERED = 1 << 20
# For x below this, e^x counts as 0: denormal numbers, in float32 from e^-87 on, make matrix
# products slow.
_LOWEST = -80.0
# e^x is computed as 2^(x log2 e), which takes a third of the time on a CPU.
_LOG2_E = math.log2(math.e)


def matrix_chunk(
    pairs: Pairs, rows: Rows, inputs: Inputs, d_losses: Tensor, into: Inputs | None, buffer: Tensor
) -> tuple[Tensor, Tensor | None]:
    """Compute the losses of a chunk ``[I]``, and which queries have positives, as in `row_losses`.

    If ``into`` is given, add the gradient of sum(d_losses * losses) to it. ``buffer``: the memory
    for the matrix ``[I, K]``, which all chunks use in turn.
    """
    with_gradient = into is not None
    z, temperature, _ = inputs
    q = z[rows.queries.slice()] / temperature  # [I, D]
    scores = scores_of(pairs, rows, z, q, buffer)  # [I, K]
    leaves = inputs.map(lambda y: y.detach().requires_grad_(with_gradient))  # the form ignores z
    with torch.set_grad_enabled(with_gradient):
        partners = find_partners(pairs, rows, scores, leaves.weights)
    x = partners.scores(scores)  # [I, P]
    x = x.clone() if x is scores else x
    is_hard = pairs.hardness > 0
    logits = torch.zeros_like(scores) if is_hard else scores
    logits = add_log_weights(pairs, rows, logits, partners, scores, temperature)
    log_count = log_count_of(pairs, logits)
    log_s: Any = log_count if is_hard else 0.0
    softmaxes = []  # for each term of log S: e^x, and the factor that makes it a derivative
    for sign, scale in pairs.log_sum_terms():
        powers = logits.add(scores, alpha=scale) if is_hard else logits
        peaks = powers.amax(1, keepdim=True)
        peaks.clamp_min_(torch.finfo(powers.dtype).min)  # without negatives -inf - -inf is NaN
        torch.threshold_(powers.sub_(peaks), _LOWEST, -math.inf).mul_(_LOG2_E).exp2_()
        total = powers.sum(1, keepdim=True)
        log_s = log_s + sign * (total.log() + peaks).squeeze(1)
        # The largest power of a row is 1, so its total is at least 1, or 0 without negatives.
        softmaxes.append((powers, sign * scale / total.clamp_min_(1.0)))
    if is_hard and log_count is not None:
        log_s.masked_fill_(log_count == -math.inf, -math.inf)

    with torch.set_grad_enabled(with_gradient):
        log_s, x = log_s.requires_grad_(with_gradient), x.requires_grad_(with_gradient)
        losses, exist = pairs.form.losses(log_s, x, partners.weights, leaves.temperature, log_count)
    if into is not None:
        d_log_s, d_x = add_gradients(losses, [log_s, x], leaves[1:], d_losses, into[1:])
        d_scores, *more = [p.mul_(by * d_log_s.unsqueeze(1)) for p, by in softmaxes]
        for d in more:
            d_scores += d
        if partners.columns is None:
            d_scores += d_x
        else:
            d_scores.scatter_add_(1, partners.columns[:, partners.num_self :], d_x)
        add_gradient_of_scores(pairs, rows, z, q, temperature, d_scores, into)
    return losses.detach(), exist


def add_gradients(
    losses: Tensor, others: list[Tensor], leaves: Sequence[Any], d_losses: Tensor, into: Any
) -> Sequence[Tensor]:
    """Differentiate sum(d_losses * losses) by ``others`` and ``leaves``.

    Add the gradient by ``leaves`` to the tensors in ``into``, and return the gradient by
    ``others``. Leaves that are None are skipped.
    """
    leaves_and_totals = [(x, total) for x, total in zip(leaves, into, strict=True) if x is not None]
    inputs = [*others, *[x for x, _ in leaves_and_totals]]
    gradients = torch.autograd.grad(losses, inputs, d_losses, materialize_grads=True)
    for (_, total), d in zip(leaves_and_totals, gradients[len(others) :], strict=True):
        total.add_(d)
    return gradients[: len(others)]


def scores_of(pairs: Pairs, rows: Rows, z: Tensor, q: Tensor, buffer: Tensor) -> Tensor:
    """Compute the scores ``[I, K]`` of queries with all their keys, in ``buffer``.

    ``q``: the embeddings of the queries divided by the temperature, ``[I, D]``.
    """
    if rows.are_both_ways:
        (keys,) = rows.keys
        one_way = q[: keys.start] @ z[keys.slice()].T  # [N, N]
        return torch.cat([one_way, one_way.T])
    scores = buffer[: rows.num_pairs()].view(len(q), -1)
    for part, numbers in zip(scores.split_with_sizes(rows.num_keys(), 1), rows.keys, strict=True):
        torch.mm(q, pairs.keys(z, numbers).T, out=part)
    return scores


def add_gradient_of_scores(
    pairs: Pairs, rows: Rows, z: Tensor, q: Tensor, temperature: Tensor, d: Tensor, into: Inputs
) -> None:
    """Add the gradient by embeddings and temperature to ``into``.

    ``d``: the gradient by scores, d loss / d scores ``[I, K]``. ``q``: as in `scores_of`.

    If both views are queries of each other (`Rows.are_both_ways`), the two derivatives of a pair
    are added before they are multiplied by embeddings. The scores and their gradient then take
    three products of matrices in place of six.
    """
    num_queries, keys = len(q), rows.keys[0]
    if rows.are_both_ways:
        num_queries, (one_way, other_way) = keys.start, d.chunk(2)
        d = one_way + other_way.T  # [N, N]
        into.z[keys.slice()].addmm_(d.T, q[:num_queries])
        d_q = d @ z[keys.slice()]
    else:
        d_q = torch.zeros_like(q)
        for part, numbers in zip(d.split_with_sizes(rows.num_keys(), 1), rows.keys, strict=True):
            d_q.addmm_(part, pairs.keys(z, numbers))
            if numbers.stop <= len(z):  # the memory has no gradient
                into.z[numbers.slice()].addmm_(part.T, q)
    into.z[rows.queries.slice()][:num_queries].add_(d_q / temperature)
    into.temperature.sub_((q[:num_queries] * d_q).sum() / temperature)


def list_chunk(
    pairs: Pairs,
    rows: Rows,
    leaves: Inputs,
    d_losses: Tensor,
    into: Inputs | None,
    sums: tuple[Tensor, Tensor, Tensor],
) -> tuple[Tensor, Tensor | None]:
    """Compute a chunk as `matrix_chunk` does, but for listed negatives and without their matrix.

    Each query is multiplied by its positives only, since log S is known. (Where Python cannot read
    how many positives a query has, it is multiplied by all embeddings.) ``leaves``: the inputs,
    which require grad. ``sums``: log S ``[M]``, the log of the number of negatives ``[M]``, and d
    loss / d log S ``[M]``, to which this chunk adds its part.
    """
    z, temperature, weights = leaves
    log_s, log_count, d_log_s = sums
    with torch.set_grad_enabled(into is not None):
        partners = find_partners(pairs, rows, z, weights)
        if partners.columns is None:
            x = z[rows.queries.slice()] @ z.T / temperature  # [I, M]
        else:
            key = partners.columns[:, partners.num_self :]  # [I, P]
            query = rows.numbers(z.device)[0].unsqueeze(1).expand_as(key)
            x = _Products.apply(z, query.flatten(), key.flatten()).view_as(key) / temperature  # type: ignore[no-untyped-call]  # torch has no type there
        i = rows.queries.slice()
        losses, exist = pairs.form.losses(log_s[i], x, partners.weights, temperature, log_count[i])
    if into is not None:
        d_log_s += add_gradients(losses, [log_s], leaves, d_losses, into)[0]
    return losses.detach(), exist


class _Products(torch.autograd.Function):
    """The dot products z_query . z_key of two lists ``[P]``.

    The embeddings of the pairs are gathered a part of the lists at a time, also in the backward.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, query: Tensor, key: Tensor) -> Tensor:
        ctx.save_for_backward(z, query, key)
        parts = zip(*_parts(z, query, key), strict=True)
        return torch.cat([torch.linalg.vecdot(z[i], z[j]) for i, j in parts])

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        z, query, key = ctx.saved_tensors
        d_z = torch.zeros_like(z)
        for i, j, d_part in zip(*_parts(z, query, key, d.unsqueeze(1)), strict=True):
            d_z.index_add_(0, i, d_part * z[j]).index_add_(0, j, d_part * z[i])
        return d_z, None, None


def _parts(z: Tensor, *lists: Tensor) -> list[Sequence[Tensor]]:
    """Split lists of pairs into parts whose embeddings have at most `_GATHERED` numbers."""
    return [torch.split(x, max(1, _GATHERED // z.shape[1])) for x in lists]


def losses_of_chunks(
    pairs: Pairs, inputs: Inputs, own: list[Span] | None, d_losses: Tensor, into: Inputs | None
) -> tuple[Tensor, Tensor]:
    """Compute the losses ``[Q]`` of queries chunk by chunk, and how many queries have positives.

    ``own``: the queries of this process; None: all queries. ``d_losses``: d loss / d losses, a
    scalar or ``[Q]``. If ``into`` is given, the gradient of sum(d_losses * losses) is added to it.
    """
    z, with_gradient = inputs.z, into is not None
    size = _CHUNK if z.device.type == "cpu" else _CHUNK_ELSEWHERE
    if pairs.negative_pairs is not None:  # no matrix: queries meet their positives only
        size *= _POSITIVES
    chunks = list(all_rows(pairs, size, own))
    sizes = [rows.queries.length() for rows in chunks]
    d_of_chunks = d_losses.expand(sum(sizes)).split_with_sizes(sizes)
    results = []
    if pairs.negative_pairs is None:
        # All chunks share one buffer: new memory pages for each chunk would take a tenth of the
        # time.
        buffer = z.new_empty(max([rows.num_pairs() for rows in chunks], default=0))
        for rows, d in zip(chunks, d_of_chunks, strict=True):
            results.append(matrix_chunk(pairs, rows, inputs, d, into, buffer))
        return joined(results, z)
    leaves = inputs.map(lambda x: x.detach().requires_grad_(with_gradient))
    query, key = pairs.negative_pairs
    with torch.set_grad_enabled(with_gradient):
        logits = _Products.apply(leaves.z, query, key) / leaves.temperature  # type: ignore[no-untyped-call]  # torch has no type there
        log_sums, log_count = log_sums_of_list(pairs, query, logits)
    log_s, d_log_s = log_sums.detach().requires_grad_(with_gradient), torch.zeros_like(log_count)
    for rows, d in zip(chunks, d_of_chunks, strict=True):
        results.append(list_chunk(pairs, rows, leaves, d, into, (log_s, log_count, d_log_s)))
    if into is not None:
        add_gradients(log_sums, [], leaves, d_log_s, into)
    return joined(results, z)


def joined(results: list[tuple[Tensor, Tensor | None]], z: Tensor) -> tuple[Tensor, Tensor]:
    """Join the chunks: the losses ``[Q]``, and how many queries have positives ``[]``."""
    losses = [loss for loss, _ in results]
    counts = [z.new_full((), len(x)) if exist is None else exist.sum() for x, exist in results]
    if len(results) == 1:
        return losses[0], counts[0]
    return torch.cat([z[:0, 0], *losses]), sum(counts, z.new_zeros(()))


class _Chunks(torch.autograd.Function):
    """The losses ``[Q]`` by chunks, or their sum.

    The gradient of the sum is computed with the sum, in the forward; the backward multiplies it by
    a number. For the losses ``[Q]`` the backward computes the chunks again.
    """

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        *differentiated, pairs, own, is_sum = arguments
        inputs, into = Inputs(*differentiated).map(Tensor.detach), None
        if is_sum and any(ctx.needs_input_grad):
            into = inputs.map(torch.zeros_like)
        losses, count = losses_of_chunks(pairs, inputs, own, inputs.z.new_ones(()), into)
        ctx.is_sum, ctx.rest = is_sum, (pairs, own)
        ctx.save_for_backward(*(inputs if into is None else into))
        ctx.mark_non_differentiable(count)
        return losses.sum() if is_sum else losses, count

    @staticmethod
    def backward(ctx: Any, d: Tensor, _: Any) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "with engine='chunks' the loss is differentiable once: engine='dense', in one "
                "process, is differentiable any number of times"
            )
        saved = Inputs(*ctx.saved_tensors)
        if ctx.is_sum:
            return *[None if x is None else x * d for x in saved], None, None, None
        (pairs, own), into = ctx.rest, saved.map(torch.zeros_like)
        with full_precision(d.device):
            losses_of_chunks(pairs, saved, own, d, into)
        return *into, None, None, None


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
    if engine == "dense":
        if own is not None:
            raise ValueError(
                f"engine='dense' computes one matrix in one process, but {processes.num_ranks()} "
                "processes hold a batch together: choose engine='auto' or 'chunks', or gather=False"
            )
        results = [row_losses(pairs, rows, inputs) for rows in all_rows(pairs, None)]
        losses, count = joined(results, inputs.z)
        losses = losses if reduction == "none" else losses.sum()
    else:
        if reduction == "none" and pairs.memory is not None:
            # The backward computes the chunks again, when the next step may have overwritten the
            # memory.
            pairs = pairs._replace(memory=pairs.memory.clone())
        if not isinstance(inputs.temperature, Tensor):
            inputs = inputs._replace(temperature=inputs.z.new_tensor(inputs.temperature))
        losses, count = _Chunks.apply(*inputs, pairs, own, reduction != "none")  # type: ignore[no-untyped-call]  # torch has no type there
    if reduction == "none":
        return losses
    total, count = processes.sum_of(losses, count)
    return total / count.clamp_min(1) if reduction == "mean" else total
