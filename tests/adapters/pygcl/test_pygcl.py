"""PGCL in PyGCL's own contrast models is PGCLLoss, whatever the mode, and InfoNCE is PyGCL's own
where the definitions are the same; its augmentors feed PyG's adapter.
"""

import copy
import gc
import pickle
import sys
import weakref
from unittest import mock

import GCL.augmentors as A
import GCL.losses as L
import pytest
import torch
from GCL.models import (
    BootstrapContrast,
    DualBranchContrast,
    SingleBranchContrast,
    WithinEmbedContrast,
)
from helpers.ranks import on_ranks
from hypothesis import given
from hypothesis import strategies as st
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_add_pool
from torch_geometric.utils import to_undirected

from pgcl_losses import InfoNCE, PGCLLoss
from pgcl_losses.adapters import pyg
from pgcl_losses.adapters.pygcl import AsTransform, InfoNCEContrastLoss, PGCLContrastLoss
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
}
# Prototypes that learn from the first step on, that rest at first, or that learn alone.
BEGINNINGS = st.sampled_from([{}, {"freeze_steps": 1}, {"warmup_steps": 1}])
ROWS = {"G2G": ("g1", "g2"), "L2L": ("h1", "h2")}


def views_of(num_rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_rows, 4, generator=generator, requires_grad=True).unbind()


@pytest.mark.filterwarnings("ignore:PGCLLoss. .* different embeddings:UserWarning")
@given(
    mode=st.sampled_from(list(ROWS)),
    intraview=st.booleans(),
    num_rows=st.integers(1, 9),
    seed=st.integers(0, 1000),
    options=st.fixed_dictionaries(OPTIONS),
    beginning=BEGINNINGS,
)
def test_it_is_pgcl(mode, intraview, num_rows, seed, options, beginning):
    options = options | beginning
    loss = PGCLContrastLoss(4, **options)
    expected = PGCLLoss(4, negatives="all" if intraview else "cross", **options)
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


@pytest.mark.parametrize("intraview", [True, False])
def test_without_weights_and_consistency_it_is_info_nce(intraview):
    plain = {"weighting": "uniform", "exclude_same_cluster": False, "consistency_weight": 0.0}
    model = DualBranchContrast(PGCLContrastLoss(4, **plain), mode="L2L", intraview_negs=intraview)
    z1, z2 = views_of(7)
    expected = InfoNCE(negatives="all" if intraview else "cross")(z1, z2)
    torch.testing.assert_close(model(h1=z1, h2=z2), expected)


@pytest.mark.parametrize(("num_rows", "intraview"), [(2899, True), (6003, False)])
def test_masks_of_more_pairs_than_a_float_counts(num_rows, intraview):
    model = DualBranchContrast(PGCLContrastLoss(4, 3), mode="L2L", intraview_negs=intraview)
    with torch.no_grad():
        assert model(h1=views_of(num_rows)[0], h2=views_of(num_rows)[1]).isfinite()


@pytest.mark.parametrize("intraview", [True, False])
def test_the_loss_is_computed_once_for_a_pair_even_of_nan(intraview):
    """With several processes a second one on some of them would wait for ever."""
    loss = PGCLContrastLoss(4, 3)
    model = DualBranchContrast(loss, mode="G2G", intraview_negs=intraview)
    z1, z2 = (z.detach().clone() for z in views_of(6))
    z1[0, 0] = torch.nan
    with mock.patch.object(loss.pgcl, "forward", wraps=loss.pgcl.forward) as computed:
        assert model(g1=z1, g2=z2).isnan()
    assert computed.call_count == 1


