"""How rows are laid out for fused kernels: in the order of their clusters, as tensor cores read.

A block of rows then has one cluster, or few, and all its pairs with another cluster weigh the same.
Nothing here asks for a number on the device.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from pgcl_losses.engine.pairs import LOG2_E, Factors, Gaussian, Pairs, Share, weight_of

# Rows are filled up to a multiple of this, so that no number of rows needs kernels of its own.
FILLED_TO = 128
# The fewest columns that tensor cores multiply.
FEWEST_COLUMNS = 16
# Up to here the number of columns is filled up to a power of 2, which kernels can hold as a whole;
# wider rows they take in parts.
_MOST_COLUMNS = 256
SOME_COLUMNS = 64


class Format(NamedTuple):
    """What products are computed of: each number is the sum of so many parts."""

    dtype: torch.dtype
    parts: int


_FORMATS = {
    "highest": Format(torch.bfloat16, 2),
    "high": Format(torch.bfloat16, 2),
    "medium": Format(torch.bfloat16, 1),
}


def precision() -> str:
    """PyTorch's own switch for products of float32, whichever form of it was used."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # its newer form was used, and CUDA differs from other devices
        return "high" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "highest"


def format_of(dtype: torch.dtype) -> Format:
    """What products of such rows are computed of."""
    if dtype == torch.float64:
        return Format(torch.float64, 1)
    if dtype != torch.float32:
        raise TypeError(f"engine='triton' computes with float32 or float64 rows, but got {dtype}")
    return _FORMATS[precision()]


class Rows(NamedTuple):
    """Rows in order, filled up with copies of the last one; and what is known of each."""

    order: Tensor  # [M] int64, the row that stands at each place
    graphs: Tensor  # [M] int32, -1 where it is filled up
    parts: Tensor  # [P, M, W] of rows so long that their products are exponents of 2
    keys: Tensor | None  # [M] int32, which line and column of the table are a row's
    left: Tensor | None  # [M, R] weights W_ij = left_i . right_j
    right: Tensor | None  # [M, R]
    mean: Tensor | None  # [M] of the Gaussian of exponents
    sharpness: Tensor | None  # [M]


