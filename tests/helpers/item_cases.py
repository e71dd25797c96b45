"""Random sets of embeddings with their items, and the oracle's losses of such tensors."""

import numpy as np
import torch
from hypothesis import strategies as st

from helpers import oracle
from helpers.marks import NEGATIVES
from helpers.rank_models import of_seed

NUMBERS = (0, 1, 2, -1, -3, 2**40, 2**40 + 1, 1 - 2**63, 2**63 - 1)
DIM = 3
# What decides about pairs, their temperature and the blocks of pairs.
PAIR_MODES = {
    "temperature": st.sampled_from([0.01, 0.05, 0.2, 1.0]),
    "negatives": st.sampled_from(NEGATIVES),
}
ENGINES = st.sampled_from(["dense", "blocks"])
BLOCKS = st.sampled_from([1, 3, 640])


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


@st.composite
def any_sets(draw, max_sets=3, max_length=5):
    """Of any lengths; or views of one length without items."""
    lengths = draw(st.lists(st.integers(1, max_length), min_size=2, max_size=max_sets))
    seed, num_items = draw(st.integers(0, 10**6)), draw(st.integers(1, len(NUMBERS)))
    if draw(st.integers(0, 3)) == 0:
        return random_sets(lengths[:1] * len(lengths), seed)[0], None
    return random_sets(lengths, seed, num_items)


def arrays(tensors):
    return [tensor.detach().double().numpy() for tensor in tensors]


def numbers(items):
    return None if items is None else [of_set.tolist() for of_set in items]


def exact_losses(sets, items=None, past=None, **options):
    """The oracle's loss of each query, set 1 first, and whether it has a positive."""
    memory = ([], None) if past is None else (past.embeddings, past.items)
    losses, have_positives = oracle.info_nce(arrays(sets), numbers(items), *memory, **options)
    return np.array(losses), have_positives


def exact_loss(sets, items=None, past=None, **options):
    """Their mean over the queries with a positive."""
    return oracle.mean_of_queries(*exact_losses(sets, items, past, **options))


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


def weighted(losses):
    """A scalar to which every loss contributes its own factor."""
    return losses @ torch.linspace(-1, 2, len(losses), dtype=losses.dtype)
