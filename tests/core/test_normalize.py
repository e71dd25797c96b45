"""Unit embeddings, and the dtype in which losses are computed."""

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
    torch.testing.assert_close(*(torch.autograd.grad(x, z, upstream) for x in (ours, theirs)))


def test_gradcheck():
    z = torch.randn(3, 4, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: unit_vectors(z, F64), z, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda z: unit_vectors(z, F64), z)


def test_vectors_of_nearly_0_become_0_without_gradient():
    z = torch.tensor([[0.0, 0.0], [3e-13, 4e-13], [3.0, 4.0]], requires_grad=True)
    unit = unit_vectors(z, torch.float32)
    torch.testing.assert_close(unit, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.6, 0.8]]))
    unit.backward(torch.ones(3, 2))
    assert not z.grad[:2].any()
    assert z.grad[2].any()


def test_losses_are_computed_in_float32_or_in_float64_where_a_tensor_is():
    half, single, double = (torch.empty(0, dtype=x) for x in (torch.half, torch.float, F64))
    assert computing_dtype(half, half.bfloat16()) == torch.float32
    assert computing_dtype(single, double) == torch.float64
