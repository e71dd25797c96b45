"""DualBranchContrast calls the losses as they would be called without it. PyGCL is not needed here;
tests/adapters/pygcl compares values with PyGCL's own.
"""

import copy
import sys
from unittest import mock

import pytest
import torch
from helpers.contrast_models import called, embeddings
from helpers.marks import assert_error, few_graphs, slips
from helpers.ranks import on_ranks

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pygcl import DualBranchContrast

on_intraview = pytest.mark.parametrize("intraview", [True, False])


@on_intraview
def test_other_options_of_info_nce_and_a_learned_temperature(intraview):
    g, _ = embeddings(5, 6)
    positives = torch.stack([torch.arange(5), torch.arange(5, 10)])
    for options in ({"hardness": 0.5}, {"debias": 0.1}, {"decoupled": True}, {"similarity": "dot"}):
        temperature = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        model = DualBranchContrast(InfoNCE(temperature=temperature, **options), "G2G", intraview)
        loss = InfoNCE(temperature=temperature, negatives="cross", queries="first", **options)
        expected = [
            loss(one, torch.cat([other, one]) if intraview else other, positives=positives)
            for one, other in (g, g.flip(0))
        ]
        value = model(g1=g[0], g2=g[1])
        torch.testing.assert_close(value, sum(expected) / 2)
        inputs = g, temperature
        gradients = [torch.autograd.grad(loss, inputs) for loss in (value, sum(expected) / 2)]
        torch.testing.assert_close(*gradients)


def test_each_positive_of_a_graph_by_itself():
    """The default of InfoNCE, `over_positives="mean"`, is the mean of InfoNCE over the nodes."""
    g, h = embeddings(3, 6)
    batch = torch.tensor([0, 1, 1, 0, 2, 2])
    losses = []
    for graphs, nodes in ((g[0], h[1]), (g[1], h[0])):
        powers = (torch.cosine_similarity(graphs[:, None], nodes, dim=-1) / 0.2).exp()
        for i, row in enumerate(powers):
            negatives = row[batch != i].sum()
            losses.append(-(row / (row + negatives)).log()[batch == i].mean())
    model = DualBranchContrast(InfoNCE(temperature=0.2), "G2L")
    torch.testing.assert_close(called(model, g, h, batch)[0], torch.stack(losses).mean())


def loss_of_anchors(anchors, samples, positive, negative):
    """PyGCL's ``InfoNCE(tau=0.2)``, one anchor at a time."""
    losses = []
    for anchor, is_positive, is_negative in zip(anchors, positive, negative, strict=True):
        scores = [torch.cosine_similarity(anchor, sample, dim=0) / 0.2 for sample in samples]
        kept = [x for x, p, n in zip(scores, is_positive, is_negative, strict=True) if p or n]
        total = torch.stack(kept).exp().sum().log()
        own = [total - x for x, p in zip(scores, is_positive, strict=True) if p]
        losses.append(torch.stack(own).mean())
    return torch.stack(losses).mean()


@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize(("mode", "num_graphs"), [("G2G", 6), ("L2L", 6), ("G2L", 3), ("G2L", 1)])
def test_samples_and_masks_are_those_of_pygcl(mode, num_graphs, has_masks):
    """With a single graph, nodes h4 of a corrupted graph are negatives of g1, and h3 of g2."""
    (g1, g2), (h1, h2, h3, h4) = g, h = embeddings(num_graphs, 6)
    batch = torch.arange(6) % num_graphs
    own = torch.eye(6).bool() if mode != "G2L" else batch == torch.arange(num_graphs)[:, None]
    branches = [(h1, h2), (h2, h1)] if mode == "L2L" else [(g1, g2), (g2, g1)]
    if mode == "G2L":
        nodes = (h2, h1) if num_graphs > 1 else (torch.cat([h2, h4]), torch.cat([h1, h3]))
        branches = list(zip((g1, g2), nodes, strict=True))
        own = torch.nn.functional.pad(own, (0, len(nodes[0]) - 6))
    masks, positive, negative = {}, own, ~own
    if has_masks:
        extra = torch.rand(own.shape) < 0.2
        positive, negative = own | extra, ~(own | extra) & (torch.rand(own.shape) < 0.6)
        masks = {"extra_pos_mask": extra, "extra_neg_mask": negative}
    losses = [loss_of_anchors(*branch, positive, negative) for branch in branches]
    model = DualBranchContrast(InfoNCE(temperature=0.2, over_positives="supcon"), mode)
    expected = sum(losses) / 2
    gradients = torch.autograd.grad(expected, [g, h], materialize_grads=True)
    torch.testing.assert_close(called(model, g, h, batch, **masks), (expected, *gradients))


