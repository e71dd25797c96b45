"""What processes compare before they exchange embeddings."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses.distributed import fingerprint

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.float32, torch.float64, torch.int64, torch.bool]


def of(*tensors):
    return fingerprint(tensors, CPU).item()


@given(
    shape=st.sampled_from([(7,), (1, 6), (6, 1), (3, 5), (2, 3, 4)]),
    dtype=st.sampled_from(DTYPES),
    positions=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    seed=st.integers(0, 1000),
)
def test_swapped_numbers_have_another_fingerprint(shape, dtype, positions, seed):
    random = torch.Generator().manual_seed(seed)
    state = (10 * torch.randn(shape, generator=random)).to(dtype)
    other = state.clone()
    one, two = positions
    other.view(-1)[[one, two]] = state.view(-1)[[two, one]]
    assert (of(state) == of(other)) == torch.equal(state, other)
    step = torch.tensor(3)
    assert (of(step, state) == of(step, other)) == torch.equal(state, other)


def test_swapped_tensors_and_changed_bits_have_another_fingerprint():
    weight, queue, step = torch.randn(3, 4), torch.randn(3, 4), torch.tensor(5)
    expected = of(weight, queue, step)
    assert of(weight.clone(), queue.mT.contiguous().mT, step) == expected
    assert of(queue, weight, step) != expected
    assert of(weight, queue, step + 1) != expected
    assert of(weight.clone().T.reshape(3, 4), queue, step) != expected
    assert of(weight * (1 + 2e-7), queue, step) != expected
    assert of() == of(torch.zeros(0, 4))
