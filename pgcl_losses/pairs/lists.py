"""The losses of listed negatives (`negative_pairs=`), from products of pairs: no matrix exists."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pgcl_losses.base.modes import can_be_read
from pgcl_losses.pairs.chunks import (
    LossesWithGradient,
    Tensors,
    chunk_size,
    cut,
    for_each_chunk,
    leaves_of,
    with_gradient,
)
from pgcl_losses.pairs.forms import LossesOfRows, Positives
from pgcl_losses.pairs.partners import Columns, Places, find_partners, lowest
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows
from pgcl_losses.pairs.sums import log_s_of, plus_scores, raise_if_differentiated_twice, scale_of

# The dot products z_i . z_j of two lists i and j [P], from z [M, D].
Products = Callable[[Tensor, Tensor, Tensor], Tensor]
# A part of a list starts few operations, so it may be smaller than a chunk of a large matrix.
_LARGEST_PART = 1 << 24
# A product of matrices computes so many scores in the time of one product of a list.
_SCORES_OF_A_PRODUCT = 128


def losses_of_lists(
    pairs: Pairs,
    inputs: Inputs,
    rows: Sequence[Rows],
    products: Products,
    is_sum: bool = False,
) -> list[LossesOfRows]:
    """Compute the losses of rows whose negatives are listed; with ``is_sum`` maybe their sum.

    The positives of all queries are computed at once, unless they are very many. Where Python may
    not read how many they are, listed positives are computed at once, and with labels each key has
    a weight, so some rows are computed at a time.
    """
    log_s, log_count = _log_s_of_lists(pairs, inputs, products)
    is_readable, are_listed = can_be_read(inputs.z), pairs.labels is None and not pairs.are_views()
    is_whole = pairs.are_views() or (are_listed and not is_readable)
    chunks = rows if is_whole else cut(pairs, rows, inputs.z)
    if are_listed and len(chunks) == len(rows):
        losses, exist = _with_listed_positives(pairs, inputs, rows, log_s, log_count, products)
        here = [slice(*some.queries) for some in rows]
        return [(losses[some], None if exist is None else exist[some]) for some in here]
    can_wait = pairs.are_views() or (len(chunks) == len(rows) and is_readable)
    if can_wait or products is not products_in_parts:
        return [_losses_of_rows(pairs, inputs, x, log_s, log_count, products) for x in chunks]
    compute = partial(_losses_with_gradient, pairs, chunks, log_count)
    return [with_gradient(compute, (*inputs.as_tensors(), log_s), is_sum)]


def _with_listed_positives(
    pairs: Pairs,
    inputs: Inputs,
    rows: Sequence[Rows],
    log_s: Tensor,
    log_count: Tensor,
    products: Products,
) -> LossesOfRows:
    """Compute the losses ``[M]`` of all queries, whose positives are listed as well."""
    assert pairs.positives is not None
    (query, key), weights = pairs.positives, inputs.positive_weights
    for start, stop in filter(None, [some.excluded_set() for some in rows]):
        is_within = (query >= start) & (query < stop) & (key >= start) & (key < stop)
        weights = weights if weights is None else weights.masked_fill(is_within, 0.0)
    x = products(inputs.z, query, key) / inputs.temperature
    positives = Positives(pairs.num_embeddings(), weights, query)
    return pairs.form.losses(log_s, x, positives, inputs.temperature, log_count)


def _losses_of_rows(
    pairs: Pairs,
    inputs: Inputs,
    rows: Rows,
    log_s: Tensor,
    log_count: Tensor,
    products: Products | None,
) -> LossesOfRows:
    """Compute the losses ``[I]`` of some rows, whose positives are views or have labels.

    ``products``: None for what takes less time, products of pairs or of matrices.
    """
    z, tau, (start, stop) = inputs.z, inputs.temperature, rows.queries
    partners, here = find_partners(pairs, rows, z, inputs.positive_weights), slice(start, stop)
    row, key = partners.positives.row, None
    row = torch.arange(stop - start, device=z.device).unsqueeze(1) if row is None else row
    if isinstance(partners, Columns):  # all embeddings are keys
        key = partners.positive_columns
    elif isinstance(partners, Places):
        most = (stop - start) * len(z) // _SCORES_OF_A_PRODUCT
        if products is not None or partners.places.numel() <= most:
            key = partners.places - row * len(z)
    if key is None:
        x = partners.scores(z[here] @ z.T)
    else:
        query, products = (row + start).expand_as(key), products or products_in_parts
        x = products(z, query.flatten(), key.flatten()).view_as(key)
    return pairs.form.losses(log_s[here], x / tau, partners.positives, tau, log_count[here])


def _losses_with_gradient(
    pairs: Pairs,
    chunks: Sequence[Rows],
    log_count: Tensor,
    inputs: Tensors,
    d_losses: Tensor,
    learns: Sequence[bool],
) -> LossesWithGradient:
    """Compute the losses of chunks of rows, one at a time, with their gradient.

    ``inputs``: the fields of `Inputs`, and log S ``[M]``.
    """
    leaves = leaves_of(inputs, learns)
    given, log_s = Inputs(*leaves[:-1]), leaves[-1]
    tau = given.temperature.detach()
    scale = scale_of(tau, is_small=False) * tau  # see `Gradient`

    def losses_of(chunk: Rows) -> LossesOfRows:
        return _losses_of_rows(pairs, given, chunk, log_s, log_count, None)

    losses, count, found = for_each_chunk(chunks, leaves, d_losses * scale, losses_of)
    if found is None:
        return losses, count, None
    zeros = [
        d_losses.new_zeros(x.shape) if learns_x else None
        for x, learns_x in zip(leaves, learns, strict=True)
    ]
    gradient = [
        zero if part is None else part.div_(scale) for part, zero in zip(found, zeros, strict=True)
    ]
    return losses, count, gradient


def _log_s_of_lists(pairs: Pairs, inputs: Inputs, products: Products) -> tuple[Tensor, Tensor]:
    """Add up listed negatives: log S and the log of their number ``[M]``, of all queries."""
    assert pairs.negative_pairs is not None
    query, key = pairs.negative_pairs
    scores = products(inputs.z, query, key) / inputs.temperature  # [P]
    zeros = scores.new_zeros(pairs.num_embeddings())
    count = zeros.index_add(0, query, torch.ones_like(scores))
    logsumexps, log_count = [], count.log()
    for extra, _ in pairs.logsumexp_terms():
        terms = plus_scores(scores, scores, extra)
        least = torch.full_like(zeros, lowest(zeros.dtype))
        peaks = least.scatter_reduce(0, query, terms.detach(), "amax")
        total = zeros.index_add(0, query, (terms - peaks[query]).exp())
        logsumexps.append(total.masked_fill(count == 0, 1.0).log() + peaks)
    every = inputs.z.detach().sum()  # NaN must give NaN, also in an embedding that is in no pair
    return log_s_of(logsumexps, log_count) + (every - every), log_count


def plain_products(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Multiply in plain torch, which autograd differentiates any number of times."""
    return (z[i] * z[j]).sum(1)


def products_in_parts(z: Tensor, i: Tensor, j: Tensor) -> Tensor:
    """Multiply a part of the lists at a time, as all their embeddings would take much memory."""
    products: Tensor = _Products.apply(z, i, j)  # type: ignore[no-untyped-call]  # torch has no type there
    return products


class _Products(torch.autograd.Function):
    """The embeddings are gathered again in the backward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, i: Tensor, j: Tensor) -> Tensor:
        ctx.save_for_backward(z, i, j)
        return torch.cat([torch.linalg.vecdot(z[a], z[b]) for a, b in _parts(z, i, j)])

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor, None, None]:
        raise_if_differentiated_twice()
        z, i, j = ctx.saved_tensors
        d_z = d.new_zeros(z.shape)
        for a, b, d_part in _parts(z, i, j, d.unsqueeze(1)):
            d_z.index_add_(0, a, d_part * z[b]).index_add_(0, b, d_part * z[a])
        return d_z, None, None


def _parts(z: Tensor, *lists: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split lists of pairs into parts whose embeddings have as many numbers as a chunk, at most."""
    size = max(1, min(chunk_size(z.device), _LARGEST_PART) // z.shape[1])
    return zip(*[torch.split(x, size) for x in lists], strict=True)
