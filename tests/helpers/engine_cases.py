"""Random pairs for engines: sets of any lengths, any of them compared, items, and weights."""

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from pgcl_losses.engine.contract import Factors, Gaussian, Pairs, Table, compared_sets, couples

# Kinds of weights. Most embeddings are in one cluster of a table, and others in several.
BY_CLUSTER = ["table", "large table", "heads", "soft", "many soft"]
WEIGHTINGS = ["uniform", *BY_CLUSTER, "gaussian", *(f"gaussian, {kind}" for kind in BY_CLUSTER)]
# Tables and factors with more columns than the 16 that kernels take at a time.
NUM_CLUSTERS = {"large table": 40, "many soft": 40}


def problem(lengths, dim, weighting="uniform", *, compared=None, items=None):
    """Pairs in float64, of which some weigh nothing. By default all sets are compared."""
    torch.manual_seed(0)
    count = sum(lengths)
    embeddings = F.normalize(torch.randn(count, dim, dtype=torch.float64), dim=1)
    if compared is None:
        compared = compared_sets(len(lengths), "all")
    by_cosine = None
    if "gaussian" in weighting:
        mean, variance = torch.rand(2, count, dtype=torch.float64)
        by_cosine = Gaussian(mean - 0.5, variance + 0.05)
        by_cosine.variance[0] = torch.inf
    kind = weighting.removeprefix("gaussian").removeprefix(", ")
    by_cluster = _by_cluster(kind, count)
    return Pairs(embeddings, tuple(lengths), tuple(compared), items, by_cluster, by_cosine)


def _by_cluster(kind, count):
    size = NUM_CLUSTERS.get(kind, 5)
    if kind in ("table", "large table"):
        return _table(count, size)
    if kind == "heads":
        return _table(count, 3, size, 2)
    if kind in ("soft", "many soft"):
        left, right = torch.rand(2, count, size, dtype=torch.float64)
        return Factors(left.where(left > 0.3, 0.0), right.where(right > 0.7, 0.0))
    return None


def _table(count, *sizes):
    log_weights, clusters = [], []
    for size in sizes:
        table = torch.rand(size, size, dtype=torch.float64)
        log_weights.append(table.where(table > 0.3, 0.0).fill_diagonal_(0.0).log())
        of_head = torch.randint(size, (count,))
        clusters.append(of_head.where(torch.rand(count) > 0.6, size // 2))
    return Table(tuple(log_weights), torch.stack(clusters, 1))


@st.composite
def any_pairs(draw, weightings=tuple(WEIGHTINGS), max_length=7):
    lengths = draw(st.lists(st.integers(0, max_length), min_size=1, max_size=4).filter(any))
    compared = draw(
        st.sampled_from([compared_sets(len(lengths), negatives) for negatives in ("all", "cross")])
        | st.lists(st.sampled_from(couples(len(lengths))), unique=True)
    )
    items = None
    if draw(st.booleans()):
        numbers = st.sampled_from([0, 1, 2, 7, -3, 2**40, 2**40 + 1])
        count = sum(lengths)
        items = torch.tensor(draw(st.lists(numbers, min_size=count, max_size=count)))
    weighting = draw(st.sampled_from(weightings))
    return problem(lengths, draw(st.integers(1, 6)), weighting, compared=compared, items=items)