def test_it_is_a_loss_and_a_module():
    loss = PGCLContrastLoss(4, 3)
    model = DualBranchContrast(loss, mode="G2G")
    assert isinstance(loss, L.Loss)
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
    other = loss(*views_of(6, seed=1))
    torch.testing.assert_close(model(g1=z1, g2=z2), expected)
    alive = loss(z1, z2)
    with torch.no_grad():
        evaluated = model(g1=z2, g2=z1)
    assert not evaluated.requires_grad
    for copied in (copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))):
        alive = loss(z1, z2)
        twin = copied(model)
        value = twin.loss(z2, z1)
        torch.testing.assert_close(value, expected)
        assert torch.autograd.grad(value, twin.loss.pgcl.prototypes.weight)[0].any()
    assert alive.isfinite()
    assert other.isfinite()


def shifted_prototypes(loss, *views):
    with torch.no_grad():
        loss.pgcl.prototypes.weight += torch.randn(3, 4)


def shifted_data_of_prototypes(loss, *views):
    loss.pgcl.prototypes.weight.data += torch.randn(3, 4)


def shifted_rows(loss, z1, z2):
    z1.data[0] += 1


def other_option(loss, *views):
    loss.pgcl.temperature = 0.5


def evaluation(loss, *views):
    loss.eval()


def frozen(loss, *views):
    loss.pgcl.requires_grad_(False)


def next_batch(loss, *views):
    loss.pgcl(*views_of(6, seed=5))


def failure(loss, z1, z2):
    loss.pgcl.temperature = 0.5
    with pytest.raises(ValueError, match="z1 has dimension 3 but"):
        loss(z1[:, :3], z2[:, :3])


CHANGES = [
    shifted_prototypes,
    shifted_data_of_prototypes,
    shifted_rows,
    other_option,
    evaluation,
    frozen,
    next_batch,
    failure,
]


