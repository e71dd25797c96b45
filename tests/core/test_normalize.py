"""Unit embeddings, and the dtype in which losses are computed."""

import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses.base.normalize import computing_dtype, unit_vectors

F64 = torch.float64


@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 9), d=st.integers(1, 9))
def test_unit_vectors_and_gradients_are_those_of_normalize_at_all_norms(seed, n, d):
    generator = torch.Generator().manual_seed(seed)
    directions, upstream = F.normalize(torch.randn(2, n, d, generator=generator, dtype=F64), dim=-1)
    for norm in (2e-12, 1.0, 1e14, 1e18):
        z = (norm * directions).float().requires_grad_()
        wide = z.detach().to(F64).requires_grad_()
        ours, theirs = unit_vectors(z, torch.float32), F.normalize(wide)
        torch.testing.assert_close(ours.to(F64), theirs, rtol=0, atol=1e-6)
        ours, theirs = (
            torch.autograd.grad(units, of, upstream.to(of.dtype))[0].to(F64) * norm
            for units, of in ((ours, z), (theirs, wide))
        )
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_gradcheck():
    z = torch.randn(3, 4, 5, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda z: unit_vectors(z, F64), z, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda z: unit_vectors(z, F64), z)


def test_vectors_of_nearly_0_become_0_without_gradient():
    z = torch.tensor([[0.0, 0.0], [3e-13, 4e-13], [3.0, 4.0]], requires_grad=True)
    unit = unit_vectors(z, torch.float32)
    torch.testing.assert_close(unit, torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.6, 0.8]]))
    (gradient,) = torch.autograd.grad(unit.square().sum(1) @ unit[:, 0], z, create_graph=True)
    (second,) = torch.autograd.grad(gradient[:, 1].sum(), z)
    for of_order in (gradient, second):
        assert not of_order[:2].any()
        assert of_order[2].any()


def test_losses_are_computed_in_float32_or_in_float64_where_a_tensor_is():
    half, single, double = (torch.empty(0, dtype=x) for x in (torch.half, torch.float, F64))
    assert computing_dtype(half, half.bfloat16()) == torch.float32
    assert computing_dtype(single, double) == torch.float64
