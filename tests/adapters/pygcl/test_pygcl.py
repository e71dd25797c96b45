"""PGCL in PyGCL's own contrast models is PGCLLoss, whatever the mode, and InfoNCE is PyGCL's own
where the definitions are the same.
"""

import copy
import pickle
import sys
import weakref
from unittest import mock

import GCL.losses as L
import pytest
import torch
from GCL.models import (
    BootstrapContrast,
    DualBranchContrast,
    SingleBranchContrast,
    WithinEmbedContrast,
)
from GCL.models.contrast_model import add_extra_mask
from GCL.models.samplers import SameScaleSampler
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters.pygcl import InfoNCEContrastLoss, PGCLContrastLoss
from pgcl_losses.contrast import WEIGHTINGS

OPTIONS = {
    "weighting": st.sampled_from(WEIGHTINGS),
    "exclude_same_cluster": st.booleans(),
    "queue_size": st.sampled_from([0, 7]),
    "memory_size": st.sampled_from([0, 7]),
    "num_prototypes": st.sampled_from([3, (3, 2)]),
    "negative_ranks": st.sampled_from([None, (0, 2), (1, 2)]),
    "soft_clusters": st.booleans(),
    "consistency_weight": st.sampled_from([0.0, 6.0]),
    "freeze_steps": st.integers(0, 1),
}
NAMES = {"G2G": ("g1", "g2"), "L2L": ("h1", "h2")}
TEMPERATURES = st.sampled_from([0.02, 0.1, 0.2, 0.5, 1.0])
on_intraview = pytest.mark.parametrize("intraview", [True, False])


def views_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, count, 4, generator=generator, requires_grad=True).unbind()


def leaves(*values, dtype=torch.float32):
    return [value.detach().to(dtype, copy=True).requires_grad_() for value in values]


def model_of(loss, intraview=False, mode="G2G"):
    """A contrast model as a function of both views."""
    model = DualBranchContrast(loss, mode=mode, intraview_negs=intraview)
    return lambda *views, **masks: model(**dict(zip(NAMES[mode], views, strict=True)), **masks)


def sample_of(anchor, other, intraview):
    return torch.cat([other, anchor]) if intraview else other


def negatives_of(intraview):
    return "all" if intraview else "cross"


@pytest.mark.filterwarnings("ignore:PGCLLoss. .* different embeddings:UserWarning")
@given(
    mode=st.sampled_from(list(NAMES)),
    intraview=st.booleans(),
    count=st.integers(1, 9),
    seed=st.integers(0, 1000),
    options=st.fixed_dictionaries(OPTIONS),
)
def test_it_is_pgcl(mode, intraview, count, seed, options):
    loss = PGCLContrastLoss(4, **options)
    expected = PGCLLoss(4, negatives=negatives_of(intraview), **options)
    expected.load_state_dict(loss.pgcl.state_dict())
    for step in range(2):
        results = []
        for side, value_of in ((loss.pgcl, model_of(loss, intraview, mode)), (expected, expected)):
            views = leaves(*views_of(count, seed + step))
            value = value_of(*views)
            side.zero_grad()
            value.backward()
            gradients = [view.grad for view in views]
            results.append([value, *gradients, side.prototypes.weight.grad, *side.buffers()])
        torch.testing.assert_close(*results)


def test_masks_of_more_pairs_than_a_float_counts():
    with torch.no_grad():
        assert model_of(PGCLContrastLoss(4, 3), intraview=True)(*views_of(2899)).isfinite()


@pytest.mark.filterwarnings("ignore:PGCLLoss. the embeddings hold NaN")
@on_intraview
@pytest.mark.parametrize("kind", ["nan", "no_grad", "inference", "one_gradient"])
def test_the_loss_is_computed_once_for_a_pair(kind, intraview):
    """With several processes a second one on some of them would wait for ever."""
    loss = PGCLContrastLoss(4, 3, queue_size=20)
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode}
    z1, z2 = leaves(*views_of(6))
    if kind == "nan":
        z1.data[0, 0] = torch.nan
    z2.requires_grad_(kind != "one_gradient")
    with (
        mock.patch.object(loss.pgcl, "forward", wraps=loss.pgcl.forward) as computed,
        modes.get(kind, torch.enable_grad)(),
    ):
        value = model_of(loss, intraview)(2 * z1, 2 * z2)
    assert computed.call_count == 1
    assert value.isnan() == (kind == "nan")
    assert loss.pgcl.prototypes.queue_filled == (6 if kind == "one_gradient" else 0)


