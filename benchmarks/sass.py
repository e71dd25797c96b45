"""Read a GPU's machine code: its loops, and the instructions of those with matrix work.

Names of instructions: HMMA, HGMMA and UTCHMMA run on tensor cores, FFMA multiplies two numbers,
MUFU are powers and reciprocals, LDG loads from memory, LDGSTS from there to shared memory, LDS and
LDSM from shared memory, LDL and STL are registers that did not fit.
"""

import re
from collections import Counter
from typing import NamedTuple

from .ttir import Tile

_INSTRUCTION = re.compile(
    r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*)((?:\.[A-Z0-9_]+)*)\s*([^;]*);", re.I
)
_SHAPES = {"16816": 16 * 8 * 16, "1688": 16 * 8 * 8, "1684": 16 * 8 * 4, "16832": 16 * 8 * 32}
_ENDS = {"EXIT", "RET", "BRX", "JMX", "KILL"}
_INTEGER = {
    *("IMAD", "IADD3", "IADD", "LEA", "LOP3", "ISETP", "SEL", "SHF", "PRMT", "PLOP3", "VIADD"),
    *("IMNMX", "MOV", "IABS", "VIMNMX", "VIADDMNMX", "UIADD3", "ULEA", "ULOP3", "UIMAD", "UMOV"),
    *("USHF", "UISETP", "USEL", "R2UR", "S2R", "S2UR", "CS2R", "UPRMT", "UPLOP3", "P2R", "R2P"),
}
_FLOAT = {
    *("FMUL", "FADD", "FMNMX", "FMNMX3", "FSEL", "FSETP", "FSET", "FMUL2", "FADD2", "FCHK"),
    *("F2FP", "F2F", "I2F", "F2I", "HADD2", "HMUL2", "HFMA2", "I2FP"),
}
_WAITS = {"BAR", "WARPGROUP", "WARPSYNC", "DEPBAR", "LDGDEPBAR", "SYNCS", "WARPGROUPSET"}


class Instruction(NamedTuple):
    address: int
    conditional: bool
    name: str
    kind: str  # what follows the name, from the point on
    operands: str

    def target(self) -> int | None:
        """Where a branch goes."""
        places = re.findall(r"0x([0-9a-f]+)", self.operands)
        return int(places[-1], 16) if self.name in ("BRA", "CALL") and places else None

    def is_product(self) -> bool:
        return self.name.endswith("MMA")

    def width(self) -> int:
        """Bytes that a thread moves."""
        widths = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}
        return next((bytes_ for part, bytes_ in widths.items() if part in self.kind), 4)

    def flops(self) -> int:
        """By one warp; 0 if it does not say."""
        if self.name == "HGMMA":  # of four warps together
            shape = re.search(r"\.(\d+)x(\d+)x(\d+)", self.kind)
            sizes = [int(size) for size in shape.groups()] if shape else [0, 0, 0]
            return 2 * sizes[0] * sizes[1] * sizes[2] // 4
        if self.name == "HMMA":
            return 2 * next((n for text, n in _SHAPES.items() if f".{text}" in self.kind), 0)
        return 0


def instructions(text: str) -> list[Instruction]:
    return [
        Instruction(int(address, 16), bool(predicate), name, kind, operands)
        for address, predicate, name, kind, operands in _INSTRUCTION.findall(text)
    ]


def _ways(code: list[Instruction]) -> list[list[int]]:
    """After each instruction, those that may be next."""
    places = {one.address: number for number, one in enumerate(code)}
    ways: list[list[int]] = []
    for number, one in enumerate(code):
        target = one.target()
        goes_on = one.conditional or one.name not in _ENDS | {"BRA"}
        if one.name == "BRA" and "," in one.operands:  # a condition among the operands
            goes_on = True
        following = [number + 1] if goes_on and number + 1 < len(code) else []
        ways.append(following + [places[p] for p in (target,) if p in places])
    return ways


def _reached(start: int, ways: list[list[int]], without: int) -> set[int]:
    reached, waiting = {start}, [start]
    while waiting:
        for number in ways[waiting.pop()]:
            if number not in reached and number != without:
                reached.add(number)
                waiting.append(number)
    return reached


def loops(code: list[Instruction]) -> list[set[int]]:
    """The numbers of each loop's instructions, out of the way or not; loops within are in both."""
    ways = _ways(code)
    back: list[list[int]] = [[] for _ in code]
    for number, following in enumerate(ways):
        for other in following:
            back[other].append(number)
    found: dict[int, set[int]] = {}
    for last, following in enumerate(ways):
        for first in following:
            # A loop is entered by its first instruction alone; other ways back are only jumps.
            if first > last or (first > 0 and last in _reached(0, ways, without=first)):
                continue
            body = {first} if first == last else _reached(last, back, without=first) | {first}
            found[first] = found.get(first, set()) | body
    return list(found.values())


class Issued(NamedTuple):
    instruction: Instruction
    times: float  # by a warp for one tile
    always: bool  # or only for some tiles


Loop = list[Issued]


