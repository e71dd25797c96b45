"""Unit embeddings, and the dtype in which losses are computed."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses._normalize import computing_dtype, unit_vectors

F64 = torch.float64


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 9), d=st.integers(1, 9))
def test_unit_vectors_are_those_of_normalize(seed, n, d):
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(n, d, generator=generator, dtype=F64, requires_grad=True)
    upstream = torch.randn(n, d, generator=generator, dtype=F64)
    ours, theirs = unit_vectors(z, F64), F.normalize(z)
    torch.testing.assert_close(ours, theirs)
    for result in (ours, theirs):
        result.backward(upstream)
    torch.testing.assert_close(z.grad, torch.autograd.grad(F.normalize(z), z, upstream)[0] * 2)


def test_gradcheck():
    z = torch.randn(3, 4, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: unit_vectors(z, F64), z)
    assert torch.autograd.gradgradcheck(lambda z: unit_vectors(z, F64), z)


def test_forward_mode_and_transforms():
    z = torch.randn(3, 4, dtype=F64)
    expected = torch.autograd.functional.jacobian(lambda z: unit_vectors(z, F64), z)
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(lambda z: unit_vectors(z, F64))(z), expected)


def test_vectors_of_nearly_0_become_0_without_gradient():
    z = torch.tensor([[0.0, 0.0], [3e-13, 4e-13], [3.0, 4.0]], requires_grad=True)
    unit = unit_vectors(z, torch.float32)
    torch.testing.assert_close(unit, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.6, 0.8]]))
    unit.backward(torch.ones(3, 2))
    assert not z.grad[:2].any()
    assert z.grad[2].any()


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ([torch.float16], torch.float32),
        ([torch.bfloat16, torch.float16], torch.float32),
        ([torch.float32, torch.float64], torch.float64),
    ],
)
def test_computing_dtype(dtypes, expected):
    assert computing_dtype(*(torch.empty(0, dtype=dtype) for dtype in dtypes)) == expected
