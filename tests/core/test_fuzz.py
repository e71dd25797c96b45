"""Embeddings of any dtype, scale and memory layout have the oracle's loss.

For more cases: FUZZ_CASES=2000 python -m pytest tests/core/test_fuzz.py
"""

import os

import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.cases import FAMILY, MODES
from helpers.item_cases import ENGINES, arrays
from helpers.marks import few_graphs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pgcl_losses import PGCLLoss

pytestmark = [pytest.mark.slow, few_graphs]

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = [
    lambda z: z,
    lambda z: z.mT.contiguous().mT,
    lambda z: z.repeat_interleave(2, 1)[:, ::2],
    lambda z: z[:1].expand_as(z),
]


@st.composite
def embeddings(draw, num_views, length, dim, dtype):
    """Views ``[N, D]``, some of them with gradient."""
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    views = []
    for _ in range(num_views):
        z = torch.from_numpy(random.normal(size=(length, dim)))
        z *= draw(st.sampled_from([1.0, 1.0, 1e-4, 1e4, 1e-15, 0.0]))
        z = draw(st.sampled_from(LAYOUTS))(z.to(dtype))
        views.append(z.requires_grad_(draw(st.booleans())))
    return views


def assert_close(ours, expected, *tensors):
    double = torch.float64 in [tensor.dtype for tensor in tensors]
    tolerance = {"rtol": 1e-6, "atol": 1e-7} if double else {"rtol": 2e-3, "atol": 2e-4}
    np.testing.assert_allclose(ours.detach().double(), expected, **tolerance)


def assert_gradients_fit(loss, inputs):
    """They are finite, and of the dtype of their input."""
    inputs = [z for z in inputs if z.requires_grad]
    gradients = torch.autograd.grad(loss, inputs, materialize_grads=True) if inputs else ()
    for z, gradient in zip(inputs, gradients, strict=True):
        assert (gradient.shape, gradient.dtype) == (z.shape, z.dtype)
        # Gradients of short embeddings overflow in float16.
        assert gradient.isfinite().all() or z.dtype == torch.float16


@settings(max_examples=int(os.environ.get("FUZZ_CASES", "200")))
@given(
    options=st.sampled_from([{"num_prototypes": 1}, {"num_prototypes": 4}, *FAMILY]),
    mode=st.fixed_dictionaries(MODES),
    engine=ENGINES,
    num_views=st.integers(2, 4),
    length=st.integers(1, 5),
    dim=st.integers(2, 4),
    dtypes=st.tuples(st.sampled_from(DTYPES), st.sampled_from(DTYPES)),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_pgcl(options, mode, engine, num_views, length, dim, dtypes, seed, data):
    torch.manual_seed(seed)
    options = {**options, **mode, "reduction": "none"}
    pgcl = PGCLLoss(dim, **options, engine=engine).to(dtypes[1])
    views = data.draw(embeddings(num_views, length, dim, dtypes[0]))
    weight, heads = pgcl.prototypes.weight, pgcl.prototypes.heads
    terms = pgcl.terms(*views)
    assert_gradients_fit(terms.loss.sum(), [*views, weight])

    z, prototypes = arrays(views), arrays(weight.split(heads))
    q_of_heads = [[oracle.targets(view, c, 0.05, 3) for view in z] for c in prototypes]
    targets = torch.cat([view.targets for view in terms.assignments])
    assert_close(targets, np.hstack([np.concatenate(q) for q in q_of_heads]), *views, weight)
    consistency = [
        oracle.consistency([oracle.log_predictions(view, c, mode["temperature"]) for view in z], q)
        for c, q in zip(prototypes, q_of_heads, strict=True)
    ]
    assert_close(terms.consistency, np.mean(consistency, axis=0), *views, weight)
    q_of_heads = arrays(targets.split(heads, 1))
    for q, c in zip(q_of_heads, prototypes, strict=True):
        gaps = np.diff(np.sort(oracle.ranking(q, np.concatenate(z), c)))
        assume(((gaps == 0) | (gaps > 1e-7)).all())  # else rounding decides about clusters
    weights = oracle.family_weights(
        np.concatenate(z),
        q_of_heads,
        prototypes,
        mode["weighting"],
        mode["exclude_same_cluster"],
        options.get("negative_ranks"),
        options.get("soft_clusters", False),
    )
    contrast = oracle.contrast(z, weights, None, mode["temperature"], False, mode["negatives"])
    assert_close(terms.contrast, contrast, *views, weight)
