# Neither the package triton nor what its decorators leave behind has type hints.
# mypy: disable-error-code="import-untyped, import-not-found"
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The kernels of the engine for CUDA. What they are given is in `triton.py`.

Tiles have shape [M, N]: a block of my rows, from `me` on, against others, from `other` on.
"""

import triton.language as tl
from triton import jit


@jit
def _forward_kernel(p, sums, masses):
    """The sums of my rows over one part of the others."""
    me = tl.program_id(0) * p.BLOCK_M
    if p.table is None:
        total, mass = _sum_up(p, me, 0, 0, sums, "any")
    else:
        first, last = _keys(p, me)
        if first == last:
            total, mass = _sum_up(p, me, first, last, sums, "one key")
        else:
            total, mass = _sum_up(p, me, first, last, sums, "some keys")
    at = tl.program_id(1) * p.num_mine + me + tl.arange(0, p.BLOCK_M)
    tl.store(sums + at, total)
    if masses is not None:
        tl.store(masses + at, mass)


@jit
def _sum_up(p, me, first, last, sums, KEYS: tl.constexpr):
    """My rows' sums, or the log2 of them where they might overflow; and the Gaussian's mass."""
    total = tl.zeros([p.BLOCK_M], sums.dtype.element_ty)
    mass = total
    peak = total - float("inf")
    mine = _my_rows(p, me, 0)
    begin, end, gap, gap_width = _my_tiles(p, first, KEYS)
    for number in range(begin, end):
        tile = number + tl.where(number < gap, 0, gap_width)
        other = tile * p.BLOCK_N
        meets = _meets(p, me, other)
        weights = 1.0
        if p.table is not None:  # on their way while tensor cores are busy
            weights = _weights(p, me, other, first, last, 0, KEYS)
        x = _exponents(p, me, other, mine)
        if p.mine.left is not None:
            weights = _weights(p, me, other, first, last, 0, KEYS)
        if p.mine.mean is not None:
            log_gaussian = _log_gaussian(p.mine, me, p.BLOCK_M, 1, x)
            gaussian = tl.exp2(log_gaussian)
            if meets:
                filled = _of_rows(p.others.graphs, other, p.BLOCK_N, 0) < 0
                gaussian = tl.where(filled, 0.0, gaussian)
            mass += tl.sum(gaussian, 1)
            x += log_gaussian
        if p.PEAKS:
            x = tl.where(weights == 0, -float("inf"), x)
            if meets:
                x = tl.where(_same_graph(p, me, other), -float("inf"), x)
            highest = tl.maximum(peak, tl.max(x, 1))
            finite = tl.where(highest == -float("inf"), 0.0, highest)
            total *= tl.exp2(peak - finite)
            peak = highest
            terms = tl.exp2(x - finite[:, None])
        else:
            terms = tl.exp2(x)
            if meets:
                terms = tl.where(_same_graph(p, me, other), 0.0, terms)
        total += tl.sum(terms * weights, 1)
    if p.PEAKS:
        total = peak + tl.log2(tl.where(total == 0, 1.0, total))
    return total, mass


@jit
def _backward_kernel(p, ends, d_mine):
    """The gradient that my rows get from one part of the others."""
    me = tl.program_id(0) * p.BLOCK_M
    if p.table is None:
        gradient = _add_up(p, ends, me, 0, 0, "any")
    else:
        first, last = _keys(p, me)
        if first == last:
            gradient = _add_up(p, ends, me, first, last, "one key")
        else:
            gradient = _add_up(p, ends, me, first, last, "some keys")
    row = tl.program_id(1) * p.num_mine + me
    _store(d_mine, row, 0, p.WIDTH, gradient, p.BLOCK_M, p.WIDTH)


@jit
def _add_up(p, ends, me, first, last, KEYS: tl.constexpr):
    """My rows' gradient."""
    gradient = tl.zeros([p.BLOCK_M, p.WIDTH], p.dtype)
    mine = _my_rows(p, me, 0)
    begin, end, gap, gap_width = _my_tiles(p, first, KEYS)
    for number in range(begin, end):
        tile = number + tl.where(number < gap, 0, gap_width)
        other = tile * p.BLOCK_N
        d_pairs = _d_pairs(p, ends, me, other, first, last, mine, KEYS)
        high, low = _split(d_pairs, p)
        gradient = _add_product(p, high, low, other, 0, gradient)
    return gradient


