"""PGCL in PyGCL's own contrast models is PGCLLoss, whatever the mode."""

import copy
import sys
import warnings
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import PGCLLoss
from pgcl_losses.adapters.pygcl import PGCLContrastLoss

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what its own needs use is deprecated
    from GCL.losses import Loss
    from GCL.models import DualBranchContrast, SingleBranchContrast

OPTIONS = {
    "weighting": st.sampled_from(["prototype", "sample", "uniform"]),
    "exclude_same_cluster": st.booleans(),
    "queue_size": st.sampled_from([0, 7]),
}
ROWS = {"G2G": ("g1", "g2"), "L2L": ("h1", "h2")}


def views_of(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_rows, 4, generator=generator, requires_grad=True).unbind()


@given(
    mode=st.sampled_from(list(ROWS)),
    intraview=st.booleans(),
    num_rows=st.integers(1, 9),
    seed=st.integers(0, 1000),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_it_is_pgcl(mode, intraview, num_rows, seed, options):
    loss = PGCLContrastLoss(4, 3, **options)
    expected = PGCLLoss(4, 3, negatives="all" if intraview else "cross", **options)
    expected.load_state_dict(loss.pgcl.state_dict())
    model = DualBranchContrast(loss, mode=mode, intraview_negs=intraview)
    for step in range(2):
        results = []
        for side in (model, expected):
            z1, z2 = (z.detach().requires_grad_() for z in views_of(num_rows, seed + step))
            first, second = ROWS[mode]
            value = side(z1, z2) if side is expected else side(**{first: z1, second: z2})
            side.zero_grad()
            value.backward()
            (weight,) = side.parameters()
            results.append([value, z1.grad, z2.grad, weight.grad, *side.buffers()])
        torch.testing.assert_close(*results)


def test_it_is_a_loss_and_a_module():
    loss = PGCLContrastLoss(4, 3)
    model = DualBranchContrast(loss, mode="G2G")
    assert isinstance(loss, Loss)
    assert list(model.parameters()) == [loss.pgcl.prototypes.weight]
    seen = []
    loss.register_forward_hook(lambda *_: seen.append(1))
    model(g1=views_of(5)[0], g2=views_of(5)[1])
    assert len(seen) == 2


def test_half_a_pair_of_calls_changes_nothing_later():
    loss = PGCLContrastLoss(4, 3)
    model = DualBranchContrast(loss, mode="G2G")
    z1, z2 = views_of(6)
    expected = model(g1=z1, g2=z2)
    loss(*views_of(6, seed=1))
    torch.testing.assert_close(model(g1=z1, g2=z2), expected)
    loss(z1, z2)  # the same rows as before
    with torch.no_grad():
        evaluated = model(g1=z2, g2=z1)
    assert not evaluated.requires_grad
    loss(z1, z2)
    torch.testing.assert_close(copy.deepcopy(model)(g1=z1, g2=z2), expected)


def test_an_own_extra_mask_may_say_what_the_sampler_meant():
    model = DualBranchContrast(PGCLContrastLoss(4, 3), mode="L2L", intraview_negs=True)
    z1, z2 = views_of(5)
    meant = 1 - torch.eye(5).repeat(1, 2)
    torch.testing.assert_close(model(h1=z1, h2=z2, extra_neg_mask=meant), model(h1=z1, h2=z2))


def test_errors():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = views_of(5)
    model = DualBranchContrast(loss, mode="L2L")
    with pytest.raises(ValueError, match=r"pos_mask must pair row i.*extra_pos_mask"):
        model(h1=z1, h2=z2, extra_pos_mask=torch.ones(5, 5))
    with pytest.raises(ValueError, match=r"neg_mask must be that of the sampler.*extra_neg_mask"):
        model(h1=z1, h2=z2, extra_neg_mask=torch.zeros(5, 5))
    with pytest.raises(ValueError, match=r"anchor has 2 rows and sample 5.*'G2G' or 'L2L'"):
        SingleBranchContrast(loss, mode="G2L")(h=z1, g=z2[:2], batch=torch.tensor([0, 0, 1, 1, 1]))
    with pytest.raises(TypeError, match="negatives is up to the contrast model"):
        PGCLContrastLoss(4, negatives="all")


def train(parameters_of, steps, accumulate=1):
    torch.manual_seed(0)
    encoder, model = torch.nn.Linear(4, 4), DualBranchContrast(PGCLContrastLoss(4, 3), mode="G2G")
    optimizer = torch.optim.Adam(parameters_of(encoder, model))
    for step in range(steps):
        z1, z2 = views_of(6, seed=step)
        model(g1=encoder(z1), g2=encoder(z2)).backward()
        if step % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()


def test_prototypes_that_no_optimizer_has_are_warned_of_once():
    with pytest.warns(UserWarning, match="prototypes have had a gradient for 50 steps") as caught:
        train(lambda encoder, model: encoder.parameters(), 120)
    assert len(caught) == 1
    train(lambda encoder, model: [*encoder.parameters(), *model.parameters()], 120)
    train(lambda encoder, model: [*encoder.parameters(), *model.parameters()], 120, accumulate=30)


def test_the_module_imports_without_pygcl():
    with mock.patch.dict(sys.modules, {"GCL": None, "GCL.losses": None}):
        sys.modules.pop("pgcl_losses.adapters.pygcl")
        from pgcl_losses.adapters.pygcl import PGCLContrastLoss as Again

        with pytest.raises(ImportError, match=r"pip install 'pgcl-losses\[pygcl\]'"):
            Again(4)
