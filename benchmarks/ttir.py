"""The matrix products in Triton's own intermediate languages.

A tile is what one turn of the outermost loop with products computes: the shape of its first
product, as the similarity of pairs comes before all that is made of it.
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
    flops: Counter[str]  # by the type of the operands
    turns_within: int  # of the loops within that have products, where there are any

    def pairs(self) -> int:
        return math.prod(self.shape)


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


def tile(text: str) -> Tile:
    """Of a kernel in the language's first form, in which no loop has been pipelined yet."""
    constants = {name: int(value) for name, value in _CONSTANT.findall(text)}
    turns: list[int] = []  # of the loops around the current line; 0 for any other braces
    found: list[tuple[Product, str, tuple[int, ...]]] = []
    for line in text.splitlines():
        body = _PLACE.sub("", line)  # of the source
        if body.lstrip().startswith("}"):
            turns.pop()
        if body.endswith("{"):
            turns.append(_turns(body, constants))
        if how := _DOT.search(line):
            named = re.search(r"inputPrecision = (\w+)", line)
            inner = tuple(one for one in turns if one)[1:]  # the first one goes from tile to tile
            found.append((_product(body, how[1]), named[1] if named else "", inner))
    if not found:
        return Tile((0, 0), Counter(), 1)
    flops: Counter[str] = Counter()
    within = 1
    for product, precision, inner in found:
        times = _MANY.get(precision, 1)
        once = 2 * product.rows * product.columns * product.depth
        operands = "bf16" if times > 1 and precision.startswith("bf16") else product.operands
        flops[operands] += once * times * math.prod(inner)
        within = max(within, math.prod(inner))
    first = found[0][0]
    return Tile((first.rows, first.columns), flops, within)


def _turns(line: str, constants: dict[str, int]) -> int:
    """Of a loop; 1 if only known when it runs, 0 if it is none."""
    loop = _FOR.search(line)
    if loop is None:
        return 1 if "scf.while" in line or "scf.for" in line else 0
    bounds = [constants.get(name) for name in loop.groups()]
    if None in bounds:
        return 1
    start, stop, step = (bound or 0 for bound in bounds)
    return max(1, math.ceil((stop - start) / max(1, step)))