@pytest.mark.parametrize("intraview", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_the_second_call_is_computed_if_anything_changed(change, intraview):
    loss = PGCLContrastLoss(4, 3, queue_size=5)
    z1, z2 = views_of(6)
    one, two = (
        (torch.cat([other, z]) if intraview else other for z, other in ((z1, z2), (z2, z1)))
        if change is not shifted_rows
        else (z2, z1)
    )
    first = loss(z1, one)
    change(loss, z1, z2)
    fresh = copy.deepcopy(loss.pgcl)
    fresh.negatives = "all" if len(two) > len(z2) else "cross"
    second, expected = loss(z2, two), fresh(z2, z1)
    torch.testing.assert_close(second, expected)
    assert second is not first
    ours, theirs = (
        torch.autograd.grad(value, [z1, z2, *weights], retain_graph=True)
        for value, weights in (
            (second, [w for w in loss.parameters() if w.requires_grad]),
            (expected, [w for w in fresh.parameters() if w.requires_grad]),
        )
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("intraview", [True, False])
def test_the_second_call_of_copied_views_has_their_gradient(intraview):
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = views_of(6)
    first = loss(z1, torch.cat([z2, z1]) if intraview else z2)
    z1, z2 = views_of(6)
    second = loss(z2, torch.cat([z1, z2]) if intraview else z1)
    torch.testing.assert_close(first, second)
    assert all(gradient.any() for gradient in torch.autograd.grad(second, [z1, z2]))


def test_a_loss_that_is_used_up_or_changed_is_not_returned_again():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = (z.detach().requires_grad_() for z in views_of(6))
    first = loss(z1, z2)
    expected = first.detach().clone()
    first.backward()
    loss(z2, z1).backward()
    torch.testing.assert_close(z1.grad, 2 * torch.autograd.grad(loss(z1, z2), z1)[0])
    total = loss(z1, z2)
    total += 1
    torch.testing.assert_close(loss(z2, z1), expected)


def test_between_steps_it_keeps_no_graph():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = views_of(6)
    z1 = 2 * z1
    in_the_graph = set()
    kept = weakref.ref(in_the_graph)
    z1.grad_fn.register_hook(in_the_graph.add)
    del in_the_graph
    value = loss(z1, z2)
    del z1
    assert kept() is not None
    del value
    gc.collect()
    assert kept() is None


def test_an_own_extra_mask_may_say_what_the_sampler_meant():
    model = DualBranchContrast(PGCLContrastLoss(4, 3), mode="L2L", intraview_negs=True)
    z1, z2 = views_of(5)
    meant = 1 - torch.eye(5).repeat(1, 2)
    torch.testing.assert_close(model(h1=z1, h2=z2, extra_neg_mask=meant), model(h1=z1, h2=z2))


def test_errors():
    loss = PGCLContrastLoss(4, 3)
    z1, z2 = views_of(5)
    model = DualBranchContrast(loss, mode="L2L")
    with pytest.raises(ValueError, match=r"without extra_pos_mask.*25 positives in pos_mask"):
        model(h1=z1, h2=z2, extra_pos_mask=torch.ones(5, 5))
    with pytest.raises(
        ValueError, match=r"leaves out 25 pairs, but of these 5 are.*extra_neg_mask"
    ):
        model(h1=z1, h2=z2, extra_neg_mask=torch.zeros(5, 5))
    with pytest.raises(ValueError, match=r"'G2G' or 'L2L'.*got 2 anchors, 5 samples"):
        SingleBranchContrast(loss, mode="G2L")(h=z1, g=z2[:2], batch=torch.tensor([0, 0, 1, 1, 1]))
    with pytest.raises(ValueError, match=r"got 5 anchors, 10 samples and no positives in pos_mask"):
        loss(z1, torch.cat([z2, z2]))  # negatives of a sampler of the user
    with pytest.raises(TypeError, match="negatives is up to the contrast model"):
        PGCLContrastLoss(4, negatives="all")


def grown(*values):
    """For float64."""
    return [value.detach().double().requires_grad_() for value in values]


def value_and_gradients(model, names, views, **masks):
    views = grown(*views)
    loss = model(**dict(zip(names, views, strict=True)), **masks)
    return loss, *torch.autograd.grad(loss, views, allow_unused=True)


TEMPERATURES = st.sampled_from([0.02, 0.1, 0.2, 0.5, 1.0])


@given(
    mode=st.sampled_from(["G2G", "L2L", "G2L"]),
    intraview=st.booleans(),
    num_rows=st.integers(2, 9),
    temperature=TEMPERATURES,
    seed=st.integers(0, 1000),
)
def test_info_nce_is_that_of_pygcl(mode, intraview, num_rows, temperature, seed):
    """With one positive for each anchor: in G2L, graphs with one node each, in any order."""
    names, views, of_graphs = ROWS.get(mode), views_of(num_rows, seed), {}
    if mode == "G2L":
        names, views = ("h1", "h2", "g1", "g2"), [*views, *views_of(num_rows, seed + 1)]
        of_graphs["batch"] = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))
    ours, theirs = (
        DualBranchContrast(loss, mode=mode, intraview_negs=intraview)
        for loss in (InfoNCEContrastLoss(temperature=temperature), L.InfoNCE(tau=temperature))
    )
    # Without it PyGCL makes each anchor a negative of itself.
    meant = torch.ones(num_rows, num_rows * (1 + intraview))
    expected = value_and_gradients(theirs, names, views, **of_graphs, extra_neg_mask=meant)
    for masks in ({}, {"extra_neg_mask": meant}):
        torch.testing.assert_close(
            value_and_gradients(ours, names, views, **of_graphs, **masks), expected
        )