def test_it_is_a_loss_and_a_module():
    loss = PGCLContrastLoss(4, 3)
    assert isinstance(loss, L.Loss)
    assert list(DualBranchContrast(loss, mode="G2G").parameters()) == [loss.pgcl.prototypes.weight]
    calls = []
    loss.register_forward_hook(lambda *_: calls.append(1))
    model_of(loss)(*views_of(5))
    assert len(calls) == 2


def test_half_a_pair_of_calls_changes_nothing_later():
    loss = PGCLContrastLoss(4, 3)
    value_of = model_of(loss)
    z1, z2 = views_of(6)
    expected = value_of(z1, z2)
    loss(*views_of(6, seed=1))
    torch.testing.assert_close(value_of(z1, z2), expected)
    loss(z1.detach(), z2.detach())
    with torch.no_grad():
        assert not loss(z2, z1).requires_grad
    for copied in (copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))):
        loss(z1, z2)
        twin = copied(loss)
        value = twin(z2, z1)
        torch.testing.assert_close(value, expected)
        assert torch.autograd.grad(value, twin.pgcl.prototypes.weight)[0].any()


@torch.no_grad()
def add(tensor):
    tensor += torch.rand(tensor.shape)


def failing_call(loss, first, *views):
    with pytest.raises(ValueError, match="z1 has dimension 3 but"):
        loss(*[view[:, :3] for view in views])


CHANGES = {
    "prototypes": lambda loss, *_: add(loss.pgcl.prototypes.weight),
    "view 1": lambda loss, first, z1, z2: add(z1),
    "view 2": lambda loss, first, z1, z2: add(z2),
    "option": lambda loss, *_: setattr(loss.pgcl, "temperature", 0.5),
    "evaluation": lambda loss, *_: loss.eval(),
    "frozen": lambda loss, *_: loss.pgcl.requires_grad_(False),
    "next batch": lambda loss, *_: loss.pgcl(*views_of(6, seed=5)),
    "failure": failing_call,
    "backward": lambda loss, first, *_: first.backward(),
}


@on_intraview
@pytest.mark.parametrize("change", CHANGES)
def test_the_second_call_is_computed_if_anything_changed(change, intraview):
    loss = PGCLContrastLoss(4, 3, queue_size=5)
    z1, z2 = leaves(*views_of(6))
    first = loss(z1, sample_of(z1, z2, intraview))
    CHANGES[change](loss, first, z1, z2)
    fresh = copy.deepcopy(loss.pgcl)
    fresh.negatives = negatives_of(intraview)
    results = []
    for module, sample in ((loss, sample_of(z2, z1, intraview)), (fresh, z1)):
        value = module(z2, sample)
        wanted = [z1, z2, *[weight for weight in module.parameters() if weight.requires_grad]]
        results.append([value, *torch.autograd.grad(value, wanted)])
    torch.testing.assert_close(*results)


@on_intraview
def test_the_second_call_of_copied_views_has_their_gradient(intraview):
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = leaves(*views_of(6))
    first = loss(z1, sample_of(z1, z2, intraview))
    z1, z2 = leaves(z1, z2)
    second = loss(z2, sample_of(z2, z1, intraview))
    torch.testing.assert_close(first, second)
    assert all(gradient.any() for gradient in torch.autograd.grad(second, [z1, z2]))


def test_a_first_loss_that_is_changed_leaves_the_second_one():
    for loss in (PGCLContrastLoss(4, 3), InfoNCEContrastLoss()):
        z1, z2 = views_of(6)
        expected = copy.deepcopy(loss)(z2, z1)
        first = loss(z1, z2)
        first += 1
        torch.testing.assert_close(loss(z2, z1), expected)


def test_after_a_pair_it_keeps_no_graph():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = (2 * view for view in views_of(6))
    kept = weakref.ref(z1)
    value = model_of(loss)(z1, z2)
    del z1, value
    assert kept() is None