@jit(do_not_specialize=["first_block"])
def _d_pairs_kernel(p, ends, d_pairs, first_block, num_rows):
    """The gradients of pairs, in parts: of a tile of some blocks of my rows."""
    block = tl.program_id(1)
    me = (first_block + block) * p.BLOCK_M
    other = tl.program_id(0) * p.BLOCK_N
    mine = _my_rows(p, me, 0)
    if p.table is None:
        of_tile = _d_pairs(p, ends, me, other, 0, 0, mine, "any")
    else:
        first, last = _keys(p, me)
        of_tile = _d_pairs(p, ends, me, other, first, last, mine, "some keys")
    row = block * p.BLOCK_M
    high, low = _split(of_tile, p)
    _store(d_pairs, row, other, p.num_others, high, p.BLOCK_M, p.BLOCK_N)
    if p.PARTS == 2:
        _store(d_pairs, num_rows + row, other, p.num_others, low, p.BLOCK_M, p.BLOCK_N)


@jit
def _multiply_kernel(p, d_pairs, d_rows, num_rows):
    """Those of one part of the others, multiplied by some columns of their rows."""
    row = tl.program_id(0) * p.BLOCK_M
    d = tl.program_id(1) * p.BLOCK_D
    gradient = tl.zeros([p.BLOCK_M, p.BLOCK_D], p.dtype)
    each = tl.cdiv(p.num_others // p.BLOCK_N, tl.num_programs(2)) * p.BLOCK_N
    begin = tl.program_id(2) * each
    for other in range(begin, tl.minimum(begin + each, p.num_others), p.BLOCK_N):
        high = _tile(d_pairs, row, other, p.num_others, p.BLOCK_M, p.BLOCK_N)
        low = high
        if p.PARTS == 2:
            low = _tile(d_pairs, num_rows + row, other, p.num_others, p.BLOCK_M, p.BLOCK_N)
        gradient = _add_product(p, high, low, other, d, gradient)
    row += tl.program_id(2) * num_rows
    _store(d_rows, row, d, p.WIDTH, gradient, p.BLOCK_M, p.BLOCK_D)


@jit
def _split(values, p):
    """Numbers as sums of two parts, of which the second may not be asked for."""
    high = values.to(p.others.parts.dtype.element_ty)
    return high, (values - high.to(values.dtype)).to(high.dtype)


@jit
def _add_product(p, high, low, other, d, gradient):
    """What pairs give, in two parts, times BLOCK_D columns of the others' rows."""
    rows = _part(p, p.others.parts, 0, p.num_others, other, d, p.BLOCK_N)
    if p.PARTS == 2:
        low_rows = _part(p, p.others.parts, 1, p.num_others, other, d, p.BLOCK_N)
        gradient = tl.dot(low, rows, gradient)
        gradient = tl.dot(high, low_rows, gradient)
    return tl.dot(high, rows, gradient)


@jit
def _d_pairs(p, ends, me, other, first, last, mine, KEYS: tl.constexpr):
    """What each pair of a tile gives: the gradient by its exponent of the sums at both its ends."""
    meets = _meets(p, me, other)
    of_me = _of_rows(ends.slopes, me, p.BLOCK_M, 1)
    of_others = _of_rows(ends.slopes_of_others, other, p.BLOCK_N, 0)
    if KEYS == "some keys" and not p.APART:  # both ends at once, in half the registers
        my_keys = _of_rows(p.mine.keys, me, p.BLOCK_M, 1)
        slopes = tl.zeros([p.BLOCK_M, p.BLOCK_N], p.dtype)
        for key in range(first, last + 1):
            is_mine = (my_keys == key).to(p.dtype)
            slopes += is_mine * of_me * _line(p, other, key, 0)
            slopes += is_mine * (of_others * _line(p, other, key, 1))
        x = _exponents(p, me, other, mine)
        d_pairs = slopes * tl.exp2(x)
    else:
        if p.table is not None:  # on their way while tensor cores are busy
            of_me *= _weights(p, me, other, first, last, 0, KEYS)
            of_others *= _weights(p, me, other, first, last, 1, KEYS)
        x = _exponents(p, me, other, mine)
        if p.mine.left is not None:
            of_me *= _weights(p, me, other, first, last, 0, KEYS)
            of_others *= _weights(p, me, other, first, last, 1, KEYS)
        if p.APART:
            at_me = x - _of_rows(ends.log_sums, me, p.BLOCK_M, 1)
            at_others = x - _of_rows(ends.log_sums_of_others, other, p.BLOCK_N, 0)
            if p.mine.mean is not None:
                at_me += _log_gaussian(p.mine, me, p.BLOCK_M, 1, x)
                at_others += _log_gaussian(p.others, other, p.BLOCK_N, 0, x)
            # What is left out may be larger than all that is in.
            d_pairs = tl.where(of_me == 0, 0.0, of_me * tl.exp2(at_me))
            d_pairs += tl.where(of_others == 0, 0.0, of_others * tl.exp2(at_others))
        else:
            d_pairs = (of_me + of_others) * tl.exp2(x)
    if meets:
        d_pairs = tl.where(_same_graph(p, me, other), 0.0, d_pairs)
    return d_pairs


@jit
def _my_tiles(p, key, KEYS: tl.constexpr):
    """The run of tiles of this part, once a gap is taken out; the gap's place and width."""
    num_tiles = p.num_others // p.BLOCK_N
    gap = num_tiles
    gap_width = 0
    if KEYS == "one key" and p.skips is not None:
        gap = tl.cdiv(tl.load(p.skips + 2 * key), p.BLOCK_N)
        gap_width = tl.maximum(tl.load(p.skips + 2 * key + 1) // p.BLOCK_N - gap, 0)
    num_tiles -= gap_width
    each = tl.cdiv(num_tiles, tl.num_programs(1))
    begin = tl.program_id(1) * each
    return begin, tl.minimum(begin + each, num_tiles), gap, gap_width


@jit
def _keys(p, me):
    """The first and the last key of my rows."""
    return tl.load(p.mine.keys + me), tl.load(p.mine.keys + me + p.BLOCK_M - 1)


@jit
def _my_rows(p, me, d):
    """BLOCK_D columns of my rows, in two parts if there are."""
    high = _part(p, p.mine.parts, 0, p.num_mine, me, d, p.BLOCK_M)
    low = high
    if p.PARTS == 2:
        low = _part(p, p.mine.parts, 1, p.num_mine, me, d, p.BLOCK_M)
    return high, low


@jit
def _exponents(p, me, other, mine):
    """s / tau of a tile, as exponents of 2."""
    x = tl.zeros([p.BLOCK_M, p.BLOCK_N], p.dtype)
    if p.BLOCK_D == p.WIDTH:
        x = _add_products(p, mine, other, 0, x)
    else:
        for d in range(0, p.WIDTH, p.BLOCK_D):
            x = _add_products(p, _my_rows(p, me, d), other, d, x)
    return x


@jit
def _add_products(p, mine, other, d, x):
    """BLOCK_D columns' share of the exponents, the smallest products first."""
    high, low = mine
    theirs = tl.trans(_part(p, p.others.parts, 0, p.num_others, other, d, p.BLOCK_N))
    if p.PARTS == 2:
        low_theirs = tl.trans(_part(p, p.others.parts, 1, p.num_others, other, d, p.BLOCK_N))
        x = tl.dot(low, theirs, x)
        x = tl.dot(high, low_theirs, x)
    return tl.dot(high, theirs, x)


@jit
def _weights(p, me, other, first, last, END: tl.constexpr, KEYS: tl.constexpr):
    """W of a tile's pairs for the sums of my rows (END 0) or of the others (END 1)."""
    if p.mine.left is not None:
        mine, theirs = (p.mine.right, p.others.left) if END else (p.mine.left, p.others.right)
        weights = tl.zeros([p.BLOCK_M, p.BLOCK_N], p.dtype)
        for r in range(0, p.RANK, p.BLOCK_R):
            mine_r = _tile(mine, me, r, p.RANK, p.BLOCK_M, p.BLOCK_R)
            theirs_r = _tile(theirs, other, r, p.RANK, p.BLOCK_N, p.BLOCK_R)
            weights = tl.dot(mine_r, tl.trans(theirs_r), weights)
    elif KEYS == "one key":
        weights = _line(p, other, first, END)
    else:
        my_keys = _of_rows(p.mine.keys, me, p.BLOCK_M, 1)
        weights = tl.zeros([p.BLOCK_M, p.BLOCK_N], p.dtype)
        for key in range(first, last + 1):
            weights += (my_keys == key).to(p.dtype) * _line(p, other, key, END)
    return weights


@jit
def _line(p, other, key, END: tl.constexpr):
    """A key's line of the table, or its column (END 1), looked up by the others' keys: [1, N]."""
    lines = (p.turned if END else p.table) + tl.cast(key, tl.int64) * p.num_keys
    return tl.load(lines + _of_rows(p.others.keys, other, p.BLOCK_N, 0))


@jit
def _meets(p, me, other):
    """Whether a tile may hold pairs that are no negatives whatever their weights."""
    line = tl.cast(me // p.BLOCK_M, tl.int64) * (p.num_others // p.BLOCK_N)
    return tl.load(p.meetings + line + other // p.BLOCK_N) != 0


@jit
def _log_gaussian(of_rows, start, SIZE: tl.constexpr, AXIS: tl.constexpr, x):
    deviation = x - _of_rows(of_rows.mean, start, SIZE, AXIS)
    deviation *= _of_rows(of_rows.sharpness, start, SIZE, AXIS)
    return -deviation * deviation


@jit
def _same_graph(p, me, other):
    """Pairs that are no negatives: of one graph, or with a row that only fills up."""
    graph = _of_rows(p.others.graphs, other, p.BLOCK_N, 0)
    return (_of_rows(p.mine.graphs, me, p.BLOCK_M, 1) == graph) | (graph < 0)


@jit
def _of_rows(values, start, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """Numbers of a tile's rows, [M, 1] (AXIS 1) or [1, N]."""
    return tl.expand_dims(tl.load(values + start + tl.arange(0, SIZE)), AXIS)


@jit
def _part(p, parts, PART: tl.constexpr, num_rows, row, d, SIZE: tl.constexpr):
    """[SIZE, BLOCK_D] of one part of rows."""
    return _tile(parts, PART * num_rows + row, d, p.WIDTH, SIZE, p.BLOCK_D)


@jit
def _tile(matrix, row, column, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """[HEIGHT, WIDTH] of a wider matrix."""
    return tl.load(_at(matrix, row, column, width, HEIGHT, WIDTH))


@jit
def _store(matrix, row, column, width, values, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    tl.store(_at(matrix, row, column, width, HEIGHT, WIDTH), values)


@jit
def _at(matrix, row, column, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    corner = matrix + (tl.cast(row, tl.int64) * width + column)
    return corner + (tl.arange(0, HEIGHT)[:, None] * width + tl.arange(0, WIDTH)[None, :])