def test_small_temperatures_at_which_pygcl_overflows():
    z1, z2 = (z.detach() for z in views_of(6))
    ours, theirs = (
        DualBranchContrast(loss, mode="L2L")(h1=z1, h2=z2)
        for loss in (InfoNCEContrastLoss(temperature=0.005), L.InfoNCE(tau=0.005))
    )
    assert ours.isfinite()
    assert not theirs.isfinite()


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
    g, h = views_of(len(sizes), seed)[0], views_of(len(batch), seed + 1)[1]
    ours, theirs = (
        value_and_gradients(SingleBranchContrast(loss, mode="G2L"), "gh", (g, h), batch=batch)
        for loss in (InfoNCEContrastLoss(temperature=temperature), L.InfoNCE(tau=temperature))
    )
    z = grown(g, h)
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
    (h1, h2), (h3, h4) = views_of(num_nodes), views_of(num_nodes, seed=1)
    g1, g2 = views_of(1)
    loss = InfoNCEContrastLoss()
    single = SingleBranchContrast(loss, mode="G2L")
    batch = torch.tensor([0] * num_nodes + [1] * num_nodes)
    expected = [
        loop(g.double(), torch.cat([h, corrupted]).double(), batch, 0.2, False)
        for g, h, corrupted in ((g1, h2, h4), (g2, h1, h3))
    ]
    one = single(**dict(zip(("h", "g", "hn"), grown(h2, g1, h4), strict=True)))
    torch.testing.assert_close(one, expected[0])
    names = ("h1", "h2", "g1", "g2", "h3", "h4")
    two = DualBranchContrast(loss, mode="G2L")(
        **dict(zip(names, grown(h1, h2, g1, g2, h3, h4), strict=True))
    )
    torch.testing.assert_close(two, sum(expected) / 2)


def test_contrast_models_without_negatives_of_their_own():
    loss = InfoNCEContrastLoss(temperature=0.5)
    z1, z2 = views_of(6)
    expected = InfoNCE(temperature=0.5, negatives="cross")(z1, z2)
    torch.testing.assert_close(WithinEmbedContrast(loss)(z1, z2), expected)
    targets = [z.detach() for z in views_of(6, seed=1)]
    names = ("h1_pred", "h2_pred", "h1_target", "h2_target")
    value = BootstrapContrast(loss)(**dict(zip(names, (z1, z2, *targets), strict=True)))
    eye = torch.eye(6)
    theirs = L.InfoNCE(tau=0.5)
    torch.testing.assert_close(
        value, (theirs(targets[0], z2, eye, 1 - eye) + theirs(targets[1], z1, eye, 1 - eye)) / 2
    )


@pytest.mark.parametrize("intraview", [True, False])
def test_info_nce_of_a_pair_is_computed_once_each_call_has_its_anchors(intraview):
    loss = InfoNCEContrastLoss()
    model = DualBranchContrast(loss, mode="G2G", intraview_negs=intraview)
    z1, z2 = views_of(6)
    with mock.patch.object(loss.info_nce, "forward", wraps=loss.info_nce.forward) as computed:
        value = model(g1=z1, g2=z2)
    assert computed.call_count == 1
    torch.testing.assert_close(value, InfoNCE(negatives=loss.info_nce.negatives)(z1, z2))
    loss = InfoNCEContrastLoss()
    first, second = loss(z1, z2), loss(z2, z1)
    both = InfoNCE(negatives="cross", reduction="none")(z1, z2)
    torch.testing.assert_close([first, second], [both[:6].mean(), both[6:].mean()])
    first += 1
    torch.testing.assert_close(second, both[6:].mean())


@pytest.mark.parametrize("change", ["value", "gradient"])
def test_a_temperature_that_changes_between_both_calls(change):
    logit = torch.tensor(1.6, requires_grad=True)
    loss = InfoNCEContrastLoss(temperature=1 / logit.exp())
    z1, z2 = views_of(6)
    first = loss(z1, z2)
    if change == "value":
        loss.info_nce.temperature.data += 0.3
    else:
        logit = logit.detach().requires_grad_()
        loss.info_nce.temperature = 1 / logit.exp()
    second = loss(z2, z1)
    fresh = InfoNCE(temperature=loss.info_nce.temperature, negatives="cross", reduction="none")
    torch.testing.assert_close(second, fresh(z2, z1)[:6].mean())
    assert torch.autograd.grad(second, logit)[0] != 0
    assert first.isfinite()