def test_an_own_extra_mask_may_say_what_the_sampler_meant():
    value_of = model_of(PGCLContrastLoss(4, 3), intraview=True)
    meant = 1 - torch.eye(5).repeat(1, 2)
    expected = value_of(*views_of(5))
    torch.testing.assert_close(value_of(*views_of(5), extra_neg_mask=meant), expected)


def test_errors():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = views_of(5)
    value_of = model_of(loss)
    with pytest.raises(ValueError, match=r"without extra_pos_mask.*25 positives in pos_mask"):
        value_of(z1, z2, extra_pos_mask=torch.ones(5, 5))
    with pytest.raises(ValueError, match=r"extra_neg_mask.* and 0 negatives in neg_mask"):
        value_of(z1, z2, extra_neg_mask=torch.zeros(5, 5))
    with pytest.raises(ValueError, match=r"'G2G' or 'L2L'.*got 2 anchors, 5 samples"):
        SingleBranchContrast(loss, mode="G2L")(h=z1, g=z2[:2], batch=torch.tensor([0, 0, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"got 5 anchors, 10 samples, no positives in pos_mask"):
        loss(z1, torch.cat([z2, z2]))  # negatives of a sampler of the user
    with pytest.raises(TypeError, match="negatives is up to the contrast model"):
        PGCLContrastLoss(4, negatives="all")


def value_and_gradients(model, names, views, **masks):
    views = leaves(*views, dtype=torch.float64)
    loss = model(**dict(zip(names, views, strict=True)), **masks)
    return loss, *torch.autograd.grad(loss, views, allow_unused=True)


@given(
    mode=st.sampled_from(["G2G", "L2L", "G2L"]),
    intraview=st.booleans(),
    count=st.integers(2, 9),
    temperature=TEMPERATURES,
    seed=st.integers(0, 1000),
)
def test_info_nce_is_that_of_pygcl(mode, intraview, count, temperature, seed):
    """With one positive for each anchor: in G2L, graphs with one node each, in any order."""
    names, views, of_graphs = NAMES.get(mode), views_of(count, seed), {}
    if mode == "G2L":
        names, views = ("h1", "h2", "g1", "g2"), [*views, *views_of(count, seed + 1)]
        of_graphs["batch"] = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    ours, theirs = (
        DualBranchContrast(loss, mode=mode, intraview_negs=intraview)
        for loss in (InfoNCEContrastLoss(temperature=temperature), L.InfoNCE(tau=temperature))
    )
    # Without it PyGCL makes each anchor a negative of itself.
    meant = torch.ones(count, count * (1 + intraview))
    fewer = (torch.rand(meant.shape) < 0.5).float()
    for masks in ({}, {"extra_neg_mask": meant}, {"extra_neg_mask": fewer}):
        expected = value_and_gradients(theirs, names, views, **of_graphs, **masks)
        value = value_and_gradients(ours, names, views, **of_graphs, **masks)
        torch.testing.assert_close(value, expected)


@on_intraview
def test_extra_masks_are_positives_by_index(intraview):
    """Positives of the masks, and negatives of them alone; each positive in its own denominator."""
    z1, z2 = leaves(*views_of(6), dtype=torch.float64)
    size = (6, 6 * (1 + intraview))
    extra_pos = (torch.rand(size) < 0.2).float()
    if intraview:
        extra_pos[:, 6:].fill_diagonal_(0)
    extra_neg = (torch.rand(size) < 0.7).float()
    model = DualBranchContrast(InfoNCEContrastLoss(), mode="L2L", intraview_negs=intraview)
    for masks in (
        {"extra_pos_mask": extra_pos},
        {"extra_pos_mask": extra_pos, "extra_neg_mask": extra_neg * (1 - extra_pos)},
    ):
        pos, neg = add_extra_mask(*SameScaleSampler(intraview)(z1, z2)[2:], **masks)
        expected = 0.0
        for anchor, other in ((z1, z2), (z2, z1)):
            sample = sample_of(anchor, other, intraview)
            scores = torch.cosine_similarity(anchor[:, None], sample, dim=-1) / 0.2
            others = (scores.exp() * neg).sum(1, keepdim=True)
            losses = ((scores.exp() + others).log() - scores) * pos
            expected += (losses.sum(1) / pos.sum(1)).mean() / 2
        value = model(h1=z1, h2=z2, **masks)
        torch.testing.assert_close(value, expected)
        torch.testing.assert_close(
            torch.autograd.grad(value, (z1, z2)), torch.autograd.grad(expected, (z1, z2))
        )


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    temperature=TEMPERATURES,
    seed=st.integers(0, 1000),
)
def test_graphs_against_nodes(sizes, temperature, seed):
    """What differs from PyGCL are the other positives in its denominator."""
    sizes[-1] += 1  # PyGCL counts graphs by their nodes
    generator = torch.Generator().manual_seed(seed)
    batch = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    batch = batch[torch.randperm(len(batch), generator=generator)]
    views = views_of(len(sizes), seed)[0], views_of(len(batch), seed + 1)[1]
    ours, theirs = (
        value_and_gradients(SingleBranchContrast(loss, mode="G2L"), "gh", views, batch=batch)
        for loss in (InfoNCEContrastLoss(temperature=temperature), L.InfoNCE(tau=temperature))
    )
    z = leaves(*views, dtype=torch.float64)
    for values, all_positives in ((ours, False), (theirs, True)):
        expected = loop(*z, batch, temperature, all_positives)
        if all(sizes) or values is ours:  # theirs is NaN
            torch.testing.assert_close(values, (expected, *torch.autograd.grad(expected, z)))


def loop(g, h, batch, temperature, all_positives):
    losses = []
    for i in range(len(g)):
        scores = torch.cosine_similarity(g[i : i + 1], h) / temperature
        others = scores[batch != i].exp().sum()
        of_positives = [
            (scores[batch == i] if all_positives else score).exp().sum().add(others).log() - score
            for score in scores[batch == i]
        ]
        if of_positives:
            losses.append(sum(of_positives) / len(of_positives))
    return sum(losses) / len(losses)


@pytest.mark.parametrize("num_nodes", [1, 6])
def test_one_graph_against_nodes_of_a_corrupted_one(num_nodes):
    views = *views_of(num_nodes), *views_of(num_nodes, seed=1), *views_of(1)
    h1, h2, h3, h4, g1, g2 = leaves(*views, dtype=torch.float64)
    loss = InfoNCEContrastLoss()
    batch = torch.tensor([0] * num_nodes + [1] * num_nodes)
    of_1, of_2 = (
        loop(g, torch.cat([h, corrupted]), batch, 0.2, False)
        for g, h, corrupted in ((g1, h2, h4), (g2, h1, h3))
    )
    torch.testing.assert_close(SingleBranchContrast(loss, mode="G2L")(h=h2, g=g1, hn=h4), of_1)
    two = DualBranchContrast(loss, mode="G2L")(h1=h1, h2=h2, g1=g1, g2=g2, h3=h3, h4=h4)
    torch.testing.assert_close(two, (of_1 + of_2) / 2)


def test_contrast_models_without_negatives_of_their_own():
    loss, theirs = InfoNCEContrastLoss(temperature=0.5), L.InfoNCE(tau=0.5)
    z1, z2 = views_of(6)
    expected = InfoNCE(temperature=0.5, negatives="cross")(z1, z2)
    torch.testing.assert_close(WithinEmbedContrast(loss)(z1, z2), expected)
    t1, t2 = (z.detach() for z in views_of(6, seed=1))
    value = BootstrapContrast(loss)(h1_pred=z1, h2_pred=z2, h1_target=t1, h2_target=t2)
    masks = torch.eye(6), 1 - torch.eye(6)
    torch.testing.assert_close(value, (theirs(t1, z2, *masks) + theirs(t2, z1, *masks)) / 2)


@on_intraview
def test_info_nce_of_a_pair_is_computed_once_each_call_has_its_anchors(intraview):
    loss = InfoNCEContrastLoss(memory_size=20, dim=4)
    expected = InfoNCE(negatives=negatives_of(intraview), memory_size=20, dim=4, reduction="none")
    for seed in range(3):
        z1, z2 = views_of(6, seed)
        both = expected(z1, z2)
        values = loss(z1, sample_of(z1, z2, intraview)), loss(z2, sample_of(z2, z1, intraview))
        torch.testing.assert_close(values, (both[:6].mean(), both[6:].mean()))
    assert loss.info_nce.memory.written == 36


@pytest.mark.parametrize("change", ["value", "gradient"])
def test_a_temperature_that_changes_between_both_calls(change):
    temperature = torch.tensor(0.2, requires_grad=True)
    loss = InfoNCEContrastLoss(temperature=temperature)
    z1, z2 = views_of(6)
    loss(z1, z2)
    if change == "value":
        add(temperature)
    else:
        (temperature,) = leaves(temperature)
        loss.info_nce.temperature = temperature
    second = loss(z2, z1)
    fresh = InfoNCE(temperature=temperature, negatives="cross", reduction="none")
    torch.testing.assert_close(second, fresh(z2, z1)[:6].mean())
    assert torch.autograd.grad(second, temperature)[0] != 0


def test_errors_of_info_nce():
    loss = InfoNCEContrastLoss()
    z1, z2 = views_of(5)
    batch = torch.tensor([0, 0, 1, 1, 1])
    extra = torch.eye(5).roll(1, 0)
    with pytest.raises(ValueError, match="pos_mask and neg_mask must not have a pair in common"):
        model_of(loss)(z1, z2, extra_pos_mask=extra, extra_neg_mask=torch.ones(5, 5))
    with pytest.raises(ValueError, match=r"anchor has 2 embeddings and sample 5: without pos_mask"):
        loss(z1[:2], z2)
    with pytest.raises(ValueError, match=r"pos_mask has shape \(2, 5\), but anchor has 3 embedd"):
        SingleBranchContrast(loss, mode="G2L")(h=z1, g=z2[:3], batch=batch)  # the last has no node
    remembering = InfoNCEContrastLoss(memory_size=8, dim=4)
    with pytest.raises(ValueError, match=r"memory_size is 8, but .* 0 for mode 'G2L'.*items"):
        SingleBranchContrast(remembering, mode="G2L")(h=z1, g=z2[:2], batch=batch)
    with pytest.raises(TypeError, match=r"reduction is up to the contrast model, but got 'sum'"):
        InfoNCEContrastLoss(reduction="sum")
    with pytest.raises(TypeError, match=r"options by name, such as temperature=, but got 0.2"):
        InfoNCEContrastLoss(0.2)
    with pytest.raises(TypeError, match=r"InfoNCEContrastLoss has no argument tau: .*temperature"):
        InfoNCEContrastLoss(tau=0.2)
    with pytest.raises(TypeError, match=r"take the losses of pgcl_losses.adapters.pygcl"):
        model_of(InfoNCE())(z1, z2)


def of_many_processes(rank, num_ranks, mode):
    graphs = [2, 4, 3][:num_ranks]
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(2, sum(graphs), 4, dtype=torch.float64, generator=generator)
    nodes = [count * 2 for count in graphs]
    h = torch.randn(2, sum(nodes), 4, dtype=torch.float64, generator=generator)
    names = ("g1", "g2", "h1", "h2") if mode == "G2L" else ("g1", "g2")

    def step(gather, views, num_graphs):
        views = [z.detach().clone().requires_grad_() for z in views][: len(names)]
        loss = InfoNCEContrastLoss(gather=gather)
        batch = torch.arange(num_graphs).repeat_interleave(2)
        named = dict(zip(names, views, strict=True))
        value = DualBranchContrast(loss, mode=mode)(**named, batch=batch)
        return value.detach(), torch.autograd.grad(value, views)

    value, gradients = step(
        True,
        [z.split(counts)[rank] for zs, counts in ((g, graphs), (h, nodes)) for z in zs],
        graphs[rank],
    )
    expected, of_all = step(False, [*g, *h], sum(graphs))
    torch.testing.assert_close(value, expected)
    for mine, every, counts in zip(gradients, of_all, [graphs, graphs, nodes, nodes], strict=False):
        # DistributedDataParallel takes their mean over processes.
        torch.testing.assert_close(mine / num_ranks, every.split(counts)[rank])


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["G2G", "G2L"])
def test_info_nce_of_many_processes_is_that_of_one(mode):
    on_ranks(of_many_processes, 3, mode)


