"""Random pairs for engines: sets of any lengths, items, a memory, and weights of every kind."""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from pgcl_losses.engine.pairs import NO_ITEM, Factors, Gaussian, Pairs, Table


class Beta(NamedTuple):
    """A pair weight that no engine was written for: (1 + s)^a (1 - s)^b, a mixture's component."""

    a: Tensor  # [M + B]
    b: Tensor

    def numbers(self, scale):
        return self.a, self.b, torch.full_like(self.a, 1 / scale)

    def formula(self, scaled, *numbers, out=None):
        a, b, unit = numbers
        cosines = scaled * unit
        return torch.add(a * (1.1 + cosines).log2(), b * (1.1 - cosines).log2(), out=out)


@st.composite
def any_pairs(draw, factors=True, by_index=True):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    random = functools.partial(torch.rand, generator=generator, dtype=torch.float64)

    def number(below, *shape):
        return torch.randint(below, shape, generator=generator)

    lengths = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    if draw(st.booleans()):
        lengths = (draw(st.integers(1, 4)),) * len(lengths)
    lengths = lengths if sum(lengths) else (1,)
    m, past = sum(lengths), draw(st.sampled_from([0, 0, 1, 7]))
    of_past = draw(st.sampled_from([None, number(2, past) == 0, number(1, past) > 0]))
    present = None
    if past and of_past is not None:
        present = torch.cat([torch.ones(m, dtype=torch.bool), of_past])
    items = draw(st.sampled_from([None, number(3, m + past), 2**60 + number(50, m + past)]))
    if items is not None and past > 0 and draw(st.booleans()):
        items[m:] = NO_ITEM

    def log_table(size):
        table = random(size, size)
        return table.masked_fill(random(size, size) < 0.3, 0.0).log()

    sizes = draw(st.sampled_from([(1,), (4,), (30,), (3, 5, 2)]))
    tables = tuple([log_table(size) for size in sizes])
    table = Table(tables, torch.stack([number(size, m + past) for size in sizes], dim=1))
    excluding = Table((torch.log(1 - torch.eye(4).double()),), number(4, m + past, 1))
    left, right = (random(m + past, 3) * (random(m + past, 3) > 0.3) for _ in range(2))
    kinds = [None, table, excluding, *([Factors(left, right)] if factors else [])]
    mean, variance = random(m + past) - 0.5, random(m + past) + 0.05
    pair_weights = [None, Gaussian(mean, variance), Beta(random(m + past), random(m + past))]
    first_queries = draw(st.booleans()) and lengths[0] > 0
    listed = number(lengths[0] if first_queries else m, 9), number(m, 9)
    listed = listed[0].sort().values, listed[1]
    return Pairs(
        F.normalize(random(m, 3) - 0.5),
        lengths,
        draw(st.sampled_from(["all", "cross", "memory"])),
        items,
        F.normalize(random(past, 3) - 0.5) if past else None,
        present,
        draw(st.sampled_from(kinds)),
        draw(st.sampled_from(pair_weights)),
        first_queries,
        listed if by_index and draw(st.booleans()) else None,
    )