def test_options_of_info_nce():
    loss = InfoNCEContrastLoss(temperature=0.4, engine="dense", gather=False)
    expected = InfoNCE(temperature=0.4, engine="dense", gather=False, reduction="none")
    assert repr(loss.info_nce) == repr(expected)
    assert isinstance(loss, L.Loss)
    with pytest.raises(TypeError, match="reduction is up to the contrast model, but got 'sum'"):
        InfoNCEContrastLoss(reduction="sum")


def test_errors_of_info_nce():
    loss = InfoNCEContrastLoss()
    z1, z2 = views_of(5)
    batch = torch.tensor([0, 0, 1, 1, 1])
    nodes = {"h1": z1, "h2": z2}
    graphs = {"g1": z1[:2], "g2": z2[:2], "batch": batch}
    for mode, views, num_anchors in (("L2L", nodes, 5), ("G2L", nodes | graphs, 2)):
        model = DualBranchContrast(loss, mode=mode)
        with pytest.raises(ValueError, match=r"several anchors.*extra_pos_mask.*with items"):
            model(**views, extra_pos_mask=torch.ones(num_anchors, 5))
        with pytest.raises(ValueError, match=r"extra_neg_mask is not supported"):
            model(**views, extra_neg_mask=torch.zeros(num_anchors, 5))
    with pytest.raises(ValueError, match=r"several anchors.*extra_pos_mask"):
        DualBranchContrast(loss, mode="L2L", intraview_negs=True)(
            h1=z1, h2=z2, extra_pos_mask=torch.eye(5).roll(1, 0).repeat(1, 2)
        )
    with pytest.raises(ValueError, match=r"anchor has 2 embeddings and sample 5: without pos_mask"):
        loss(z1[:2], z2)
    with pytest.raises(ValueError, match=r"pos_mask has shape \(2, 5\), but anchor has 3 embedd"):
        SingleBranchContrast(loss, mode="G2L")(h=z1, g=z2[:3], batch=batch)  # the last has no node
    remembering = InfoNCEContrastLoss(memory_size=8)
    with pytest.raises(
        ValueError, match=r"memory_size is 8, but it must be 0 for mode 'G2L'.*items"
    ):
        SingleBranchContrast(remembering, mode="G2L")(h=z1, g=z2[:2], batch=batch)


def test_memory_has_each_embedding_once():
    loss = InfoNCEContrastLoss(memory_size=20)
    expected = InfoNCE(memory_size=20, negatives="cross")
    model = DualBranchContrast(loss, mode="G2G")
    for seed in range(3):
        z1, z2 = views_of(6, seed)
        torch.testing.assert_close(model(g1=z1, g2=z2), expected(z1, z2))
    assert loss.info_nce.memory.written == 36


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


def train(parameters_of, steps, accumulate=1, looks=0, freeze_steps=0, **options):
    torch.manual_seed(0)
    encoder = torch.nn.Linear(4, 4)
    model = DualBranchContrast(PGCLContrastLoss(4, 3, freeze_steps=freeze_steps), mode="G2G")
    optimizer = torch.optim.Adam(parameters_of(encoder, model), **options)
    for step in range(steps):
        z1, z2 = views_of(6, seed=step)
        model(g1=encoder(z1), g2=encoder(z2)).backward()
        if step % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
        if looks and step % looks == 0:
            with torch.no_grad():
                model(g1=z1, g2=z2)
                model.eval()(g1=z1, g2=z2)
            model.train()


def encoder_alone(encoder, model):
    return encoder.parameters()


def test_a_warning_points_to_the_users_line():
    model = DualBranchContrast(PGCLContrastLoss(4, 10), mode="G2G")
    g1, g2 = views_of(6)
    model(g1=g1, g2=g2)
    model(g1=g1, g2=g2)
    with pytest.warns(UserWarning, match="are balanced over 10") as caught:
        model(g1=g1, g2=g2)
    assert caught[0].filename == __file__


def both(encoder, model):
    return [*encoder.parameters(), *model.parameters()]