def extra_masks_of_many_processes(rank, num_ranks, intraview):
    """Some ranks have extra positives, one has no anchors at all; the temperature is learned."""
    labels = [torch.tensor(of_rank) for of_rank in ([0, 1, 2], [], [3, 3, 4, 5])]
    counts = [len(of_rank) for of_rank in labels]
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(2, sum(counts), 4, dtype=torch.float64, generator=generator)

    def step(gather, views, of_views):
        views = [view.detach().clone().requires_grad_() for view in views]
        tau = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        loss = InfoNCEContrastLoss(gather=gather, temperature=tau)
        model = DualBranchContrast(loss, mode="L2L", intraview_negs=intraview)
        same = (of_views[:, None] == of_views).float()
        extra = torch.cat([same, torch.zeros_like(same)], 1) if intraview else same
        value = model(h1=views[0], h2=views[1], extra_pos_mask=extra)
        return value.detach(), torch.autograd.grad(value, [tau, *views])

    wrong = torch.ones(counts[rank], (1 + intraview) * counts[rank] + (rank == 0))
    sample = sample_of(*[view.split(counts)[rank] for view in z], intraview)
    with pytest.raises(ValueError, match=r"pos_mask has shape|masks of another rank are wrong"):
        InfoNCEContrastLoss()(z[0].split(counts)[rank], sample, wrong)
    value, (d_tau, *d_views) = step(True, [view.split(counts)[rank] for view in z], labels[rank])
    expected, (d_expected, *d_of_all) = step(False, [*z], torch.cat(labels).long())
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(d_tau, d_expected)
    for mine, every in zip(d_views, d_of_all, strict=True):
        torch.testing.assert_close(mine / num_ranks, every.split(counts)[rank])


