"""Random problems: two views of a few graphs, their clusters, and prototypes; losses of views."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from helpers.marks import NEGATIVES
from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.contrast import WEIGHTINGS

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
# The first to be drawn from, with a temperature.
MODES = {
    "temperature": st.sampled_from([0.05, 0.2, 1.0]),
    "weighting": st.sampled_from(WEIGHTINGS),
    "exclude_same_cluster": st.booleans(),
    "negatives": st.sampled_from(NEGATIVES),
}

# Losses of three views, from the embedding dimension, for models that take any loss.
LOSSES_OF_THREE_VIEWS = {
    "InfoNCE": lambda dim: InfoNCE(negatives="cross"),
    "a queue of three views": lambda dim: PGCLLoss(dim, 4, queue_size=5, queue_views=3),
    "heads": lambda dim: PGCLLoss(dim, (4, 3), negative_ranks=(0, 2)),
    "soft clusters": lambda dim: PGCLLoss(dim, 4, soft_clusters=True),
}


def assert_model_is_its_loss(model, batch):
    """A model of an adapter, against its loss called directly, in two steps of training."""
    alone, weights = copy.deepcopy(model.loss), [*model.encoder.parameters()]
    for step in range(2):  # the second one with a queue
        results = []
        for loss_of in (model, lambda batch: alone(*model.embeddings(batch))):
            torch.manual_seed(step)
            value = loss_of(batch)
            results.append([value, *torch.autograd.grad(value, weights)])
        torch.testing.assert_close(*results)
        torch.testing.assert_close(model.loss.state_dict(), alone.state_dict())


@dataclass
class Case:
    z1: np.ndarray  # [N, D]
    z2: np.ndarray
    clusters: np.ndarray  # [2N]
    prototypes: np.ndarray  # [K, D]

    def arrays(self) -> list[np.ndarray]:
        return [self.z1, self.z2]

    def views(self, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
        return [torch.tensor(z, dtype=dtype) for z in self.arrays()]

    def given(self, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
        """What the contrast takes besides views."""
        prototypes = torch.tensor(self.prototypes, dtype=dtype)
        return {"clusters": torch.tensor(self.clusters).chunk(2), "prototypes": prototypes}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    n = draw(st.integers(1, 5))
    d = draw(st.integers(1, 4))
    k = draw(st.integers(1, 8))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))

    def vectors(count: int) -> np.ndarray:
        return random.normal(size=(count, d)) * 10 ** random.uniform(-3, 3, size=(count, 1))

    z1 = vectors(n)
    views = draw(st.sampled_from(["unrelated", "similar", "identical", "opposed"]))
    z2 = {
        "unrelated": vectors(n),
        "similar": z1 * (1 + 0.1 * random.normal(size=(n, d))),
        "identical": z1.copy(),
        "opposed": -z1,
    }[views]
    if draw(st.booleans()):
        z1[random.integers(n)] = 0.0
    pattern = draw(st.sampled_from(["random", "one", "spread"]))
    clusters = {
        "random": random.integers(k, size=2 * n),
        "one": np.full(2 * n, random.integers(k)),
        "spread": np.arange(2 * n) % k,
    }[pattern]
    return Case(z1, z2, clusters, vectors(k))
