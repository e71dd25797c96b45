"""The losses of published scripts: our options give their value and their gradient.

Each formula is that of the script's code, named by its function, in plain torch and without the
1e-4 to 1e-8 that some add to a denominator. docs/swap.md has the table, test_swaps_of_fields those
of other fields. tests/adapters/pygcl calls PyGCL itself.
"""

import itertools
from functools import partial

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
TEMPERATURES = st.sampled_from([0.1, 0.2, 0.5, 1.0])
few = settings(max_examples=25)


def problem(seed, lengths, temperature):
    """Sets of embeddings that are not normalised, and a temperature."""
    random = of_seed(seed)
    sets = [torch.randn(n, DIM, dtype=torch.float64, generator=random) for n in lengths]
    temperature = torch.tensor(temperature, dtype=torch.float64)
    return tuple(torch.nn.Parameter(tensor) for tensor in (*sets, temperature))


def random_pairs(seed, shape):
    """Some pairs of a matrix, as a matrix of 0 and 1."""
    return (torch.rand(shape, generator=of_seed(seed)) < 0.4).double()


def cosines(a, b, tau):
    return F.normalize(a) @ F.normalize(b).T / tau


def dots(a, b, tau):
    return a @ b.T / tau


def others(scores):
    """All but the diagonal."""
    return scores.masked_fill(torch.eye(len(scores), dtype=torch.bool), -torch.inf)


def graphcl(x, x_aug, tau, scores=cosines):
    """`loss_cal` of GraphCL, JOAO and SimGRACE; AD-GCL with sym=False; DIG's and 3DInfomax's."""
    sim = scores(x, x_aug, tau)
    return (others(sim).logsumexp(1) - sim.diag()).mean()


def adgcl(x, x_aug, tau):
    """`calc_loss` of AD-GCL, with its default sym=True."""
    return (graphcl(x, x_aug, tau) + graphcl(x_aug, x, tau)) / 2


def grace(h1, h2, tau, scores=cosines, mean=True):
    """`loss` of GRACE and GCA after projection; DIG's for GRACE; PyGCL with intraview_negs."""

    def semi_loss(a, b):
        within, between = scores(a, a, tau), scores(a, b, tau)
        return torch.cat([others(within), between], 1).logsumexp(1) - between.diag()

    losses = (semi_loss(h1, h2) + semi_loss(h2, h1)) / 2
    return losses.mean() if mean else losses.sum()


def simclr(z1, z2, tau):
    """NT-Xent: `info_nce_loss` of sthalles/SimCLR, here of pytorch-metric-learning."""
    return NTXentLoss(tau)(torch.cat([z1, z2]), torch.arange(len(z1)).repeat(2))


def molclr(zis, zjs, tau, scores=cosines):
    """`NTXentLoss` of MolCLR, which has dot products without use_cosine_similarity."""
    z, n = torch.cat([zjs, zis]), len(zis)
    return F.cross_entropy(others(scores(z, z, tau)), torch.arange(2 * n).roll(n))


def hcl(out_1, out_2, tau, beta=1.0, tau_plus=0.1):
    """`criterion` of HCL with estimator="hard" and its defaults."""
    out, n = F.normalize(torch.cat([out_1, out_2])), len(out_1)
    scores, own = out @ out.T / tau, torch.eye(n, dtype=torch.bool).repeat(2, 2)
    neg, pos = scores[~own].view(2 * n, -1).exp(), scores.roll(n, 0).diag().exp()
    importance, count = neg**beta, 2 * n - 2
    reweighted = (importance * neg).sum(1) / importance.mean(1)
    total = (reweighted - tau_plus * count * pos) / (1 - tau_plus)
    total = total.maximum(count * (-1 / tau).exp())
    return -(pos / (pos + total)).log().mean()


def gcc(keys, queries, tau, scores=cosines):
    """GCC without --moco; `loss_cl` of ProG's GraphCL and SimGRACE; GraphLoG's `inter_NCE_loss`."""
    return F.cross_entropy(scores(keys, queries, tau), torch.arange(len(keys)))


def clip(images, texts, tau, scores=cosines):
    """CLIP; MoleculeSTM's `do_CL` with InfoNCE; `dual_CL` of GraphMVP; PyGCL by default."""
    return (gcc(images, texts, tau, scores) + gcc(texts, images, tau, scores)) / 2


