"""How embeddings are laid out for the fused kernels: by cluster, in the form tensor cores read.

A block of embeddings then has one cluster, or few, and all its pairs with another cluster weigh the
same. Nothing here asks for a number on the device.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.engine.contract import LOG2_E, Gaussian, Pairs, Portion, Table

# Embeddings are filled up to a multiple of this, so that no batch size needs kernels of its own.
FILLED_TO = 128
# The fewest columns that tensor cores multiply.
FEWEST_COLUMNS = 16
# Up to here the dimension is filled up to a power of 2, which kernels can hold; more dimensions
# they take in slices.
_MOST_COLUMNS = 256
SOME_COLUMNS = 64
# Runs of tiles for each embedding of a block and each set, of which one has its item.
_MOST_RUNS = 8


class Format(NamedTuple):
    """What products are computed of: each number is the sum of so many parts."""

    dtype: torch.dtype
    parts: int


def precision() -> str:
    """PyTorch's own switch for products of float32, whichever form of it was used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # its newer form was used, and CUDA differs from other devices
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def format_of(dtype: torch.dtype) -> Format:
    """What products of such embeddings are computed of."""
    if dtype == torch.float64:
        return Format(torch.float64, 1)
    if dtype != torch.float32:
        raise TypeError(
            f"engine='triton' computes with float32 or float64 embeddings, but got {dtype}"
        )
    return Format(torch.bfloat16, 1 if precision() == "medium" else 2)


class Sorted(NamedTuple):
    """Embeddings in the order of their keys, filled up with copies of the last one."""

    order: Tensor  # [M] int64, the embedding at each position
    items: Tensor  # [M] int32, -1 where it is filled up
    parts: Tensor  # [P, M, W] of embeddings so long that their products are exponents of 2
    keys: Tensor | None  # [M] int32, the row and column of the table
    left: Tensor | None  # [M, R] weights W_ij = left_i . right_j
    right: Tensor | None  # [M, R]
    mean: Tensor | None  # [M] of the Gaussian of exponents
    sharpness: Tensor | None  # [M]