class Layout(NamedTuple):
    """The rows of a share, those that they meet, which are all, and the weights between them."""

    mine: Rows
    others: Rows
    counts: tuple[int, int]  # of both, without those that fill up
    table: Tensor | None  # [K, K] W by the keys of both rows
    skips: Tensor | None  # [K, 2] the run of others that have no weights with rows of a key

    def meetings(self, block_m: int, block_n: int, num_graphs: int) -> Tensor:
        """Which tiles have pairs of one graph, or others that fill up: int8 ``[I, J]``."""
        count, num_rows = self.counts
        num_blocks, num_tiles = len(self.mine.graphs) // block_m, len(self.others.graphs) // block_n
        tiles = self.mine.graphs.new_zeros(num_blocks, num_tiles, dtype=torch.int8)
        tiles[:, num_rows // block_n :] = 1
        places = torch.arange(num_rows, device=tiles.device)
        place_of = torch.empty_like(places).index_copy_(0, self.others.order[:num_rows], places)
        blocks, graphs = places[:count] // block_m, self.mine.graphs[:count]
        for view in place_of.view(-1, num_graphs):
            tiles.view(-1).index_fill_(0, blocks * num_tiles + view[graphs] // block_n, 1)
        return tiles

    def unsort(self, of_mine: Tensor, elsewhere: float) -> Tensor:
        """Numbers of my rows, in the order of all rows."""
        count, num_rows = self.counts
        of_all = of_mine.new_full((num_rows, *of_mine.shape[1:]), elsewhere)
        return of_all.index_copy_(0, self.mine.order[:count], of_mine[:count])


def lay_out(pairs: Pairs, temperature: float, share: Share, *, forward: bool) -> Layout:
    """A share is a run of rows, each against all others."""
    rows, num_rows, scale = pairs.rows.detach(), len(pairs.rows), LOG2_E / temperature
    run = share.of(num_rows)
    kind = format_of(rows.dtype)
    keys, table = _table(pairs)
    left, right = _factors(pairs, kind) if table is None else (None, None)
    gaussian = weight_of(Gaussian, pairs.weights)
    mean, sharpness = None, None
    if gaussian is not None:  # of exponents, in place of cosines
        mean = gaussian.mean * scale
        sharpness = (0.5 * LOG2_E / gaussian.variance).sqrt_() / scale

    def laid(run: slice) -> Rows:
        count = run.stop - run.start
        order = torch.arange(count + -count % FILLED_TO, device=rows.device).clamp_(max=count - 1)
        if keys is not None:
            order = keys[run].argsort(stable=True)[order]
        order = order + run.start
        graphs = (order % pairs.num_graphs()).int()
        graphs[count:] = -1
        of_rows = (keys, left, right, mean, sharpness)
        known = [None if values is None else values[order] for values in of_rows]
        return Rows(order, graphs, _parts(rows[order] * math.sqrt(scale), kind), *known)

    others = laid(slice(0, num_rows))
    mine = others if share.num_ranks == 1 else laid(run)
    skips = None
    if table is not None and others.keys is not None:
        # Forward, a Gaussian's mass is that of all rows.
        if gaussian is None or not forward:
            skips = _skips(pairs, others.keys[:num_rows], table)
        fill = -len(table) % 16  # for numbers of clusters, too, see `FILLED_TO`
        table = F.pad(table, (0, fill, 0, fill))
    return Layout(mine, others, (run.stop - run.start, num_rows), table, skips)


def _parts(rows: Tensor, kind: Format) -> Tensor:
    """Numbers as sums of parts, with as many columns as kernels take: ``[P, M, W]``."""
    width = rows.shape[1]
    filled = width + -width % SOME_COLUMNS
    if width <= _MOST_COLUMNS:
        filled = max(FEWEST_COLUMNS, 1 << (width - 1).bit_length())
    return torch.stack(_split(F.pad(rows, (0, filled - width)), kind)[: kind.parts])


def _split(values: Tensor, kind: Format) -> tuple[Tensor, Tensor]:
    first = values.to(kind.dtype)
    return first, (values - first).to(kind.dtype)


def _table(pairs: Pairs) -> tuple[Tensor | None, Tensor | None]:
    """Weights that go by the clusters or the views of both rows: keys of rows, and W by keys."""
    factors = weight_of(Factors, pairs.weights)
    if factors is None:
        if not pairs.across_views:
            return None, None
        clusters = torch.zeros_like(pairs.rows[:, 0], dtype=torch.int64)
        table = pairs.rows.new_ones(1, 1)
    elif factors.looked_up() and factors.lines is factors.right:
        clusters, table = factors.right, factors.left_lines()
    else:
        return None, None
    if pairs.across_views:
        clusters = clusters + _views(pairs) * len(table)
        apart = 1 - torch.eye(pairs.num_views, dtype=table.dtype, device=table.device)
        table = torch.kron(apart, table)
    return clusters.int(), table


def _skips(pairs: Pairs, keys: Tensor, table: Tensor) -> Tensor:
    """A key's own view, across views; else its own cluster. Where there is no weight, that is."""
    numbers = torch.arange(len(table), dtype=keys.dtype, device=keys.device)
    unit = len(table) // pairs.num_views if pairs.across_views else 1
    first = numbers // unit * unit
    ends = torch.searchsorted(keys, torch.stack([first, first + unit], 1))
    return ends.masked_fill_((table.diagonal() != 0).unsqueeze(1), 0).int()


def _factors(pairs: Pairs, kind: Format) -> tuple[Tensor | None, Tensor | None]:
    """Any other factors, as columns of parts whose products add up to W: ``[M, R]``."""
    factors = weight_of(Factors, pairs.weights)
    if factors is None:
        return None, None
    left, right = factors.left_matrix(), factors.right_matrix().to(factors.log_left.dtype)
    if pairs.across_views:  # columns for each view: the left ones of a row are in those of others
        views = torch.arange(pairs.num_views, device=left.device)
        in_view = (_views(pairs).unsqueeze(1) == views).to(left.dtype).unsqueeze(2)  # [M, V, 1]
        left = ((1 - in_view) * left.unsqueeze(1)).flatten(1)
        right = (in_view * right.unsqueeze(1)).flatten(1)
    of_left, of_right = _split(left, kind), _split(right, kind)
    left = torch.cat([of_left[0], of_left[1], of_left[0]], 1)
    right = torch.cat([of_right[0], of_right[0], of_right[1]], 1)
    fill = 0, -left.shape[1] % FEWEST_COLUMNS
    return F.pad(left, fill), F.pad(right, fill)


def _views(pairs: Pairs) -> Tensor:
    """The view of each row ``[M]``."""
    return torch.arange(len(pairs.rows), device=pairs.rows.device) // pairs.num_graphs()
