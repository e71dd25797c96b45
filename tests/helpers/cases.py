"""Random sets of embeddings, labels, positives and weights, and the options that choose pairs."""

import functools
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor

from helpers.losses import DIM, of_seed
from helpers.marks import NEGATIVES
from helpers.score_mods import SCORE_MODS, random_metadata
from pgcl_losses.contrast import WEIGHTINGS
from pgcl_losses.pairs import chunks, lists, partners, rows
from pgcl_losses.pairs.rows import NO_LABEL, Listed, Pairs
from pgcl_losses.pairs.weights import Gaussian, Table, mean_of_one

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
    {"num_prototypes": (3, 5, 4), "exclude_same_cluster": False},
]
NUMBERS = (0, 1, 2, -2, -3, 2**40, 2**40 + 1, 1 - 2**63, 2**63 - 1)


class Way(NamedTuple):
    """A way to compute a loss: the option `engine`, and how many pairs a chunk has."""

    engine: str
    chunk: int = 1 << 19


# A small batch is not cut into chunks unless they are smaller.
DENSE, NOT_CUT, CUT = Way("dense"), Way("chunks"), Way("chunks", 20)
WAYS = st.sampled_from([DENSE, NOT_CUT, CUT, Way("chunks", 1)])


def in_chunks(pairs):
    """Chunks of another number of pairs than their own, on every device."""
    return mock.patch.dict(chunks._CHUNK_SIZES, cpu=pairs, other=pairs)


def random_sets(lengths, seed=0, num_labels=4):
    """Embeddings ``[N_a, D]`` of each set, as leaves with gradient, and their labels ``[N_a]``."""
    random = of_seed(seed)
    numbers = torch.tensor(NUMBERS)[torch.randperm(len(NUMBERS), generator=random)[:num_labels]]
    sets, labels = [], []
    for length in lengths:
        embeddings = torch.randn(length, DIM, dtype=torch.float64, generator=random)
        sets.append(embeddings.requires_grad_())
        labels.append(numbers[torch.randint(len(numbers), (length,), generator=random)])
    return sets, labels


def listed(pairs, weights=None):
    """Positives by index as the oracle takes them."""
    if pairs is None:
        return None
    weights = torch.ones(pairs.shape[1]) if weights is None else weights
    return [(a, b, w) for (a, b), w in zip(pairs.T.tolist(), weights, strict=True)]


def are_apart(lengths, query, key):
    """Whether queries and keys lie in different sets."""
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return number[query] != number[key]


def as_lists(labels):
    return None if labels is None else [of_set.tolist() for of_set in labels]


def upstream(losses):
    """A scalar to which every loss contributes its own factor."""
    return losses.view(-1) @ torch.linspace(2, -1, losses.numel(), dtype=losses.dtype)


class Beta(NamedTuple):
    """A pair weight that no engine was written for: (1 + s)^a (1 - s)^b, a mixture's component."""

    a: Tensor  # [M + B]
    b: Tensor

    def log_weights(self, i, cosines):
        a, b = self.a[i].unsqueeze(1), self.b[i].unsqueeze(1)
        return a * (1.1 + cosines).log() + b * (1.1 - cosines).log()

    def rows(self, pick, scores, temperature, filled):
        i, _ = pick(torch.arange(len(self.a)))
        return mean_of_one(self.log_weights(i, scores * temperature), filled)


class Problem(NamedTuple):
    """What an engine gets."""

    z: Tensor  # [M, D]
    pairs: Pairs
    positive_weights: Tensor | None  # [P]


