"""The losses of published scripts: our options give their value and their gradient.

Each formula is that of the script's code, named by its function, in plain torch. docs/swap.md has
the table. tests/adapters/pygcl calls PyGCL itself.
"""

import pytest
import torch
import torch.nn.functional as F
from helpers.item_cases import gradients
from helpers.rank_models import of_seed
from hypothesis import given, settings
from hypothesis import strategies as st
from pytorch_metric_learning.losses import NTXentLoss

from pgcl_losses import InfoNCE

DIM = 5
SEEDS, LENGTHS = st.integers(0, 10**6), st.integers(2, 9)
# Below 0.1 the differences in the code of GraphCL, AD-GCL and GRACE lose digits, also in float64.
TEMPERATURES = st.sampled_from([0.1, 0.2, 0.5, 1.0])
few = settings(max_examples=25)


def problem(seed, length, temperature):
    """Two views that are not normalised, and a temperature."""
    random, temperature = of_seed(seed), torch.tensor(temperature, dtype=torch.float64)
    views = torch.randn(2, length, DIM, dtype=torch.float64, generator=random)
    return tuple(torch.nn.Parameter(tensor) for tensor in (*views, temperature))


def exp_cosines(x, x_aug, tau):
    norms = torch.outer(x.norm(dim=1), x_aug.norm(dim=1))
    return (x @ x_aug.T / norms / tau).exp()


def graphcl(x, x_aug, tau):
    """`loss_cal` of GraphCL, JOAO and SimGRACE; AD-GCL with sym=False; `NT_Xent` of DIG."""
    sim = exp_cosines(x, x_aug, tau)
    return -(sim.diag() / (sim.sum(1) - sim.diag())).log().mean()


def adgcl(x, x_aug, tau):
    """`calc_loss` of AD-GCL, with its default sym=True."""
    sim = exp_cosines(x, x_aug, tau)
    return sum(-(sim.diag() / (sim.sum(dim) - sim.diag())).log().mean() for dim in (0, 1)) / 2


def grace(h1, h2, tau):
    """`loss` of GRACE and GCA after their projections; `infoNCE_local_intra_node` of DIG.

    PyGCL with intraview_negs is the same.
    """

    def semi_loss(a, b):
        within, between = exp_cosines(a, a, tau), exp_cosines(a, b, tau)
        return -(between.diag() / (within.sum(1) + between.sum(1) - within.diag())).log()

    return ((semi_loss(h1, h2) + semi_loss(h2, h1)) / 2).mean()


def simclr(z1, z2, tau):
    """NT-Xent: `info_nce_loss` of sthalles/SimCLR, here of pytorch-metric-learning."""
    return NTXentLoss(tau)(torch.cat([z1, z2]), torch.arange(len(z1)).repeat(2))


def gcc(keys, queries, tau):
    """`NCESoftmaxLossNS` of GCC, without --moco."""
    logits = F.normalize(keys) @ F.normalize(queries).T / tau
    return F.cross_entropy(logits, torch.arange(len(keys)))


def clip(images, texts, tau):
    """CLIP, 1 / tau its logit scale; MoleculeSTM's `do_CL` with InfoNCE; PyGCL by default."""
    return (gcc(images, texts, tau) + gcc(texts, images, tau)) / 2


def dcl(z1, z2, tau):
    """`DCL` of raminnakhli/Decoupled-Contrastive-Learning, which adds both directions."""
    own = torch.eye(len(z1), dtype=torch.bool).repeat(1, 2)

    def one_way(a, b):
        a, b = F.normalize(a), F.normalize(b)
        logits = torch.cat([a @ a.T, a @ b.T], 1) / tau
        return ((-a * b).sum(1) / tau + logits.masked_fill(own, -torch.inf).logsumexp(1)).mean()

    return one_way(z1, z2) + one_way(z2, z1)


GRAPHCL = {"negatives": "cross", "queries": "first", "decoupled": True}
SWAPS = {  # the script's loss, our options, and a factor of our loss
    "GraphCL": (graphcl, GRAPHCL, 1),
    "AD-GCL": (adgcl, {"negatives": "cross", "decoupled": True}, 1),
    "GRACE": (grace, {}, 1),
    "SimCLR": (simclr, {}, 1),
    "CLIP": (clip, {"negatives": "cross"}, 1),
    "GCC": (gcc, {"negatives": "cross", "queries": "first"}, 1),
    "DCL": (dcl, {"decoupled": True}, 2),
}


def assert_same(ours, expected, inputs):
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, inputs), gradients(expected, inputs))


@few
@given(seed=SEEDS, length=LENGTHS, temperature=TEMPERATURES)
@pytest.mark.parametrize(("script", "options", "factor"), SWAPS.values(), ids=[*SWAPS])
def test_a_swap_gives_the_loss_of_the_script(script, options, factor, seed, length, temperature):
    *views, tau = problem(seed, length, temperature)
    ours = factor * InfoNCE(temperature=tau, **options)(*views)
    assert_same(ours, script(*views, tau), [*views, tau])


@few
@given(seed=SEEDS, length=st.integers(1, 4), temperature=TEMPERATURES)
def test_moco_and_gcc(seed, length, temperature):
    """MoCo's `forward`, GCC's `MemoryMoCo`: a queue of keys, and class 0 is the positive."""
    *past, tau = problem(seed, length, temperature)
    queue = F.normalize(torch.cat(past)).detach()
    options = {"negatives": "memory", "queries": "first", "memory_size": len(queue), "dim": DIM}
    loss_of = InfoNCE(temperature=tau, **options).double()
    loss_of.remember(queue)
    for step in range(1, 5):
        q, k, _ = problem(seed + step, length, temperature)
        unit, key = F.normalize(q), F.normalize(k).detach()
        logits = torch.cat([(unit * key).sum(1, keepdim=True), unit @ queue.T], 1) / tau
        expected = F.cross_entropy(logits, torch.zeros(length, dtype=torch.long))
        assert_same(loss_of(q, k.detach()), expected, [q, tau])
        queue = torch.cat([queue[length:], key])
        loss_of.remember(k)
