# Neither the package triton nor what its decorators leave behind has type hints.
# mypy: disable-error-code="import-untyped, import-not-found"
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"
"""The fused kernels. What they are given is in `launch.py`.

Tiles have shape [I, J]: BLOCK_I of my embeddings, from number `i` on, and BLOCK_J of the others,
from number `j` on.
"""

import triton.language as tl
from triton import jit


@jit
def _forward_kernel(p, sums, totals):
    """The sums of a block of my embeddings over one split of the others."""
    i = tl.program_id(0) * p.BLOCK_I
    if p.table is None:
        of_block, totals_of_block = _sums(p, i, 0, 0, "any")
    else:
        first, last = _keys(p, i)
        if first == last:
            of_block, totals_of_block = _sums(p, i, first, last, "one key")
        else:
            of_block, totals_of_block = _sums(p, i, first, last, "some keys")
    at = tl.program_id(1) * p.num_mine + i + tl.arange(0, p.BLOCK_I)
    tl.store(sums + at, of_block)
    if totals is not None:
        tl.store(totals + at, totals_of_block)


@jit
def _sums(p, i, first, last, KEYS: tl.constexpr):
    """Sums, or log2 of them where they might overflow; and the totals of the pair weight."""
    sums = tl.zeros([p.BLOCK_I], p.dtype)
    totals = sums
    peaks = sums - float("inf")
    mine = _my_columns(p, i, 0)
    begin, end, gap, gap_width = _my_tiles(p, first, KEYS)
    for number in range(begin, end):
        tile = number + tl.where(number < gap, 0, gap_width)
        j = tile * p.BLOCK_J
        is_masked = _is_masked(p, i, tile)
        weights = 1.0
        if p.table is not None:  # on their way while tensor cores are busy
            weights = _weights(p, i, j, first, last, False, KEYS)
        x = _exponents(p, i, j, mine)
        if p.mine.left is not None:
            weights = _weights(p, i, j, first, last, False, KEYS)
        if p.mine.mean is not None:
            log_gaussian = _log_gaussian(p.mine, i, p.BLOCK_I, 1, x)
            gaussian = tl.exp2(log_gaussian)
            if is_masked:
                fills_up = _of_each(p.others.items, j, p.BLOCK_J, 0) < 0
                gaussian = tl.where(fills_up, 0.0, gaussian)
            totals += tl.sum(gaussian, 1)
            x += log_gaussian
        if p.PEAKS:
            x = tl.where(weights == 0, -float("inf"), x)
            if is_masked:
                x = tl.where(_are_masked(p, i, j), -float("inf"), x)
            highest = tl.maximum(peaks, tl.max(x, 1))
            finite = tl.where(highest == -float("inf"), 0.0, highest)
            sums *= tl.exp2(peaks - finite)
            peaks = highest
            terms = tl.exp2(x - finite[:, None])
        else:
            terms = tl.exp2(x)
            if is_masked:
                terms = tl.where(_are_masked(p, i, j), 0.0, terms)
        sums += tl.sum(terms * weights, 1)
    if p.PEAKS:
        sums = peaks + tl.log2(tl.where(sums == 0, 1.0, sums))
    return sums, totals


@jit
def _backward_kernel(p, known, d_mine):
    """The gradient that a block of my embeddings gets from one split of the others."""
    i = tl.program_id(0) * p.BLOCK_I
    if p.table is None:
        gradient = _gradient(p, known, i, 0, 0, "any")
    else:
        first, last = _keys(p, i)
        if first == last:
            gradient = _gradient(p, known, i, first, last, "one key")
        else:
            gradient = _gradient(p, known, i, first, last, "some keys")
    row = tl.program_id(1) * p.num_mine + i
    _store(d_mine, row, 0, p.WIDTH, gradient, p.BLOCK_I, p.WIDTH)


@jit
def _gradient(p, known, i, first, last, KEYS: tl.constexpr):
    gradient = tl.zeros([p.BLOCK_I, p.WIDTH], p.dtype)
    mine = _my_columns(p, i, 0)
    begin, end, gap, gap_width = _my_tiles(p, first, KEYS)
    for number in range(begin, end):
        tile = number + tl.where(number < gap, 0, gap_width)
        is_masked = _is_masked(p, i, tile)
        d_pairs = _d_pairs(p, known, i, tile * p.BLOCK_J, first, last, mine, is_masked, KEYS)
        high, low = _split(d_pairs, p)
        gradient = _add_product(p, high, low, tile * p.BLOCK_J, 0, gradient)
    return gradient


@jit(do_not_specialize=["first_block"])
def _d_pairs_kernel(p, known, d_pairs, first_block, height):
    """The gradients of pairs, in parts: one tile of some blocks of my embeddings."""
    block = tl.program_id(1)
    i = (first_block + block) * p.BLOCK_I
    tile = tl.program_id(0)
    j = tile * p.BLOCK_J
    mine = _my_columns(p, i, 0)
    is_masked = _is_masked(p, i, tile)
    if p.table is None:
        of_tile = _d_pairs(p, known, i, j, 0, 0, mine, is_masked, "any")
    else:
        first, last = _keys(p, i)
        of_tile = _d_pairs(p, known, i, j, first, last, mine, is_masked, "some keys")
    row = block * p.BLOCK_I
    high, low = _split(of_tile, p)
    _store(d_pairs, row, j, p.num_others, high, p.BLOCK_I, p.BLOCK_J)
    if p.PARTS == 2:
        _store(d_pairs, height + row, j, p.num_others, low, p.BLOCK_I, p.BLOCK_J)


