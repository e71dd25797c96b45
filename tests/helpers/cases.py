"""Random sets of embeddings, items, positives and weights, and the options that choose pairs."""

import functools
import math
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from helpers.losses import DIM, of_seed
from helpers.marks import NEGATIVES
from pgcl_losses.contrast import WEIGHTINGS
from pgcl_losses.engine import pairs as pairs_module
from pgcl_losses.engine.pair_weights import Factors, Gaussian, Table
from pgcl_losses.engine.pairs import NO_ITEM, Pairs

# What decides which pairs count and how much: every combination.
EVERY_MODE = [
    {"weighting": weighting, "exclude_same_cluster": exclude, "negatives": negatives}
    for weighting in WEIGHTINGS
    for exclude in (True, False)
    for negatives in NEGATIVES
]
# The rest of the family, one of each kind.
FAMILY: list[dict[str, Any]] = [
    {"num_prototypes": (3, 5)},
    {"num_prototypes": 4, "negative_ranks": (1, 3)},
    {"num_prototypes": 4, "soft_clusters": True},
    {"num_prototypes": (3, 5), "negative_ranks": (0, 2), "exclude_same_cluster": False},
    {"num_prototypes": (3, 5, 4), "negative_ranks": (1, 3), "soft_clusters": True},
]
NUMBERS = (0, 1, 2, -2, -3, 2**40, 2**40 + 1, 1 - 2**63, 2**63 - 1)
ENGINES = st.sampled_from(["dense", "blocks"])
BLOCKS = st.sampled_from([1, 3, 640])


def in_blocks(size):
    """The engine of blocks with blocks of another size than its own, on every device."""
    return mock.patch.multiple(pairs_module, _BLOCK=size, _BLOCK_ELSEWHERE=size)


def random_sets(lengths, seed=0, num_items=4):
    """Embeddings ``[N_a, D]`` of each set, as leaves with gradient, and their items ``[N_a]``."""
    random = of_seed(seed)
    numbers = torch.tensor(NUMBERS)[torch.randperm(len(NUMBERS), generator=random)[:num_items]]
    sets, items = [], []
    for length in lengths:
        embeddings = torch.randn(length, DIM, dtype=torch.float64, generator=random)
        sets.append(embeddings.requires_grad_())
        items.append(numbers[torch.randint(len(numbers), (length,), generator=random)])
    return sets, items


def listed(pairs, weights=None):
    """Positives by index as the oracle takes them."""
    if pairs is None:
        return ()
    weights = torch.ones(pairs.shape[1]) if weights is None else weights
    return [(a, b, w) for (a, b), w in zip(pairs.T.tolist(), weights, strict=True)]


def as_lists(items):
    return None if items is None else [of_set.tolist() for of_set in items]


def upstream(losses):
    """A scalar to which every loss contributes its own factor."""
    return losses.view(-1) @ torch.linspace(2, -1, losses.numel(), dtype=losses.dtype)


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
    """What an engine gets: sets of any lengths, items, a memory, and weights of every kind."""
    generator = of_seed(draw(st.integers(0, 10**6)))
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
    num_queries = lengths[0] if first_queries else m

    def pairs(count):
        query = number(num_queries, count * (m > 1))
        return torch.stack([query, (query + 1 + number(max(1, m - 1), len(query))) % m])

    positives = positive_weights = negative_pairs = None
    if m > 1 and draw(st.booleans()):
        positives = pairs(9)
        # The derivative by a weight of 0 is a multiple of e^x / E, which dot products make inf.
        positive_weights = random(9) * ((random(9) > 0.3) | (not is_unit))
    negatives = draw(st.sampled_from(["all", "cross", "memory", *["given"] * is_plain]))
    if negatives == "given":
        negative_pairs = pairs(12)
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


def for_oracle(pairs, embeddings, positive_weights):
    """The same as arguments of ``oracle.info_nce``, without empty slots of the memory."""
    count, num_memory = len(embeddings), pairs.size_of_memory()
    filled = torch.arange(count + num_memory)
    if pairs.filled is not None:
        filled = filled[pairs.filled]
    slots = filled[count:]
    weights = weights_of(pairs)[:, filled]
    if pairs.pair_weight is not None:
        cosines = pairs.embeddings @ pairs.keys()[filled].T
        numbers = [of_each[:count, None] for of_each in pairs.pair_weight.numbers(1.0)]
        by_cosine = (pairs.pair_weight.formula(cosines, *numbers) * math.log(2)).softmax(1)
        weights = weights * by_cosine * len(filled)
    items, memory_items = None, None
    if pairs.items is not None:
        items = as_lists(pairs.items[:count].split(pairs.lengths))
        memory_items = pairs.items[slots].tolist()
    return {
        "sets": embeddings.split(pairs.lengths),
        "items": items,
        "memory": None if pairs.memory is None else pairs.memory[slots - count],
        "memory_items": memory_items,
        "negatives": pairs.negatives,
        "hardness": pairs.hardness,
        "weights": weights,
        "queries": "first" if pairs.first_queries else "all",
        "similarity": "dot",  # they are normalised already
        "listed": listed(pairs.positives, positive_weights),
        "negative_pairs": as_lists(() if pairs.negative_pairs is None else pairs.negative_pairs.T),
    }


def weights_of(pairs):
    """Of a table or of factors, ``[M, M + B]``."""
    weights, count = pairs.weights, len(pairs.embeddings)
    if isinstance(weights, Table):
        of_heads = zip(weights.log_weights, weights.clusters.T, strict=True)
        each = [log_w[clusters[:count, None], clusters].exp() for log_w, clusters in of_heads]
        return sum(each) / len(each)
    if isinstance(weights, Factors):
        return weights.left[:count] @ weights.right.T
    return pairs.embeddings.new_ones(count, len(pairs.keys()))