@pytest.mark.slow
@on_intraview
def test_extra_masks_of_many_processes(intraview):
    on_ranks(extra_masks_of_many_processes, 3, intraview)


@pytest.mark.parametrize("options", [{"hardness": 0.5}, {"debias": 0.1}, {"decoupled": True}])
def test_own_negatives_do_not_depend_on_how_they_are_computed(options):
    """An own negative is one more negative, whichever way both calls are computed."""
    views = views_of(5)
    model = DualBranchContrast(InfoNCEContrastLoss(**options), mode="L2L", intraview_negs=True)
    z1, z2 = (view.double() for view in views)
    items = torch.arange(15)
    loss = InfoNCE(negatives="cross", queries="first", **options)
    pairs = torch.stack([torch.arange(5), torch.arange(5, 10)])
    expected = [
        loss(one, torch.cat([other, one]), items=(items[:5], items[5:]), positives=pairs)
        for one, other in ((z1, z2), (z2, z1))
    ]
    torch.testing.assert_close(model(h1=z1, h2=z2), sum(expected) / 2)


def test_a_warning_points_to_the_users_line():
    model = DualBranchContrast(PGCLContrastLoss(4, 10), mode="G2G")
    g1, g2 = views_of(6)
    model(g1=g1, g2=g2)
    model(g1=g1, g2=g2)
    with pytest.warns(UserWarning, match="are balanced over 10") as caught:
        model(g1=g1, g2=g2)
    assert caught[0].filename == __file__


def train_the_encoder_alone(num_steps):
    encoder, value_of = torch.nn.Linear(4, 4), model_of(PGCLContrastLoss(4, 3))
    optimizer = torch.optim.Adam(encoder.parameters())
    for step in range(num_steps):
        optimizer.zero_grad()
        value_of(*map(encoder, views_of(6, seed=step))).backward()
        optimizer.step()


def test_the_optimizer_of_pygcls_examples_is_warned_of_once():
    with pytest.warns(UserWarning, match="prototypes have not moved in 16") as caught:
        train_the_encoder_alone(60)
    assert len(caught) == 1


def test_the_module_imports_without_frameworks():
    gone = {"GCL": None, "GCL.losses": None, "torch_geometric": None}
    with mock.patch.dict(sys.modules, gone):
        sys.modules.pop("pgcl_losses.adapters.pygcl")
        from pgcl_losses.adapters.pygcl import PGCLContrastLoss as Again

        with pytest.raises(ImportError, match=r"torch-sparse; pip install PyGCL==0\.1\.2 dgl=="):
            Again(4)
