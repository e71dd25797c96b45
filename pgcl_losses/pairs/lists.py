"""The losses of listed negatives (`negative_pairs=`), from products of pairs: no matrix exists."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pgcl_losses.pairs.chunks import chunk_size, cut
from pgcl_losses.pairs.forms import LossesOfRows, Positives
from pgcl_losses.pairs.partners import AllKeys, Columns, Partners, find_partners, lowest
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows
from pgcl_losses.pairs.sums import log_sum, more, raise_if_differentiated_twice

# The dot products z_i . z_j of two lists i and j [P], from z [M, D].
Products = Callable[[Tensor, Tensor, Tensor], Tensor]
# A part of a list starts few operations, so it may be smaller than a chunk of a large matrix.
_LARGEST_PART = 1 << 24


def losses_of_lists(
    pairs: Pairs, inputs: Inputs, rows: Sequence[Rows], products: Products
) -> list[LossesOfRows]:
    """Compute the losses of rows whose negatives are listed.

    Positives that are listed are computed at once: nothing has to be read. Labels may give each
    query very many positives, so with labels some rows are computed at a time, and once more in the
    backward.
    """
    log_s, log_count = _log_sums(pairs, inputs, products)
    form, tau = pairs.form, inputs.temperature
    if pairs.labels is None and pairs.positives is not None:
        (query, key), weights = pairs.positives, inputs.positive_weights
        for start, stop in filter(None, [some.excluded_set() for some in rows]):
            is_within = (query >= start) & (query < stop) & (key >= start) & (key < stop)
            weights = weights if weights is None else weights.masked_fill(is_within, 0.0)
        positives = Positives(pairs.num_embeddings(), weights, query)
        x = products(inputs.z, query, key) / tau
        losses, exist = form.losses(log_s, x, positives, tau, log_count)
        here = [slice(*some.queries) for some in rows]
        return [(losses[some], None if exist is None else exist[some]) for some in here]

    def losses_of(some: Rows, z: Tensor, log_s: Tensor) -> LossesOfRows:
        partners, here = (
            find_partners(pairs, some, z, inputs.positive_weights),
            slice(*some.queries),
        )
        x = _scores_of_positives(pairs, some, z, partners, products) / tau
        return form.losses(log_s[here], x, partners.positives, tau, log_count[here])

    chunks = cut(pairs, rows, inputs.z)
    if products is products_in_parts and len(chunks) > len(rows):
        again: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        return [again(losses_of, some, inputs.z, log_s) for some in chunks]
    return [losses_of(some, inputs.z, log_s) for some in chunks]


def _scores_of_positives(
    pairs: Pairs, rows: Rows, z: Tensor, partners: Partners, products: Products
) -> Tensor:
    """Multiply queries by their positives; by all embeddings, if positives cannot be read."""
    (start, stop), row = rows.queries, partners.positives.row
    if isinstance(partners, AllKeys):
        return z[start:stop] @ z.T
    row = torch.arange(stop - start, device=z.device).unsqueeze(1) if row is None else row
    if isinstance(partners, Columns):  # all embeddings are keys
        key = partners.positive_columns
    else:
        key = partners.places - row * pairs.num_embeddings()
    query = (row + start).expand_as(key)
    return products(z, query.flatten(), key.flatten()).view_as(key)


def _log_sums(pairs: Pairs, inputs: Inputs, products: Products) -> tuple[Tensor, Tensor]:
    """Add up listed negatives: log S and the log of their number ``[M]``, of all queries."""
    assert pairs.negative_pairs is not None
    query, key = pairs.negative_pairs
    scores = products(inputs.z, query, key) / inputs.temperature  # [P]
    zeros = scores.new_zeros(pairs.num_embeddings())
    count = zeros.index_add(0, query, torch.ones_like(scores))
    log_sums, log_count = [], count.log()
    for extra, _ in pairs.log_sum_terms():
        terms = more(scores, scores, extra)
        least = torch.full_like(zeros, lowest(zeros.dtype))
        peaks = least.scatter_reduce(0, query, terms.detach(), "amax")
        total = zeros.index_add(0, query, (terms - peaks[query]).exp())
        log_sums.append(total.masked_fill(count == 0, 1.0).log() + peaks)
    every = inputs.z.detach().sum()  # NaN must give NaN, also in an embedding that is in no pair
    return log_sum(log_sums, log_count) + (every - every), log_count


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