@pytest.mark.parametrize("given", [{}, {"looks": 7}, {"fused": True}])
def test_prototypes_that_no_optimizer_has_are_warned_of_once(given):
    with pytest.warns(UserWarning, match="prototypes have not moved in 16") as caught:
        train(encoder_alone, 120, **given)
    assert len(caught) == 1


@pytest.mark.parametrize(
    "given", [{}, {"looks": 3}, {"fused": True}, {"accumulate": 16}, {"freeze_steps": 70}]
)
def test_no_warning_of_prototypes_that_move(given):
    train(both, 130, **given)


AUGMENTORS = {
    "Identity": A.Identity(),
    "NodeDropping": A.NodeDropping(pn=0.4),
    "EdgeRemoving": A.EdgeRemoving(pe=0.4),
    "RWSampling": A.RWSampling(num_seeds=10, walk_length=3),
    "PPRDiffusion": A.PPRDiffusion(use_cache=False),
    "MarkovDiffusion": A.MarkovDiffusion(use_cache=False),
    "FeatureMasking": A.FeatureMasking(pf=0.4),
    "FeatureDropout": A.FeatureDropout(pf=0.4),
    "Compose": A.Compose([A.EdgeRemoving(pe=0.2), A.FeatureMasking(pf=0.2)]),
    "RandomChoice": A.RandomChoice([A.NodeDropping(pn=0.2), A.Identity()], num_choices=1),
}


def graphs_with(edge_attributes=(), sizes=(5, 1, 8, 6, 3)):
    graphs = []
    for i, size in enumerate(sizes):
        edge_index = torch.stack([torch.arange(size), torch.arange(size).roll(-1)])
        edge_index = to_undirected(edge_index[:, : size - 1])
        weight = 100.0 * i + edge_index.sum(0)
        data = Data(x=torch.full((size, 4), i + 1.0), edge_index=edge_index, y=torch.tensor([i]))
        data.update(dict.fromkeys(edge_attributes, weight))
        graphs.append(data)
    return graphs


# PyGCL calls what is deprecated of PyG.
old_names = pytest.mark.filterwarnings("ignore:'dropout_adj' is deprecated")


@old_names
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("edge_attributes", [(), ("edge_weight",), ("bond_order",)])
@pytest.mark.parametrize("name", AUGMENTORS)
def test_augmentors_keep_row_i_graph_i(name, edge_attributes):
    graphs = graphs_with(edge_attributes)
    batch = Batch.from_data_list(graphs)
    before = copy.deepcopy(batch)
    torch.manual_seed(5)
    view = AsTransform(AUGMENTORS[name])(batch)
    assert torch.equal(view.batch, before.batch)
    assert torch.equal(view.ptr, before.ptr)
    assert torch.equal(view.y, before.y)
    for key, value in before:
        assert torch.equal(batch[key], value)

    # The same edges as the augmentor makes by itself, and what they carry.
    torch.manual_seed(5)
    weight = before.get(edge_attributes[0]) if edge_attributes else None
    x, edge_index, weight = AUGMENTORS[name](before.x, before.edge_index, weight)
    assert torch.equal(view.x, x)
    carried = view.get((*edge_attributes, "edge_weight")[0])
    assert (carried is None) == (weight is None)
    rows, expected = (
        sorted(map(tuple, torch.cat([ends, w[None]]).T.tolist()))
        for ends, w in (
            (view.edge_index, torch.zeros(view.num_edges) if carried is None else carried),
            (edge_index, torch.zeros(edge_index.shape[1]) if weight is None else weight),
        )
    )
    assert rows == expected

    apart = view.to_data_list()
    assert [data.num_nodes for data in apart] == [data.num_nodes for data in graphs]
    again = Batch.from_data_list(apart)
    assert torch.equal(again.edge_index, view.edge_index)
    for data in pyg.NodeDrop(0.5)(view).to_data_list():
        own = (data.x == data.y + 1) | (data.x == 0)  # of no other graph
        assert own.all() or name == "FeatureDropout"
        assert data.edge_index.numel() == 0 or data.edge_index.max() < data.num_nodes