def listed(mask, intraview):
    """Pairs of an extra mask ``[N, N]`` or ``[N, 2N]`` as positions in both views, one by one."""
    num, pairs = len(mask), []
    for i in range(num):
        for j in range(num):
            if mask[i, j]:
                pairs += [(i, num + j), (num + i, j)]
            if intraview and mask[i, num + j]:
                pairs += [(i, j), (num + i, num + j)]
    return torch.tensor(pairs, dtype=torch.long).view(-1, 2).T


@few_graphs
@on_intraview
@pytest.mark.parametrize("mode", ["G2G", "L2L"])
@pytest.mark.parametrize("has_masks", [False, True])
def test_pgcl_is_pgcl_loss(mode, intraview, has_masks):
    options = {"num_prototypes": (3, 2), "queue_size": 7, "memory_size": 20, "freeze_steps": 1}
    model = DualBranchContrast(PGCLLoss(4, **options), mode, intraview)
    expected = PGCLLoss(4, negatives="all" if intraview else "cross", **options)
    expected.load_state_dict(model.loss.state_dict())
    masks, pairs = {}, {}
    if has_masks:
        positive = torch.eye(6).repeat(1, 1 + intraview).bool().roll(1, 0)
        left_out = positive.roll(1, 0)
        left_out.fill_diagonal_(False)
        masks = {"extra_pos_mask": positive, "extra_neg_mask": ~(positive | left_out)}
        positive[:, :6].fill_diagonal_(True)
        lists = [listed(mask, intraview) for mask in (positive, left_out)]
        weights = (
            torch.arange(2).flip(0).repeat_interleave(torch.tensor([p.shape[1] for p in lists]))
        )
        pairs = {"positives": torch.cat(lists, 1), "positive_weights": weights}
    for _ in range(2):
        results = []
        views = torch.randn(2, 6, 4, requires_grad=True)
        names = ("g1", "g2") if mode == "G2G" else ("h1", "h2")
        named = dict(zip(names, views, strict=True))
        for loss, value in (
            (model.loss, model(**named, **masks)),
            (expected, expected(*views, **pairs)),
        ):
            inputs = [views, loss.prototypes.weight]
            results.append([value, *torch.autograd.grad(value, inputs), *loss.buffers()])
        torch.testing.assert_close(*results)