def tile_loops(
    code: list[Instruction], warps: int, tiles: list[Tile], *, one_tile: bool
) -> list[tuple[Tile, Loop]]:
    """The loop that goes from tile to tile, or all of the code without one; for each such loop.

    They are told from loops around them and within by how many of these there are. A program with
    ``one_tile`` has no such loop.
    """
    by_hand = not any(one.is_product() for one in code)  # without tensor cores

    def has_work(body: set[int]) -> bool:
        names = ("FFMA", "FFMA2") if by_hand else ()
        return any(code[number].is_product() or code[number].name in names for number in body)

    ways = _ways(code)
    busy = [body for body in loops(code) if has_work(body)]
    if not busy:
        return [(tile, [Issued(one, 1.0, True) for one in code]) for tile in tiles]

    if one_tile:
        innermost = [body for body in busy if not any(other < body for other in busy)]
        within = set[int]().union(*innermost)
        tile, whole = tiles[0], set(range(len(code)))
        return [(tile, _issued(code, ways, [whole, *busy], within, warps, tile))]

    def height(body: set[int]) -> int:
        return 1 + max((height(one) for one in busy if one < body), default=0)

    def depth(body: set[int]) -> int:
        return sum(body < one for one in busy)

    outermost = sorted((body for body in busy if depth(body) == 0), key=min)
    lowest = min(map(height, outermost)) if any(tile.depth == 0 for tile in tiles) else 0
    found = []
    for tile_depth in sorted({tile.depth for tile in tiles}):
        bodies = [
            body
            for body in sorted(busy, key=min)
            if depth(body) == tile_depth and (tile_depth > 0 or height(body) == lowest)
        ]
        of_depth = [tile for tile in tiles if tile.depth == tile_depth]
        for number, body in enumerate(bodies):
            tile = of_depth[min(number, len(of_depth) - 1)]
            within = set[int]().union(*(one for one in busy if one < body))
            found.append((tile, _issued(code, ways, [body], within, warps, tile)))
    return found


def _issued(
    code: list[Instruction],
    ways: list[list[int]],
    taken: list[set[int]],
    within: set[int],
    warps: int,
    tile: Tile,
) -> Loop:
    """Of the first of what is ``taken``; the others are loops in it that have a turn at least."""
    body = taken[0]
    times, turns = 1.0, float(tile.turns_within)
    of_own, of_within = (
        warps * sum(code[number].flops() for number in part) for part in (body - within, within)
    )
    if of_within:
        turns = max(1.0, (tile.flops.total() - of_own) / of_within)
    elif of_own:  # more than one tile a turn, if the loop was unrolled
        times = tile.flops.total() / of_own
    always = set[int]().union(*(_always(ways, one) for one in taken))
    return [
        Issued(
            code[number],
            times * (turns if number in within else 1.0),
            number in always or code[number].is_product(),  # of one warp for all, on some cards
        )
        for number in sorted(body)
    ]


def _always(ways: list[list[int]], body: set[int]) -> set[int]:
    """The instructions of a loop, or of all code, that no turn goes around."""
    head = min(body)
    inside = [
        [other for other in following if other in body and other != head] for following in ways
    ]
    last = [number for number in body if head in ways[number]]
    last = last or [number for number in body if not ways[number]]
    entries = Counter(other for number in body for other in inside[number])
    always: set[int] = set()
    is_always = True
    for number in sorted(body):
        before = number - 1
        runs_on = (
            number != head and entries[number] == 1 and inside[before : before + 1] == [[number]]
        )
        if not runs_on:  # the first one of a run
            reached = _reached(head, inside, without=number)
            is_always = number == head or not any(one in reached for one in last)
        if is_always:
            always.add(number)
    return always


def group(loop: Loop) -> Counter[str]:
    """Instructions of a warp for one tile, by what they do; `total` is all that are always issued.

    `for some tiles` are those that are not.
    """
    groups: dict[str, float] = {"for some tiles": 0.0}
    for one in loop:
        for name in (_group(one.instruction), "total") if one.always else ("for some tiles",):
            groups[name] = groups.get(name, 0.0) + one.times
    return Counter({name: round(count) for name, count in groups.items()})


def _group(one: Instruction) -> str:
    if one.is_product():
        return one.name
    if one.name in ("FFMA", "FFMA2", "DFMA"):
        return "FMA"
    if one.name in ("LDG", "LDGSTS"):
        return f"{one.name} {'narrow' if one.width() < 8 else 'wide'}"
    if one.name in ("MUFU", "LDS", "LDSM", "LDL", "STL"):
        return one.name
    if one.name in ("STS", "STSM"):
        return "STS"
    if one.name in _WAITS:
        return "waits"
    if one.name in _INTEGER:
        return "integers"
    return "floats" if one.name in _FLOAT else "others"


def bytes_of(loop: Loop, *names: str) -> int:
    """That such instructions of one warp move for one tile."""
    moves = [one for one in loop if one.always and one.instruction.name in names]
    return round(sum(32 * one.instruction.width() * one.times for one in moves))