def test_edges_are_grouped_by_graph_again():
    batch = Batch.from_data_list(graphs_with(["edge_weight"]))

    def shuffled(x, edge_index, edge_weight):
        order = torch.randperm(edge_index.shape[1])[3:]
        return x, edge_index[:, order], edge_weight[order]

    view = AsTransform(shuffled)(batch)
    assert view.num_edges == batch.num_edges - 3
    for i, data in enumerate(view.to_data_list()):
        assert torch.equal(data.edge_weight, 100.0 * i + data.edge_index.sum(0))


@old_names
def test_augmentors_take_one_plain_data_too():
    (data,) = graphs_with(["edge_weight"], sizes=[9])
    view = AsTransform(A.EdgeRemoving(pe=0.5))(data)
    assert type(view) is Data
    assert len(view.edge_weight) == view.num_edges < data.num_edges


@old_names
def test_augmentors_feed_the_model_of_pyg():
    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = GINConv(torch.nn.Linear(4, 8))

        def forward(self, x, edge_index, batch, num_graphs):
            return global_add_pool(self.conv(x, edge_index), batch, num_graphs)

    augment = pyg.RandomChoice([AsTransform(AUGMENTORS["Compose"]), pyg.NodeDrop(0.2)])
    model = pyg.ContrastiveModel(
        Encoder(), AsTransform(A.NodeDropping(pn=0.2)), augment, PGCLLoss(8, 3)
    )
    for _ in range(4):
        model(Batch.from_data_list(graphs_with(["edge_weight"]))).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert repr(augment) == "RandomChoice([AsTransform(Compose), NodeDrop(p=0.2)])"


@old_names
def test_augmentors_that_do_not_fit():
    batch = Batch.from_data_list(graphs_with(["edge_weight"]))
    for augmentor, message in [
        (lambda x, e, w: (x[1:], e, w), "augmentor made 22 nodes of 23: it must keep them all"),
        (lambda x, e, w: (x, e.new_tensor([[0], [7]]), w[:1]), "joined graphs .* EdgePerturb"),
        (lambda x, e, w: (x, e[:, 1:], w), r"made 35 edges but 36 values of edge_weight"),
        (lambda x, e, w: (x, e[:, 1:], None), "takes nothing along, but they have edge_weight"),
    ]:
        with pytest.raises(ValueError, match=message):
            AsTransform(augmentor)(batch)
    batch = Batch.from_data_list(graphs_with(["edge_weight", "edge_kind"]))
    with pytest.raises(ValueError, match=r"takes edge_weight along, but they have edge_weight, ed"):
        AsTransform(A.EdgeRemoving(pe=0.5))(batch)
    assert torch.equal(AsTransform(A.FeatureMasking(pf=1.0))(batch).edge_kind, batch.edge_kind)
    for augmentor in (A.PPRDiffusion(), A.Compose([A.Identity(), A.MarkovDiffusion()])):
        with pytest.raises(ValueError, match=r"first batch for every other one.*use_cache=False"):
            AsTransform(augmentor)
    with pytest.raises(TypeError, match="must be an augmentor of PyGCL, but got 'drop'"):
        AsTransform("drop")
    with pytest.raises(TypeError, match=r"got None; for no augmentation .* torch.nn.Identity\(\)"):
        AsTransform(None)
    with pytest.raises(TypeError, match="data must be a Batch or Data, but got list"):
        AsTransform(A.Identity())([])


def test_the_module_imports_without_frameworks():
    gone = {"GCL": None, "GCL.losses": None, "torch_geometric": None}
    with mock.patch.dict(sys.modules, gone):
        sys.modules.pop("pgcl_losses.adapters.pygcl")
        from pgcl_losses.adapters.pygcl import PGCLContrastLoss as Again

        with pytest.raises(ImportError, match=r"torch-sparse; pip install PyGCL==0\.1\.2 dgl=="):
            Again(4)