@few_graphs
@on_intraview
@pytest.mark.parametrize(
    ("make", "mode", "count"),
    [(InfoNCE, "G2G", 1), (InfoNCE, "G2L", 2), (lambda: PGCLLoss(4), "L2L", 1)],
)
def test_how_often_the_loss_is_called(make, mode, count, intraview):
    """A memory or queue stores each batch once."""
    loss, calls = make(), []
    loss.register_forward_hook(lambda *_: calls.append(None))
    called(DualBranchContrast(loss, mode, intraview), *embeddings(3, 6), torch.arange(6) // 2)
    assert len(calls) == count


def compare_processes(rank, num_ranks):
    """The second process has more graphs. DistributedDataParallel takes the mean of gradients."""
    graphs, batch = [2, 3], torch.tensor([0, 0, 1, 1, 2, 2, 2, 3, 4])
    nodes = [4, 5]
    g, h = embeddings(5, 9)
    for mode, intraview in (("G2G", False), ("L2L", True), ("G2L", False), ("G2L", True)):
        whole = DualBranchContrast(InfoNCE(gather=False), mode, intraview)
        expected = called(whole, g, h, batch)
        mine = g.split(graphs, 1)[rank].detach(), h.split(nodes, 1)[rank].detach()
        own_batch = batch.split(nodes)[rank] - 2 * rank
        model = DualBranchContrast(InfoNCE(), mode, intraview)
        ours = called(model, *(z.requires_grad_() for z in mine), own_batch)
        torch.testing.assert_close(ours[0], expected[0])
        for gradient, of_all, sizes in zip(ours[1:], expected[1:], (graphs, nodes), strict=True):
            torch.testing.assert_close(gradient / num_ranks, of_all.split(sizes, 1)[rank])


def test_two_processes_compute_one_loss():
    on_ranks(compare_processes, 2)


def with_intraview(**options):
    return DualBranchContrast(InfoNCE(**options), "L2L", intraview_negs=True)


def changed():
    """Its loss was replaced by one that does not compare within a view."""
    model = with_intraview()
    model.loss = InfoNCE()
    return model


Z, EYE, ONES = torch.ones(5, 4), torch.eye(5), torch.ones(5, 10)
SHARED = {"extra_pos_mask": ONES.roll(1, 0).tril(-1), "extra_neg_mask": ONES}
g2l = DualBranchContrast(InfoNCE(), "G2L")

TYPE_ERRORS = [
    (lambda: DualBranchContrast(InfoNCE, "G2G"), "loss must be InfoNCE(...)"),
    (lambda: DualBranchContrast(torch.nn.MSELoss(), "G2G"), "got MSELoss()", "PyGCL's own"),
]
VALUE_ERRORS = [
    (
        lambda: DualBranchContrast(InfoNCE(), "L2G"),
        "mode must be 'G2G', 'L2L' or 'G2L'",
        "'L2G'",
    ),
    (lambda: DualBranchContrast(PGCLLoss(4), "G2L"), "must not be 'G2L'", "PGCLLoss"),
    # Options that contradict the contrast model.
    (lambda: with_intraview(negatives="cross"), "negatives of the loss is 'cross', not 'all'"),
    (lambda: with_intraview(queries="first"), "queries of the loss is 'first', not 'all'"),
    (
        lambda: with_intraview(memory_size=8, dim=4),
        "memory_size of the loss is 8, not 0: give each",
    ),
    (lambda: changed()(h1=Z, h2=Z), "negatives of the loss is 'all', not 'cross': give each"),
    # Calls.
    (lambda: with_intraview()(Z), "mode 'L2L' needs tensors of one length", "'h2': None"),
    (
        lambda: with_intraview()(Z, Z[:3]),
        "'h1': torch.Size([5, 4]), 'h2': torch.Size([3, 4])",
    ),
    (lambda: g2l(g1=Z, g2=Z, h1=Z, h2=Z), "mode 'G2L' needs", "'batch': None"),
    (lambda: g2l(g1=Z[:1], g2=Z[:1], h1=Z, h2=Z), "'h3': None, 'h4': None"),
    (
        lambda: g2l(g1=Z[:1], g2=Z[:1], h1=Z, h2=Z, batch=torch.zeros(5, dtype=torch.long)),
        "'h3': None, 'h4': None",
    ),
    (lambda: with_intraview()(Z, Z, extra_pos_mask=EYE), "shape (5, 10), but got (5, 5)"),
    (
        lambda: with_intraview()(Z, Z, **SHARED),
        "share a pair: give extra_neg_mask & ~extra_pos_mask",
    ),
]


@pytest.mark.parametrize(
    ("error", "call", "words"),
    [*slips(TypeError, TYPE_ERRORS), *slips(ValueError, VALUE_ERRORS)],
)
def test_mistakes(error, call, words):
    assert_error(error, call, words)


def test_options_that_say_the_same_and_copies():
    z1, z2 = torch.randn(2, 5, 4)
    model = DualBranchContrast(InfoNCE.like("PyGCL"), "G2G")
    torch.testing.assert_close(copy.deepcopy(model)(g1=z1, g2=z2), InfoNCE.like("PyGCL")(z1, z2))


def test_the_adapter_needs_no_framework():
    with mock.patch.dict(sys.modules, {"GCL": None, "torch_geometric": None, "dgl": None}):
        sys.modules.pop("pgcl_losses.adapters.pygcl")
        from pgcl_losses.adapters.pygcl import DualBranchContrast as Again

        assert Again(InfoNCE(), "G2G").loss.negatives == "cross"