def tricl(e1, e2, tau, mean=True):
    """`node_level_loss` of TriCL, and its `group_level_loss` of hyperedges."""
    between = cosines(e1, e2, tau)
    losses = -sum(sim.log_softmax(1).diag() for sim in (between, between.T)) / 2
    return losses.mean() if mean else losses.sum()


def dcl(z1, z2, tau):
    """`DCL` of raminnakhli/Decoupled-Contrastive-Learning, which adds both directions."""

    def one_way(a, b):
        within, between = cosines(a, a, tau), cosines(a, b, tau)
        negatives = torch.cat([others(within), others(between)], 1)
        return (negatives.logsumexp(1) - between.diag()).mean()

    return one_way(z1, z2) + one_way(z2, z1)


CROSS, FIRST = {"negatives": "cross"}, {"negatives": "cross", "queries": "first"}
GRAPHCL, DOT, SUM = {**FIRST, "decoupled": True}, {"similarity": "dot"}, {"reduction": "sum"}
SWAPS = {  # the script's loss, our options, and a factor of our loss
    "GraphCL": (graphcl, GRAPHCL, 1),
    "DIG or 3DInfomax, norm=False": (partial(graphcl, scores=dots), GRAPHCL | DOT, 1),
    "AD-GCL": (adgcl, {"negatives": "cross", "decoupled": True}, 1),
    "GRACE": (grace, {}, 1),
    "GRACE, mean=False": (partial(grace, mean=False), SUM, 0.5),
    "DIG's GRACE, norm=False": (partial(grace, scores=dots), DOT, 1),
    "SimCLR": (simclr, {}, 1),
    "MolCLR": (molclr, {}, 1),
    "MolCLR, dot": (partial(molclr, scores=dots), DOT, 1),
    "HCL": (hcl, {"hardness": 1.0, "debias": 0.1}, 1),
    "HCL, beta=2": (partial(hcl, beta=2.0), {"hardness": 2.0, "debias": 0.1}, 1),
    "CLIP": (clip, CROSS, 1),
    "GraphMVP without --normalize": (partial(clip, scores=dots), CROSS | DOT, 1),
    "GCC, ProG or GraphLoG": (gcc, FIRST, 1),
    "TriCL": (tricl, CROSS, 1),
    "TriCL, mean=False": (partial(tricl, mean=False), CROSS | SUM, 0.5),
    "DCL": (dcl, {"decoupled": True}, 2),
}


def assert_same(ours, expected, inputs):
    torch.testing.assert_close(ours, expected)
    torch.testing.assert_close(gradients(ours, inputs), gradients(expected, inputs))


@few
@given(seed=SEEDS, length=LENGTHS, temperature=TEMPERATURES)
@pytest.mark.parametrize(("script", "options", "factor"), SWAPS.values(), ids=[*SWAPS])
def test_a_swap_gives_the_loss_of_the_script(script, options, factor, seed, length, temperature):
    *views, tau = problem(seed, [length] * 2, temperature)
    ours = factor * InfoNCE(temperature=tau, **options)(*views)
    assert_same(ours, script(*views, tau), [*views, tau])


def swap_test(test):
    return few(given(seed=SEEDS, n=LENGTHS, temperature=TEMPERATURES)(test))


@swap_test
def test_dig_with_three_views(seed, n, temperature):
    """`NCE_loss` adds up the pairs of views that sigma has."""
    *zs, tau = problem(seed, [n] * 3, temperature)
    loss_of = InfoNCE(temperature=tau, **GRAPHCL)
    pairs = list(itertools.combinations(zs, 2))
    expected = sum(graphcl(a, b, tau) for a, b in pairs)
    assert_same(sum(loss_of(a, b) for a, b in pairs), expected, [*zs, tau])