@st.composite
def any_pairs(draw):
    """Sets of any lengths, labels, listed pairs, a memory, weights of every kind, score_mods."""
    generator = of_seed(draw(st.integers(0, 10**6)))
    random = functools.partial(torch.rand, generator=generator, dtype=torch.float64)

    def number(below, *shape):
        return torch.randint(below, shape, generator=generator)

    lengths = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    lengths = lengths if sum(lengths) else (1,)
    has_labels = draw(st.booleans())
    if not has_labels or draw(st.booleans()):
        lengths = (draw(st.integers(1, 4)),) * len(lengths)
    m, size = sum(lengths), draw(st.sampled_from([0, 0, 1, 7]))
    of_memory = draw(st.sampled_from([None, number(2, size) == 0, number(1, size) > 0]))
    filled = None
    if size and of_memory is not None:
        filled = torch.cat([torch.ones(m, dtype=torch.bool), of_memory])
    labels = draw(st.sampled_from([number(3, m + size), 2**60 + number(50, m + size)]))
    if size > 0 and draw(st.booleans()):
        labels[m:] = NO_LABEL

    def log_table(size):
        table = random(size, size)
        return table.masked_fill(random(size, size) < 0.3, 0.0).log()

    sizes = draw(st.sampled_from([(1,), (4,), (30,), (3, 5, 2)]))
    tables = tuple([log_table(of_head) for of_head in sizes])
    table = Table(tables, torch.stack([number(of_head, m + size) for of_head in sizes], dim=1))
    excluding = Table((torch.log(1 - torch.eye(4).double()),), number(4, m + size, 1))
    mean, variance = random(m + size) - 0.5, random(m + size) + 0.05
    by_cosine = [Gaussian(mean, variance), Beta(random(m + size), random(m + size))]
    kinds = [(table, None), (excluding, None), (None, by_cosine[0]), (table, by_cosine[1])]
    weights, cosine_weights = draw(st.sampled_from([(None, None)] * 4 + kinds))
    is_plain = weights is None and cosine_weights is None
    is_unit = not is_plain or draw(st.booleans())
    first_queries = draw(st.booleans()) and lengths[0] > 0
    num_queries = lengths[0] if first_queries else m

    def pairs(count):
        query = number(num_queries, count * (m > 1)).sort().values
        return Listed(query, (query + 1 + number(max(1, m - 1), len(query))) % m)

    negatives = draw(st.sampled_from(["all", "cross", *["memory"] * (size > 0)]))
    positives = positive_weights = negative_pairs = None
    if m > 1 and (draw(st.booleans()) or not (has_labels or len(set(lengths)) == 1)):
        positives = pairs(9)
        # The derivative by a weight of 0 is a multiple of e^x / E, which dot products make inf.
        positive_weights = random(9) * ((random(9) > 0.3) | (not is_unit))
        if negatives == "cross":  # a positive in the set of the query is an error
            is_apart = are_apart(lengths, *positives)
            positive_weights = positive_weights.masked_fill(~is_apart, 0.0)
    if is_plain and size == 0 and draw(st.booleans()):
        negative_pairs = pairs(12)
    hardness = draw(st.sampled_from([0.0, 0.5, 3.0])) if is_plain else 0.0
    score_mod = None
    if size == 0 and negative_pairs is None and hardness == 0:
        score_mod = draw(st.sampled_from([None, *(SCORE_MODS if is_unit else SCORE_MODS[:1])]))
    unit = F.normalize if is_unit else lambda z: 5 * z
    return Problem(
        unit(random(m, 3) - 0.5),
        Pairs(
            lengths,
            negatives,
            first_queries,
            labels if has_labels else None,
            positives,
            negative_pairs,
            unit(random(size, 3) - 0.5) if size else None,
            filled,
            weights,
            cosine_weights,
            hardness,
            score_mod,
            None if score_mod is None else random_metadata(m, generator),
        ),
        positive_weights,
    )


def for_oracle(problem, z, positive_weights):
    """The same as arguments of ``oracle.info_nce``, without empty slots of the memory."""
    pairs, count = problem.pairs, len(z)
    keys = problem.z if pairs.memory is None else torch.cat([problem.z, pairs.memory])
    filled = torch.arange(len(keys))
    if pairs.filled is not None:
        filled = filled[pairs.filled]
    slots = filled[count:]
    weights = weights_of(pairs, len(keys))[:, filled]
    if pairs.cosine_weights is not None:
        cosines = problem.z @ keys[filled].T
        if isinstance(pairs.cosine_weights, Beta):
            log_w = pairs.cosine_weights.log_weights(torch.arange(count), cosines)
        else:
            mean, variance = (of_each[:count, None] for of_each in pairs.cosine_weights)
            log_w = -((cosines - mean) ** 2) / (2 * variance)
        weights = weights * log_w.softmax(1) * len(filled)
    labels, memory_labels = None, None
    if pairs.labels is not None:
        labels = as_lists(pairs.labels[:count].split(pairs.lengths))
        memory_labels = pairs.labels[slots].tolist()
    listed_negatives, listed_positives = pairs.negative_pairs, None
    if pairs.positives is not None:
        of_oracle = torch.ones_like(pairs.positives.query, dtype=torch.bool)
        if pairs.negatives == "cross":
            of_oracle = are_apart(pairs.lengths, *pairs.positives)
        pairs_of_oracle = torch.stack(pairs.positives)[:, of_oracle]
        listed_positives = listed(pairs_of_oracle, positive_weights[of_oracle])
    return {
        "sets": z.split(pairs.lengths),
        "labels": labels,
        "memory": None if pairs.memory is None else pairs.memory[slots - count],
        "memory_labels": memory_labels,
        "negatives": pairs.negatives,
        "hardness": pairs.hardness,
        "score_mod": pairs.score_mod,
        "metadata": pairs.metadata,
        "weights": weights,
        "queries": "first" if pairs.first_queries else "all",
        "similarity": "dot",  # they are normalised already
        "listed": listed_positives,
        "negative_pairs": None
        if listed_negatives is None
        else torch.stack(listed_negatives).T.tolist(),
    }


def weights_of(pairs, num_keys):
    """Of a table, ``[M, M + B]``."""
    weights, count = pairs.cluster_weights, pairs.num_embeddings()
    if weights is None:
        return torch.ones(count, num_keys, dtype=torch.float64)
    of_heads = zip(weights.log_weights, weights.clusters.T, strict=True)
    each = [log_w[clusters[:count, None], clusters].exp() for log_w, clusters in of_heads]
    return sum(each) / len(each)


@contextmanager
def as_on(readable):
    """On a CPU, or on a device that Python must not read."""
    with ExitStack() as patched:
        for module in () if readable else (rows, partners, chunks, lists):
            patched.enter_context(mock.patch.object(module, "can_be_read", return_value=False))
        yield
