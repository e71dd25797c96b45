"""The matrix products in Triton's own intermediate languages.

One turn of a loop over other rows computes a tile: this is the innermost loop with products whose
end is known only when it runs. A tile has the shape of its first product, as the similarity of
pairs comes first.
"""

import math
import re
from collections import Counter
from typing import NamedTuple

_CONSTANT = re.compile(r"(%[\w.#]+) = arith\.constant (-?\d+) : i\d+")
_FOR = re.compile(r"scf\.for \S+ = (%[\w.#]+) to (%[\w.#]+) step (%[\w.#]+)")
_DOT = re.compile(r"(?:= |^\s*)(tt\.dot\w*|ttng\.warp_group_dot|ttng\.tc_gen5_mma\w*) ")
_TENSOR = re.compile(r"(?:tensor|memdesc)<((?:\d+x)+)(\w+)(?:, (#\w+))?")
_PLACE = re.compile(r"\s+loc\(#\w+\)\s*$")
_MANY = {"tf32x3": 3, "bf16x3": 3, "bf16x6": 6}  # products that one is made of


class Product(NamedTuple):
    rows: int
    columns: int
    depth: int
    operands: str  # their type
    how: str  # the operation, with the layout of its result where that tells more


class Tile(NamedTuple):
    shape: tuple[int, int]
    inner: int  # how many numbers its first product adds up
    flops: Counter[str]  # by the type of the operands
    depth: int  # how many loops there are around its own
    turns_within: int  # of the loops within that have products, where there are any


def products(text: str) -> list[Product]:
    """All of them, as in any of the two languages."""
    lines = (_PLACE.sub("", line) for line in text.splitlines())
    return [_product(line, how[1]) for line in lines if (how := _DOT.search(line))]


def _product(line: str, how: str) -> Product:
    _, _, types = line.rpartition(" : ")
    shapes = [  # the operands', and where it is named, the result's
        ([int(length) for length in dims.split("x")[:-1]], dtype, layout)
        for dims, dtype, layout in _TENSOR.findall(types)
    ]
    (left, dtype, _), (right, *_), *_ = shapes
    layout = re.sub(r"\W|\d+$", "", shapes[-1][2])
    how = f"{how} {layout}" if how == "tt.dot" and layout else how
    return Product(left[-2], right[-1], left[-1], dtype, how)


def tiles(text: str) -> list[Tile]:
    """Of a kernel in the language's first form, in which no loop has been pipelined yet."""
    constants = {name: int(value) for name, value in _CONSTANT.findall(text)}
    around: list[tuple[int, int]] = []  # of each line, its braces: where, and a loop's turns
    found: dict[tuple[int, int], list[tuple[Product, str, int]]] = {}
    for number, line in enumerate(text.splitlines()):
        body = _PLACE.sub("", line)
        if body.lstrip().startswith("}"):
            around.pop()
        if body.endswith("{"):
            around.append((number, _turns(body, constants)))
        if how := _DOT.search(line):
            open_ended = [place for place, turns in around if turns == 0]
            loop = open_ended[-1] if open_ended else -1
            within = math.prod(turns for place, turns in around if place > loop)
            named = re.search(r"inputPrecision = (\w+)", line)
            product = _product(body, how[1]), named[1] if named else "", within
            found.setdefault((loop, max(0, len(open_ended) - 1)), []).append(product)
    return [_tile(depth, of_loop) for (_, depth), of_loop in found.items()]


def _tile(depth: int, found: list[tuple[Product, str, int]]) -> Tile:
    flops: Counter[str] = Counter()
    for product, precision, within in found:
        times = within * _MANY.get(precision, 1)
        operands = "bf16" if precision.startswith("bf16") else product.operands
        flops[operands] += 2 * product.rows * product.columns * product.depth * times
    first = found[0][0]
    turns_within = max(within for _, _, within in found)
    return Tile((first.rows, first.columns), first.depth, flops, depth, turns_within)


def _turns(line: str, constants: dict[str, int]) -> int:
    """Of a loop, 0 where only known when it runs; 1 of any other braces."""
    loop = _FOR.search(line)
    if loop is None:
        return 0 if "scf.while" in line else 1
    bounds = [constants.get(name) for name in loop.groups()]
    if None in bounds:
        return 0
    start, stop, step = (bound or 0 for bound in bounds)
    return max(1, math.ceil((stop - start) / max(1, step)))
