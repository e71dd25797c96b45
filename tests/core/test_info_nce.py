import numpy as np
import pytest
import torch
from helpers import oracle
from helpers.blocks import in_blocks
from helpers.rank_models import mean_over_ranks, of_seed
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from live_bytes import LiveBytes

from pgcl_losses import Batch, InfoNCE, PGCLLoss
from pgcl_losses.contrast import NEGATIVES
from pgcl_losses.ranks import Ranks


def views_of(num_views, num_rows, seed=0, width=3):
    return torch.randn(num_views, num_rows, width, dtype=torch.float64, generator=of_seed(seed))


@given(
    num_views=st.integers(2, 4),
    num_rows=st.integers(1, 6),
    seed=st.integers(0, 1000),
    temperature=st.sampled_from([0.05, 0.2, 1.0]),
    negatives=st.sampled_from(NEGATIVES),
    engine=st.sampled_from(["dense", "streaming"]),
    block=st.sampled_from([1, 3, 640]),
)
def test_agrees_with_the_oracle(num_views, num_rows, seed, temperature, negatives, engine, block):
    views = views_of(num_views, num_rows, seed)
    with in_blocks(block):
        options = {"temperature": temperature, "negatives": negatives, "engine": engine}
        ours = InfoNCE(**options, reduction="none")(*views)
    weights = np.ones((views[..., 0].numel(),) * 2)
    expected = oracle.contrast(views.numpy(), weights, None, temperature, False, negatives)
    np.testing.assert_allclose(ours, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("negatives", NEGATIVES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_gradcheck(negatives, reduction):
    loss = InfoNCE(negatives=negatives, reduction=reduction)
    inputs = [view.requires_grad_() for view in views_of(3, 4)]
    assert torch.autograd.gradcheck(loss, inputs)
    assert torch.autograd.gradgradcheck(loss, inputs)


def test_is_a_configuration_of_the_whole():
    views = views_of(3, 6)
    whole = PGCLLoss(3, weighting="uniform", exclude_same_cluster=False, consistency_weight=0.0)
    torch.testing.assert_close(InfoNCE()(*views), whole.double()(*views))


def test_reductions():
    views = views_of(2, 5)
    each = InfoNCE(reduction="none")(*views)
    assert each.shape == (10,)
    torch.testing.assert_close(InfoNCE()(*views), each.mean())
    torch.testing.assert_close(InfoNCE(reduction="sum")(*views), each.sum())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype):
    views = views_of(2, 6).to(dtype).requires_grad_()
    loss = InfoNCE()(*views)
    loss.backward()
    assert (loss.dtype, views.grad.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(loss.double(), InfoNCE()(*views.double()), rtol=1e-5, atol=1e-5)


def test_memory_grows_with_rows_and_not_with_pairs():
    def peak(num_rows):
        views = views_of(2, num_rows).float().requires_grad_()
        with LiveBytes() as live:
            InfoNCE(engine="streaming")(*views).backward()
        return live.peak

    with in_blocks(128):
        assert peak(1200) < 5 * peak(300)


def test_in_the_contrasts_place():
    pgcl = PGCLLoss(3, 4).double()
    pgcl.contrast = InfoNCE()
    views = views_of(2, 6).requires_grad_()
    terms = pgcl.terms(*views)
    torch.testing.assert_close(terms.contrast, InfoNCE()(*views))
    assert pgcl.prototypes.heads == (4,)
    pgcl.prototypes.requires_grad_(False)  # or it would warn that no optimizer moves them
    for _ in range(25):  # what warns looks at it, too
        pgcl(*views)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:Guards may run:RuntimeWarning")
def test_compiled_as_one_graph():
    torch.compiler.reset()
    compiled = torch.compile(InfoNCE(), fullgraph=True, backend="aot_eager")
    views = [view.requires_grad_() for view in views_of(3, 6)]
    torch.testing.assert_close(compiled(*views), InfoNCE()(*views))


def test_errors():
    views = views_of(2, 5)
    with pytest.raises(TypeError, match=r"views must be two or more Tensors .* but got 1"):
        InfoNCE()(views[0])
    with pytest.raises(TypeError, match=r"views must be two or more Tensors .* but got 0"):
        InfoNCE()()
    with pytest.raises(TypeError, match=r"but got 1, a list: unpack it, \*views"):
        InfoNCE()(list(views))
    with pytest.raises(ValueError, match=r"z3 has shape \(4, 3\) but z1 has \(5, 3\)"):
        InfoNCE()(*views, views[0, :4])
    with pytest.raises(ValueError, match="negatives must be one of 'all', 'cross', but got 'al'"):
        InfoNCE(negatives="al")
    with pytest.raises(TypeError, match="a batch has all views and items in it: give it alone"):
        InfoNCE()(Batch(Ranks((5,)), views), views[0])


COUNTS = {1: [5], 2: [2, 4], 3: [3, 0, 4]}


def over_ranks(rank, num_ranks):
    counts = COUNTS[num_ranks]
    for num_views, negatives, reduction in ((2, "all", "mean"), (3, "cross", "sum")):
        options = {"negatives": negatives, "reduction": reduction}
        whole, views = (views_of(num_views, sum(counts)).requires_grad_() for _ in range(2))
        expected = InfoNCE(**options, gather=False)(*whole)
        ours = InfoNCE(**options)(*(view.split(counts)[rank] for view in views))
        expected.backward()
        ours.backward()
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(mean_over_ranks(views.grad), whole.grad, rtol=1e-9, atol=1e-9)
    return True


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_over_ranks(num_ranks):
    assert all(on_ranks(over_ranks, num_ranks))
