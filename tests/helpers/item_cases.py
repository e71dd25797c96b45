"""Random sets of embeddings with their items, and the oracle's losses of such tensors."""

import numpy as np
import torch
from hypothesis import strategies as st

from helpers import oracle
from helpers.rank_models import of_seed

NUMBERS = (0, 1, 2, -2, -3, 2**40, 2**40 + 1, 1 - 2**63, 2**63 - 1)
DIM = 3
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


def arrays(tensors):
    return [tensor.detach().double().numpy() for tensor in tensors]


def numbers(items):
    return None if items is None else [of_set.tolist() for of_set in items]


def listed(pairs, weights=None):
    """Positives by index as the oracle takes them."""
    if pairs is None:
        return ()
    weights = torch.ones(pairs.shape[1]) if weights is None else weights
    return [(a, b, w) for (a, b), w in zip(pairs.T.tolist(), weights.tolist(), strict=True)]


def exact_losses(sets, items=None, past=None, **options):
    """The oracle's loss of each query, set 1 first, and whether it has a positive."""
    memory = ([], None) if past is None else (past.embeddings, past.items)
    losses, have_positives = oracle.info_nce(arrays(sets), numbers(items), *memory, **options)
    return np.array(losses), have_positives


def gradients(loss, inputs):
    return torch.autograd.grad(loss, inputs, materialize_grads=True)


def weighted(losses):
    """A scalar to which every loss contributes its own factor."""
    return losses @ torch.linspace(-1, 2, len(losses), dtype=losses.dtype)