@swap_test
def test_heco(seed, n, temperature):
    """`Contrast` after its projections, with lambda; row i of `pos` has the positives of node i."""
    z_mp, z_sc, tau = problem(seed, [n] * 2, temperature)
    pos, lam = random_pairs(seed, (n, n)).fill_diagonal_(1), 0.3

    def one_way(a, b):
        fractions = cosines(a, b, tau).softmax(1)
        return -(fractions * pos).sum(1).log().mean()

    a, b = pos.nonzero().T
    positives = torch.stack([torch.cat([a, n + a]), torch.cat([n + b, b])])
    loss_of = InfoNCE(temperature=tau, over_positives="sum", **CROSS, reduction="none")
    mp, sc = loss_of(z_mp, z_sc, positives=positives).view(2, n).mean(1)
    expected = lam * one_way(z_mp, z_sc) + (1 - lam) * one_way(z_sc, z_mp)
    assert_same(lam * mp + (1 - lam) * sc, expected, [z_mp, z_sc, tau])


@swap_test
def test_homogcl(seed, n, temperature):
    """`loss`, without what its code counts twice: a node's other view in the denominator."""
    z1, z2, tau = problem(seed, [n] * 2, temperature)
    adj1, adj2 = (random_pairs(seed + k, (n, n)).fill_diagonal_(0) for k in (1, 2))
    saliency = torch.nn.Parameter(torch.rand(n, n, dtype=torch.float64, generator=of_seed(seed)))

    def semi_loss(a, adj_a, b, adj_b):
        within, between = cosines(a, a, tau).exp(), cosines(a, b, tau).exp()
        pos = between.diag() + (within * adj_a * saliency).sum(1)
        neg = (within * (1 - adj_a)).sum(1) + (between * (1 - adj_b)).sum(1)
        return -(pos / (pos + neg - within.diag() - between.diag())).log()

    expected = (semi_loss(z1, adj1, z2, adj2) + semi_loss(z2, adj2, z1, adj1)).mean() / 2
    edges1, edges2 = adj1.nonzero().T, adj2.nonzero().T
    to_other = torch.tensor([[0], [n]])
    of_others = edges2 + to_other, edges1 + to_other.flip(0)
    positives = torch.cat([edges1, n + edges2, *of_others], 1)
    weights = [saliency[tuple(edges)] for edges in (edges1, edges2)]
    weights = torch.cat([*weights, torch.zeros(len(weights[0]) + len(weights[1]))])
    loss_of = InfoNCE(temperature=tau, over_positives="sum")
    ours = loss_of(z1, z2, positives=positives, positive_weights=weights)
    assert_same(ours, expected, [z1, z2, saliency, tau])


@swap_test
def test_3dinfomax_with_conformers(seed, n, temperature):
    """`NTXentMultiplePositives`: the 3D view has several conformers of each molecule."""
    z1, z2, tau = problem(seed, [n, 3 * n], temperature)
    sim = cosines(z1, z2, tau).view(n, n, 3).logsumexp(2)
    expected = (others(sim).logsumexp(1) - sim.diag()).mean()
    molecules = torch.arange(n)
    loss_of = InfoNCE(temperature=tau, over_positives="sum", **GRAPHCL)
    ours = loss_of(z1, z2, items=(molecules, molecules.repeat_interleave(3)))
    assert_same(ours, expected, [z1, z2, tau])


@swap_test
def test_graphlog_within_graphs(seed, n, temperature):
    """`intra_NCE_loss`: masked nodes against their graph, whose masked nodes are positives."""
    nodes, modified, tau = problem(seed, [3 * n] * 2, temperature)
    graph, masked = torch.arange(n).repeat(3), torch.arange(n + 1)  # two nodes of graph 0
    same = graph[masked].unsqueeze(1) == graph  # [masked nodes, nodes]
    is_positive = same & (torch.arange(3 * n) <= n)
    sims = cosines(modified[masked], nodes, tau).exp()
    expected = -((sims * is_positive).sum(1) / (sims * same).sum(1)).log().mean()
    behind = torch.tensor([[0], [n + 1]])
    ours = InfoNCE(temperature=tau, over_positives="sum", negatives="given", queries="first")(
        modified[masked],
        nodes,
        positives=is_positive.nonzero().T + behind,
        negative_pairs=(same & ~is_positive).nonzero().T + behind,
    )
    assert_same(ours, expected, [nodes, modified, tau])


