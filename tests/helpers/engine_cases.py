"""Random pairs for engines: sets of any lengths, items, a memory, and weights of every kind."""

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from pgcl_losses.engine.pair_weights import Factors, Gaussian, Table
from pgcl_losses.engine.pairs import NO_ITEM, Pairs


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
def any_pairs(draw):
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    random = functools.partial(torch.rand, generator=generator, dtype=torch.float64)

    def number(below, *shape):
        return torch.randint(below, shape, generator=generator)

    lengths = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    lengths = lengths if sum(lengths) else (1,)
    has_items = draw(st.booleans())
    if not has_items or draw(st.booleans()):
        lengths = (draw(st.integers(1, 4)),) * len(lengths)
    m, size = sum(lengths), draw(st.sampled_from([0, 0, 1, 7]))
    of_memory = draw(st.sampled_from([None, number(2, size) == 0, number(1, size) > 0]))
    filled = None
    if size and of_memory is not None:
        filled = torch.cat([torch.ones(m, dtype=torch.bool), of_memory])
    items = draw(st.sampled_from([number(3, m + size), 2**60 + number(50, m + size)]))
    if size > 0 and draw(st.booleans()):
        items[m:] = NO_ITEM

    def log_table(size):
        table = random(size, size)
        return table.masked_fill(random(size, size) < 0.3, 0.0).log()

    sizes = draw(st.sampled_from([(1,), (4,), (30,), (3, 5, 2)]))
    tables = tuple([log_table(of_head) for of_head in sizes])
    table = Table(tables, torch.stack([number(of_head, m + size) for of_head in sizes], dim=1))
    excluding = Table((torch.log(1 - torch.eye(4).double()),), number(4, m + size, 1))
    left, right = (random(m + size, 3) * (random(m + size, 3) > 0.3) for _ in range(2))
    mean, variance = random(m + size) - 0.5, random(m + size) + 0.05
    of_pairs = [Gaussian(mean, variance), Beta(random(m + size), random(m + size))]
    kinds = [(table, None), (excluding, None), (Factors(left, right), None)]
    kinds += [(None, of_pairs[0]), (table, of_pairs[1]), (Factors(left, right), of_pairs[0])]
    weights, pair_weight = draw(st.sampled_from([(None, None)] * 4 + kinds))
    is_plain = weights is None and pair_weight is None
    is_unit = not is_plain or draw(st.booleans())
    first_queries = draw(st.booleans()) and lengths[0] > 0
    positives = positive_weights = None
    if m > 1 and draw(st.booleans()):
        query = number(lengths[0] if first_queries else m, 9)
        positives = torch.stack([query, (query + 1 + number(m - 1, 9)) % m])
        # The derivative by a weight of 0 is a multiple of e^x / E, which dot products make inf.
        positive_weights = random(9) * ((random(9) > 0.3) | (not is_unit))
    names = ["all", "cross", "memory"]
    negative_pairs, negatives = (
        None,
        draw(st.sampled_from([*names, "given"] if is_plain else names)),
    )
    if negatives == "given":
        query = number(lengths[0] if first_queries else m, 12 * (m > 1))
        negative_pairs = torch.stack([query, (query + 1 + number(max(1, m - 1), len(query))) % m])
    unit = F.normalize if is_unit else lambda z: 5 * z
    return Pairs(
        unit(random(m, 3) - 0.5),
        lengths,
        negatives,
        items if has_items else None,
        unit(random(size, 3) - 0.5) if size else None,
        filled,
        weights,
        pair_weight,
        draw(st.sampled_from([0.0, 0.5, 3.0])) if is_plain else 0.0,
        is_unit,
        first_queries,
        positives,
        positive_weights,
        negative_pairs,
    )