@jit
def _multiply_kernel(p, d_pairs, gradients, height):
    """Those of one split of the others, multiplied by some columns of their embeddings."""
    row = tl.program_id(0) * p.BLOCK_I
    d = tl.program_id(1) * p.BLOCK_D
    gradient = tl.zeros([p.BLOCK_I, p.BLOCK_D], p.dtype)
    each = tl.cdiv(p.num_others // p.BLOCK_J, tl.num_programs(2)) * p.BLOCK_J
    begin = tl.program_id(2) * each
    for j in range(begin, tl.minimum(begin + each, p.num_others), p.BLOCK_J):
        high = _tile(d_pairs, row, j, p.num_others, p.BLOCK_I, p.BLOCK_J)
        low = high
        if p.PARTS == 2:
            low = _tile(d_pairs, height + row, j, p.num_others, p.BLOCK_I, p.BLOCK_J)
        gradient = _add_product(p, high, low, j, d, gradient)
    row += tl.program_id(2) * height
    _store(gradients, row, d, p.WIDTH, gradient, p.BLOCK_I, p.BLOCK_D)


@jit
def _split(values, p):
    """Numbers as sums of two parts, of which the second may not be asked for."""
    high = values.to(p.others.parts.dtype.element_ty)
    return high, (values - high.to(values.dtype)).to(high.dtype)


@jit
def _add_product(p, high, low, j, d, gradient):
    """What pairs give, in two parts, times BLOCK_D columns of the others."""
    others = _part(p, p.others.parts, 0, p.num_others, j, d, p.BLOCK_J)
    if p.PARTS == 2:
        low_others = _part(p, p.others.parts, 1, p.num_others, j, d, p.BLOCK_J)
        gradient = tl.dot(low, others, gradient)
        gradient = tl.dot(high, low_others, gradient)
    return tl.dot(high, others, gradient)


@jit
def _d_pairs(p, known, i, j, first, last, mine, is_masked, KEYS: tl.constexpr):
    """What each pair of a tile gives: the gradient by its exponent of both embeddings' sums."""
    d_i = _of_each(known.d_sums, i, p.BLOCK_I, 1)
    d_j = _of_each(known.d_sums_of_others, j, p.BLOCK_J, 0)
    if KEYS == "some keys" and not p.APART:  # of both at once, in half the registers
        my_keys = _of_each(p.mine.keys, i, p.BLOCK_I, 1)
        weighted = tl.zeros([p.BLOCK_I, p.BLOCK_J], p.dtype)
        for key in range(first, last + 1):
            is_mine = (my_keys == key).to(p.dtype)
            weighted += is_mine * d_i * _table_row(p, j, key, False)
            weighted += is_mine * (d_j * _table_row(p, j, key, True))
        x = _exponents(p, i, j, mine)
        d_pairs = weighted * tl.exp2(x)
    else:
        if p.table is not None:  # on their way while tensor cores are busy
            d_i *= _weights(p, i, j, first, last, False, KEYS)
            d_j *= _weights(p, i, j, first, last, True, KEYS)
        x = _exponents(p, i, j, mine)
        if p.mine.left is not None:
            d_i *= _weights(p, i, j, first, last, False, KEYS)
            d_j *= _weights(p, i, j, first, last, True, KEYS)
        if p.APART:
            log_i = x - _of_each(known.log_sums, i, p.BLOCK_I, 1)
            log_j = x - _of_each(known.log_sums_of_others, j, p.BLOCK_J, 0)
            if p.mine.mean is not None:
                log_i += _log_gaussian(p.mine, i, p.BLOCK_I, 1, x)
                log_j += _log_gaussian(p.others, j, p.BLOCK_J, 0, x)
            # What is left out may be larger than all that is in.
            d_pairs = tl.where(d_i == 0, 0.0, d_i * tl.exp2(log_i))
            d_pairs += tl.where(d_j == 0, 0.0, d_j * tl.exp2(log_j))
        else:
            d_pairs = (d_i + d_j) * tl.exp2(x)
    if is_masked:
        d_pairs = tl.where(_are_masked(p, i, j), 0.0, d_pairs)
    return d_pairs


@jit
def _my_tiles(p, key, KEYS: tl.constexpr):
    """The run of tiles of this split, without a gap; the gap's start and width."""
    num_tiles = p.num_others // p.BLOCK_J
    gap = num_tiles
    gap_width = 0
    if KEYS == "one key" and p.skipped is not None:
        gap = tl.cdiv(tl.load(p.skipped + 2 * key), p.BLOCK_J)
        gap_width = tl.maximum(tl.load(p.skipped + 2 * key + 1) // p.BLOCK_J - gap, 0)
    num_tiles -= gap_width
    each = tl.cdiv(num_tiles, tl.num_programs(1))
    begin = tl.program_id(1) * each
    return begin, tl.minimum(begin + each, num_tiles), gap, gap_width


@jit
def _is_masked(p, i, tile):
    """Whether a tile may hold pairs that are no negatives whatever their weights."""
    is_masked = tile >= 0
    if p.masked is not None:
        width = tl.cdiv(p.num_others // p.BLOCK_J, p.RUN)
        row = tl.cast(i // p.BLOCK_I, tl.int64) * width
        is_masked = tl.load(p.masked + row + tile // p.RUN) != 0
    return is_masked


@jit
def _keys(p, i):
    """The first and the last key of a block."""
    return tl.load(p.mine.keys + i), tl.load(p.mine.keys + i + p.BLOCK_I - 1)


@jit
def _my_columns(p, i, d):
    """BLOCK_D columns of my embeddings, in two parts if there are."""
    high = _part(p, p.mine.parts, 0, p.num_mine, i, d, p.BLOCK_I)
    low = high
    if p.PARTS == 2:
        low = _part(p, p.mine.parts, 1, p.num_mine, i, d, p.BLOCK_I)
    return high, low


@jit
def _exponents(p, i, j, mine):
    """s / tau of a tile, as exponents of 2."""
    x = tl.zeros([p.BLOCK_I, p.BLOCK_J], p.dtype)
    if p.BLOCK_D == p.WIDTH:
        x = _add_products(p, mine, j, 0, x)
    else:
        for d in range(0, p.WIDTH, p.BLOCK_D):
            x = _add_products(p, _my_columns(p, i, d), j, d, x)
    return x


@jit
def _add_products(p, mine, j, d, x):
    """What BLOCK_D columns add to the exponents, the smallest products first."""
    high, low = mine
    others = tl.trans(_part(p, p.others.parts, 0, p.num_others, j, d, p.BLOCK_J))
    if p.PARTS == 2:
        low_others = tl.trans(_part(p, p.others.parts, 1, p.num_others, j, d, p.BLOCK_J))
        x = tl.dot(low, others, x)
        x = tl.dot(high, low_others, x)
    return tl.dot(high, others, x)


@jit
def _weights(p, i, j, first, last, TRANSPOSED: tl.constexpr, KEYS: tl.constexpr):
    """W_ij of a tile; or W_ji, for the sums of the others."""
    if p.mine.left is not None:
        of_i, of_j = p.mine.left, p.others.right
        if TRANSPOSED:
            of_i, of_j = p.mine.right, p.others.left
        weights = tl.zeros([p.BLOCK_I, p.BLOCK_J], p.dtype)
        for r in range(0, p.FACTORS, p.BLOCK_R):
            some_of_i = _tile(of_i, i, r, p.FACTORS, p.BLOCK_I, p.BLOCK_R)
            some_of_j = _tile(of_j, j, r, p.FACTORS, p.BLOCK_J, p.BLOCK_R)
            weights = tl.dot(some_of_i, tl.trans(some_of_j), weights)
    elif KEYS == "one key":
        weights = _table_row(p, j, first, TRANSPOSED)
    else:
        my_keys = _of_each(p.mine.keys, i, p.BLOCK_I, 1)
        weights = tl.zeros([p.BLOCK_I, p.BLOCK_J], p.dtype)
        for key in range(first, last + 1):
            weights += (my_keys == key).to(p.dtype) * _table_row(p, j, key, TRANSPOSED)
    return weights


@jit
def _table_row(p, j, key, TRANSPOSED: tl.constexpr):
    """A key's row of the table, or its column, looked up by the others' keys: [1, J]."""
    table = p.transposed if TRANSPOSED else p.table
    row = table + tl.cast(key, tl.int64) * p.num_keys
    return tl.load(row + _of_each(p.others.keys, j, p.BLOCK_J, 0))


@jit
def _log_gaussian(of, start, SIZE: tl.constexpr, AXIS: tl.constexpr, x):
    deviation = x - _of_each(of.mean, start, SIZE, AXIS)
    deviation *= _of_each(of.sharpness, start, SIZE, AXIS)
    return -deviation * deviation


@jit
def _are_masked(p, i, j):
    """Pairs that are no negatives: of one item, or with an embedding that only fills up."""
    item = _of_each(p.others.items, j, p.BLOCK_J, 0)
    return (_of_each(p.mine.items, i, p.BLOCK_I, 1) == item) | (item < 0)


@jit
def _of_each(values, start, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """Numbers of a tile's embeddings, [I, 1] (AXIS 1) or [1, J]."""
    return tl.expand_dims(tl.load(values + start + tl.arange(0, SIZE)), AXIS)


@jit
def _part(p, parts, PART: tl.constexpr, count, row, d, SIZE: tl.constexpr):
    """[SIZE, BLOCK_D] of one part of embeddings."""
    return _tile(parts, PART * count + row, d, p.WIDTH, SIZE, p.BLOCK_D)


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
