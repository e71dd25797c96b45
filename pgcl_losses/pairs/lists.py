"""The sums of listed negatives (`negative_pairs=`), from products of pairs: no matrix exists."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pgcl_losses.base.normalize import full_precision
from pgcl_losses.pairs.partners import Partners, lowest
from pgcl_losses.pairs.rows import Inputs, Pairs, Rows
from pgcl_losses.pairs.sums import (
    SumsOfRows,
    Total,
    add_product,
    chunk_size,
    log_sum,
    more,
    raise_if_differentiated_twice,
)

# The dot products z_i . z_j of two lists i and j [P], from z [M, D]; without j, of a slice i with
# all embeddings [I, M].
Products = Callable[[Tensor, Any, Tensor | None], Tensor]
# A part of a list starts few operations, so it may be smaller than a chunk of a large matrix.
_LARGEST_PART = 1 << 24


class ListSums(NamedTuple):
    """The sums of listed negatives of all queries."""

    log_s: Tensor  # [M]
    log_count: Tensor  # [M]
    products: Products

    def pick(self, pairs: Pairs, rows: Rows, inputs: Inputs, partners: Partners) -> SumsOfRows:
        """Pick the sums of some rows, and compute the scores of their positives.

        If Python cannot read how many positives a query has, it is multiplied by all embeddings.
        """
        z, (start, stop), row = inputs.z, rows.queries, partners.positives.row
        if partners.mask is not None:
            x = self.products(z, slice(start, stop), None)  # [I, M]
        else:
            row = torch.arange(stop - start, device=z.device).unsqueeze(1) if row is None else row
            key = partners.of_positives
            if key is None:  # all embeddings are keys
                assert partners.places is not None
                key = partners.places - row * pairs.num_embeddings()
            query = (row + start).expand_as(key)
            x = self.products(z, query.flatten(), key.flatten()).view_as(key)
        return x / inputs.temperature, self.log_s[start:stop], self.log_count[start:stop]


def list_sums(pairs: Pairs, inputs: Inputs, products: Products) -> ListSums:
    """Add up listed negatives, once for all queries."""
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
    return ListSums(log_sum(log_sums, log_count) + (every - every), log_count, products)


def plain_products(z: Tensor, i: Any, j: Tensor | None) -> Tensor:
    """Multiply in plain torch, which autograd differentiates any number of times."""
    return z[i] @ z.T if j is None else (z[i] * z[j]).sum(1)


def products_in_parts(z: Tensor, i: Any, j: Tensor | None, total: Total | None = None) -> Tensor:
    """Multiply a part of the lists at a time, as all their embeddings would take much memory.

    If a ``total`` is given, the backward adds the gradient by embeddings to it.
    """
    function = _ProductsWithAll if j is None else _Products
    products: Tensor = function.apply(z, i, j, total)  # type: ignore[no-untyped-call]  # torch has no type there
    return products


class _Products(torch.autograd.Function):
    """The embeddings are gathered again in the backward."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, i: Tensor, j: Tensor, total: Total | None) -> Tensor:
        ctx.save_for_backward(z, i, j)
        ctx.total = total
        return torch.cat([torch.linalg.vecdot(z[a], z[b]) for a, b in _parts(z, i, j)])

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None]:
        raise_if_differentiated_twice()
        z, i, j = ctx.saved_tensors
        d, d_z = scaled_and_total(d, z, ctx.total)
        for a, b, d_part in _parts(z, i, j, d.unsqueeze(1)):
            d_z.index_add_(0, a, d_part * z[b]).index_add_(0, b, d_part * z[a])
        return d_z if ctx.total is None else None, None, None, None


class _ProductsWithAll(torch.autograd.Function):
    """A product of matrices, whose backward autocast does not lower."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, i: slice, _: None, total: Total | None) -> Tensor:
        ctx.save_for_backward(z)
        ctx.rest = i, total
        return z[i] @ z.T

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, None, None, None]:
        raise_if_differentiated_twice()
        (z,), (i, total) = ctx.saved_tensors, ctx.rest
        d, d_z = scaled_and_total(d, z, total)
        with full_precision(d.device):
            add_product(d_z, d.T, z[i])
            add_product(d_z[i], d, z)
        return d_z if total is None else None, None, None, None


def scaled_and_total(d: Tensor, z: Tensor, total: Total | None) -> tuple[Tensor, Tensor]:
    """Return derivatives in the unit of a total, and the tensor ``[M, D]`` to add to."""
    return (d * total.unit, total.scaled) if total else (d, d.new_zeros(z.shape))


def _parts(z: Tensor, *lists: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Split lists of pairs into parts whose embeddings have as many numbers as a chunk, at most."""
    size = max(1, min(chunk_size(z.device), _LARGEST_PART) // z.shape[1])
    return zip(*[torch.split(x, size) for x in lists], strict=True)