class Layout(NamedTuple):
    """The embeddings of a portion, the others, which are all of them, and the weights."""

    kind: Format
    mine: Sorted
    others: Sorted
    counts: tuple[int, int]  # of both, without those that fill up
    table: Tensor | None  # [K, K] W by the keys of both embeddings
    skipped: Tensor | None  # [K, 2] the run of others that have no weight with a key
    lengths: tuple[int, ...] | None  # of sets; None where items are given

    def masked_tiles(self, block_i: int, block_j: int) -> tuple[Tensor | None, int]:
        """Which runs of tiles may hold pairs of one item or others that fill up: int8 ``[I, J]``.

        The length of these runs keeps the memory linear in the number of embeddings. None if items
        are given: then any tile may.
        """
        if self.lengths is None:
            return None, 1
        num_mine, num_others = self.counts
        num_blocks, num_tiles = len(self.mine.order) // block_i, len(self.others.order) // block_j
        run = 1 << int(num_tiles / (_MOST_RUNS * block_i * len(self.lengths))).bit_length()
        masked = self.others.items.new_zeros(num_blocks, -(-num_tiles // run), dtype=torch.int8)
        masked[:, num_others // block_j // run :] = 1
        positions = torch.arange(num_others, device=masked.device)
        order = self.others.order[:num_others]
        position_of = torch.empty_like(positions).index_copy_(0, order, positions)
        blocks, items = positions[:num_mine] // block_i, self.mine.items[:num_mine]
        for of_set in position_of.split_with_sizes(self.lengths):
            if len(of_set) > 0:  # later items mask its last tile in vain
                runs = of_set[items.clamp(max=len(of_set) - 1)] // (block_j * run)
                masked.view(-1).index_fill_(0, blocks * masked.shape[1] + runs, 1)
        return masked, run

    def unsort(self, of_mine: Tensor, elsewhere: float) -> Tensor:
        """Numbers of my embeddings, in the order of all embeddings."""
        count, num_others = self.counts
        of_all = of_mine.new_full((num_others, *of_mine.shape[1:]), elsewhere)
        return of_all.index_copy_(0, self.mine.order[:count], of_mine[:count])


def lay_out(
    pairs: Pairs, temperature: float | Tensor, portion: Portion, *, forward: bool
) -> Layout:
    """A portion is a run of embeddings, each against all others."""
    embeddings, scale = pairs.embeddings.detach(), LOG2_E / temperature
    count, kind = len(embeddings), format_of(embeddings.dtype)
    sets, items = _sets_and_items(pairs)
    keys, table = _keys(pairs, sets)
    left, right = _factors(pairs, sets, kind) if table is None else (None, None)
    mean, sharpness = None, None
    if isinstance(pairs.by_cosine, Gaussian):
        mean, sharpness = pairs.by_cosine.numbers(scale)  # of exponents, in place of cosines

    def laid(run: slice) -> Sorted:
        length = run.stop - run.start
        positions = torch.arange(length + -length % FILLED_TO, device=embeddings.device)
        order = positions.clamp_(max=length - 1)
        if keys is not None:
            order = keys[run].argsort(stable=True)[order]
        order = order + run.start
        of_items = items[order]
        of_items[length:] = -1
        parts = _parts(embeddings[order] * scale**0.5, kind)
        known = [
            None if values is None else values[order]
            for values in (keys, left, right, mean, sharpness)
        ]
        return Sorted(order, of_items, parts, *known)

    others = laid(slice(0, count))
    run = portion.of(count)
    mine = others if portion.num_ranks == 1 else laid(run)
    skipped = None
    if table is not None and others.keys is not None:
        if pairs.by_cosine is None or not forward:  # its totals are those of all embeddings
            skipped = _skipped(pairs, others.keys[:count], table)
        fill = -len(table) % 16  # so that few numbers of clusters need kernels of their own
        table = F.pad(table, (0, fill, 0, fill))
    lengths = pairs.lengths if pairs.items is None else None
    return Layout(kind, mine, others, (run.stop - run.start, count), table, skipped, lengths)


def _parts(embeddings: Tensor, kind: Format) -> Tensor:
    """Numbers as sums of parts, with as many columns as kernels take: ``[P, M, W]``."""
    dim = embeddings.shape[1]
    filled = dim + -dim % SOME_COLUMNS
    if dim <= _MOST_COLUMNS:
        filled = max(FEWEST_COLUMNS, 1 << (dim - 1).bit_length())
    return torch.stack(_split(F.pad(embeddings, (0, filled - dim)), kind)[: kind.parts])


def _split(values: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    first = values.to(kind.dtype)
    return first, (values - first).to(kind.dtype)


def _sets_and_items(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The set of each embedding, and a number below 2^31 for its item: ``[M]`` both."""
    device = pairs.embeddings.device
    sets = [torch.full((n,), number, device=device) for number, n in enumerate(pairs.lengths)]
    if pairs.items is None:
        items = torch.cat([torch.arange(n, device=device) for n in pairs.lengths]).int()
    else:  # how many embeddings are of items with smaller numbers
        items = torch.searchsorted(pairs.items.sort().values, pairs.items, out_int32=True)
    return torch.cat(sets), items


def _compared(pairs: Pairs) -> Tensor:
    """1 where two sets are compared: ``[S, S]``, written without a copy from the host."""
    compared = pairs.embeddings.new_zeros(2 * (len(pairs.lengths),))
    for a, b in pairs.compared:
        compared[a, b] = compared[b, a] = 1.0
    return compared


def _keys(pairs: Pairs, sets: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Weights that go by the clusters or the sets: keys of embeddings, and W by keys."""
    weights = pairs.by_cluster
    if isinstance(weights, Table) and len(weights.log_weights) == 1:
        keys, table = weights.clusters[:, 0], _not_denormal(weights.log_weights[0])
    elif weights is None and not pairs.compares_all():
        keys, table = torch.zeros_like(sets), pairs.embeddings.new_ones(1, 1)
    else:
        return None, None
    if not pairs.compares_all():
        keys = keys + sets * len(table)
        table = torch.kron(_compared(pairs), table)
    return keys.int(), table


def _skipped(pairs: Pairs, keys: Tensor, table: Tensor) -> Tensor:
    """The run of others of a key's own set, if that is not compared with itself; else of the key.

    There is none where the key has a weight with itself.
    """
    numbers = torch.arange(len(table), dtype=keys.dtype, device=keys.device)
    first, end = numbers, numbers + 1
    if not pairs.compares_all():
        size = len(table) // len(pairs.lengths)
        own_set = (_compared(pairs).diagonal() == 0).repeat_interleave(size)
        first = torch.where(own_set, numbers // size * size, first)
        end = torch.where(own_set, first + size, end)
    runs = torch.searchsorted(keys, torch.stack([first, end], 1))
    return runs.masked_fill_((table.diagonal() != 0).unsqueeze(1), 0).int()


def _factors(pairs: Pairs, sets: Tensor, kind: Format) -> tuple[Tensor | None, Tensor | None]:
    """Any other weights, as columns of parts whose products add up to W: ``[M, R]``."""
    weights = pairs.by_cluster
    if weights is None:
        return None, None
    if isinstance(weights, Table):  # a mean of several: the right factors have a 1 for each
        log_count = math.log(len(weights.log_weights))
        tables = [_not_denormal(log_weights - log_count) for log_weights in weights.log_weights]
        heads = list(zip(tables, weights.clusters.unbind(1), strict=True))
        left = torch.cat([table[of_head] for table, of_head in heads], 1)
        right = torch.cat([F.one_hot(of_head, len(table)) for table, of_head in heads], 1)
        right = right.to(left.dtype)
    else:
        left, right = weights
    if not pairs.compares_all():  # columns for each set: the left ones in sets compared with it
        in_set = torch.eye(len(pairs.lengths), dtype=left.dtype, device=left.device)[sets]
        left = (_compared(pairs)[sets].unsqueeze(2) * left.unsqueeze(1)).flatten(1)
        right = (in_set.unsqueeze(2) * right.unsqueeze(1)).flatten(1)
    of_left, of_right = _split(left, kind), _split(right, kind)
    left = torch.cat([of_left[0], of_left[1], of_left[0]], 1)
    right = torch.cat([of_right[0], of_right[0], of_right[1]], 1)
    fill = 0, -left.shape[1] % FEWEST_COLUMNS
    return F.pad(left, fill), F.pad(right, fill)


def _not_denormal(log_weights: Tensor) -> Tensor:
    """Weights, 0 where they are too small for products."""
    return F.threshold(log_weights.exp(), torch.finfo(log_weights.dtype).tiny, 0.0)