@swap_test
def test_cloome(seed, n, temperature):
    """`cloob`: InfoLOOB of patterns retrieved from images and from molecules, times tau."""
    *patterns, tau = problem(seed, [n] * 4, temperature)
    halves = patterns[:2], patterns[2:]
    scores = [cosines(*half, tau) for half in halves]
    expected = tau * sum((others(k).logsumexp(1) - k.diag()).mean() for k in scores)
    loss_of = InfoNCE(temperature=tau, **GRAPHCL)
    ours = tau * sum(loss_of(*half) for half in halves)
    assert_same(ours, expected, [*patterns, tau])


@swap_test
def test_gprompt(seed, n, temperature):
    """`Gprompt_tuning_loss` of ProG: embeddings against the centers of classes, added up."""
    embedding, center_embedding, tau = problem(seed, [n, 4], temperature)
    labels = torch.randint(4, (n,), generator=of_seed(seed))
    expected = -cosines(embedding, center_embedding, tau).log_softmax(1)[range(n), labels].sum()
    loss_of = InfoNCE(temperature=tau, **FIRST, **SUM)
    ours = loss_of(embedding, center_embedding, items=(labels, torch.arange(4)))
    assert_same(ours, expected, [embedding, center_embedding, tau])


@pytest.mark.parametrize(("k", "similarity"), [(1, "cosine"), (3, "dot")], ids=["ProG", "PyG"])
@swap_test
def test_links_against_sampled_ones(k, similarity, seed, n, temperature):
    """`Gprompt_link_loss` of ProG; `LinkNeighborLoader` of PyG with triplets and cross-entropy."""
    z, tau = problem(seed, [n], temperature)
    src, dst_pos, *dst_neg = torch.randint(n, (2 + k, 4), generator=of_seed(seed))
    unit = F.normalize(z) if similarity == "cosine" else z
    logits = [(unit[src] * unit[dst]).sum(1) / tau for dst in (dst_pos, *dst_neg)]
    expected = F.cross_entropy(torch.stack(logits, 1), torch.zeros(4, dtype=torch.long))
    keys, sampled = torch.cat([dst_pos, *dst_neg]), torch.arange(4 * k)
    loss_of = InfoNCE(temperature=tau, similarity=similarity, negatives="given", queries="first")
    ours = loss_of(
        z[src],
        z[keys],
        items=(torch.arange(4), torch.arange(len(keys))),
        negative_pairs=torch.stack([sampled % 4, 8 + sampled]),
    )
    assert_same(ours, expected, [z, tau])


@swap_test
def test_bipartite_links(seed, n, temperature):
    """A link of each user against all items but its known ones: sets of other lengths by index."""
    users, items, tau = problem(seed, [n, n + 3], temperature)
    known = random_pairs(seed, (n, n + 3)).bool()
    link = torch.randint(n + 3, (n,), generator=of_seed(seed))
    known[range(n), link] = False
    logits = dots(users, items, tau).masked_fill(known, -torch.inf)
    pairs = torch.cat([torch.stack([torch.arange(n), link]), known.nonzero().T], 1)
    pairs = pairs + torch.tensor([[0], [n]])
    weights = (torch.arange(pairs.shape[1]) < n).double()
    loss_of = InfoNCE(temperature=tau, **FIRST, **DOT)
    ours = loss_of(users, items, positives=pairs, positive_weights=weights)
    assert_same(ours, F.cross_entropy(logits, link), [users, items, tau])


@few
@given(seed=SEEDS, length=st.integers(1, 4), temperature=TEMPERATURES)
def test_moco_and_gcc(seed, length, temperature):
    """MoCo's `forward`, GCC's `MemoryMoCo`: a queue of keys, and class 0 is the positive."""
    *past, tau = problem(seed, [length] * 2, temperature)
    queue = F.normalize(torch.cat(past)).detach()
    options = {"negatives": "memory", "queries": "first", "memory_size": len(queue), "dim": DIM}
    loss_of = InfoNCE(temperature=tau, **options).double()
    loss_of.remember(queue)
    for step in range(1, 5):
        q, k, _ = problem(seed + step, [length] * 2, temperature)
        unit, key = F.normalize(q), F.normalize(k).detach()
        logits = torch.cat([(unit * key).sum(1, keepdim=True), unit @ queue.T], 1) / tau
        expected = F.cross_entropy(logits, torch.zeros(length, dtype=torch.long))
        assert_same(loss_of(q, k.detach()), expected, [q, tau])
        queue = torch.cat([queue[length:], key])
        loss_of.remember(k)
